"""Where a captured step's samples come from: all of them on the device, or one batch that a feed has brought there.

source = Source(parts, fused.fold, key)
source.begin(epoch, turns, rate)      # what each step of the epoch takes, in a table on the device
images, labels = source.take(size)    # within the step: the batch at the cursor
"""

from collections.abc import Sequence
from typing import final

import numpy as np
import torch

from deepex.data.feeds.device import DeviceFeed
from deepex.data.feeds.samples import Turn
from deepex.step.captured.kernels.take import Taker
from deepex.step.eager import mixed_many
from deepex.step.runner import StepInputs


@final
class BatchTable:
    """Batches by a `cursor` on the device: row after row of a table of places in the order, random keys, and rates.

    `key` gets the key of the batch that was taken last. `sizes`: of all batches that occur, the full one first.
    """

    def __init__(self, inputs: StepInputs, fold: tuple[int, int, int], key: torch.Tensor, *, most_steps_at_once: int) -> None:
        self._inputs, shards = inputs, inputs.samples.shards
        device = inputs.arena.memory.device
        self._resident = inputs.feed if isinstance(inputs.feed, DeviceFeed) else None
        if self._resident is not None:
            images, labels, order = self._resident.images, self._resident.labels, self._resident.order
        else:
            images, labels = (torch.from_numpy(array).to(device) for array in inputs.samples.empty(shards.batch))
            labels.zero_()
            order = torch.arange(shards.batch, device=device)
        prepare, augment = inputs.prepare, inputs.prepare.augment
        self._taker = Taker(
            images=images, labels=labels, order=order, key=key, factor=prepare.factor.flatten(), offset=prepare.offset.flatten(),
            size=augment.size, pad=augment.config.pad, flip=augment.config.flip, fold=fold[0], border=fold[1], kernel=fold[2],
        )  # fmt: skip
        exact = inputs.options.precision != "bf16" or inputs.task.needs_images
        self._dtype = torch.float32 if exact else torch.bfloat16
        counts = [self._count(replica) for replica in inputs.samples.replicas]
        fulls, rests = {min(count, shards.batch) for count in counts}, {count % shards.batch for count in counts}
        self.sizes = sorted((fulls | rests) - {0}, reverse=True)
        rows = max(sum(-(-count // shards.batch) for count in counts), most_steps_at_once)
        self.cursor = torch.zeros(1, dtype=torch.int64, device=device)
        self.rates = torch.zeros(rows, device=device)
        self._places = torch.zeros((rows, 2), dtype=torch.int64, device=device)
        self.keys: list[int] = []

    @property
    def resident(self) -> bool:
        """Whether a step needs nothing from the host."""
        return self._resident is not None

    def begin(self, epoch: int, turns: Sequence[Turn]) -> None:
        """Lay out the steps of an epoch, or of the rest of one."""
        inputs = self._inputs
        begins = [begin for begin, _ in inputs.samples.batches(turns)]
        steps = [(turn.replica, step) for turn in turns for step in range(turn.start, turn.stop)]
        assert len(begins) == len(steps), "turns end where their shards do"
        replicas, numbers = np.array(steps, np.uint64).reshape(-1, 2).T
        keys = mixed_many(inputs.options.seed, replicas, epoch, numbers)
        rows = np.stack([np.array(begins, np.int64) if self.resident else np.zeros(len(steps), np.int64), keys.view(np.int64)], 1)
        rates = np.array([inputs.rate(epoch, step) for _, step in steps], np.float32)
        self._places[: len(rows)].copy_(torch.from_numpy(rows))
        self.rates[: len(rates)].copy_(torch.from_numpy(rates))
        self.cursor.zero_()
        self.keys = keys.tolist()

    def batches(self, turn: Turn) -> list[int]:
        """How many samples each batch of a turn has."""
        batch, count = self._inputs.samples.shards.batch, self._count(turn.replica)
        full, rest = divmod(max(min(turn.stop * batch, count) - turn.start * batch, 0), batch)
        return [batch] * full + [rest] * (rest > 0)

    def bring(self, steps: int) -> None:
        """See to it that the next batches are on the device when the stream gets there; not more than one unless `resident`."""
        if self._resident is not None:
            self._resident.skip(steps)
            return
        images, labels = self._inputs.feed.next()
        self._taker.images[: len(images)].copy_(images)
        self._taker.labels[: len(labels)].copy_(labels)

    def take(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The batch at the cursor, ready for the network."""
        return self._taker.take(self._places, self.cursor, size, self._dtype)

    def _count(self, replica: int) -> int:
        first, end = self._inputs.samples.shards.bounds(replica)
        return end - first
