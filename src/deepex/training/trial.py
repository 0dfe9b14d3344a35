"""A trial of what training will do, before there is a run directory: what cannot be trained is told in one line.

    trial = check_network(network, config, dataset, shards, ranks=comm.size)
    trial.activation_bytes(config.batch)                         # what a step keeps between its two passes

A copy of the network takes two samples, forwards and backwards, and another copy evaluates two; one sample, if the last batch has
only one. It happens on the CPU with made-up images, and no rank speaks to another. The copies share the weights, which nobody
updates. The network, its buffers and modes, and torch's random numbers are left as they were.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import torch
from torch import nn

from deepex.arena.held import Held
from deepex.arena.network import aliases, check_averages, check_weights, kept_with_history, listed, standing_still, twin, unchanged
from deepex.arena.writes import Writes
from deepex.data.feeds.shard import Shards, Slices
from deepex.data.find import OpenDataset
from deepex.errors import ConfigError, UserError, told
from deepex.task import make_task
from deepex.task.task import Task
from deepex.training.config import RunConfig

_FEW: Final = 2  # one is too few for batch norm
_THREADS: Final = 4  # several ranks of a node may be here at once
_LEAST_EVALUATED: Final = 64  # a batch of an evaluation, as the trainer has it

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What was seen: the bytes that autograd kept of so many images; None if it could not be told.

    `moving`: the tensors that no optimiser changes and no layer in training mode, but the network itself, such as the weights of a
    teacher that follows. Looked for where there are several replicas, which must agree on them.
    """

    saved_bytes: int | None
    images: int
    moving: frozenset[str] = frozenset()

    def activation_bytes(self, batch: int) -> int | None:
        """The bytes that autograd keeps of a batch in float32, weights not counted; with bf16 it is about half."""
        return None if self.saved_bytes is None else self.saved_bytes * batch // self.images


def check_network(network: nn.Module, config: RunConfig, dataset: OpenDataset, shards: Shards, *, ranks: int) -> Trial:
    """Raise ConfigError for a network that this configuration cannot train or evaluate on this dataset."""
    check_weights(network)
    check_averages(network, shards.replicas)
    height, width = config.augment.size(*dataset.manifest.shape[1:])
    shape = (dataset.manifest.shape[0], height, width)
    attempt = _Attempt(network, config, make_task(config.task), shape, max(len(dataset.manifest.classes), 1))
    trained = _batches({shards.size(0), shards.size(shards.replicas - 1)}, config.batch)
    with _undisturbed(config), unchanged(network):
        trials = [attempt.on(attempt.train, few, stands_for) for few, stands_for in trained.items()]
        for few, stands_for in _batches(_evaluated(config, dataset, ranks), max(config.batch, _LEAST_EVALUATED)).items():
            attempt.on(attempt.evaluate, few, stands_for)
        return replace(trials[-1], moving=attempt.moving(max(trained)) if shards.replicas > 1 else frozenset())


