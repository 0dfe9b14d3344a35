"""The order of image tensors in memory: channels-last or contiguous, whichever this network trains faster in, here.

    choice = choose_order(network, shape=(1, 28, 28), batch=32, task=task, device=cpu)
    choice.channels_last, choice.reason

On a GPU channels-last feeds the tensor cores. On a CPU it depends: max pooling is up to seven times faster in it, ResNet-18 a tenth
slower. So a few steps of each are timed, on a copy of the network. A network that asks for `view` after a convolution cannot take
channels-last: it stays contiguous.
"""

import warnings
from dataclasses import dataclass
from time import perf_counter
from typing import Final

import torch
from torch import nn

from deepex.arena.network import twin, unchanged
from deepex.errors import told
from deepex.task.task import Task

_TRIAL_SECONDS: Final = 4.0
_MIN_ROUNDS, _MAX_ROUNDS = 4, 20
_FEW: Final = 2  # images
_CLEAR: Final = 1.2  # so far ahead after a few rounds, nothing turns it


@dataclass(frozen=True, kw_only=True)
class ImageOrder:
    """The order that was chosen, and why."""

    channels_last: bool
    reason: str


def choose_order(network: nn.Module, *, shape: tuple[int, ...], batch: int, task: Task, device: torch.device) -> ImageOrder:
    """Choose for training on batches of `shape` (channels, height, width); network and random numbers are left as they were."""
    with unchanged(network):
        return _chosen(network, shape, batch, task, device)


def _chosen(network: nn.Module, shape: tuple[int, ...], batch: int, task: Task, device: torch.device) -> ImageOrder:
    refusal = _refusal(network, shape, task)
    if refusal is not None:
        return ImageOrder(channels_last=False, reason=f"the network cannot take channels-last: {refusal}")
    if device.type == "cuda":
        return ImageOrder(channels_last=True, reason="tensor cores read channels-last")
    before = torch.random.get_rng_state()
    trials = {last: _Trial(network, (batch, *shape), task, channels_last=last) for last in (False, True)}
    began = perf_counter()
    for rounds in range(1, _MAX_ROUNDS + 1):
        for trial in trials.values():  # in turns, so that a busy moment of the machine hits both
            trial.step()
        if rounds < _MIN_ROUNDS:
            continue
        plain, last = (min(trial.seconds[1:]) for trial in trials.values())
        if perf_counter() - began > _TRIAL_SECONDS or max(plain, last) > _CLEAR * min(plain, last):
            break
    torch.random.set_rng_state(before)
    text = f"contiguous {plain * 1e3:.1f} ms a step, channels-last {last * 1e3:.1f} ms, best of {rounds - 1} at the start"
    return ImageOrder(channels_last=last < plain, reason=text)


def _refusal(network: nn.Module, shape: tuple[int, ...], task: Task) -> str | None:
    """What a network that trains in the usual order raises in the other; None if it takes both."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            _Trial(network, (_FEW, *shape), task, channels_last=True).step()
        except Exception as error:  # noqa: BLE001 - it is somebody's network
            return told(error)
    return None


class _Trial:
    """Steps of a copy of the network in one order; the first warms up."""

    def __init__(self, network: nn.Module, shape: tuple[int, ...], task: Task, *, channels_last: bool) -> None:
        order = torch.channels_last if channels_last else torch.contiguous_format
        self._network = twin(network, channels_last=channels_last)
        self._task, self.seconds = task, list[float]()
        self._images = torch.empty(shape, memory_format=order).uniform_()
        self._labels = torch.zeros(shape[0], dtype=torch.int64)

    def step(self) -> None:
        began = perf_counter()
        self._task.loss(self._network(self._images), self._images, self._labels).backward()
        self.seconds.append(perf_counter() - began)
        self._network.zero_grad()
