"""Which samples a replica sees: near-equal contiguous shards. In which order: see order.py.

    shards = Shards(count=6000, replicas=7, batch=32)
    shards.bounds(0)               # (0, 858)
    shards.samples(0, 26, 27)      # 26: the last batch of the shard is short

Nothing here depends on the number of ranks: R replicas on one rank see exactly what R replicas on R ranks see, and a resumed run
what the uninterrupted one would have seen.
"""

from dataclasses import dataclass

from deepex.errors import ConfigError


@dataclass(frozen=True)
class Shards:
    """`count` samples split over `replicas`; the first `count % replicas` shards have one sample more."""

    count: int
    replicas: int
    batch: int

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ConfigError(f"batch is {self.batch}; it must be at least 1")
        full_batches = self.count // self.batch
        if self.replicas > full_batches:
            ways = [f"at most {full_batches} replicas"] * (full_batches > 0)
            ways += [f"batch {self.count // self.replicas}"] * (self.replicas <= self.count)
            raise ConfigError(
                f"{self.replicas} replicas with batch {self.batch} need {self.replicas * self.batch} samples, and the dataset has "
                f"{self.count}: every replica needs one full batch; use {' or '.join(ways) or 'fewer replicas and a smaller batch'}"
            )

    @property
    def steps(self) -> int:
        """Steps of an epoch: those of the largest shard. A replica whose shard ends earlier waits."""
        return -(-self.size(0) // self.batch)

    def size(self, replica: int) -> int:
        """Samples of a replica's shard."""
        return self.count // self.replicas + (replica < self.count % self.replicas)

    def bounds(self, replica: int) -> tuple[int, int]:
        """First sample of the shard, and the one after its last."""
        start = replica * (self.count // self.replicas) + min(replica, self.count % self.replicas)
        return start, start + self.size(replica)

    def samples(self, replica: int, start: int, stop: int) -> int:
        """Samples a replica sees in the steps from `start` up to `stop`."""
        return self._between(self.size(replica), start, stop)

    def total_samples(self, start: int, stop: int) -> int:
        """Samples all replicas together see in those steps; known to every rank without asking the others."""
        larger = self.count % self.replicas
        small = self._between(self.count // self.replicas, start, stop)
        return larger * self._between(self.size(0), start, stop) + (self.replicas - larger) * small

    def _between(self, size: int, start: int, stop: int) -> int:
        return min(stop * self.batch, size) - min(start * self.batch, size)


@dataclass(frozen=True)
class Slices:
    """`count` samples split over `ranks` for validation; some may have none."""

    count: int
    ranks: int
    batch: int

    def bounds(self, rank: int) -> tuple[int, int]:
        """First sample of the slice, and the one after its last."""
        return rank * self.count // self.ranks, (rank + 1) * self.count // self.ranks