class _Attempt:
    """Tries steps of a network, each on a copy of its own."""

    def __init__(self, network: nn.Module, config: RunConfig, task: Task, shape: tuple[int, ...], classes: int) -> None:
        self._network, self._config, self._task = network, config, task
        self._shape, self._classes = shape, classes
        self._aliases = aliases(network)

    def on(self, act: Callable[[int], T], few: int, stands_for: int) -> T:
        """Do something with `few` images. A network may need more of them: then with as many as they stand for."""
        raised: list[_RaisedError] = []
        for count in dict.fromkeys((few, stands_for)):
            try:
                return act(count)
            except _RaisedError as error:
                raised.append(error)
        raise self._refusal(raised[-1]) from raised[-1].error

    def train(self, count: int) -> Trial:
        """A step on `count` images."""
        network = self._twin()
        held, kept = Held(network), [_kept(network, path, key) for path, key, _ in self._aliases]
        images, labels = self._batch(count)
        doing = f"training on {count}"
        with _raised_in(doing):
            output, saved_bytes = _forward(network, images)
        self._check_output(output, images)
        with _raised_in(doing):
            self._learn(output, images, labels)
        held.check()
        self._check_aliases(network, kept)
        self._check_gradients(network)
        if keeps := kept_with_history(network):  # which is right, unless the next step goes back along it
            with _raised_in(f"keeping {', '.join(map(repr, keeps))} with its history from one step to the next, and {doing}"):
                self._learn(network(images), images, labels)
        return Trial(saved_bytes=saved_bytes, images=count)

    def moving(self, count: int) -> frozenset[str]:
        """The tensors that should stand still, and do not in a step on `count` images."""
        network = self._twin()
        writes = Writes(standing_still(network))
        if writes.tensors:
            with suppress(Exception), writes:  # what cannot be watched so is left to the check at the end of each epoch
                images, labels = self._batch(count)
                self._learn(network(images), images, labels)
        return frozenset(writes.found)

    def _twin(self) -> nn.Module:
        return twin(self._network, channels_last=self._config.layout == "channels_last")

    def _learn(self, output: Any, images: torch.Tensor, labels: torch.Tensor) -> None:
        loss = self._task.loss(output, images, labels)
        self._task.measure_sums(output, images, labels)
        if loss.requires_grad:
            loss.backward()

    @torch.no_grad()
    def evaluate(self, count: int) -> None:
        """An evaluation of `count` images."""
        network = self._twin().eval()
        held = Held(network)
        images, labels = self._batch(count)
        with _raised_in(f"evaluating {count}"):
            output = network(images)
        self._check_output(output, images, " when it evaluates")
        with _raised_in(f"evaluating {count}"):
            self._task.loss(output, images, labels)
            self._task.measure_sums(output, images, labels)
        held.check()

    def _batch(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The same on every rank."""
        order = torch.channels_last if self._config.layout == "channels_last" else torch.contiguous_format
        images = torch.empty((count, *self._shape), memory_format=order)  # one channel has such strides too
        images.uniform_(generator=torch.Generator().manual_seed(0))
        return images, torch.zeros(count, dtype=torch.int64)

    def _check_output(self, output: Any, images: torch.Tensor, when: str = "") -> None:
        if self._task.takes(output, images, self._classes):
            return
        rule = self._task.rule(images, self._classes)
        raise ConfigError(
            f"net {self._config.net!r} returned {_described(output)} for images of shape {tuple(images.shape)}{when}; with "
            f"task={self._config.task} it must return {rule}: mend its forward"
        )

    def _check_aliases(self, network: nn.Module, kept: list[list[object]]) -> None:
        """Refuse attributes in the memory of weights, which training moves elsewhere; not those that are made anew in each step."""
        for (path, key, name), before in zip(self._aliases, kept, strict=True):
            if {*map(id, before)} & {*map(id, _kept(network, path, key))}:
                raise ConfigError(
                    f"the network keeps {f'{path}.{key}'.lstrip('.')!r} in the memory of its {name!r}, which training moves "
                    "elsewhere: keep that tensor itself, or make the other of it in forward"
                )

    def _check_gradients(self, network: nn.Module) -> None:
        found = {name: parameter.grad for name, parameter in network.named_parameters() if parameter.grad is not None}
        if not found:
            raise ConfigError(
                f"net {self._config.net!r} learns nothing: no trainable weight has a part in what it returns; look for detach(), "
                "no_grad() or argmax() in its forward, or for layers that it does not use"
            )
        for name, gradient in found.items():
            if gradient.layout is not torch.strided:
                raise ConfigError(
                    f"the network's {name!r} has gradients of layout {gradient.layout}; they must be dense: set sparse=False there"
                )

    def _refusal(self, raised: "_RaisedError") -> ConfigError:
        doing, error = raised.doing, raised.error
        remedy = "mend it there, or set layout=contiguous" if self._config.layout == "channels_last" else "mend it there"
        if "through the graph a second time" in str(error):
            remedy = "detach() what it keeps"
        if self._config.deterministic and "deterministic" in str(error):
            remedy = "use another layer, or set deterministic=false"
        return ConfigError(f"net {self._config.net!r} raised, {doing} images of shape {self._shape}, {told(error)}; {remedy}")


class _RaisedError(Exception):
    """The network raised `error` while `doing` something."""

    def __init__(self, doing: str, error: BaseException) -> None:
        super().__init__(doing)
        self.doing, self.error = doing, error


@contextmanager
def _raised_in(doing: str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # whatever it is, it is somebody's network
        raise _RaisedError(doing, error) from error


@contextmanager
def _undisturbed(config: RunConfig) -> Iterator[None]:
    """Put back what a trial changes in torch. Warnings come again in the first step."""
    threads, strictness = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    torch.set_num_threads(min(threads, _THREADS))
    if config.deterministic:
        torch.set_deterministic_debug_mode("error")
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.default_generator.manual_seed(0)  # every rank finds the same
            yield
    finally:
        torch.set_num_threads(threads)
        torch.set_deterministic_debug_mode(strictness)


def _kept(network: nn.Module, path: str, key: str) -> list[object]:
    return [one for one in listed(vars(network.get_submodule(path)).get(key)) if isinstance(one, torch.Tensor)]


def _batches(counts: Iterable[int], batch: int) -> dict[int, int]:
    """The sizes of batches that `counts` samples are cut into: those that are tried, and what each stands for."""
    sizes = {min(count, batch) for count in counts} | {count % batch for count in counts}
    return {min(size, _FEW): size for size in sorted(sizes) if size}


def _evaluated(config: RunConfig, dataset: OpenDataset, ranks: int) -> set[int]:
    """How many samples a rank may have to evaluate."""
    part = dataset.manifest.parts.get("validation")
    if config.validate == "none" or part is None:
        return set()
    slices = Slices(part.count, ranks if config.validate == "parallel" else 1, 1)
    bounds = (slices.bounds(rank) for rank in range(slices.ranks))
    return {stop - start for start, stop in bounds}


def _forward(network: nn.Module, images: torch.Tensor) -> tuple[Any, int | None]:
    """The network's output, and the bytes that autograd keeps of the way there."""
    with suppress(RuntimeError):  # torch.func, for one, does not let itself be watched
        return _watched(network, images)
    return network(images), None


def _watched(network: nn.Module, images: torch.Tensor) -> tuple[Any, int]:
    weights = {_address(tensor) for tensor in (*network.parameters(), *network.buffers())}
    saved: dict[int, torch.UntypedStorage] = {}  # keeps them alive, so that no address is used twice

    def keep(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        if tensor.layout is torch.strided and _address(tensor) not in weights:
            saved[_address(tensor)] = tensor.untyped_storage()
        return tensor, tensor._version

    with torch.autograd.graph.saved_tensors_hooks(keep, _unchanged):
        output = network(images)
    return output, sum(storage.nbytes() for storage in saved.values())


def _unchanged(kept: tuple[torch.Tensor, int]) -> torch.Tensor:
    """What a backward pass asks for. Where it is watched, autograd leaves it to us to see that nobody has written to it."""
    tensor, version = kept
    if tensor._version != version:
        shape = tuple(tensor.shape)
        raise RuntimeError(
            f"one of the variables needed for gradient computation, of shape {shape}, has been modified by an inplace operation"
        )
    return tensor


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _described(output: Any) -> str:
    """What a network returned, in words."""
    if isinstance(output, torch.Tensor):
        return f"a tensor of {str(output.dtype).removeprefix('torch.')} of shape {tuple(output.shape)}"
    if isinstance(output, tuple | list):
        return f"a {type(output).__name__} of {len(output)}: {', '.join(map(_described, output[:4]))}"
    if isinstance(output, dict):
        return f"a {type(output).__name__} with the keys {', '.join(map(repr, list(output)[:8]))}"
    return f"a {type(output).__name__}" if output is not None else "None"
