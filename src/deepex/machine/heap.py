"""The heap: let a process keep the memory it frees, because the next step takes as much again.

>>> keep_tensors(os.environ)        # before PyTorch is loaded
>>> keep_heap(os.environ)
'kept'
>>> give_back_heap()        # later, when nothing is trained any more
>>> with loading():         # of what stays
...     import torch

glibc returns the top of the heap, and each large block, to the system as soon as it is free. A training step on a CPU frees its
activations and gradients and asks for them anew some milliseconds later, and the kernel then clears every page of them: for
ResNet-18 on images of 28×28 up to 13,700 page faults a step, a sixth of its time. Kept, it is none.

PyTorch 2.10 and later has a heap of its own for tensors on aarch64, mimalloc, which returns what has been free for 10 ms, and can
be told otherwise only by the environment in which it is loaded. After 10 s is late enough for steps, and soon enough for what one
trial took and nothing else does.
"""

import ctypes
import gc
import platform
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Final

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # malloc.h
_NEVER: Final = -1
_ASKED: Final = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")
_PURGE: Final = "MIMALLOC_PURGE_DELAY"  # milliseconds
_LATE: Final = "10000"


def keep_tensors(environ: MutableMapping[str, str]) -> None:
    """Make PyTorch's own heap keep what is freed, where it has one. Only before PyTorch is loaded; a user's own value stays."""
    environ.setdefault(_PURGE, _LATE)


def keep_heap(environ: Mapping[str, str]) -> str:
    """Make freed memory stay with the process. Tells what holds now: `kept`, or why it is left as it was.

    It holds for the whole process and cannot be taken back, but `give_back_heap` empties it. What a user has set in the
    environment goes first.
    """
    asked = [name for name in _ASKED if name in environ]
    if "glibc.malloc" in environ.get("GLIBC_TUNABLES", ""):
        asked.append("GLIBC_TUNABLES")
    if asked:
        return f"as {asked[0]} says"
    change = getattr(ctypes.CDLL(None), "mallopt", None)
    if change is None:
        return "the C library's own way: it has no mallopt"
    if not (change(_TRIM_THRESHOLD, _NEVER) and change(_MMAP_MAX, 0)):
        return "the C library's own way: it refused"
    if platform.machine() == "aarch64" and environ.get(_PURGE) != _LATE:
        return f"as {_PURGE} says" if _PURGE in environ else f"PyTorch's own way: {_PURGE}={_LATE} must be set before it is loaded"
    return "kept"


def give_back_heap() -> None:
    """Return what is free to the system, once. glibc alone has this."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@contextmanager
def loading() -> Iterator[None]:
    """Load modules, for as long as the process lives, without a look for garbage among them: not now, nor later, nor at the end.

    PyTorch comes as 170,000 objects, and Python would go through them again and again: a quarter of the CPU time of a short run.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
