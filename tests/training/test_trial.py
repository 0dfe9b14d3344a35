"""What cannot be trained is told before there is a run directory, in one line."""

import dataclasses
import os
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import deepex
from deepex.comm.solo import SoloCommunicator
from deepex.data.dataset import PackedDataset
from deepex.data.feeds.shard import Shards
from deepex.errors import ConfigError
from deepex.step.cost import activation_bytes
from deepex.step.image_order import choose_order
from deepex.task import make_task
from deepex.training.config import RunConfig
from deepex.training.trial import Trial, check_network
from tests import networks
from tests.mpi import own_lines, run_deepex

MakeData = Callable[[int], Path]


class Changed(nn.Module):
    """A dense layer, and something done to its output."""

    def __init__(self, change: Callable[[torch.Tensor], Any] = lambda output: output, outputs: int = 10) -> None:
        super().__init__()
        self.dense, self.change = nn.Linear(784, outputs), change

    def forward(self, images: torch.Tensor) -> Any:
        return self.change(self.dense(images.flatten(1)))


class Least(Changed):
    """Wants batches of `sizes` images."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.sizes = sizes

    def forward(self, images: torch.Tensor) -> Any:
        if len(images) not in self.sizes:
            raise ValueError(f"{len(images)} images")
        return super().forward(images)


class Modal(Changed):
    """Returns something else when it evaluates."""

    def forward(self, images: torch.Tensor) -> Any:
        output = super().forward(images)
        return output if self.training else {"out": output}


class InPlace(Changed):
    """Spoils what its backward pass needs."""

    def forward(self, images: torch.Tensor) -> Any:
        output = super().forward(images).exp()
        output.add_(1)
        return output


class Viewing(nn.Module):
    """Asks for a view after a convolution, as many do."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.dense = nn.Conv2d(1, 4, 3, stride=4), nn.Linear(4 * 7 * 7, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.dense(self.convolution(images).view(len(images), -1))


class Sampling(nn.Module):
    """An autoencoder's outputs."""

    def __init__(self, *latent: tuple[int, ...], logits: tuple[int, ...] = (1, 28, 28)) -> None:
        super().__init__()
        self.gain, self.latent, self.logits = nn.Parameter(torch.ones(1)), latent, logits

    def forward(self, images: torch.Tensor) -> Any:
        logits = images[:, :1, : self.logits[1], : self.logits[2]] * self.gain
        return (logits, *(self.gain * torch.ones(len(images), *shape) for shape in self.latent))


def dense(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), *layers)


def one_memory() -> nn.Module:
    network = dense(nn.Linear(784, 784, bias=False), nn.Linear(784, 784, bias=False), nn.Linear(784, 10))
    network[2].weight = nn.Parameter(network[1].weight.data)
    return network


def with_buffer(buffer: torch.Tensor) -> nn.Module:
    network = Changed()
    network.register_buffer("extra", buffer)
    return network


def with_dtype(dtype: torch.dtype) -> nn.Module:
    network = Changed()
    network.dense.weight = nn.Parameter(torch.zeros(10, 784, dtype=dtype))
    return network


def part_frozen() -> nn.Module:
    network = dense(nn.Linear(784, 10), nn.Linear(10, 10))
    network[1].requires_grad_(False)
    return network


class Memory(nn.Module):
    """Keeps what it computed with its history: to be looked at, or (`adds`) to be used in the next step."""

    def __init__(self, *, adds: bool) -> None:
        super().__init__()
        self.dense, self.adds = nn.Linear(784, 10), adds
        self.seen: list[torch.Tensor] = []

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.dense(images.flatten(1))
        summed = output + (self.seen[0].mean() if self.adds and self.seen else 0)
        self.seen = [summed * output]
        return summed


class Shared(nn.Module):
    """Several tensors in one memory; what `change` does to them is done in each pass."""

    def __init__(self, parameters: bool, parts: Callable[[torch.Tensor], list[torch.Tensor]], change: bool = False) -> None:
        super().__init__()
        self.dense, self.change = nn.Linear(784, 10), change
        names = ("one", "other")
        for name, part in zip(names, parts(torch.rand(10, 20)), strict=True):
            if parameters or (name == "one" and not change):
                self.register_parameter(name, nn.Parameter(part))
            else:
                self.register_buffer(name, part)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.change:
            self.one.add_(1)
        output: torch.Tensor = self.dense(images.flatten(1)) + self.one.sum() + self.other.sum()
        return output


