"""The heap: what a process frees stays with it, counted in page faults by the kernel."""

import gc
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

from deepex.machine.heap import keep_heap, keep_tensors, loading
from deepex.record import RunDirectory
from tests.mpi import HANGS, rank_environ, run_deepex

COUNT = """
import os, resource, sys
from deepex.machine.heap import give_back_heap, keep_heap, keep_tensors

if sys.argv[1] == "keep":
    keep_tensors(os.environ)
    assert keep_heap(os.environ) == "kept"

import time
import numpy as np
import torch

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE")

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

returned = 0
for turn in range(12):
    if turn == 2:                        # by now the heap has grown
        began, returned = faults(), 0
    tensors = [torch.ones(12 << 20), *(torch.ones(1 << 18) for _ in range(8))]       # 48 MB, above all thresholds; and small ones
    before = resident()
    del tensors
    time.sleep(0.15)                     # longer than mimalloc keeps anything of its own accord; it looks when it is next asked
    torch.ones(1 << 18)
    returned += before - resident()
taken = faults() - began
np.ones(12 << 20, np.float32)            # of the C library, wherever tensors are
before = resident()
give_back_heap()
print(taken, returned, before - resident())
"""
PAGES = 48 * 1024 // 64  # of one large tensor, with the largest pages that are usual (64 KB)


def measure(how: str) -> list[int]:
    """Faults and bytes returned in ten rounds, and bytes given back at the end, where the heap is kept or left as it is."""
    environ = {key: value for key, value in rank_environ().items() if not key.startswith("MIMALLOC_")}
    command = [sys.executable, "-c", COUNT, how]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=HANGS)
    return [int(number) for number in done.stdout.split()]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the kernel tells no resident set")
def test_freed_memory_is_kept_until_it_is_given_back() -> None:
    taken, returned, given_back = measure("keep")
    assert taken < PAGES, "one tensor's pages at most, for ten rounds"
    assert returned < 10e6
    assert given_back > 40e6
    assert measure("leave")[1] > 100e6, "else this test tells nothing"


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({"MIMALLOC_PURGE_DELAY": "10000"}, "kept"),
        ({"MIMALLOC_PURGE_DELAY": "0"}, "as MIMALLOC_PURGE_DELAY says"),
        ({}, "PyTorch's own way: MIMALLOC_PURGE_DELAY=10000 must be set before it is loaded"),
    ],
)
def test_a_heap_of_pytorchs_own_is_told_of(environ: dict[str, str], told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert keep_heap(environ) == told


@pytest.mark.slow
def test_a_run_keeps_the_heap(tmp_path: Path) -> None:
    words = ("--set=net=tests.networks:telling", "--set=epochs=1", "--set=threads=1", f"--out={tmp_path / 'run'}", "-q")
    done = run_deepex("train", "fashion", *words, TELL=str(tmp_path / "told"))
    assert done.returncode == 0, done.stderr
    assert RunDirectory.open(tmp_path / "run").state["heap"] == "kept"
    assert (tmp_path / "told").read_text(encoding="ascii") == "10000"


def test_a_users_own_delay_stays() -> None:
    environ = {"MIMALLOC_PURGE_DELAY": "0"}
    keep_tensors(environ)
    assert environ == {"MIMALLOC_PURGE_DELAY": "0"}


@pytest.mark.parametrize(
    "environ",
    [{"MALLOC_TRIM_THRESHOLD_": "131072"}, {"MALLOC_MMAP_MAX_": "9"}, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=9"}],
)
def test_what_the_user_has_set_goes_first(environ: dict[str, str]) -> None:
    assert keep_heap(environ) == f"as {next(iter(environ))} says"


def test_what_is_loaded_is_not_looked_through_again() -> None:
    """What is made afterwards is; also if the load fails."""

    class Ring:
        def __init__(self) -> None:
            self.itself = self

    stays, before = [], gc.get_freeze_count()

    def load() -> None:
        with loading():
            stays.extend(weakref.ref(Ring()) for _ in range(3))
            assert not gc.isenabled()
            raise ImportError

    with pytest.raises(ImportError):
        load()
    goes = weakref.ref(Ring())
    gc.collect()
    assert gc.isenabled()
    assert gc.get_freeze_count() > before
    assert all(ring() is not None for ring in stays), "nobody looked"
    assert goes() is None
