"""Batch-norm statistics of the agreed weights, estimated anew before they are evaluated.

    with statistics.estimated(epoch):
        …evaluate, or write the weights…

Running statistics are averages over the last twenty steps or so. Where replicas make few steps in an epoch and the weights move far
in each, they lag behind: with 8 steps per epoch on 384 replicas a network that was wrong in 19 % of its training samples was wrong
in 73 % of the others, with them. So the statistics are measured on some training batches with the weights as they are now. The
batches are those of certain replicas and steps, whichever rank has them; training goes on with the running ones.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch import nn

from deepex.arena.arena import Arena
from deepex.arena.mode import evaluating
from deepex.comm import Communicator
from deepex.data.feeds.feed import Feed
from deepex.data.feeds.samples import Turn
from deepex.data.feeds.shard import Shards
from deepex.step.eager import EagerStep
from deepex.sync.total import make_total

_SAMPLES: Final = 1024
_LEAST_BATCHES: Final = 8

Norm = nn.modules.batchnorm._NormBase


def statistics_kind(network: nn.Module) -> str:
    """Whether a network that trains has `running` statistics, `frozen` ones alone, or `none`."""
    there = [layer for layer in network.modules() if isinstance(layer, Norm) and layer.running_mean is not None]
    return "running" if any(map(_tracks, there)) else "frozen" if there else "none"


class Statistics:
    """Measures and puts in place. Collective."""

    def __init__(
        self, network: nn.Module, arena: Arena, step: EagerStep, feed: Feed, shards: Shards, *, comm: Communicator, mine: range,
        deterministic: bool,
    ) -> None:  # fmt: skip
        self._network, self._arena, self._step, self._feed, self._comm = network, arena, step, feed, comm
        self._layers = [layer for layer in network.modules() if isinstance(layer, Norm) and _tracks(layer)]
        number = max(_LEAST_BATCHES, -(-_SAMPLES // shards.batch))
        chosen = [divmod(k, shards.replicas) for k in range(number)]
        full = [(step, replica) for step, replica in chosen if (step + 1) * shards.batch <= shards.size(replica)]
        self._number = len(full)
        self._turns = [Turn(replica, step, step + 1) for step, replica in full if replica in mine]
        self._total = make_total(arena.buffers, deterministic=deterministic, zeros=comm.zeros)

    @contextmanager
    def estimated(self, epoch: int) -> Iterator[None]:
        """Put estimates in place; afterwards all buffers are as they were."""
        with self._arena.keeping_buffers():
            buffers = list(self._network.buffers())
            self._measure(epoch, [buffer.clone() for buffer in buffers], buffers)
            yield

    @torch.no_grad()
    def _measure(self, epoch: int, kept: list[torch.Tensor], buffers: list[torch.Tensor]) -> None:
        total, region = self._total, self._arena.buffers
        momenta = [layer.momentum for layer in self._layers]
        total.clear()
        total.add(region, 0.0)
        with evaluating(self._network):
            try:
                for layer in self._layers:
                    layer.train()
                    layer.momentum = 1.0  # what a batch leaves behind is its own
                self._feed.begin(epoch, self._turns)
                for _ in self._turns:
                    raw, _labels = self._feed.next()
                    with self._step.precision():
                        self._network(self._step.prepare(raw))
                    total.add(region, 1 / self._number)
            finally:
                for layer, momentum in zip(self._layers, momenta, strict=True):
                    layer.momentum = momentum
        self._arena.take_back_buffers()
        total.reach(self._comm)
        total.into(region)
        measured = {id(layer.running_mean) for layer in self._layers} | {id(layer.running_var) for layer in self._layers}
        for buffer, value in zip(buffers, kept, strict=True):
            if id(buffer) not in measured:
                buffer.copy_(value)


def _tracks(layer: nn.Module) -> bool:
    """Whether training moves the layer's statistics; those of a layer in evaluation mode are its owner's."""
    return isinstance(layer, Norm) and layer.running_mean is not None and layer.training
