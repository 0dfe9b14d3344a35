"""The small contract that every communicator keeps.

    arena = comm.zeros(count, torch.float32, device)
    comm.sum(arena)                 # in place, on the tensor's own memory, one collective
    rows = comm.gather({"host": h}) # small values, to every rank, in rank order
    parts = comm.exchange(parts)    # row r to rank r, and from it
    comm.send(tensor, 1)            # to one rank, which calls comm.receive(tensor, 0)

Four implementations: `solo`, `mpi`, `gloo`, `nccl`. Variation beyond that is wrapping (wrapped.py: hooks around every call), never
inheritance. All calls but `send` and `receive` are collective: every rank makes the same calls in the same order, from one
thread; another thread has a communicator of its own (`for_thread`, see background.py).
"""

import json
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from deepex.comm.place import Place
from deepex.errors import CommError

_TEST_COUNTS: Final = (8, 65536)  # libraries sum short and long tensors by different algorithms
_TEST_RANGE: Final = 64  # small whole numbers, which any order adds up exactly

Zeros = Callable[[int, torch.dtype, torch.device], torch.Tensor]  # makes zeroed memory for so many numbers


def own_zeros(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Make zeroed memory of this process alone."""
    return torch.zeros(count, dtype=dtype, device=device)


class Communicator(ABC):
    """Ranks that talk. `kind` is its name in `--set comm=…`, `place` where this rank stands in it, `reason` why it was chosen.

    `why` is what calls are made for at present: nothing here reads it, whoever wraps this does (wrapped.py).
    """

    kind: str
    place: Place
    reason = "the caller's"
    why = ""

    @property
    def rank(self) -> int:
        """This process, counted from 0."""
        return self.place.rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.place.size

    @contextmanager
    def because(self, why: str) -> Iterator[None]:
        """Say what calls are made for meanwhile, as `sync 3 of epoch 2`; also those that a background is given meanwhile."""
        before, self.why = self.why, why
        try:
            yield
        finally:
            self.why = before

    @property
    def overlaps(self) -> bool:
        """Whether another thread may communicate meanwhile (`for_thread`), and that is known to go well."""
        return True

    @abstractmethod
    def sum(self, tensor: torch.Tensor, weight: float = 1.0) -> None:
        """Replace a contiguous tensor by the sum over all ranks of `weight` · tensor, in place: one collective, no copy of it."""

    def zeros(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Make memory for what will be summed; ranks of one node may share it (shared.py)."""
        return own_zeros(count, dtype, device)

    def shares(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies in memory that the ranks share."""
        return False

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        """Replace a contiguous tensor by that of rank `root`, in place."""

    @abstractmethod
    def gather_rows(self, row: torch.Tensor) -> torch.Tensor:
        """Give every rank all ranks' 1-d tensors of equal length and of any type, as rows in rank order on the same device."""

    @abstractmethod
    def exchange(self, parts: torch.Tensor) -> torch.Tensor:
        """Send row r of a contiguous 2-d tensor of `size` rows to rank r; in row r of the result is what rank r sent here.

        The tensor may have any type and stays as it is; the result has its shape, type and device.
        """

    @abstractmethod
    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Send a contiguous tensor to another rank, which receives it. Not collective; it may wait until that rank receives.

        No training sends so: it is how the study `transfer` measures what a message between two ranks takes.
        """

    @abstractmethod
    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """Replace a contiguous tensor by the one of equal size that rank `source` sends. Not collective."""

    @abstractmethod
    def barrier(self) -> None:
        """Return when every rank has called it."""

    @abstractmethod
    def split(self, color: int, key: int = 0) -> "Communicator":
        """Give each rank a communicator of those with its `color`, ordered by `key`, then by rank."""

    @abstractmethod
    def for_thread(self) -> "Communicator":
        """Give a communicator of the same ranks that one other thread may use while this one is in use.

        Collective, here and in `close` of what it gives; all between belongs to that thread. Its collectives sleep where they can
        rather than spin, since the cores are for whoever computes meanwhile. A communicator that wraps another one wraps what that
        one gives.
        """

    @abstractmethod
    def abort(self, code: int) -> None:
        """End every rank of the job at once. Not collective; does not return."""

    @abstractmethod
    def close(self) -> None:
        """Release what this communicator holds. The caller's own communicator, if it was handed one, stays usable."""

    def _locate(self, rank: int, size: int, launcher: str) -> None:
        """Set `place` by asking every rank for its host, and see that sums are right. Collective, and the last of the building.

        MPI_Comm_split_type is not asked: MPICH 5.0.2 takes every rank for alone on its node where Slurm places ranks one by one.
        """
        self.place = Place(rank=rank, size=size, local_rank=rank, local_size=size)  # enough to gather with
        host = socket.gethostname()
        told = self.gather([host, _boot()])
        nodes = [name for index, name in enumerate(told) if name not in told[:index]]
        neighbours = [other for other, name in enumerate(told) if name == told[rank]]
        self.place = Place(
            rank=rank,
            size=size,
            local_rank=neighbours.index(rank),
            local_size=len(neighbours),
            node=nodes.index(told[rank]),
            num_nodes=len(nodes),
            host=host,
            launcher=launcher,
        )
        self.check_sums(self._sums_on())

    def check_sums(self, device: torch.device) -> None:
        """Sum known numbers on `device`: a library that adds up wrongly is an error, and never a wrong weight. Collective."""
        for count in _TEST_COUNTS if self.size > 1 else ():
            self._check_sum(count, device)

    def _check_sum(self, count: int, device: torch.device) -> None:
        numbers = torch.arange(count, device=device).remainder_(_TEST_RANGE).float()
        summed = numbers + self.rank % _TEST_RANGE
        self.sum(summed)
        expected = numbers.mul_(self.size).add_(sum(rank % _TEST_RANGE for rank in range(self.size)))
        wrong = (summed != expected).nonzero().flatten()
        if len(wrong):
            where = int(wrong[0])
            raise CommError(
                f"a sum of {count} known numbers over {self.size} ranks came out wrong in {len(wrong)} of them: number {where} is "
                f"{float(summed[where])}, not {float(expected[where])}. This {self.kind} cannot be trusted: see that all ranks "
                "load one library and start it with one thread level (`deepex doctor`), or try another --set comm="
            )

    def _sums_on(self) -> torch.device:
        """Where this communicator can sum on any machine that it runs on."""
        return torch.device("cpu")

    def gather(self, value: object) -> list[Any]:
        """Give every rank all ranks' small JSON values, in rank order."""
        data = json.dumps(value).encode()
        lengths = self.gather_rows(torch.tensor([len(data)]))[:, 0].tolist()
        row = torch.zeros(max(lengths), dtype=torch.uint8)
        row[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        rows = self.gather_rows(row).numpy()
        return [json.loads(bytes(rows[rank, :length])) for rank, length in enumerate(lengths)]


def _boot() -> str:
    """What tells apart two hosts of one name: the start of their systems. Containers of a host may have other names."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def check_tensor(tensor: torch.Tensor) -> None:
    """Refuse what a collective could only handle through a hidden copy."""
    if not tensor.is_contiguous():
        raise CommError(
            f"a collective got a tensor of shape {tuple(tensor.shape)} with strides {tensor.stride()}; it takes contiguous "
            "memory, so that nothing is copied: pass the arena, not a view of one layer"
        )


def check_parts(parts: torch.Tensor, size: int) -> None:
    """Refuse what has not one row for each rank."""
    check_tensor(parts)
    if parts.dim() != 2 or len(parts) != size:
        raise CommError(f"an exchange got a tensor of shape {tuple(parts.shape)}; it takes one row for each of the {size} ranks")


def check_partner(rank: int, size: int, partner: int) -> None:
    """Refuse a message to nobody, or to oneself, which would wait forever."""
    if partner == rank or not 0 <= partner < size:
        raise CommError(f"rank {rank} of {size} got rank {partner} for a message; it must be another one from 0 to {size - 1}")


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor of any type as bytes: to move it, a communicator need not know what it holds."""
    return tensor.view(torch.uint8)


def scale(tensor: torch.Tensor, weight: float) -> None:
    """Multiply in place; zero wipes out whatever was there, not-a-numbers too."""
    if weight == 0:
        tensor.zero_()
    elif weight != 1:
        tensor.mul_(weight)
