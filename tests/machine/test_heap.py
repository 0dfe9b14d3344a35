"""The heap: what a process frees stays with it, counted in page faults by the kernel."""

import subprocess
import sys
from pathlib import Path

import pytest

from deepex.machine.heap import keep_heap
from tests.mpi import HANGS, rank_environ

COUNT = """
import ctypes, os, resource, sys
import torch
from deepex.machine.heap import give_back_heap, keep_heap

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE")

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

how = "leave" if os.fork() else "keep"                                   # loading torch takes most of the time
if how == "keep":
    assert keep_heap({}) == "kept"
for turn in range(12):
    if turn == 2:                        # by now the heap has grown
        before, began = resident(), faults()
    torch.ones(12 << 20), [torch.ones(1 << 18) for _ in range(8)]       # 48 MB, above any threshold of glibc; and small ones
taken = faults() - began
give_back_heap()
print(how, taken, before - resident(), flush=True)
if how == "leave":
    assert os.wait()[1] == 0
"""
PAGES = 48 * 1024 // 64  # of one large tensor, with the largest pages that are usual (64 KB)


def measure() -> dict[str, tuple[int, int]]:
    """The faults and what was given back, of a process that keeps its heap, and of one that leaves it as it is."""
    done = subprocess.run(
        [sys.executable, "-c", COUNT], env=rank_environ(), capture_output=True, text=True, check=True, timeout=HANGS
    )
    return {how: (int(taken), int(returned)) for how, taken, returned in map(str.split, done.stdout.splitlines())}


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the kernel tells no resident set")
def test_freed_memory_is_kept_until_it_is_given_back() -> None:
    found = measure()
    taken, returned = found["keep"]
    assert taken < PAGES, "one tensor's pages at most, for ten rounds"
    assert returned > 40e6
    assert found["leave"][0] > 10 * PAGES, "else this test tells nothing"


@pytest.mark.parametrize(
    "environ",
    [{"MALLOC_TRIM_THRESHOLD_": "131072"}, {"MALLOC_MMAP_MAX_": "9"}, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=9"}],
)
def test_what_the_user_has_set_goes_first(environ: dict[str, str]) -> None:
    assert keep_heap(environ) == f"as {next(iter(environ))} says"
