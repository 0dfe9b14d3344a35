"""Collectives that run while the caller computes.

    background = Background(comm)               # collective
    pending = background.sum(tensor, weight)    # returns at once
    step()
    pending.wait()                              # the sum is there
    background.close()

One thread works off what is handed over, in that order, on a communicator of its own, so that its messages cannot meet the
caller's. From `sum` until `wait` the tensor belongs to the thread; then it is the caller's again. It should be ordinary memory:
what `comm.zeros` made is summed as if it were not shared.

How the thread leaves the cores to the caller: MPI posts the collective and is looked after now and then (mpi.py), which needs
THREAD_MULTIPLE and takes under 4 % of a core while a rank is late (MPICH; a call that blocks takes all that it can get); gloo
sleeps by itself; NCCL runs on the device. The adding up is work for a core wherever it is done.

On CUDA tensors the thread works in a stream of its own, which begins when the caller's has come to where it was at `sum`; `wait`
makes the caller's stream wait for it, not the caller. Collectives of two NCCL communicators may run on a device at the same time
only if both fit on it, so ranks that also use the main one meanwhile should begin the two in the same order. CUDA tensors are
tested on ranks that share a GPU (tests/gpu), through MPI and gloo; NCCL on several GPUs is untested.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from time import perf_counter
from typing import final

import torch

from deepex.comm.base import Communicator, check_tensor
from deepex.errors import CommError

Work = Callable[[Communicator], None]


@final
class Pending:
    """Work that was handed to a background. `seconds` is how long it took, known after `wait`."""

    def __init__(self, work: Work, why: str, lane: "_Lane | None") -> None:
        self._work: Work | None = work
        self._why, self._lane = why, lane
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._host_seconds = 0.0

    @property
    def done(self) -> bool:
        """Whether `wait` would return or raise at once."""
        return self._done.is_set()

    @property
    def seconds(self) -> float:
        """How long the work took: in the thread, or on the accelerator, which this then waits for."""
        return self._host_seconds if self._lane is None else self._lane.seconds()

    def wait(self) -> None:
        """Return when the work is done; raise what failed in it. On an accelerator the caller's stream waits, not the caller."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        if self._lane is not None:
            self._lane.join()

    def _execute(self, comm: Communicator, failure: BaseException | None) -> BaseException | None:
        """Do the work, unless earlier work failed; give back what failed. The work and what it holds are let go."""
        begun = perf_counter()
        self._error = self._attempt(comm) if failure is None else failure
        self._host_seconds = perf_counter() - begun
        self._work = None
        self._done.set()
        return self._error

    def _attempt(self, comm: Communicator) -> BaseException | None:
        assert self._work is not None, "work is done once"
        try:
            with torch.no_grad(), comm.because(self._why), _within(self._lane):
                self._work(comm)
        except BaseException as error:  # noqa: BLE001 - it is raised where the caller waits
            return error
        return None


@final
class Background:
    """A thread that communicates for this rank. Collective to make; every rank hands over the same work in the same order.

    What fails in the thread is raised by `wait`, and from then on by `sum` and `run`: the ranks no longer agree on what comes next.
    With one rank there is nothing to wait for: the work is done at once, without a thread.
    """

    def __init__(self, comm: Communicator) -> None:
        self._threaded, self._callers = comm.size > 1, comm
        self._comm = comm.for_thread() if self._threaded else comm
        self._failure: BaseException | None = None
        self._last: Pending | None = None
        self._closed = False
        self._queue: SimpleQueue[Pending | None] = SimpleQueue()
        self._stream: torch.cuda.Stream | None = None
        # A daemon: Python does not wait for it when it ends, so a rank that fails can leave a sum that nobody else joins.
        self._thread = threading.Thread(target=self._serve, name="deepex-background", daemon=True)
        if self._threaded:
            self._thread.start()

    def sum(self, tensor: torch.Tensor, weight: float = 1.0) -> Pending:
        """Begin what `Communicator.sum` does, and return at once. The tensor is not to be touched until `wait` has returned."""
        check_tensor(tensor)
        return self._issue(lambda comm: comm.sum(tensor, weight), tensor.device if tensor.is_cuda else None)

    def run(self, work: Work) -> Pending:
        """Begin any work on the background's own communicator, and return at once.

        On an accelerator, results are to be written into memory that the caller made: what the work itself makes belongs to the
        thread's stream, and could be used again there while the caller still reads it.
        """
        return self._issue(work, torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else None)

    def close(self) -> None:
        """End the thread and release its communicator; a second call does nothing.

        Collective after every `wait` has returned. Otherwise (a rank fails, and unwinds) nothing is waited for and no other rank
        is needed: the thread is left to itself, and what it still had to do fails.
        """
        if self._closed:
            return
        self._closed = True
        idle = self._last is None or self._last.done
        sound = idle and self._failure is None
        if not idle:
            self._failure = CommError("the background was closed before its work was done: wait for all of it first")
        self._queue.put(None)
        if self._threaded and idle:
            self._thread.join()
        if self._threaded and sound:
            self._comm.close()

    def _issue(self, work: Work, device: torch.device | None) -> Pending:
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise CommError("the background is closed and takes no more work: make another one")
        pending = Pending(work, self._callers.why, self._lane(device) if self._threaded and device is not None else None)
        self._last = pending
        if self._threaded:
            self._queue.put(pending)
        else:
            self._failure = pending._execute(self._comm, None)
        return pending

    def _lane(self, device: torch.device) -> "_Lane":
        if self._stream is None or self._stream.device != device:
            self._stream = torch.cuda.Stream(device)
        return _Lane(self._stream)

    def _serve(self) -> None:
        while (pending := self._queue.get()) is not None:
            self._failure = pending._execute(self._comm, self._failure) or self._failure
            del pending  # the last hold on a tensor is not to be the thread's, which waits here for more


@final
class _Lane:
    """The thread's stream for one piece of work, between two moments of the caller's: made by `sum`, joined by `wait`."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._issued = torch.cuda.current_stream(stream.device).record_event()
        self._begun, self._ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    @contextmanager
    def within(self) -> Iterator[None]:
        """Work in the thread's stream, after what the caller's had to do."""
        with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
            self._stream.wait_event(self._issued)
            self._begun.record()
            yield
            self._ended.record()

    def join(self) -> None:
        """Let the caller's stream wait for the thread's."""
        torch.cuda.current_stream(self._stream.device).wait_event(self._ended)

    def seconds(self) -> float:
        """How long the accelerator was at it."""
        self._ended.synchronize()
        return float(self._begun.elapsed_time(self._ended)) / 1000


@contextmanager
def _within(lane: _Lane | None) -> Iterator[None]:
    if lane is None:
        yield
        return
    with lane.within():
        yield
