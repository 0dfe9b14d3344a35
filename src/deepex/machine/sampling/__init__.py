"""What a run uses beside its time: processor, memory, files, network, GPU, energy; one thread per rank reads it.

    with Sampler(0.2, open_sources(first=True), clock.progress) as sampler:
        …                                   # an epoch
        used = sampler.take()               # since the last `take`
        used.amounts["cpu_seconds"]["forward"], used.peaks["memory_bytes"]

What the kernel and the driver count is read five times a second. A sample takes 0.07 ms of a core, and 0.28 where others have
emptied its caches meanwhile: 0.14 % (benchmarks/sampling.py). What cannot be read is absent: never zero, and no error.

A phase may last a millisecond, a sample comes every 200. The processor's seconds are read at every mark of the phase clock, so
they are those of the phase. Everything else is dealt to the phases that passed within an interval, in proportion to their seconds.
That tells apart phases that last longer than an interval; those that alternate faster all get the same rate. On a GPU the host
does not know which phase the device is in: there everything is under `epoch`. A peak is the highest level that a sample met.
"""

from functools import partial
from pathlib import Path

from deepex.machine.reading import attempt
from deepex.machine.sampling.gpu import open_gpu
from deepex.machine.sampling.ledger import Used
from deepex.machine.sampling.node import disks, idle, network, packages
from deepex.machine.sampling.process import memory, processor, storage
from deepex.machine.sampling.sampler import Sampler
from deepex.machine.sampling.series import Series
from deepex.machine.sampling.source import UsageSource

__all__ = ["Sampler", "Series", "Source", "Used", "open_sources"]


def open_sources(*, first: bool, gpu: str | None = None, root: Path = Path("/")) -> list[UsageSource]:
    """All that can be read here: of this process, of its GPU, and, for the first rank of a node, of the node."""
    kinds = (processor, memory, storage, *((idle, disks, network, packages) if first else ()))
    found: list[UsageSource | None] = [attempt(partial(kind, root)) for kind in kinds]
    found.append(open_gpu(gpu) if gpu is not None else None)
    return [source for source in found if source is not None]
