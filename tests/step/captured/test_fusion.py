"""Whole networks with their fusions, against the same networks as they are: outputs, gradients, buffers."""

import copy
import gc
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from deepex import nets
from deepex.nets.response import LocalResponse
from deepex.step.captured.fusion import Fused, fuse, parts
from deepex.step.captured.fusion.parts import FusionContext
from deepex.step.captured.kernels.normalise import remaker
from deepex.step.captured.linear_ops import Lane, dense

torch.backends.cudnn.allow_tf32 = False
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _fused(network: nn.Module, **means: Any) -> tuple[Fused, Lane]:
    lane = Lane(DEVICE)
    key = torch.ones(1, dtype=torch.int64, device=DEVICE)
    return fuse(network, FusionContext(weights=lambda parameter: parameter, lane=lane, key=key, **means)), lane


def _compare(network: nn.Module, images: torch.Tensor, bound: float = 2e-4, **means: Any) -> Fused:
    """Run both in float32 and the plain one in float64, too: a network that magnifies rounding is allowed to."""
    network = network.to(DEVICE, memory_format=torch.channels_last).train()
    images = images.to(DEVICE).contiguous(memory_format=torch.channels_last)
    exact = copy.deepcopy(network).double()
    fused, lane = _fused(network, **means)
    torch.manual_seed(0)
    found = _first(fused(images))
    torch.manual_seed(0)
    expected = _first(exact(images.double()))
    direction = torch.randn_like(expected)
    found.backward(direction.float())
    lane.join()
    expected.backward(direction)
    assert _off(found, expected) < bound
    for (name, parameter), reference in zip(network.named_parameters(), exact.parameters(), strict=True):
        gradient = lane.gradient(parameter)
        assert gradient is not None, name
        assert _off(gradient, reference.grad) < 50 * bound, name
    for (name, buffer), reference in zip(network.named_buffers(), exact.buffers(), strict=True):
        if buffer.is_floating_point():
            assert _off(buffer, reference) < bound, name
    return fused


def _first(output: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


def _off(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.detach().double() - expected.detach()).norm() / expected.detach().norm().clamp_min(1e-12))


def test_a_residual_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """ResNet-18 with fewer channels in its later stages: interpreted, a kernel takes its time for each block of them."""
    monkeypatch.setattr("deepex.nets.resnet._WIDTHS", (64, 32, 32, 32))
    torch.manual_seed(0)  # of some networks rounding moves a value across zero, where the gradient jumps
    fused = _compare(nets.build("resnet18", channels=3, size=(20, 20), classes=10), torch.randn(4, 3, 20, 20))
    assert fused.found["batch norm + add + ReLU"] == 8
    assert fused.found["batch norm + ReLU"] == 8
    assert fused.found["batch norm + ReLU + max pooling"] == 1
    owned = _owned(fused)
    assert owned[parts.Normed] == [True] * 8, "what only a norm reads may become its gradient"
    plain, projected = [(True, False, True)] * 5, [(True, True, True)] * 3
    assert sorted(owned[parts.Joined]) == [*plain, *projected]
    assert fused.found["average pooling"] == 1


def test_a_norm_in_evaluation_mode_is_computed_with_its_own_statistics() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    nn.init.uniform_(network[1].running_mean)
    network[1].eval()
    network = network.to(DEVICE, memory_format=torch.channels_last)
    images = torch.randn(4, 3, 8, 8, device=DEVICE).contiguous(memory_format=torch.channels_last)
    plain = copy.deepcopy(network)
    fused, _ = _fused(network)
    assert _off(fused(images), plain(images)) < 2e-4
    assert fused.found["batch norm + ReLU"] == 1, "the other one"
    assert torch.equal(network[1].running_mean, plain[1].running_mean)
    assert _off(network[4].running_mean, plain[4].running_mean) < 2e-4


