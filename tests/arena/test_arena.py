"""The arena: one allocation, views that keep their strides, any module."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepex.arena.arena import ALIGNMENT_BYTES, Arena
from deepex.errors import ConfigError
from deepex.nets import build
from tests.full import examples

CPU = torch.device("cpu")


class Tied(nn.Module):
    """An encoder and a decoder that share one weight; a frozen layer; a shared buffer; an integer buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 6, bias=False)
        self.decoder = nn.Linear(6, 6, bias=False)
        self.decoder.weight = self.encoder.weight
        self.norm = nn.BatchNorm1d(6)
        self.frozen = nn.Linear(6, 3)
        for parameter in self.frozen.parameters():
            parameter.requires_grad_(False)
        self.register_buffer("table", torch.arange(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.norm(self.decoder(torch.relu(self.encoder(x)))))


def test_everything_is_a_view_of_one_allocation() -> None:
    network = build("resnet18", channels=1, size=(28, 28), classes=10)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    arena = Arena(network, CPU, channels_last=True)
    start, end = arena.memory.data_ptr(), arena.memory.data_ptr() + arena.memory.nbytes
    for name, value in (*network.named_parameters(), *network.named_buffers()):
        assert torch.equal(value, before[name]), name
        if value.is_floating_point():
            assert start <= value.data_ptr() < end
            assert value.data_ptr() % 4 == 0
            assert (value.data_ptr() - start) % ALIGNMENT_BYTES == 0, name
    for parameter, gradient in zip(network.parameters(), arena.gradient_tensors(), strict=False):
        assert start <= gradient.data_ptr() < end
        if parameter.dim() == 4:
            assert parameter.is_contiguous(memory_format=torch.channels_last)
    assert arena.num_parameters == sum(p.numel() for p in network.parameters())


def test_each_weight_keeps_its_own_order_of_dimensions() -> None:
    last = torch.randn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    weights = {"rows": torch.randn(3, 5), "columns": torch.randn(5, 3).t(), "every other": torch.randn(3, 10)[:, ::2], "last": last}
    network = nn.ParameterDict(weights)
    Arena(network, CPU)
    assert {name: value.stride() for name, value in network.items()} == {
        "rows": (5, 1), "columns": (1, 3), "every other": (5, 1), "last": last.stride(),
    }  # fmt: skip
    assert all(torch.equal(network[name], value) for name, value in weights.items())
    point = nn.Conv2d(4, 3, 1)
    Arena(point, CPU, channels_last=True)
    assert point.weight.stride() == (4, 1, 1, 1), "it is channels-last as it is"


def test_regions_lie_so_that_each_sync_is_one_slice() -> None:
    network = build("resnet18", channels=1, size=(28, 28), classes=10)
    arena = Arena(network, CPU, states=("momentum", "squares"))
    order = [arena.gradients, arena.buffers, arena.weights, *arena.states.values(), arena.frozen]
    offsets = [region.storage_offset() for region in order]
    assert offsets == sorted(offsets)
    assert sum(region.numel() for region in order) == arena.memory.numel()
    assert list(arena.states) == ["momentum", "squares"] == arena.layout.to_json()["states"]
    for region, parts in (
        (arena.gradients_and_buffers, order[:2]),
        (arena.model, order[1:3]),
        (arena.model_and(0), order[1:3]),
        (arena.model_and(1), order[1:4]),
        (arena.model_and(2), order[1:5]),
        (arena.all_states, order[3:5]),
        (arena.kept, order[1:]),
    ):
        assert region.is_contiguous()
        assert region.data_ptr() == parts[0].data_ptr()
        assert region.numel() == sum(part.numel() for part in parts)
    padding = arena.memory.nbytes / (4 * 4 * arena.num_parameters + 4 * sum(b.numel() for b in network.buffers()))
    assert padding < 1.01, "weights, gradients, two states and statistics, and no hidden copy"


def test_without_a_region_for_gradients_the_rest_lies_as_before() -> None:
    gathering, other = (Arena(build("lenet", channels=1, size=(28, 28), classes=10), CPU, gathers=g) for g in (True, False))
    assert other.gradients.numel() == 0
    assert other.layout == gathering.layout
    assert other.memory.numel() == gathering.memory.numel() - gathering.weights.numel()
    assert other.kept.numel() == gathering.kept.numel(), "checkpoints fit both"


@pytest.mark.parametrize("gathers", [True, False])
def test_gradients_arrive(gathers: bool) -> None:
    torch.manual_seed(0)
    network, plain = (build("lenet", channels=1, size=(28, 28), classes=10) for _ in range(2))
    plain.load_state_dict(network.state_dict())
    arena = Arena(network, CPU, channels_last=True, gathers=gathers)
    images = torch.randn(4, 1, 28, 28)
    plain(images).square().mean().backward()
    theirs = dict(plain.named_parameters())
    for _ in range(2):  # a second backward replaces, it does not add
        arena.gradients.fill_(9)
        arena.backward(network(images).square().mean())
    for slot, gradient in zip(arena.layout.weights, arena.gradient_tensors(), strict=True):
        assert torch.allclose(gradient, theirs[slot.name].grad, atol=1e-6), slot.name
        assert gradient.stride() == slot.stride, "the update walks through both in one order"
    total = torch.stack([p.grad.norm() for p in plain.parameters()]).norm()
    found = torch.stack([gradient.norm() for gradient in arena.gradient_tensors()]).norm()
    assert found.item() == pytest.approx(total.item(), rel=1e-5)
    arena.drop_gradients()
    assert all(parameter.grad is None for parameter in network.parameters()), "no second copy is kept"


@pytest.mark.parametrize("gathers", [True, False])
def test_a_weight_that_took_no_part_gets_no_gradient(gathers: bool) -> None:
    network = nn.ModuleDict({"used": nn.Linear(3, 3), "idle": nn.Linear(3, 3)})
    arena = Arena(network, CPU, gathers=gathers)
    arena.gradients.fill_(9)
    arena.backward(network["used"](torch.ones(1, 3)).sum())
    for slot, gradient in zip(arena.layout.weights, arena.gradient_tensors(), strict=True):
        assert bool(gradient.any()) == slot.name.startswith("used"), slot.name


@pytest.mark.parametrize("gathers", [True, False])
def test_gradients_that_come_in_parts_are_added_up(gathers: bool) -> None:
    """Re-entrant checkpoints go backward one by one: a weight that two of them share gets its gradient in two parts."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense = nn.Linear(4, 4)

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                values = checkpoint(self.dense, values, use_reentrant=True).tanh()
            return values.sum()

    network = Twice()
    plain = copy.deepcopy(network)
    values = torch.randn(3, 4, requires_grad=True)
    plain.dense(plain.dense(values).tanh()).tanh().sum().backward()
    arena = Arena(network, CPU, gathers=gathers)
    arena.backward(network(values))
    for found, parameter in zip(arena.gradient_tensors(), plain.parameters(), strict=True):
        assert torch.allclose(found, parameter.grad, atol=1e-6)


def test_tied_frozen_and_integer_tensors() -> None:
    network = Tied()
    arena = Arena(network, CPU)
    assert network.decoder.weight is network.encoder.weight
    assert [slot.name for slot in arena.layout.weights] == ["encoder.weight", "norm.weight", "norm.bias"]
    assert {slot.name for slot in arena.layout.frozen} == {"frozen.weight", "frozen.bias"}
    assert [slot.name for slot in arena.layout.buffers] == ["norm.running_mean", "norm.running_var"]
    assert network.table.tolist() == [0, 1, 2, 3]
    assert network.frozen.weight.grad is None
    arena.backward(network(torch.randn(5, 6)).square().sum())
    assert arena.gradients.norm() > 0
    assert network.norm.running_mean.data_ptr() == arena.layout.buffers[0].view(arena.buffers).data_ptr()
    arena.buffers.fill_(7)
    assert network.norm.running_mean.eq(7).all()


def test_no_decay_on_bias_and_norm() -> None:
    network = build("resnet18", channels=1, size=(28, 28), classes=10)
    arena = Arena(network, CPU)
    undecayed = {slot.name for slot in arena.layout.undecayed}
    norms = {f"{n}.{k}" for n, m in network.named_modules() if isinstance(m, nn.BatchNorm2d) for k in ("weight", "bias")}
    biases = {name for name, _ in network.named_parameters() if name.endswith("bias")}
    assert undecayed == norms | biases
    assert all(slot.offset < arena.num_decayed for slot in arena.layout.decayed)
    assert all(slot.offset >= arena.num_decayed for slot in arena.layout.undecayed)


def test_mixed_dtypes_and_empty_networks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"mixes dtypes.*module\.float"):
        Arena(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()), CPU)
    with pytest.raises(ConfigError, match="no parameters"):
        Arena(nn.ReLU(), CPU)


@settings(max_examples=examples(10, 30), deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), st.booleans()), min_size=1, max_size=6))
def test_any_stack_of_layers_keeps_its_values(layers: list[tuple[int, int, bool]]) -> None:
    network = nn.ModuleList(nn.Conv2d(i, o, 3, bias=bias) for i, o, bias in layers)
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    arena = Arena(network, CPU, channels_last=True)
    named = dict(arena.named_tensors())
    assert named.keys() == before.keys()
    assert all(torch.equal(named[name], value) for name, value in before.items())
    arena.weights.mul_(2)
    assert all(torch.equal(p, 2 * before[name]) for name, p in network.named_parameters())
    occupied = sum(p.numel() for p in network.parameters())
    arena.weights.fill_(1)
    for slot in arena.layout.weights:
        slot.view(arena.weights).zero_()
    assert int(arena.weights.sum()) == arena.weights.numel() - occupied, "slots do not overlap"


def test_biases_are_known_by_their_names() -> None:
    network = nn.ModuleDict({"attention": nn.MultiheadAttention(4, 2), "recurrent": nn.GRU(2, 2), "dense": nn.Linear(2, 2)})
    nn.utils.parametrize.register_parametrization(network["dense"], "bias", nn.Identity())
    layout = Arena(network, CPU).layout
    assert {slot.name for slot in layout.decayed} == {
        "attention.in_proj_weight", "attention.out_proj.weight", "recurrent.weight_ih_l0", "recurrent.weight_hh_l0", "dense.weight"
    }  # fmt: skip


def test_a_buffer_that_an_attribute_names_too_stays_one() -> None:
    network = nn.BatchNorm1d(2)
    network.seen = network.running_mean
    Arena(network, CPU)
    network(torch.ones(3, 2))
    assert network.seen is network.running_mean
    assert network.seen[0] > 0


def test_a_gradient_that_a_hook_has_taken_is_none() -> None:
    network = nn.Linear(2, 2)

    def takes(parameter: nn.Parameter) -> None:
        parameter.grad = None

    network.bias.register_post_accumulate_grad_hook(takes)
    arena = Arena(network, CPU)
    arena.gradients.fill_(1)
    arena.backward(network(torch.ones(1, 2)).sum())
    assert [view.sum() for view in arena.gradient_tensors()] == [4, 0]
