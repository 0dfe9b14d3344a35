"""What a run uses, beside its phases: a sampler on every rank, what it found in the row that ranks gather, the series in a file.

with UsageWatch(config.sampling, device, comm, run, clock) as usage:
    …                                               # an epoch
    rows = comm.gather_rows([…, *usage.row()])
    record = EpochRecord(…, usage=usage_of(rows))
    usage.write()
"""

from types import TracebackType
from typing import Self, final

import torch

from deepex.comm import Communicator
from deepex.machine.reading import attempt
from deepex.machine.sampling import Sampler, Series, open_sources
from deepex.machine.sampling.usage import NOTHING, to_row
from deepex.record import RunDirectory
from deepex.record.clock import PhaseClock


@final
class UsageWatch:
    """Samples while the `with` block runs, unless the interval is 0; nothing is left afterwards."""

    def __init__(
        self, interval_seconds: float, device: torch.device, comm: Communicator, run: RunDirectory, clock: PhaseClock
    ) -> None:
        self._interval_seconds, self._device, self._clock = interval_seconds, device, clock
        place = comm.place
        self._is_first = place.local_rank == 0
        self._path = run.path / ("resources.jsonl" if place.num_nodes == 1 else f"resources-{place.host}.jsonl")
        self._gpu: str | None = None
        self.sampler: Sampler | None = None

    def __enter__(self) -> Self:
        if not self._interval_seconds:
            return self
        self._gpu = gpu_identifier(self._device) if self._device.type == "cuda" else None
        sources = open_sources(first=self._is_first, gpu=self._gpu)
        series = Series(self._path, self._interval_seconds) if self._is_first else None
        self.sampler = Sampler(self._interval_seconds, sources, self._clock.progress, series)
        self.sampler.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.sampler is not None:
            self.sampler.close()

    def epoch_began(self, epoch: int) -> None:
        """Tell the series; what came before is of no phase."""
        if self.sampler is not None:
            self.sampler.pause()
            self.sampler.epoch = epoch

    def pause(self) -> None:
        """Take a sample between two phases: what is done before or after here, such as a checkpoint, does not blur into them."""
        if self.sampler is not None:
            self.sampler.pause()

    def row(self) -> list[float]:
        """What this rank has used since the last time, for the other ranks."""
        if self.sampler is None:
            return list(NOTHING)
        return to_row(self.sampler.take(), first=self._is_first, gpu=self._gpu)

    def write(self) -> None:
        """Write down the series of samples, on the first rank of a node; outside the phases."""
        if self.sampler is not None:
            self.sampler.write()


def gpu_identifier(device: torch.device) -> str | None:
    """The GPU's identifier, by which its driver knows it whatever CUDA_VISIBLE_DEVICES says."""
    uuid = attempt(lambda: str(torch.cuda.get_device_properties(device).uuid))
    return uuid if uuid is None or uuid.startswith("GPU-") else f"GPU-{uuid}"