def _owned(fused: Fused) -> dict[type, list[bool | tuple[bool, bool]]]:
    """What modules of each kind may write over."""
    found = defaultdict(list)
    for module in fused._run.modules():
        if hasattr(module, "owned"):
            found[type(module)].append(module.owned)
    return found


class _Shared(nn.Module):
    """A map with more than one reader, or a gradient that goes to two."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(4, 4, 3, padding=1, bias=False) for _ in range(2))
        self.norm, self.other = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "two norms, added":
            y = self.first(x)
            return self.second(torch.relu(self.norm(y) + self.other(y)))
        if self.kind == "a norm and a convolution":
            y = self.first(x)
            return self.norm(y) * self.other(self.second(y))
        if self.kind == "a norm of what a ReLU keeps":
            return self.other(self.second(self.norm(torch.relu(self.first(x)))))
        if self.kind == "a sum and what came before":
            before = self.second(x)  # whose gradient is looked at later
            return self.other(torch.relu(self.norm(self.first(x)) + x) + before)
        if self.kind == "a shortcut's ReLU and what came before":
            y = self.first(x)
            before = torch.tanh(y)  # as above; and the sum of norm and shortcut hands on what it gets
            return ((self.norm(y) + torch.relu(self.second(x))) + before) * self.other(x)
        added = torch.relu(self.first(x)) + torch.relu(self.second(x))  # autograd hands one gradient to both
        return self.norm(added) * self.other(x)


@pytest.mark.parametrize(
    "kind",
    [
        *("two norms, added", "a norm and a convolution", "a norm of what a ReLU keeps", "a sum and what came before"),
        *("a shortcut's ReLU and what came before", "a sum of two"),
    ],
)
def test_nothing_is_written_over_that_others_read(kind: str) -> None:
    torch.manual_seed(0)
    _compare(_Shared(kind), torch.randn(3, 4, 6, 5))


class _Smaller(nn.Module):
    """A map that a convolution makes smaller, and that may have a second reader."""

    def __init__(self, *, twice: bool) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3, stride=2)
        self.twice = twice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.relu(self.norm(self.first(x)))
        y = self.second(z)
        return y.mean() + z.mean() if self.twice else y.mean()


@pytest.mark.parametrize("twice", [False, True])
def test_a_huge_map_is_not_kept_but_made_again(twice: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits either way; where somebody else reads it, it is kept."""
    torch.manual_seed(0)
    network = _Smaller(twice=twice).to(DEVICE, memory_format=torch.channels_last)
    images = torch.randn(2, 3, 9, 8, device=DEVICE).contiguous(memory_format=torch.channels_last)
    gradients = []
    for huge in (0, 1 << 28):
        maps: list[StorageWeakRef] = []

        def noted(z: torch.Tensor, maps: list[StorageWeakRef] = maps) -> Any:
            maps.append(StorageWeakRef(z.untyped_storage()))
            return remaker(z)

        monkeypatch.setattr(parts, "_HUGE_BYTES", huge)
        monkeypatch.setattr(parts, "remaker", noted)
        fused, lane = _fused(network)
        loss = fused(images)
        gc.collect()  # interpreted kernels hold their arguments in cycles
        assert [one.expired() for one in maps] == [True] * (huge == 0 and not twice)
        network.zero_grad()
        loss.backward()
        lane.join()
        gradients.append([lane.gradient(parameter) for parameter in network.parameters()])
    assert all(map(torch.equal, *gradients))


def test_an_autoencoder() -> None:
    network = nets.build("cvae", channels=1, size=(6, 6), classes=1, filters=16, features=4)
    network.log_variance = _Small(network.log_variance)
    fused = _compare(network, torch.rand(8, 1, 6, 6))
    assert fused.found["thin Conv2d + ReLU"] == 1
    assert fused.found["thin ConvTranspose2d"] == 1
    assert fused.found["ConvTranspose2d + ReLU"] == 2
    assert fused.found["flattening + dense + ReLU"] == 1
    assert fused.found["dense + unflattening + ReLU"] == 1
    assert fused.found["noise"] == 1


