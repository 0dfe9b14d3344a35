"""The network compiled by Inductor, forward and backward: operators that follow each other become one loop or one GPU kernel.

    choice = compile_step(network, step, arena.take_back_buffers, batch=32)     # compiles now; the step runs that code from here on
    choice.reason, choice.fusions

Compiling takes a second or so for each layer, so blocks that are equal are compiled once: each block on its own, instead of the
network as a whole, where that saves enough. The code fits one size of batch. The short batch at the end of a shard, and evaluation,
run the module as it is; both share its weights and buffers, which are the arena's.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from time import perf_counter
from typing import Any, Final, final

import torch
from torch import nn

from deepex.errors import ConfigError
from deepex.step.eager import EagerStep
from deepex.step.runner import StepChoice

Backend = str | Callable[..., Any]
_SAVES: Final = 3  # blocks are compiled apart if that spares at least one in so many layers; what is lost are fusions between them
_UNLIMITED: Final = 1 << 20


def compile_step(
    network: nn.Module, step: EagerStep, settle: Callable[[], None], *, batch: int, backend: Backend = "inductor"
) -> StepChoice:
    """Make `step` run the compiled network, and compile it now: what fails, fails before the run has begun.

    `settle` makes the network use the arena's buffers again, if it has replaced them.
    """
    compiled = CompiledNetwork(network, settle, batch=batch, backend=backend)
    before, began = _num_graphs(), perf_counter()
    step.use(compiled)
    try:
        with compiling():
            step.trial_seconds(batch)
    except Exception as error:
        step.use(network)
        step.trial_seconds(batch)  # a network that fails as it is says so itself
        raise ConfigError(_refusal(error)) from error
    found = {"regions": len(compiled.regions), "graphs": _num_graphs() - before}
    what = "the whole network" if compiled.regions == [network] else f"{found['regions']} blocks, equal ones once"
    reason = f"asked for; {what}, {found['graphs']} graphs, compiled in {perf_counter() - began:.0f} s"
    return StepChoice(kind="compiled", reason=reason, fusions=found)


@final
class CompiledNetwork:
    """Calls the network: its compiled code for `batch` images in training, the module as it is for any other number.

    The compiled code is hung into the modules for the time of a call alone, so that whoever else calls them finds them plain.
    Before a call, `settle`: a buffer that the last call has put in place of another would carry that call's gradient into this one,
    because to autograd compiled code is one operation.
    """

    def __init__(self, network: nn.Module, settle: Callable[[], None], *, batch: int, backend: Backend = "inductor") -> None:
        self._network, self._settle, self._batch = network, settle, batch
        self.regions = find_regions(network)
        compiled = _compiled(backend)
        self._calls = [(region.__dict__, partial(compiled, region)) for region in self.regions]

    def __call__(self, images: torch.Tensor) -> Any:
        """Compute the network's output."""
        self._settle()
        if len(images) != self._batch:
            return self._network(images)
        for attributes, call in self._calls:
            attributes["_compiled_call_impl"] = call
        try:
            return self._network(images)
        finally:
            for attributes, _ in self._calls:
                attributes.pop("_compiled_call_impl", None)


def find_regions(network: nn.Module) -> list[nn.Module]:
    """What to compile: the network as a whole or, where enough of it is repeated, its blocks, none within another."""
    prints = {block: _fingerprint(block) for block in network.modules() if _is_block(block)}
    times = Counter(prints.values())
    regions = list(dict.fromkeys(_outermost(network, prints, times)))
    distinct = {prints[region]: _num_layers(region) for region in regions}
    spared = sum(_num_layers(region) for region in regions) - sum(distinct.values())
    return regions if spared and _SAVES * spared >= _num_layers(network) else [network]


def _outermost(module: nn.Module, prints: dict[nn.Module, Hashable], times: Counter[Hashable]) -> Iterator[nn.Module]:
    """The largest blocks that are repeated, and those between them in which nothing is."""
    repeated = (times[prints[block]] > 1 for block in module.modules() if block in prints)
    if module in prints and (times[prints[module]] > 1 or not any(repeated)):
        yield module
    else:
        for child in module.children():
            yield from _outermost(child, prints, times)


def _is_block(module: nn.Module) -> bool:
    """Whether a module is called, has weights, and is more than one of PyTorch's own layers."""
    called = type(module).forward is not nn.Module.forward  # a ModuleList is not
    layer = type(module).__module__.startswith("torch.nn.") and next(module.children(), None) is None
    return called and not layer and next(module.parameters(), None) is not None


def _fingerprint(module: nn.Module) -> Hashable:
    """What equal blocks have in common. A difference that it misses costs a graph, no more: the compiler sees it."""
    tensors = chain(module.named_parameters(), module.named_buffers())
    return type(module), repr(module), tuple((name, t.shape, t.stride(), t.dtype, t.requires_grad) for name, t in tensors)


def _num_layers(module: nn.Module) -> int:
    return sum(next(part.parameters(recurse=False), None) is not None for part in module.modules())


def _compiled(backend: Backend) -> Callable[..., Any]:
    """The compiler's version of `_call`, for fixed shapes."""
    threads = torch.get_num_threads()  # its loops are cut for so many; named here, they are part of the key on disk
    options: dict[str, Any] | None = {"cpp.threads": threads, "compile_threads": threads} if backend == "inductor" else None
    if options is not None and torch.are_deterministic_algorithms_enabled():
        options["deterministic"] = True
    compiled: Callable[..., Any] = torch.compile(_call, backend=backend, dynamic=False, options=options)
    return compiled


def _call(module: nn.Module, *inputs: Any, **options: Any) -> Any:
    """What is compiled, instead of `module.compile()`: that sees no more than PyTorch's own code of a Sequential, and skips it.

    The module is an argument, so the code of one fits all that are equal.
    """
    return module._call_impl(*inputs, **options)


@contextmanager
def compiling() -> Iterator[None]:
    """Let as many graphs be compiled as there are kinds of regions: all regions of a process share one limit, of eight.

    It holds for the trial alone, which sees each kind once. The compiler looks at gradients of inner tensors, and is warned of it.
    """
    from torch._dynamo import config

    with warnings.catch_warnings(), config.patch(recompile_limit=_UNLIMITED, accumulated_recompile_limit=_UNLIMITED):
        warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a leaf")
        yield


def _num_graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def _refusal(error: BaseException) -> str:
    causes: list[BaseException] = [error]
    while (inner := getattr(causes[-1], "inner_exception", None) or causes[-1].__cause__) is not None and inner not in causes:
        causes.append(inner)
    if any("Compiler" in type(cause).__name__ and "Invalid" in type(cause).__name__ for cause in causes):
        return (
            "step is compiled, but no C++ compiler was found: install one (g++ or clang++, or load its module), or set step=eager"
        )
    last = causes[-1]
    text = next(iter(str(last).strip().splitlines()), "")[:200]
    return (
        f"step is compiled, but compiling failed ({type(last).__name__}: {text}): it needs a C++ compiler that works "
        "and, on a GPU, Triton; or set step=eager"
    )
