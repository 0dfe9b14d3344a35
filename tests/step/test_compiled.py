"""Compiled steps: what is compiled, how often, and that it learns the same. No C++ compiler is needed: backends are injected."""

import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import deepex
from deepex.arena.optimiser.config import OptimConfig
from deepex.comm.solo import SoloCommunicator
from deepex.errors import ConfigError
from deepex.nets.lenet import lenet
from deepex.nets.resnet import Residual, resnet18, resnet50
from deepex.record import RunDirectory
from deepex.step import choose
from deepex.step.compiled import CompiledNetwork, compile_step, compiling, find_regions
from deepex.sync.config import SyncConfig
from deepex.training.config import RunConfig

MakeData = Callable[[int], Path]
GRADIENT_BACKEND = "aot_eager"  # autograd is compiled as for Inductor; operators are PyTorch's


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.main = nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images + self.main(images)


def blocks(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, width in zip((1, *widths), widths, strict=False):
        layers += [nn.Conv2d(before, width, 1)] * (before != width) + [Block(width)]
    return nn.Sequential(*layers)


def nothing() -> None:
    """No arena, no buffers to settle."""


class Counting:
    """A backend that counts the graphs it is given, and runs them as they are."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward


@pytest.mark.parametrize(("widths", "graphs"), [([4] * 8, 1), ([4] * 4 + [6] * 4, 2), ([4] * 12 + [6] * 12 + [8] * 12, 3)])
def test_equal_blocks_are_compiled_once(widths: list[int], graphs: int) -> None:
    network, backend = blocks(*widths), Counting()
    compiled = CompiledNetwork(network, nothing, batch=2, backend=backend)
    assert compiled.regions == [module for module in network if isinstance(module, Block)]
    images = torch.rand(2, 1, 6, 6)
    expected = network(images)
    with compiling():
        assert torch.allclose(compiled(images), expected)
    assert backend.graphs == graphs


def test_more_kinds_of_blocks_than_torch_would_compile(make_step: Any) -> None:
    widths = [width for width in range(2, 14) for _ in range(2)]
    network, backend = nn.Sequential(blocks(*widths), nn.AdaptiveAvgPool2d(1), nn.Flatten()), Counting()
    choice = compile_step(network, make_step(network), nothing, batch=2, backend=backend)
    assert (choice.fusions, backend.graphs) == ({"regions": 24, "graphs": 12}, 12)


def test_blocks_or_the_whole_network() -> None:
    with torch.device("meta"):
        small, residual, deep = (make(channels=1, size=(28, 28), classes=10) for make in (lenet, resnet18, resnet50))
    assert find_regions(small) == [small]
    assert find_regions(residual) == [residual]  # seven of its eight blocks differ
    regions = find_regions(deep)
    assert sum(isinstance(region, Residual) for region in regions) == 16
    inside = {id(module) for region in regions for module in region.modules()}
    assert len(inside) == sum(len(list(region.modules())) for region in regions)


def test_repeated_layers_of_pytorch_are_no_blocks() -> None:
    network = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
    assert find_regions(network) == [network]


def test_blocks_in_a_module_list_are_found() -> None:
    network = nn.ModuleDict({"some": nn.ModuleList(Block(4) for _ in range(4))})
    assert find_regions(network) == list(network["some"])


def test_a_block_that_is_used_twice_is_one_region() -> None:
    shared = Block(4)
    network = nn.Sequential(shared, nn.Sequential(Block(4), shared, Block(4)))
    assert find_regions(network).count(shared) == 1


def test_only_full_batches_are_compiled_and_modules_stay_plain() -> None:
    network, backend = blocks(4, 4), Counting()
    compiled = CompiledNetwork(network, nothing, batch=8, backend=backend)
    for count in (5, 3, 1):
        compiled(torch.rand(count, 1, 6, 6))
    assert backend.graphs == 0
    with compiling():
        compiled(torch.rand(8, 1, 6, 6))
    seen = backend.graphs
    assert seen > 0
    with pytest.raises(RuntimeError):
        compiled(torch.rand(8, 2, 6, 6))
    network(torch.rand(8, 1, 6, 6))
    network.eval()(torch.rand(64, 1, 6, 6))
    assert backend.graphs == seen
    assert all("_compiled_call_impl" not in vars(module) for module in network.modules())


@pytest.fixture
def compiled_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_me")  # as importing it leaves it
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(choose, "compile_step", partial(compile_step, backend=GRADIENT_BACKEND))


def trained(config: RunConfig, out: Path) -> tuple[dict[str, torch.Tensor], RunDirectory]:
    run = deepex.train(config, SoloCommunicator(), out=out)
    return load_file(out / "weights.safetensors"), run


@pytest.mark.usefixtures("compiled_here")
@pytest.mark.parametrize("net", ["batch_normed", "counting"])
@pytest.mark.parametrize("sync", [SyncConfig(period=2), SyncConfig(strategy="gradients")], ids=["weights", "gradients"])
def test_compiled_steps_learn_what_eager_ones_do(net: str, sync: SyncConfig, make_data: MakeData, tmp_path: Path) -> None:
    """Shards of 17, 16 and 16 samples in batches of 8: one ends with a batch of one."""
    settings: dict[str, Any] = {
        "net": f"tests.networks:{net}", "data": str(make_data(49)), "epochs": 2, "batch": 8, "replicas": 3, "threads": 1,
        "layout": "channels_last", "optim": OptimConfig(rate=0.02, momentum=0.9, weight_decay=0.01), "sync": sync,
    }  # fmt: skip
    expected, plain = trained(RunConfig(**settings, step="eager"), tmp_path / "eager")
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    found, run = trained(RunConfig(**settings, step="compiled"), tmp_path / "compiled")
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] - before
    assert run.state["step"]["kind"] == "compiled"
    assert graphs == run.state["step"]["fusions"]["graphs"] == 1
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)
    ours, theirs = run.epochs()[-1], plain.epochs()[-1]
    assert ours.validation is not None
    assert theirs.validation is not None
    assert ours.validation.loss == pytest.approx(theirs.validation.loss, rel=1e-5)


@pytest.mark.usefixtures("compiled_here")
def test_bf16_and_blocks(make_data: MakeData, tmp_path: Path) -> None:
    config = RunConfig(
        net="tests.step.test_compiled:classifier", data=str(make_data(49)), epochs=1, batch=8, step="compiled", precision="bf16",
    )  # fmt: skip
    _, run = trained(config, tmp_path / "run")
    assert run.state["step"]["fusions"] == {"regions": 4, "graphs": 1}
    assert "equal ones once" in run.state["step"]["reason"]
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"].startswith(str(tmp_path / "cache/deepex/inductor"))


def classifier(channels: int, classes: int) -> nn.Module:
    some = [Block(4) for _ in range(4)]
    return nn.Sequential(nn.Conv2d(channels, 4, 3, stride=4), *some, nn.Flatten(), nn.Linear(4 * 7 * 7, classes))


@pytest.fixture
def make_step() -> Callable[[nn.Module], Any]:
    return _Step


class _Step:
    """A step that computes images of one channel and keeps no gradients."""

    def __init__(self, network: nn.Module) -> None:
        self.compute: Callable[[torch.Tensor], Any] = network

    def use(self, compute: Callable[[torch.Tensor], Any]) -> None:
        self.compute = compute

    def trial_seconds(self, batch: int) -> float:
        self.compute(torch.rand(batch, 1, 6, 6)).sum().backward()
        return 0.0


def without_compiler(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
    from torch._inductor.exc import InvalidCxxCompiler

    raise InvalidCxxCompiler


def broken(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
    raise RuntimeError("ld: cannot find -lgomp\nand much more")


@pytest.mark.parametrize(("backend", "words"), [(without_compiler, "install one"), (broken, "cannot find -lgomp")])
def test_without_a_compiler_the_remedy_is_told(backend: Any, words: str, make_step: Any) -> None:
    network = blocks(4)
    step = make_step(network)
    with pytest.raises(ConfigError, match=words) as caught:
        compile_step(network, step, nothing, batch=2, backend=backend)
    assert "step=eager" in str(caught.value)
    assert "much more" not in str(caught.value)
    assert step.compute is network


def test_a_network_that_fails_as_it_is_says_so_itself(make_step: Any) -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3))
    with pytest.raises(RuntimeError, match="channels"):
        compile_step(network, make_step(network), nothing, batch=2, backend="eager")