class _Thinner(nn.Module):
    """A map behind a ReLU that becomes thin, and may have a second reader."""

    def __init__(self, *, bias: bool, twice: bool) -> None:
        super().__init__()
        self.first = nn.Conv2d(6, 16, 3, padding=1, bias=bias)
        self.second = nn.ConvTranspose2d(16, 2, 3, padding=1)
        self.twice = twice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.relu(self.first(x))
        y = self.second(z)
        return y + z.mean(1, keepdim=True) if self.twice else y


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("twice", [False, True])
def test_a_relu_in_front_of_a_thin_convolution(twice: bool, bias: bool) -> None:
    """Its gradient is the thin convolution's business, unless somebody else has one, too."""
    torch.manual_seed(0)
    fused = _compare(_Thinner(bias=bias, twice=twice), torch.randn(3, 6, 6, 5))
    made = [module for module in fused._run.modules() if isinstance(module, parts.Convolution)]
    assert [module.masked for module in made] == [not twice]


def test_frozen_biases_in_front_of_a_thin_convolution_get_nothing() -> None:
    network = _Thinner(bias=True, twice=False).to(DEVICE, memory_format=torch.channels_last)
    network.first.bias.requires_grad_(False)
    fused, lane = _fused(network)
    fused(torch.randn(2, 6, 6, 5, device=DEVICE)).sum().backward()
    lane.join()
    assert lane.gradient(network.first.bias) is None
    assert lane.gradient(network.first.weight) is not None


