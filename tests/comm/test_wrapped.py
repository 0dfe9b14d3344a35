"""A wrapped communicator is what it wraps, and its hook sees every call. The contract on real ranks is in test_contract.py."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from deepex.comm import Call, Communicator, WrappedCommunicator
from deepex.comm.distributed import DistributedCommunicator
from deepex.comm.mpi import MpiCommunicator
from deepex.comm.solo import SoloCommunicator
from deepex.errors import CommError

CPU = torch.device("cpu")
IMPLEMENTATIONS = (DistributedCommunicator, MpiCommunicator, SoloCommunicator)
METHODS = sorted({*Communicator.__abstractmethods__, "zeros", "shares"})
COMPOSED = {"because", "check_sums", "gather", "rank", "size"}  # of what is forwarded
UNSEEN = {"abort", "shares"}  # the one ends the others whatever a hook does, the other asks no other rank
VALUES = {torch.Tensor: torch.ones(6, dtype=torch.float64), float: 0.5, int: 7}


def noting(inner: Communicator, log: list[Any]) -> WrappedCommunicator:
    """The log has each call when it begins, and its name when it has ended."""

    @contextmanager
    def note(call: Call) -> Iterator[None]:
        log.append(call)
        yield
        log.append(call.what)

    return WrappedCommunicator(inner, note)


@pytest.mark.parametrize("name", METHODS)
def test_a_call_is_forwarded_with_the_hook_around_it(name: str) -> None:
    """With all that it may be called with; and what it gives comes back."""
    signature, log, given = inspect.signature(getattr(Communicator, name)), [], object()
    _, *parameters = signature.parameters.values()
    arguments = [VALUES.get(parameter.annotation, parameter.name) for parameter in parameters]
    inner = mock.create_autospec(Communicator, instance=True, why="sync 3 of epoch 2")
    method = getattr(inner, name)
    method.side_effect = lambda *_: log.append("made") or given
    result = getattr(noting(inner, log), name)(*arguments)
    method.assert_called_once_with(*arguments)
    if signature.return_annotation == "Communicator":
        assert isinstance(result, WrappedCommunicator)
        assert result._inner is given
    else:
        assert result is (given if signature.return_annotation is not None else None)
    if name in UNSEEN:
        assert log == ["made"]
        return
    call, *rest = log
    assert rest == ["made", name]
    takes_tensor = any(parameter.annotation is torch.Tensor for parameter in parameters)
    assert call == Call(name, 48 if takes_tensor else 0, "sync 3 of epoch 2")
    assert call.arguments == (*arguments,)


def test_nothing_is_forgotten() -> None:
    """What is not forwarded is made of what is, as long as no implementation has one of its own."""
    public = {name for name in {*dir(Communicator), *inspect.get_annotations(Communicator)} if not name.startswith("_")}
    assert public - vars(WrappedCommunicator).keys() == COMPOSED
    for implementation in IMPLEMENTATIONS:
        assert not vars(implementation).keys() & COMPOSED


def test_it_stands_where_the_other_one_stands() -> None:
    solo = SoloCommunicator()
    comm = WrappedCommunicator(solo, lambda _: None)
    assert (comm.kind, comm.place, comm.reason, comm.overlaps) == ("solo", solo.place, "the caller's", True)
    comm.place, comm.reason = replace(solo.place, rank=1, size=3), "asked for"
    assert (solo.rank, solo.size, solo.reason) == (comm.rank, comm.size, comm.reason) == (1, 3, "asked for")


def test_bytes_are_those_of_the_tensor_that_is_handed_over() -> None:
    calls: list[Call] = []
    comm = WrappedCommunicator(SoloCommunicator(), calls.append)
    comm.sum(torch.ones(1000)[100:900])
    comm.broadcast(torch.ones(7, dtype=torch.bfloat16))
    comm.exchange(torch.ones(1, 3, dtype=torch.complex64))
    comm.gather_rows(torch.ones(0))
    comm.zeros(1000, torch.float32, CPU)
    assert [call.num_bytes for call in calls] == [3200, 14, 24, 0, 0]
    assert "arguments" not in repr(calls[0]), "a log of large tensors can be read"


def test_what_is_made_of_several_calls_is_seen_as_these() -> None:
    calls: list[Call] = []
    assert WrappedCommunicator(SoloCommunicator(), calls.append).gather("é") == ["é"]
    assert calls == [Call("gather_rows", 8), Call("gather_rows", 8)]


def test_a_hook_can_play_the_other_rank() -> None:
    """Rank 1 of 2 as the check of sums expects it, and a library that adds up wrongly."""
    comm = SoloCommunicator()
    comm.place = replace(comm.place, size=2)

    @contextmanager
    def play(call: Call) -> Iterator[None]:
        yield
        call.arguments[0].mul_(2).add_(1)

    def spoil(call: Call) -> None:
        call.arguments[0][-1] += 1

    WrappedCommunicator(comm, play).check_sums(CPU)
    with pytest.raises(CommError, match="known numbers over 2 ranks came out wrong in 1 of them"):
        WrappedCommunicator(WrappedCommunicator(comm, play), spoil).check_sums(CPU)


def test_what_a_hook_raises_comes_out_of_the_call() -> None:
    """Before it the call is not made, after it is; what the call itself raises goes through the hook."""
    tensor, seen = torch.ones(3), []

    @contextmanager
    def fail_after(_: Call) -> Iterator[None]:
        try:
            yield
        except CommError as error:
            seen.append(error)
            raise
        raise TimeoutError

    def fail(_: Call) -> None:
        raise ConnectionError

    with pytest.raises(ConnectionError):
        WrappedCommunicator(SoloCommunicator(), fail).sum(tensor, 0.5)
    assert tensor.eq(1).all()
    with pytest.raises(TimeoutError):
        WrappedCommunicator(SoloCommunicator(), fail_after).sum(tensor, 0.5)
    assert tensor.eq(0.5).all()
    with pytest.raises(CommError) as caught:
        WrappedCommunicator(SoloCommunicator(), fail_after).sum(torch.ones(4, 4)[:, ::2])
    assert seen == [caught.value]


def test_reasons_end_with_what_they_are_for() -> None:
    calls: list[Call] = []
    comm = WrappedCommunicator(SoloCommunicator(), calls.append)
    comm.barrier()
    with comm.because("epoch 1"):
        comm.barrier()
        with pytest.raises(CommError), comm.because("sync 1 of epoch 1"):
            comm.send(torch.ones(1), to=0)
        comm.barrier()
    comm.barrier()
    assert [call.why for call in calls] == ["", "epoch 1", "sync 1 of epoch 1", "epoch 1", ""]


def test_a_reason_holds_for_parts_and_for_every_wrapper_but_not_for_other_threads() -> None:
    calls: list[Call] = []
    outer = WrappedCommunicator(WrappedCommunicator(SoloCommunicator(), calls.append), calls.append)
    part, other = outer.split(0).split(0), outer.for_thread()
    calls.clear()
    with outer.because("sync 1"):
        part.barrier()
        other.barrier()
        with other.because("sync 0"):
            other.barrier()
    assert [call.why for call in calls] == ["sync 1", "sync 1", "", "", "sync 0", "sync 0"]


def test_a_reason_may_be_said_where_nobody_listens() -> None:
    comm = SoloCommunicator()
    with comm.because("sync 1"):
        assert comm.why == "sync 1"
    assert comm.why == ""
