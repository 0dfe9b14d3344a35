"""What is trained; without torch, because JAX's process reads it too."""

from dataclasses import dataclass

RATE = 1e-4  # small enough for a loss that is summed over pixels; speed does not depend on it
MOMENTUM = 0.9
PADDING = 4  # black pixels on each side before a random crop back to the size
WARM_UP = 3  # steps before anything is timed or captured


class Unavailable(Exception):  # noqa: N818 - it is an answer, not a failure
    """A peer is not installed, or does not apply to the workload."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A network and the dataset that it learns: `count` samples of `shape` (C, H, W); `task` is classify or reconstruct."""

    name: str
    net: str
    shape: tuple[int, int, int]
    classes: int
    batch: int
    task: str
    augment: bool
    count: int

    def __post_init__(self) -> None:
        if self.count < self.batch:
            raise ValueError(f"{self.count} samples make no full batch of {self.batch}; take a smaller batch")

    @property
    def num_steps(self) -> int:
        """Full batches in an epoch."""
        return self.count // self.batch

    @property
    def num_samples(self) -> int:
        """Samples in the full batches of an epoch."""
        return self.num_steps * self.batch