class _Small(nn.Module):
    """Makes what is drawn from it disappear, for a network whose two copies draw different numbers."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * 1e-3 - 60.0


@pytest.mark.parametrize(
    ("name", "size", "options", "expected"),
    [
        ("lenet", (12, 12), {}, {"thin Conv2d + ReLU + max pooling": 1, "Conv2d + ReLU + max pooling": 1}),
        ("lenet-caffe", (16, 16), {}, {"thin Conv2d + max pooling": 1, "Conv2d + max pooling": 1}),
        pytest.param(
            *("vgg11", (32, 32), {"dropout": 0.0}),
            {"Conv2d + ReLU + max pooling": 4, "thin Conv2d + ReLU + max pooling": 1},
            marks=pytest.mark.gpu,
        ),
        pytest.param(
            *("googlenet", (33, 33), {"dropout": 0.0}, {"local response": 2, "fork": 9, "concatenation": 9}), marks=pytest.mark.gpu
        ),
    ],
)
def test_other_networks(name: str, size: tuple[int, int], options: dict, expected: dict) -> None:
    torch.manual_seed(0)
    fused = _compare(nets.build(name, channels=1, size=size, classes=3, **options), torch.rand(2, 1, *size))
    assert {key: fused.found[key] for key in expected} == expected


def test_local_response() -> None:
    torch.manual_seed(0)
    response = LocalResponse(5, alpha=0.1)
    network = nn.Sequential(nn.Conv2d(2, 8, 3), nn.ReLU(), response, nn.Conv2d(8, 4, 1), nn.LocalResponseNorm(3, alpha=0.1))
    assert _compare(network, torch.randn(2, 2, 6, 5)).found["local response"] == 2


def _block() -> nn.Module:
    """An inception block behind a convolution, and another behind the first."""

    def convolution(inputs: int, outputs: int, side: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(inputs, outputs, side, padding=side // 2), nn.ReLU(inplace=True))

    class _Inception(nn.Module):
        def __init__(self, inputs: int) -> None:
            super().__init__()
            self.one, self.three = convolution(inputs, 8, 1), nn.Sequential(convolution(inputs, 6, 1), convolution(6, 16, 3))
            self.normed = nn.Sequential(nn.Conv2d(inputs, 8, 1, bias=False), nn.BatchNorm2d(8))
            self.pooled = nn.Sequential(nn.MaxPool2d(3, 1, padding=1), convolution(inputs, 8, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([self.one(x), self.three(x), self.normed(x), self.pooled(x)], dim=1)

    return nn.Sequential(convolution(8, 8, 3), _Inception(8), _Inception(40), nn.Conv2d(40, 4, 1))


def test_the_gradients_of_branches_are_added_at_once() -> None:
    torch.manual_seed(0)
    fused = _compare(_block(), torch.randn(3, 8, 7, 5))
    assert fused.found["fork"] == 2
    assert fused.found["concatenation"] == 2


class _Copies(TorchDispatchMode):
    """Counts copies of maps, and sums of them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(args[0], torch.Tensor) and args[0].dim() == 4:  # the interpreter's own copies are flat
            self.found[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


def test_slices_of_the_gradient_are_read_where_they_are() -> None:
    network = _block().to(DEVICE, memory_format=torch.channels_last).train()
    images = torch.randn(3, 8, 7, 5, device=DEVICE).contiguous(memory_format=torch.channels_last)
    fused, _ = _fused(network)
    output = fused(images)
    direction = torch.randn_like(output)
    with _Copies() as copies:
        output.backward(direction)
    # in each of the two blocks, the norm needs a copy of its slice; convolutions with a ReLU do not
    assert {name: copies.found[name] for name in ("clone", "copy_", "add", "cat")} == {"clone": 2, "copy_": 0, "add": 0, "cat": 0}


@pytest.mark.parametrize(
    ("joins", "count"),
    [
        (lambda a, b: torch.cat([a, b], 1), 1),
        (lambda a, b: torch.concat((a, b), axis=1), 1),
        (lambda a, b: torch.cat([a, b], -3), 0),
        (lambda a, b: torch.cat([a, b]), 0),
        (lambda a, b: torch.cat([a, b.flatten(2).unflatten(2, (5, 4)), a], dim=1), 1),
        (lambda a, b: torch.cat([a.flatten(1), b.flatten(1)], dim=1), 1),  # not maps: left to torch
    ],
)
def test_concatenations_of_any_kind(joins: Callable[..., torch.Tensor], count: int) -> None:
    class _Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Conv2d(2, 8, 3, padding=1), nn.Conv2d(2, 8, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return joins(self.one(x), self.other(x))

    torch.manual_seed(0)
    assert _compare(_Two(), torch.randn(2, 2, 5, 4)).found["concatenation"] == count


@pytest.mark.parametrize(("channels", "side", "padding"), [(6, 5, 2), (20, 5, 0), (9, 3, 1), (16, 7, 1), (1, 3, 0)])
@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_thin_convolutions_of_the_images(channels: int, side: int, padding: int, pooled: bool, bias: bool) -> None:
    torch.manual_seed(0)
    thin = 1 if side == 7 else 2
    first = nn.Conv2d(thin, channels, side, padding=padding, bias=bias)
    fused = _compare(nn.Sequential(first, nn.ReLU(), *([nn.MaxPool2d(2)] * pooled)), torch.randn(3, thin, 9, 10))
    assert fused.found["thin Conv2d + ReLU" + " + max pooling" * pooled] == 1


@pytest.mark.parametrize(
    "module", [nn.Conv2d(1, 8, 3, padding=2), nn.Conv2d(1, 8, (3, 5)), nn.Conv2d(1, 8, 5, padding=(0, 1)), nn.Conv2d(2, 8, 7)]
)
def test_other_convolutions_of_the_images(module: nn.Conv2d) -> None:
    assert _compare(nn.Sequential(module, nn.ReLU()), torch.randn(2, module.in_channels, 7, 8)).found["Conv2d + ReLU"] == 1


@pytest.mark.parametrize("side", [1, 3])
def test_a_shared_convolution_of_images_and_maps(side: int) -> None:
    torch.manual_seed(0)
    shared, tied = nn.Conv2d(3, 3, side, padding=side // 2), nn.Conv2d(3, 3, side, padding=side // 2, bias=False)
    tied.weight = shared.weight
    fused = _compare(nn.Sequential(shared, nn.ReLU(), nn.MaxPool2d(2), shared, nn.ReLU(), tied), torch.randn(2, 3, 9, 8))
    assert fused.found["Conv2d + ReLU + max pooling"] == 1


def test_a_shared_convolution_to_few_channels() -> None:
    class _Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.shared = nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(16, 4, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            return self.shared(y).relu() + self.shared(y * 2.0)

    torch.manual_seed(0)
    assert _compare(_Twice(), torch.randn(2, 8, 5, 4)).found["fork"] == 1


class _Users(nn.Module):
    """A map with two users, one of which may do something to it."""

    def __init__(self, use: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.use = nn.Conv2d(2, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        other = self.last(y)
        return self.use(y) * 2 + other


@pytest.mark.parametrize(
    ("use", "forks"),
    [
        (lambda y: y + 1.0, 1),
        (lambda y: functional.max_pool2d(y, 1), 0),  # not known
        (lambda y: y.view(y.shape).mul(2.0), 0),  # its memory goes on
    ],
)
def test_only_what_nobody_changes_is_forked(use: Callable[[torch.Tensor], torch.Tensor], forks: int) -> None:
    torch.manual_seed(0)
    assert _compare(_Users(use), torch.randn(2, 2, 5, 4)).found["fork"] == forks


@pytest.mark.parametrize("use", [lambda y: y[:, :].relu_(), lambda y: functional.relu(y, inplace=True)])
def test_autograd_still_sees_changes_in_place(use: Callable[[torch.Tensor], torch.Tensor]) -> None:
    fused, _ = _fused(_Users(use).to(DEVICE).train())
    assert fused.found["fork"] == 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        fused(torch.randn(2, 2, 5, 4, device=DEVICE)).sum().backward()


def test_images_may_come_folded() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 8, 7, stride=2, padding=3), nn.ReLU()).to(DEVICE, memory_format=torch.channels_last)
    fused, lane = _fused(network, folds=True)
    assert fused.fold == (2, 3, 7)
    images = torch.randn(2, 3, 11, 8, device=DEVICE)
    rows, columns = (11 + 7) // 2, (8 + 7) // 2
    bordered = functional.pad(images, (3, 2 * columns - 8 - 3, 3, 2 * rows - 11 - 3))
    squares = bordered.view(2, 3, rows, 2, columns, 2).permute(0, 3, 5, 1, 2, 4).reshape(2, 12, rows, columns)
    folded = functional.pad(squares, (0, 0, 0, 0, 0, 4)).contiguous(memory_format=torch.channels_last)
    found, expected = fused(folded), network(images)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    direction = torch.randn_like(expected)
    found.backward(direction)
    lane.join()
    gradient = lane.gradient(network[0].weight)
    expected.backward(direction)
    torch.testing.assert_close(gradient, network[0].weight.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("spoil", ["hook", "frozen", "eval", "shared"])
def test_what_is_not_plain_stays_right(spoil: str) -> None:
    heard = []
    shared = nn.Conv2d(8, 8, 3, padding=1)
    network = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), shared, nn.ReLU(), shared, nn.BatchNorm2d(8))
    if spoil == "hook":
        network[1].register_forward_hook(lambda *_: heard.append(1))
    network = network.to(DEVICE, memory_format=torch.channels_last).train()
    if spoil == "eval":
        network[1].eval()
    if spoil == "frozen":
        network[0].weight.requires_grad_(False)
    exact = copy.deepcopy(network)
    fused, lane = _fused(network)
    images = torch.randn(4, 1, 9, 9, device=DEVICE)
    found, expected = fused(images), exact(images)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    direction = torch.randn_like(expected)
    found.backward(direction)
    lane.join()
    expected.backward(direction)
    assert len(heard) == (2 if spoil == "hook" else 0)
    for parameter, reference in zip(network.parameters(), exact.parameters(), strict=True):
        if reference.grad is None:
            assert lane.gradient(parameter) is None
        else:
            torch.testing.assert_close(lane.gradient(parameter), reference.grad, rtol=1e-2, atol=2e-3)


class _Branches(nn.Module):
    """Python that cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) if float(x.sum()) > 0 else self.layer(-x)


@pytest.mark.parametrize("wrap", [lambda m: m, lambda m: nn.Sequential(m, nn.BatchNorm2d(8), nn.ReLU())])
def test_what_cannot_be_traced_runs_as_it_is(wrap: Callable[[nn.Module], nn.Module]) -> None:
    network = wrap(_Branches()).to(DEVICE).train()
    exact = copy.deepcopy(network)
    images = torch.rand(2, 1, 8, 8, device=DEVICE)
    torch.testing.assert_close(_fused(network)[0](images), exact(images), rtol=1e-4, atol=1e-4)


class _Tied(nn.Module):
    """One layer in two places, of which the fusion takes one by the lane and leaves the other, or its bias, to autograd."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.conv, self.dense = kind, nn.Conv2d(4, 4, 3, padding=1), nn.Linear(4, 4)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "pooled":
            return self.pool(functional.relu(self.conv(self.conv(x)))).mean((2, 3))
        if self.kind == "unfused":
            return functional.conv2d(self.conv(x), self.conv.weight).mean((2, 3))
        return self.dense(x.mean((2, 3))) @ self.dense.weight


@pytest.mark.parametrize("kind", ["pooled", "unfused", "dense"])
def test_tied_weights_get_the_gradients_of_all_their_uses(kind: str) -> None:
    torch.manual_seed(0)
    _compare_used(_Tied(kind).to(DEVICE), torch.randn(2, 4, 6, 6, device=DEVICE))


class _TurnedTwice(nn.Module):
    """A dense layer behind two maps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)
        self.flat, self.dense = nn.Flatten(), nn.Linear(4 * 3 * 2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.dense(self.flat(self.first(x)))) * self.dense(self.flat(self.second(x)))


def test_a_weight_that_is_turned_twice_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """There its gradient would lie, in the middle of the backward pass, where its second use has the weight."""
    torch.manual_seed(0)
    network, turned = _TurnedTwice(), []
    room = torch.empty_like(network.dense.weight, device=DEVICE)

    def noted(*arguments: Any, **options: Any) -> torch.Tensor:
        turned.append(options["reorder"])
        return dense(*arguments, **options)

    monkeypatch.setattr(parts, "dense", noted)
    _compare(network, torch.randn(5, 3, 5, 4), room=lambda _parameter: room)
    assert len(turned) == 2
    assert None not in turned


def _compare_used(network: nn.Module, images: torch.Tensor) -> Fused:
    """Outputs, and the gradients of those parameters that have any."""
    exact = copy.deepcopy(network)
    fused, lane = _fused(network)
    found, expected = fused(images), exact(images)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    direction = torch.randn_like(expected)
    found.backward(direction)
    lane.join()
    expected.backward(direction)
    for (name, parameter), reference in zip(network.named_parameters(), exact.parameters(), strict=True):
        gradient = lane.gradient(parameter)
        assert (gradient is None) == (reference.grad is None), name
        if gradient is not None:
            torch.testing.assert_close(gradient, reference.grad, rtol=1e-3, atol=1e-4, msg=name)
    return fused


def test_dense_layers_around_maps_in_any_order_of_memory() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 24), nn.Unflatten(1, (-1, 2, 3)), nn.ReLU(), nn.Flatten(), nn.Linear(24, 5)).to(DEVICE)
    for layer in (network[0], network[4]):
        layer.weight.data = layer.weight.data.t().contiguous().t()
    fused = _compare_used(network, torch.randn(8, 3, device=DEVICE))
    assert fused.found["dense + unflattening + ReLU"] == 1
    assert fused.found["flattening + dense"] == 1


def test_an_unflattening_may_leave_a_side_open() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 24), nn.Unflatten(1, (-1, 2, 3)), nn.ReLU()).to(DEVICE)
    _compare_used(network, torch.randn(8, 3, device=DEVICE))


@pytest.mark.parametrize("kind", ["no affine", "no bias", "no statistics"])
def test_batch_norms_that_lack_something(kind: str) -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4, affine=kind != "no affine", track_running_stats=kind != "no statistics")
    if kind == "no bias":
        norm.register_parameter("bias", None)
    _compare_used(nn.Sequential(nn.Conv2d(4, 4, 1), norm, nn.ReLU()).to(DEVICE), torch.randn(4, 4, 5, 5, device=DEVICE))


def test_a_norm_in_two_places_is_counted_twice_in_one_place() -> None:
    norm = nn.BatchNorm2d(4)
    fused, _ = _fused(nn.Sequential(nn.Conv2d(4, 4, 1), norm, nn.Conv2d(4, 4, 1), norm, nn.BatchNorm2d(4)).to(DEVICE).train())
    assert len({counter.data_ptr() for counter in fused.counters}) == len(fused.counters) == 2
    assert sorted(fused.calls) == [1, 2]


@pytest.mark.parametrize("rows", [2, 60])
def test_what_is_not_a_number_is_seen_behind_a_fused_relu(rows: int) -> None:
    fused, _ = _fused(nn.Sequential(nn.BatchNorm2d(4), nn.ReLU()).to(DEVICE).train())
    images = torch.randn(2, 4, rows, 20, device=DEVICE)
    images[0, 1, 0, 0] = float("nan")
    assert fused(images)[:, 1].isnan().all()


class _InPlace(nn.Module):
    """Code that changes tensors which somebody still needs."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.case = case
        self.first, self.second, self.norm = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        if self.case == "the sum takes the place of a side":
            side = h * 1
            before = side
            side += self.norm(x)
            return side.sum((2, 3)) + 2 * before.sum((2, 3)) ** 2
        if self.case == "the sum is activated in place":
            out = self.norm(h) + x
            return functional.relu(out, inplace=True).sum((2, 3)) + (3 * out).sum((2, 3))
        if self.case == "a side changes after the sum":
            side = x * 1
            out = self.norm(h) + side
            side.mul_(0)
            return functional.relu(out).sum((2, 3))
        if self.case == "the input changes after the convolution":
            side = x * 1
            out = self.second(side)
            side.mul_(0)
            return functional.relu(out).sum((2, 3)) + h.sum((2, 3)) + self.norm(h).sum((2, 3))
        return (self.norm(h) + self.norm(self.second(x))).sum((2, 3))


CASES = [
    "the sum takes the place of a side", "the sum is activated in place", "a side changes after the sum",
    "the input changes after the convolution", "one norm twice",
]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_code_that_changes_tensors_in_place(case: str) -> None:
    torch.manual_seed(0)
    network = _InPlace(case).to(DEVICE, memory_format=torch.channels_last).train()
    exact = copy.deepcopy(network)
    fused, lane = _fused(network)
    images = torch.randn(4, 4, 5, 5, device=DEVICE).contiguous(memory_format=torch.channels_last)
    found, expected = fused(images), exact(images)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    direction = torch.randn_like(expected)
    failures = []
    for output in (expected, found):
        try:
            output.backward(direction)
        except RuntimeError as error:
            failures.append(str(error))
    lane.join()
    assert len(failures) in (0, 2), "what PyTorch refuses may be refused"
    if not failures:
        for parameter, reference in zip(network.parameters(), exact.parameters(), strict=True):
            if reference.grad is not None:
                torch.testing.assert_close(lane.gradient(parameter), reference.grad, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(network.norm.running_mean, exact.norm.running_mean, rtol=1e-3, atol=1e-4)
