"""A communicator around another one: it forwards every call, with a hook before and after.

    @contextmanager
    def timed(call: Call) -> Iterator[None]:
        begun = perf_counter()
        yield                       # here the call is made
        print(f"{call.what} of {call.num_bytes} bytes for {call.why}: {perf_counter() - begun:.6f} s")

    comm = WrappedCommunicator(comm, timed)
    with comm.because("sync 3 of epoch 2"):
        comm.sum(arena)             # sum of 4000000 bytes for sync 3 of epoch 2: 0.002113 s

A hook that has nothing to do afterwards may be any function: `WrappedCommunicator(comm, calls.append)` notes what is called. What a
hook raises comes out of the call, and a hook that sleeps makes a slow rank. So this is also what tests watch, and break.

`gather` and `check_sums` are made of other calls, and the hook sees these. It does not see what an implementation sends within one
call, as `zeros` does to share memory. On an accelerator a call may return before its work is done: a hook that measures it there
records events of the device.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final, TypeVar, TypeVarTuple, Unpack, final

import torch
from typing_extensions import override

from deepex.comm.base import Communicator

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

_NOTHING: Final = nullcontext()


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a communicator, as this rank makes it: `num_bytes` are those of the tensor that it hands over.

    `arguments` are the caller's own, for the time of the call: whoever keeps them keeps their memory.
    """

    what: str
    num_bytes: int
    why: str = ""
    arguments: tuple[Any, ...] = field(default=(), repr=False, compare=False)


Hook = Callable[[Call], AbstractContextManager[object] | None]


def _shared(path: str) -> Any:
    """An attribute that is another communicator's, to read and to set."""
    owner, _, name = path.partition(".")
    return property(attrgetter(path), lambda self, value: setattr(getattr(self, owner), name, value))


@final
class WrappedCommunicator(Communicator):
    """Behaves as `inner` does. What it gives, by `split` and `for_thread`, is wrapped with the same hook.

    The hook is called in the thread that communicates: with a background, by two at a time. `abort` has no hook, since it must end
    the other ranks whatever else fails.
    """

    kind = _shared("_inner.kind")
    place = _shared("_inner.place")
    reason = _shared("_inner.reason")
    why = _shared("_whole.why")

    def __init__(self, inner: Communicator, hook: Hook) -> None:
        self._inner, self._hook = inner, hook
        self._whole = inner  # of a part: what it was split from, in the thread of which it is used

    def _call(self, what: str, call: Callable[[Unpack[Arguments]], T], *arguments: *Arguments) -> T:
        num_bytes = sum(one.nbytes for one in arguments if isinstance(one, torch.Tensor))
        with self._hook(Call(what, num_bytes, self.why, arguments)) or _NOTHING:
            return call(*arguments)

    @property
    @override
    def overlaps(self) -> bool:
        return self._inner.overlaps

    @override
    def sum(self, tensor: torch.Tensor, weight: float = 1.0) -> None:
        self._call("sum", self._inner.sum, tensor, weight)

    @override
    def zeros(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._call("zeros", self._inner.zeros, count, dtype, device)

    @override
    def shares(self, tensor: torch.Tensor) -> bool:
        return self._inner.shares(tensor)

    @override
    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        self._call("broadcast", self._inner.broadcast, tensor, root)

    @override
    def gather_rows(self, row: torch.Tensor) -> torch.Tensor:
        return self._call("gather_rows", self._inner.gather_rows, row)

    @override
    def exchange(self, parts: torch.Tensor) -> torch.Tensor:
        return self._call("exchange", self._inner.exchange, parts)

    @override
    def send(self, tensor: torch.Tensor, to: int) -> None:
        self._call("send", self._inner.send, tensor, to)

    @override
    def receive(self, tensor: torch.Tensor, source: int) -> None:
        self._call("receive", self._inner.receive, tensor, source)

    @override
    def barrier(self) -> None:
        self._call("barrier", self._inner.barrier)

    @override
    def split(self, color: int, key: int = 0) -> "WrappedCommunicator":
        part = WrappedCommunicator(self._call("split", self._inner.split, color, key), self._hook)
        part._whole = self
        return part

    @override
    def for_thread(self) -> "WrappedCommunicator":
        return WrappedCommunicator(self._call("for_thread", self._inner.for_thread), self._hook)

    @override
    def abort(self, code: int) -> None:
        self._inner.abort(code)

    @override
    def close(self) -> None:
        self._call("close", self._inner.close)
