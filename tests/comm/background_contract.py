"""What a background keeps on every communicator: checks that contract.py runs on ranks."""

import functools
import sys
import threading
from collections.abc import Callable

import pytest
import torch

from deepex.comm import Background, Call, Communicator, WrappedCommunicator
from deepex.errors import CommError

Check = Callable[[Communicator, Background], None]


def _with_background(check: Check) -> Callable[[Communicator], None]:
    """Run a check with a background that is closed after it; where the thread level is too low, see that one is refused."""

    @functools.wraps(check)
    def checked(comm: Communicator) -> None:
        if comm.size > 1:
            assert comm.overlaps == _may_have_one(comm)
        if not _may_have_one(comm):
            with pytest.raises(CommError, match=r"initialise it with MPI\.Init_thread"):
                Background(comm)
            return
        background = Background(comm)
        check(comm, background)
        background.close()
        background.close()
        assert not _threads()
        with pytest.raises((CommError, ZeroDivisionError)):
            background.sum(torch.ones(1))

    return checked


def _may_have_one(comm: Communicator) -> bool:
    if comm.kind != "mpi" or comm.size == 1:
        return True
    mpi = sys.modules["mpi4py.MPI"]
    return bool(mpi.Query_thread() >= mpi.THREAD_MULTIPLE)


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "deepex-background"]


def _values(comm: Communicator, count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(100 * seed + comm.rank))


@_with_background
def check_background_sums_as_the_communicator_does(comm: Communicator, background: Background) -> None:
    for dtype in (torch.float32, torch.float64, torch.int64):
        for count, part in ((1, 1.0), (7, 0.5), (1_000_003, 1 / comm.size)):
            tensor = (_values(comm, count) * 100).to(dtype)
            weight = part if dtype.is_floating_point else 1.0
            expected, address = tensor.clone(), tensor.data_ptr()
            comm.sum(expected, weight)
            pending = background.sum(tensor, weight)
            pending.wait()
            assert pending.done
            assert pending.seconds > 0
            assert tensor.data_ptr() == address
            assert torch.allclose(tensor, expected, rtol=1e-5, atol=1e-4), (dtype, count)


@_with_background
def check_background_weighs_with_zero(comm: Communicator, background: Background) -> None:
    tensor = torch.full((1000,), float("nan") if comm.rank == 1 else 4.0)
    background.sum(tensor, 0.0 if comm.rank == 1 else 0.5).wait()
    assert tensor.eq(2.0 * (comm.size - (comm.size > 1))).all()


@_with_background
def check_background_keeps_the_order_of_what_is_pending(comm: Communicator, background: Background) -> None:
    """Those of one rank may wait in another order."""
    order: list[int] = []
    tensors = [torch.full((count,), float(comm.rank)) for count in (100_000, 1, 5000, 3)]
    pendings = []
    for index, tensor in enumerate(tensors):
        pendings.append(background.sum(tensor))
        pendings.append(background.run(lambda _, index=index: order.append(index)))
    for pending in pendings if comm.rank % 2 else reversed(pendings):
        pending.wait()
    assert all(tensor.eq(sum(range(comm.size))).all() for tensor in tensors)
    assert order == [0, 1, 2, 3]


@_with_background
def check_background_and_communicator_do_not_wait_for_each_other(comm: Communicator, background: Background) -> None:
    """Half of the ranks begin with one, half with the other."""
    for round_number in range(5):
        tensor, other = torch.ones(100_003), torch.full((5,), float(round_number))
        if comm.rank % 2:
            comm.sum(other)
            pending = background.sum(tensor)
        else:
            pending = background.sum(tensor)
            comm.sum(other)
        comm.barrier()
        pending.wait()
        assert tensor.eq(comm.size).all()
        assert other.eq(round_number * comm.size).all()