def rows(whole: torch.Tensor) -> list[torch.Tensor]:
    return [whole[:6], whole[5:]]


def columns(whole: torch.Tensor) -> list[torch.Tensor]:
    return [whole[:, ::2], whole[:, 1::2]]


def every_third(whole: torch.Tensor) -> list[torch.Tensor]:
    return [whole[:, ::2], whole[:, ::3]]


def keeping(what: Callable[[nn.Linear], Any]) -> nn.Module:
    network = Changed()
    network.kept = what(network.dense)
    return network


class Fourier(nn.Module):
    """Has a parameter of four dimensions that is no kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.filter, self.dense = nn.Parameter(torch.ones(1, 28, 15, 2)), nn.Linear(784, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft2(images) * torch.view_as_complex(self.filter)
        output: torch.Tensor = self.dense(torch.fft.irfft2(spectrum).flatten(1))
        return output


class Teacher(nn.Module):
    """A frozen copy that follows, and a batch norm in evaluation mode whose mean it sets itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.student, self.teacher = nn.BatchNorm2d(1).eval(), nn.Linear(784, 10), nn.Linear(784, 10)
        self.still = nn.Linear(10, 10).requires_grad_(False)
        self.teacher.requires_grad_(False).load_state_dict(self.student.state_dict())

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training:
            torch._foreach_lerp_([self.teacher.weight.data], [self.student.weight.data], 0.1)
            self.teacher.bias.data.mul_(0.9).add_(self.student.bias.data, alpha=0.1)
            with torch.no_grad():
                self.norm.running_mean.copy_(images.mean()[None])
        images = self.norm(images).flatten(1)
        output: torch.Tensor = self.still(self.student(images) + 0.1 * self.teacher(images))
        return output


