"""The contract that every communicator keeps, as checks that run on its ranks.

On those of the pool, where MPI has THREAD_MULTIPLE, and in a launch of its own with just the thread level that is named:

    mpiexec -n 2 python -m tests.comm.contract FUNNELED mpi gloo    an object per word: {check: "ok" or what went wrong}

Below MULTIPLE the checks of the background see that an MPI communicator refuses one.
"""

import gc
import json
import os
import resource
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deepex.comm import Communicator, WrappedCommunicator, as_communicator, connect
from deepex.comm.library import start_mpi
from deepex.comm.nodes import describe_nodes
from deepex.comm.solo import SoloCommunicator
from deepex.errors import CommError
from tests.comm import background_contract

UNFIT = {torch.complex32, torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4}  # torch warns of making one


def check_place(comm: Communicator) -> None:
    places = comm.gather([comm.place.rank, comm.place.size, comm.place.local_rank, comm.place.local_size, comm.place.num_nodes])
    assert [place[0] for place in places] == list(range(comm.size))
    assert all(place == [r, comm.size, r, comm.size, 1] for r, place in enumerate(places)), places
    assert comm.place.host


def check_nodes_have_their_ranks(comm: Communicator) -> None:
    """As if every two ranks were on a node."""
    place, rank = comm.place, comm.rank
    comm.place = replace(place, node=rank // 2, num_nodes=(comm.size + 1) // 2, local_rank=rank % 2, local_size=min(2, comm.size))
    try:
        machines = describe_nodes(comm, Path(), os.environ)
    finally:
        comm.place = place
    assert [machine["ranks"] for machine in machines] == [[*range(n, min(n + 2, comm.size))] for n in range(0, comm.size, 2)]
    assert {machine["host"] for machine in machines} == {place.host}


def check_sum_in_place(comm: Communicator) -> None:
    for dtype in (torch.float32, torch.float64, torch.int64, torch.int32):
        for count in (1, 7, 100_003):
            tensor = (torch.arange(count) % 97 + comm.rank).to(dtype)
            address = tensor.data_ptr()
            comm.sum(tensor)
            expected = (torch.arange(count) % 97 * comm.size + sum(range(comm.size))).to(dtype)
            assert torch.equal(tensor, expected), (dtype, count)
            assert tensor.data_ptr() == address


def check_weighted_sum(comm: Communicator) -> None:
    """Also with weight zero for what is not a number."""
    for count in (3, 2_500_001):
        tensor = torch.full((count,), float("nan") if comm.rank == 1 else 4.0)
        comm.sum(tensor, 0.0 if comm.rank == 1 else 0.5)
        assert tensor.eq(2.0 * (comm.size - (comm.size > 1))).all()


def check_sum_of_a_slice_leaves_the_rest(comm: Communicator) -> None:
    tensor = torch.ones(1000)
    comm.sum(tensor[100:900])
    assert tensor[:100].eq(1).all()
    assert tensor[900:].eq(1).all()
    assert tensor[100:900].eq(comm.size).all()


def check_memory_that_the_ranks_share(comm: Communicator) -> None:
    """The same sums, on memory that the communicator made; several chunks long, and shorter than one part per rank."""
    cpu = torch.device("cpu")
    for dtype in (torch.float32, torch.float64, torch.int64):
        for count in (1, 7, 1_000_003):
            tensor = comm.zeros(count, dtype, cpu)
            assert tensor.shape == (count,)
            assert not tensor.any()
            assert comm.shares(tensor[count // 2 :]) == (comm.size > 1)
            assert not comm.shares(torch.zeros(3))
            for _ in range(2):
                tensor.copy_(torch.arange(count) % 97 + comm.rank)
                comm.sum(tensor)
                assert torch.equal(tensor, (torch.arange(count) % 97 * comm.size + sum(range(comm.size))).to(dtype)), (dtype, count)
    tensor = comm.zeros(500_000, torch.float32, cpu).fill_(4)
    part = tensor[1000:400_000].view(-1, 3)
    part[5] = float("nan") if comm.rank == 1 else 4.0
    comm.sum(part, 0.0 if comm.rank == 1 else 0.5)
    assert part.eq(2.0 * (comm.size - (comm.size > 1))).all()
    assert tensor[:1000].eq(4).all()
    assert tensor[400_000:].eq(4).all()


def check_shared_sums_are_rounded_alike_everywhere(comm: Communicator) -> None:
    tensor = comm.zeros(300_001, torch.float32, torch.device("cpu"))
    values = [torch.randn(300_001, generator=torch.Generator().manual_seed(rank)) for rank in range(comm.size)]
    tensor.copy_(values[comm.rank])
    comm.sum(tensor, 1 / comm.size)
    expected = values[0] * (1 / comm.size)
    for other in values[1:]:
        expected.add_(other, alpha=1 / comm.size)
    assert torch.equal(tensor, expected), "the order is that of the ranks, as of replicas that take turns on one rank"


def check_different_parts_of_shared_memory_are_refused(comm: Communicator) -> None:
    tensor = comm.zeros(1000, torch.float32, torch.device("cpu"))
    if comm.size > 1:
        for bounds in ((comm.rank, 900), (comm.rank, 900 + comm.rank)):
            with pytest.raises(CommError, match="different parts"):
                comm.sum(tensor[slice(*bounds)])


def check_shared_memory_outlives_its_communicator(comm: Communicator) -> None:
    part = comm.split(0)
    tensor = part.zeros(1000, torch.float32, torch.device("cpu")).fill_(1)
    part.sum(tensor)
    part.close()
    tensor.add_(1)
    assert tensor.eq(comm.size + 1).all()


def check_a_rank_that_cannot_share_keeps_all_from_it(comm: Communicator) -> None:
    """One that has no room for its block, and one that may not open another file, that of its neighbour."""
    free = os.dup(0)
    os.close(free)
    for limit, value in ((resource.RLIMIT_FSIZE, 1000), (resource.RLIMIT_NOFILE, free + 1)):
        before = resource.getrlimit(limit)
        if comm.rank == comm.size - 1:
            resource.setrlimit(limit, (value, before[1]))
        try:
            tensor = comm.zeros(1000, torch.float32, torch.device("cpu")).fill_(1)
        finally:
            resource.setrlimit(limit, before)
        assert not comm.shares(tensor)
        comm.sum(tensor, 0.5)
        assert tensor.eq(comm.size / 2).all()


def _num_shared_blocks() -> int:
    return Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:deepex")


def check_shared_memory_that_nobody_uses_is_given_back(comm: Communicator) -> None:
    """As after each of many runs on one communicator; of that which is used, a view may be all that is left."""
    cpu = torch.device("cpu")
    view = comm.zeros(1000, torch.float32, cpu)[100:200].fill_(1)
    comm.zeros(1, torch.float32, cpu)
    before = _num_shared_blocks()
    for _ in range(3):
        comm.zeros(10_000, torch.float32, cpu).fill_(1)
    assert _num_shared_blocks() == before, "the last is there, those before it are not"
    assert comm.shares(view) == (comm.size > 1)
    comm.sum(view)
    assert view.eq(comm.size).all()


def check_sum_is_the_same_on_every_rank(comm: Communicator) -> None:
    tensor = torch.randn(10_001, generator=torch.Generator().manual_seed(comm.rank))
    comm.sum(tensor)
    bits = comm.gather(tensor.view(torch.int32).sum(dtype=torch.int64).item())
    assert len(set(bits)) == 1, bits


def check_broadcast(comm: Communicator) -> None:
    for root in range(comm.size):
        tensor = torch.full((5, 3), float(comm.rank))
        comm.broadcast(tensor, root)
        assert tensor.eq(root).all()


def check_gather_rows(comm: Communicator) -> None:
    for dtype in (torch.float64, torch.int64, torch.uint8):
        rows = comm.gather_rows(torch.tensor([comm.rank, 10 + comm.rank], dtype=dtype))
        assert rows.tolist() == [[r, 10 + r] for r in range(comm.size)]


def check_rows_and_parts_may_be_of_any_type(comm: Communicator) -> None:
    """Bytes are moved, so even those of not-a-numbers arrive as they were."""
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype) and value not in UNFIT}
    assert {torch.int8, torch.uint8, torch.bfloat16, torch.float16, torch.bool, torch.complex64} < dtypes
    for dtype in sorted(dtypes, key=str):
        for count in (1, 5, 1003):
            bits = _random_bits(comm.size, count, dtype)
            rows = comm.gather_rows(bits[comm.rank, 0].view(dtype))
            assert (rows.dtype, rows.shape) == (dtype, (comm.size, count))
            assert torch.equal(rows.view(torch.uint8), bits[:, 0]), dtype
            parts = bits[comm.rank].view(dtype)
            received = comm.exchange(parts)
            assert (received.dtype, received.shape) == (dtype, (comm.size, count))
            assert torch.equal(received.view(torch.uint8), bits[:, comm.rank]), dtype
            assert torch.equal(parts.view(torch.uint8), _random_bits(comm.size, count, dtype)[comm.rank])


def _random_bits(size: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """From each rank, to each rank."""
    shape, end = (size, size, count * dtype.itemsize), 2 if dtype == torch.bool else 256
    return torch.randint(0, end, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(count))


def check_rows_and_parts_may_be_long_or_empty(comm: Communicator) -> None:
    for count in (0, 300_001):
        rows = comm.gather_rows(torch.arange(count) + comm.rank)
        assert torch.equal(rows, torch.arange(count) + torch.arange(comm.size)[:, None])
        parts = comm.exchange(torch.arange(count) + (100 * comm.rank + torch.arange(comm.size))[:, None])
        assert torch.equal(parts, torch.arange(count) + (100 * torch.arange(comm.size) + comm.rank)[:, None])


def check_what_has_not_one_row_per_rank_is_not_exchanged(comm: Communicator) -> None:
    for shape in ((comm.size + 1, 2), (comm.size,), (comm.size, 2, 2)):
        with pytest.raises(CommError, match=f"one row for each of the {comm.size} ranks"):
            comm.exchange(torch.ones(shape))


def check_messages_from_rank_to_rank(comm: Communicator) -> None:
    """From each to each, small and large, of a type that MPI cannot sum; in place."""
    for count in (1, 300_001):
        for sender in range(comm.size):
            for receiver in set(range(comm.size)) - {sender}:
                tensor = torch.full((count,), comm.rank, dtype=torch.bfloat16)
                address = tensor.data_ptr()
                if comm.rank == sender:
                    comm.send(tensor, receiver)
                elif comm.rank == receiver:
                    comm.receive(tensor, sender)
                assert tensor.eq(sender if comm.rank == receiver else comm.rank).all()
                assert tensor.data_ptr() == address


def check_messages_to_nobody_are_refused(comm: Communicator) -> None:
    for partner in (comm.rank, comm.size, -1):
        for call in (comm.send, comm.receive):
            with pytest.raises(CommError, match=f"another one from 0 to {comm.size - 1}"):
                call(torch.ones(1), partner)


def check_gather_values_of_different_sizes(comm: Communicator) -> None:
    values = comm.gather({"text": "é" * comm.rank * 50, "list": [None, comm.rank]})
    assert values == [{"text": "é" * r * 50, "list": [None, r]} for r in range(comm.size)]


def check_barrier(comm: Communicator) -> None:
    comm.barrier()


def check_strided_tensors_are_refused(comm: Communicator) -> None:
    for call in (comm.sum, comm.broadcast, comm.exchange):
        with pytest.raises(CommError, match="contiguous"):
            call(torch.ones(4, comm.size).t()[:, ::2])


def check_split(comm: Communicator) -> None:
    part = comm.split(comm.rank % 2)
    members = [r for r in range(comm.size) if r % 2 == comm.rank % 2]
    assert (part.rank, part.size) == (members.index(comm.rank), len(members))
    tensor = torch.tensor([float(comm.rank)])
    part.sum(tensor)
    assert tensor.item() == sum(members)
    inner = part.split(0)
    assert inner.size == part.size
    inner.close()
    part.close()
    comm.barrier()
    assert len(comm.gather(1)) == comm.size


def check_split_again_and_again(comm: Communicator) -> None:
    """Also where the ranks hold different numbers of communicators: all but the last have one more."""
    held = comm.split(int(comm.rank == comm.size - 1))
    if comm.rank < comm.size - 1:
        another = held.split(0)
    for _ in range(4):
        part = comm.split(0)
        assert part.gather(comm.rank) == list(range(comm.size))
        part.close()
    if comm.rank < comm.size - 1:
        another.close()
    held.close()


CHECKS = [value for name, value in sorted((globals() | vars(background_contract)).items()) if name.startswith("check_")]


def check_on_ranks(comm: Any, name: str) -> dict[str, str]:
    """As a job of the pool, on an MPI communicator that is handed over: for each check, what rank 0 to the last found."""
    kind = name.removeprefix("wrapped-")
    handed = as_communicator(comm)
    return _check(SoloCommunicator() if kind == "solo" else handed if kind == "mpi" else _gloo(handed), name)


def _gloo(handed: Communicator) -> Communicator:
    from deepex.comm.distributed import DistributedCommunicator

    return DistributedCommunicator("gloo", bootstrap=handed)


def _check(comm: Communicator, name: str) -> dict[str, str]:
    """Run every check, in the same order on every rank, and close the communicator."""
    kind = name.removeprefix("wrapped-")
    comm = WrappedCommunicator(comm, lambda _: None) if name != kind else comm
    assert comm.kind == kind
    report = {}
    for check in CHECKS:
        try:
            check(comm)
            found = "ok"
        except Exception:  # noqa: BLE001 - whatever it is, it is the verdict
            found = traceback.format_exc()
        results = comm.gather(found)
        report[check.__name__] = next((f"rank {r}: {text}" for r, text in enumerate(results) if text != "ok"), "ok")
    comm.close()
    gc.collect()  # an error that was raised on purpose holds the frames that it came through, and these hold communicators
    # One that still works while Python ends would abort the process. A thread that was joined may be listed a moment longer; one
    # that was not waits for work, and stays.
    patience = time.monotonic() + 2
    while _gloo_threads():
        assert time.monotonic() < patience, _gloo_threads()
        time.sleep(0.01)
    return report


def _gloo_threads() -> list[str]:
    names = []
    for path in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # it has just ended
            names.append(path.read_text().strip())
    return [name for name in names if "gloo" in name]


if __name__ == "__main__":
    if "mpi" in sys.argv:  # with just this thread level, as a program that hands us a communicator may: ours is always MULTIPLE
        start_mpi(sys.argv[1])
    for each in sys.argv[2:]:
        made = SoloCommunicator() if each.endswith("solo") else connect(each.removeprefix("wrapped-"))
        first, size = made.rank == 0, made.size
        checked = _check(made, each)
        if first:
            print(json.dumps({"kind": each, "size": size, "checks": checked}))