@_with_background
def check_background_returns_before_others_have_begun(comm: Communicator, background: Background) -> None:
    """The last rank begins when all others, each with a sum under way, have computed and met it in a barrier."""
    tensor = _values(comm, 50_000)
    expected = tensor.clone()
    comm.sum(expected)
    pending = background.sum(tensor) if comm.rank < comm.size - 1 else None
    torch.ones(50, 50) @ torch.ones(50, 50)
    assert pending is None or not pending.done
    comm.barrier()
    if pending is None:
        pending = background.sum(tensor)
    pending.wait()
    assert torch.allclose(tensor, expected, atol=1e-5)


@_with_background
def check_background_runs_any_work_on_its_own_communicator(comm: Communicator, background: Background) -> None:
    """As a sum of parts would: exchange them, add them up, gather."""
    values, total, callers = _values(comm, 12 * comm.size), torch.empty(12 * comm.size), threading.current_thread()

    def work(own: Communicator) -> None:
        assert (own.kind, own.rank, own.size) == (comm.kind, comm.rank, comm.size)
        assert (own is comm) == (threading.current_thread() is callers) == (comm.size == 1)
        part = own.exchange(values.view(comm.size, -1)).sum(0)
        own.barrier()
        total.copy_(own.gather_rows(part).view(-1))

    background.run(work).wait()
    comm.sum(values)
    assert torch.allclose(total, values, atol=1e-5)


@_with_background
def check_background_raises_what_failed_in_its_thread(comm: Communicator, background: Background) -> None:
    first, second = background.run(lambda _: None), background.run(lambda _: 1 // 0)
    first.wait()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            second.wait()
    with pytest.raises(ZeroDivisionError):
        background.sum(torch.ones(3))


@_with_background
def check_background_does_nothing_after_a_failure(comm: Communicator, background: Background) -> None:
    if comm.size == 1:
        background.run(lambda _: 1 // 0)
        return
    begin, ran = threading.Event(), []
    background.run(lambda _: begin.wait() and 1 // 0)
    after = background.run(lambda _: ran.append(1))
    begin.set()
    with pytest.raises(ZeroDivisionError):
        after.wait()
    assert not ran


@_with_background
def check_background_refuses_strided_tensors_at_once(comm: Communicator, background: Background) -> None:
    with pytest.raises(CommError, match="contiguous"):
        background.sum(torch.ones(4, 4).t()[:, ::2])
    background.sum(torch.ones(3)).wait()


def check_background_closes_without_the_others(comm: Communicator) -> None:
    """One rank closes with a sum under way that no other has begun. They join later: else nothing could go on here."""
    if comm.size == 1 or not _may_have_one(comm):
        return
    background, tensor, begun = Background(comm), torch.ones(1000), threading.Event()

    def work(own: Communicator) -> None:
        begun.set()
        own.sum(tensor)

    if comm.rank == 0:
        pending, after = background.run(work), background.sum(torch.ones(3))
        begun.wait()
        background.close()
        assert not pending.done
    comm.barrier()
    if comm.rank != 0:
        pending = background.sum(tensor)
    pending.wait()
    assert tensor.eq(comm.size).all()
    if comm.rank == 0:
        with pytest.raises(CommError, match="closed before its work was done"):
            after.wait()
    else:
        background._queue.put(None)  # the thread alone: the communicator stays, since rank 0 does not release it either
    background._thread.join()


@_with_background
def check_background_of_a_communicator_that_is_wrapped(comm: Communicator, background: Background) -> None:
    """Also why a sum is made: what was said when it was handed over, not what is when it is begun."""
    calls: list[Call] = []
    wrapped, begin = WrappedCommunicator(comm, calls.append), threading.Event()
    other = Background(wrapped)
    tensor = torch.ones(1000)
    with wrapped.because("the wait"):
        other.run(lambda _: begin.wait() if comm.size > 1 else None)
    with wrapped.because("sync 1"):
        pending = other.sum(tensor)
    with wrapped.because("the end"):
        begin.set()
        pending.wait()
        other.close()
    assert tensor.eq(comm.size).all()
    threaded = [Call("for_thread", 0)], [Call("close", 0)]
    before, after = threaded if comm.size > 1 else ([], [])
    assert calls == [*before, Call("sum", 4000, "sync 1"), *after]
