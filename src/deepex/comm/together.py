"""Errors in company: either every rank raises the same error, or the job ends at once with one message.

together(comm, lambda: open_dataset(path))     # a mistake that any rank finds becomes the error of all
with abort_on_failure(comm, say):              # from here on a failing rank takes the job down
    train()
"""

import os
import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import sleep
from typing import TYPE_CHECKING, TypeVar

from deepex import errors
from deepex.comm.launch import leave_code

if TYPE_CHECKING:
    from deepex.comm.base import Communicator

T = TypeVar("T")


class AgreedError(Exception):
    """Carries an error that every rank has raised: nobody needs to be told, nobody is waiting."""

    def __init__(self, error: errors.DeepexError) -> None:
        super().__init__(str(error))
        self.error = error


def together(comm: "Communicator", work: Callable[[], T]) -> T:
    """Run `work` on every rank; if it fails with one of our errors anywhere, raise that of the lowest such rank everywhere."""
    found: errors.DeepexError | None = None
    result: list[T] = []
    try:
        result.append(work())
    except errors.DeepexError as error:
        found = error
    told = comm.gather(None if found is None else [type(found).__name__, str(found), socket.gethostname()])
    for rank, (kind, message, host) in ((rank, one) for rank, one in enumerate(told) if one is not None):
        alike = all(one is not None and one[:2] == [kind, message] for one in told)
        raise AgreedError(rebuilt(kind, message if alike else f"rank {rank} on {host}: {message}"))
    return result[0]


def rebuilt(kind: str, message: str) -> errors.DeepexError:
    """The same kind of error, from its name and message; UnknownName builds its own message, so it travels as its base."""
    cls = getattr(errors, kind, errors.FailureError)
    if cls is errors.UnknownName:
        cls = errors.UserError
    rebuilt = cls(message)
    assert isinstance(rebuilt, errors.DeepexError)
    return rebuilt


@contextmanager
def abort_on_failure(comm: "Communicator", say: Callable[[str], None], log: Callable[[str], None]) -> Iterator[None]:
    """End every rank if this one fails; `say` gets the one message, `log` the traceback for the run directory.

    An error that all ranks agreed on is raised as it is. No collective is called while an error is on its way.
    """
    try:
        yield
    except AgreedError as agreed:
        agreed.error.agreed = True
        raise agreed.error from None
    except BaseException as error:
        if comm.size == 1:
            raise
        log(traceback.format_exc())
        sleep(min(comm.rank, 5) * 0.1)  # where all ranks fail alike, the lowest ends the others before they repeat its message
        say(f"rank {comm.rank} on {socket.gethostname()} failed: {errors.told(error)}")
        code = getattr(error, "exit_code", 1)
        leave_code(code, os.environ)
        comm.abort(code)
        raise