class Hooked(nn.Module):
    """Its hook names it, so that a copy's hook changes the original."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(784, 10)
        self.register_buffer("calls", torch.zeros(()))
        self.dense.register_forward_hook(lambda *_: self.calls.add_(1) and None)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.dense(images.flatten(1))
        return output


class Last(nn.Module):
    """The last output of a recurrent layer."""

    def forward(self, outputs: tuple[torch.Tensor, Any]) -> torch.Tensor:
        return outputs[0][:, -1]


class Derived(Changed):
    """Has a derivative taken forwards, which does not let itself be watched."""

    def forward(self, images: torch.Tensor) -> Any:
        flat = images.flatten(1)
        return torch.func.jvp(self.dense, (flat,), (torch.ones_like(flat),))[0]


def tied() -> nn.Module:
    network = dense(nn.Linear(784, 784, bias=False), nn.Linear(784, 784, bias=False), nn.Linear(784, 10))
    network[2].weight = network[1].weight
    return network


def attempt(network: nn.Module, data: Path, count: int = 48, replicas: int = 1, **keys: Any) -> Trial:
    config = RunConfig(net="mine:net", data=str(data), **{"batch": 8, **keys})
    return check_network(network, config, PackedDataset.open(data), Shards(count, replicas, config.batch), ranks=1)


def refusal(network: nn.Module, data: Path, **keys: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        attempt(network, data, **keys)
    return str(caught.value)


TO_CLASSIFY = "for images of shape (2, 1, 28, 28); with task=classify it must return a tensor of real numbers of shape (2, 10)"


@pytest.mark.parametrize(
    ("network", "said"),
    [
        (Changed(lambda output: {"out": output}), f"returned a dict with the keys 'out' {TO_CLASSIFY}"),
        (Changed(lambda output: (output, output)), "returned a tuple of 2: a tensor of float32 of shape (2, 10), a tensor of"),
        (Changed(lambda output: [output]), "returned a list of 1: a tensor"),
        (Changed(lambda _: None), f"returned None {TO_CLASSIFY}"),
        (Changed(outputs=3), f"returned a tensor of float32 of shape (2, 3) {TO_CLASSIFY}"),
        (Changed(lambda output: output[0]), "returned a tensor of float32 of shape (10,)"),
        (Changed(lambda output: output.mean()), "returned a tensor of float32 of shape ()"),
        (Changed(lambda output: output[..., None, None]), "of shape (2, 10, 1, 1)"),
        (Changed(lambda output: output.round().long()), "returned a tensor of int64 of shape (2, 10)"),
        (Changed(lambda output: output + 0j), "returned a tensor of complex64 of shape (2, 10)"),
        (Changed(lambda output: output.detach()), "learns nothing: no trainable weight has a part in what it returns"),
        (Changed(lambda output: output.detach().requires_grad_()), "learns nothing"),
        (Modal(), "returned a dict with the keys 'out' for images of shape (2, 1, 28, 28) when it evaluates"),
        (dense(nn.Linear(700, 10)), "raised, training on 8 images of shape (1, 28, 28), RuntimeError: mat1 and mat2 shapes cannot"),
        (InPlace(), "one of the variables needed for gradient computation, of shape (8, 10), has been modified by an inplace"),
        (Least(3), "raised, training on 8 images of shape (1, 28, 28), ValueError: 8 images"),
        (Least(8), "raised, evaluating 64 images of shape (1, 28, 28), ValueError: 64 images"),
        (dense(nn.LazyLinear(10)), "'1.weight' has no shape yet, as it is of a lazy layer: run one batch through the network"),
        (nn.Flatten(), "the network has no parameters: there is nothing to train"),
        (Changed().requires_grad_(False), "all 2 parameters of the network are frozen"),
        (Changed().double(), "'dense.weight' is float64; parameters must be float32: convert the network"),
        (Changed().half(), "'dense.weight' is float16; parameters must be float32"),
        (dense(nn.Linear(784, 10), nn.Linear(10, 10).bfloat16()), "'2.weight' is bfloat16; parameters must be float32"),
        (with_dtype(torch.complex64), "'dense.weight' is complex64; parameters must be float32"),
        (with_buffer(torch.zeros(2, dtype=torch.float64)), "'extra' is float64; buffers of real and complex numbers must be"),
        (with_buffer(torch.zeros(2, dtype=torch.complex64)), "must be float32: keep it as torch.view_as_real"),
        (with_buffer(torch.zeros(2).to_sparse()), "'extra' has the layout torch.sparse_coo"),
        (one_memory(), "'1.weight' and '2.weight' are two parameters in the same memory, which training would part"),
        (Shared(True, rows), "'one' and 'other' are two parameters in the same memory"),
        (Shared(True, every_third), "'one' and 'other' are two parameters in the same memory"),
        (Shared(False, rows), "the network's buffer 'other' is in the memory of its parameter 'one', which training would part"),
        (Shared(False, rows, change=True), "the network's buffers 'one' and 'other' are in the same memory, and it changes them"),
        (Shared(True, lambda whole: [whole[:1].expand(4, 20), whole[1:]]), "'one' has elements that share memory, as expand()"),
        (keeping(lambda dense: dense.weight.data), "keeps 'kept' in the memory of its 'dense.weight', which training"),
        (keeping(lambda dense: {"some": dense.bias[2:].detach()}), "keeps 'kept' in the memory of its 'dense.bias'"),
        (Memory(adds=True), "keeping 'seen' with its history from one step to the next, and training on 8 images"),
        (Memory(adds=True), "; detach() what it keeps"),
        (Changed().to("meta"), "'dense.weight' is on meta; a network is built on the CPU"),
    ],
)  # fmt: skip
def test_a_network_that_cannot_be_trained_is_told_why(make_data: MakeData, network: nn.Module, said: str) -> None:
    assert said in refusal(network, make_data(48))


@pytest.mark.parametrize(
    ("network", "said"),
    [
        (Sampling((3,)), "returned a tuple of 2: a tensor of float32 of shape (2, 1, 28, 28), a tensor of float32 of shape (2, 3)"),
        (Sampling((3,), (4,)), "it must return logits, a tensor of real numbers of shape (2, 1, 28, 28), or a tuple of these"),
        (Sampling((3,), (3,), (3,)), "returned a tuple of 4"),
        (Sampling((3,), (3,), logits=(1, 14, 28)), "returned a tuple of 3: a tensor of float32 of shape (2, 1, 14, 28)"),
        (Changed(), "returned a tensor of float32 of shape (2, 10)"),
    ],
)
def test_a_network_that_cannot_reconstruct_is_told_why(make_data: MakeData, network: nn.Module, said: str) -> None:
    assert said in refusal(network, make_data(48), task="reconstruct")


@pytest.mark.parametrize(
    "network",
    [
        Changed(outputs=12),
        Changed(lambda output: output * float("nan")),
        Changed(lambda output: output.double()),
        part_frozen(),
        tied(),
        Shared(True, columns),
        Shared(False, columns),
        Shared(False, columns, change=True),
        with_buffer(torch.zeros(1).expand(3)),
        keeping(lambda dense: [dense.weight]),
        keeping(lambda dense: dense.weight.detach().clone()),
        Derived(),
        dense(nn.utils.spectral_norm(nn.Linear(784, 10))),
        dense(nn.Unflatten(1, (28, 28)), nn.LSTM(28, 10, batch_first=True), Last()),
        Memory(adds=False),
        with_buffer(torch.zeros(2, dtype=torch.int64)),
        Least(8, 64),
        networks.held_norm(1, 10),
        networks.evaluating(1, 10),
        networks.masked(10),
        dense(nn.utils.parametrizations.weight_norm(nn.Linear(784, 10))),
        dense(nn.Linear(784, 10), nn.BatchNorm1d(10, momentum=None)),
    ],
)
def test_what_can_be_trained_may_be(make_data: MakeData, network: nn.Module) -> None:
    attempt(network, make_data(48))


def test_what_a_network_changes_of_frozen_tensors_is_found(make_data: MakeData) -> None:
    moved = {"teacher.weight", "teacher.bias", "norm.running_mean"}
    assert attempt(Teacher(), make_data(48), replicas=2).moving == moved
    assert attempt(Teacher(), make_data(48)).moving == frozenset(), "of one replica nobody must agree"


def test_a_trial_leaves_what_a_hook_of_a_copy_changes_as_it_was(make_data: MakeData) -> None:
    network = Hooked()
    attempt(network, make_data(48))
    choose_order(network, shape=(1, 28, 28), batch=4, task=make_task("classify"), device=torch.device("cpu"))
    assert network.calls == 0


def test_a_network_that_takes_one_order_is_trained_in_that(make_data: MakeData) -> None:
    cpu, classify = torch.device("cpu"), make_task("classify")
    choice = choose_order(Fourier(), shape=(1, 28, 28), batch=4, task=classify, device=cpu)
    assert not choice.channels_last
    assert "cannot take channels-last: RuntimeError: Tensor must have a last dimension with stride 1" in choice.reason
    attempt(Fourier(), make_data(48))
    assert "last dimension with stride 1" in refusal(Fourier(), make_data(48), layout="channels_last")


def test_an_autoencoder_may_return_its_latent_variables_or_logits_alone(make_data: MakeData) -> None:
    for network in (Sampling((3,), (3,)), Sampling((3, 2), (3, 2)), Sampling()):
        attempt(network, make_data(48), task="reconstruct")


def test_a_network_that_drops_a_batch_of_one_is_told_only_where_there_is_one(make_data: MakeData) -> None:
    network = Changed(torch.squeeze)
    attempt(network, make_data(48))
    assert "returned a tensor of float32 of shape (10,) for images of shape (1, 1, 28, 28)" in refusal(
        network, make_data(49), count=49
    )


def test_a_cumulative_average_is_refused_for_several_replicas(make_data: MakeData) -> None:
    network = dense(nn.Linear(784, 10), nn.BatchNorm1d(10, momentum=None))
    assert "batch norm '2' has momentum None (a cumulative average), and the 2 replicas'" in refusal(
        network, make_data(48), replicas=2
    )
    network[2].eval()
    attempt(network, make_data(48), replicas=2)


def test_what_a_layer_cannot_do_the_same_way_twice_is_told_where_that_was_asked_for(make_data: MakeData) -> None:
    class Putting(Changed):
        def forward(self, images: torch.Tensor) -> Any:
            output = super().forward(images)
            return torch.zeros_like(output).put_(torch.arange(output.numel()), output.flatten(), accumulate=False)

    attempt(Putting(), make_data(48))
    before = torch.get_deterministic_debug_mode()
    assert "use another layer, or set deterministic=false" in refusal(Putting(), make_data(48), deterministic=True)
    assert torch.get_deterministic_debug_mode() == before


def test_a_network_that_cannot_be_copied_is_told_so(make_data: MakeData) -> None:
    network = Changed()
    network.lock = threading.Lock()
    assert "cannot be copied, which is needed to try it (TypeError: cannot pickle" in refusal(network, make_data(48))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_a_layer_that_keeps_what_it_computed_can_be_copied(make_data: MakeData) -> None:
    attempt(dense(nn.utils.weight_norm(nn.Linear(784, 10))), make_data(48))
    attempt(dense(prune.l1_unstructured(nn.Linear(784, 10), "weight", 0.5)), make_data(48))


def test_an_error_is_told_with_its_place_in_the_users_code(make_data: MakeData) -> None:
    message = refusal(Least(3), make_data(48))
    assert message.count("\n") == 0
    assert f"({__file__}, line " in message
    assert message.endswith("in forward); mend it there")


def test_nothing_is_left_of_a_trial(make_data: MakeData) -> None:
    network = networks.normed(1, 10)
    network[3].eval()
    tensors = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    random, modes, threads = torch.random.get_rng_state(), [m.training for m in network.modules()], torch.get_num_threads()
    with warnings.catch_warnings():
        attempt(network, make_data(48), validate="parallel")
    assert torch.equal(torch.random.get_rng_state(), random)
    assert ([m.training for m in network.modules()], torch.get_num_threads()) == (modes, threads)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in network.state_dict().items())
    assert all(parameter.grad is None for parameter in network.parameters())


def test_a_trial_tells_what_autograd_keeps(make_data: MakeData) -> None:
    network = networks.normed(1, 10)
    assert attempt(network, make_data(48)).activation_bytes(32) == activation_bytes(network, (1, 28, 28), 32)


def test_a_network_that_views_maps_trains_in_the_usual_order(make_data: MakeData) -> None:
    attempt(Viewing(), make_data(48))
    assert "mend it there, or set layout=contiguous" in refusal(Viewing(), make_data(48), layout="channels_last")
    for device in ("cpu", "cuda"):
        choice = choose_order(Viewing(), shape=(1, 28, 28), batch=8, task=make_task("classify"), device=torch.device(device))
        assert not choice.channels_last
        assert "cannot take channels-last: RuntimeError: view size is not compatible" in choice.reason


@pytest.mark.parametrize("keys", [{"net": "tests.training.test_trial:wordy"}, {"net": "lenet", "step": "captured"}])
def test_no_run_directory_is_made_for_what_cannot_be_trained(make_data: MakeData, tmp_path: Path, keys: dict[str, Any]) -> None:
    if torch.cuda.is_available():
        keys = {**keys, "device": "cpu"}
    config = dataclasses.replace(RunConfig(net="lenet", data=str(make_data(48)), batch=8), **keys)
    with pytest.raises(ConfigError):
        deepex.train(config, SoloCommunicator(), out=tmp_path / "run")
    assert os.listdir(tmp_path) == []


def wordy() -> nn.Module:
    return Changed(lambda output: {"out": output})


@pytest.mark.slow
def test_all_ranks_end_with_one_message(make_data: MakeData, tmp_path: Path) -> None:
    sets = [f"--set={s}" for s in ("net=tests.training.test_trial:wordy", f"data={make_data(48)}", "batch=8")]
    done = run_deepex("train", "fashion", *sets, "--ranks", "2", "--out", str(tmp_path / "run"))
    assert (done.returncode, list(tmp_path.iterdir())) == (2, [])
    assert len(own_lines(done.stderr)) == 1
    assert "returned a dict with the keys 'out'" in done.stderr
