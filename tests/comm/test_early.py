"""In a rank MPI is loaded before PyTorch, in every program that a launcher starts; alone, it is not loaded at all."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.full import examples
from tests.mpi import ROOT, rank_environ, run_ranks

# Runs what is given as a rank would, and prints which of the two came first; both are in the order in which they were begun.
# With `until`, what is imported ends where torch would be loaded: that takes most of the time.
ORDER = """
import json, runpy, sys
how, name, *sys.argv[1:] = sys.argv[1:]
class End(BaseException):
    pass
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            sys.modules["torch"] = None
            raise End
if how == "until":
    sys.meta_path.insert(0, Finder())
try:
    __import__(name) if how != "run" else runpy.run_module(name, run_name="__main__", alter_sys=True)
except SystemExit as ended:
    assert not ended.code
except End:
    pass
print(f"ORDER {json.dumps([name for name in sys.modules if name in ('mpi4py.MPI', 'torch')])} END", flush=True)
"""
BENCHMARKS = ("one_sync", "memory", "two_ranks", "feed_memory", "sync_peers")


def orders(stdout: str) -> list[list[str]]:
    """What each rank printed: in one piece, but perhaps on one line with another's."""
    return [json.loads(text) for text in re.findall("ORDER (.*?) END", stdout)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("deepex.study.transfer", ["--comm", "mpi", "--seconds", "0.001", "--repeats", "1", "--sizes", "8"]),
        ("deepex.study.frameworks", ["pytorch", "fashion", "--set", "epochs=1", "--set", "samples=64", "--set", "validate=none"]),
    ],
)
def test_programs_of_studies_load_mpi_first(name: str, options: list[str], tmp_path: Path) -> None:
    done = run_ranks(2, "-c", ORDER, "run", name, *options, "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert orders(done.stdout) == [["mpi4py.MPI", "torch"]] * 2, done.stdout


@pytest.mark.parametrize(
    ("name", "ranks"), [*((name, 2) for name in BENCHMARKS), *((name, 1) for name in BENCHMARKS[: examples(1, len(BENCHMARKS))])]
)
def test_benchmarks_do_so_too(name: str, ranks: int) -> None:
    """Alone they load no MPI at all, also not after torch."""
    path = os.pathsep.join([str(ROOT / "benchmarks"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    variables = {"PMI_RANK": "0", "PMI_SIZE": str(ranks), "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", ORDER, "until" if ranks == 2 else "import", name],
        env=rank_environ() | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert orders(done.stdout) == [["mpi4py.MPI", "torch"] if ranks == 2 else ["torch"]]


@pytest.mark.parametrize(
    ("variables", "loaded"),
    [
        ({}, False),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, False),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, True),
        ({"PMI_RANK": "0", "PMI_SIZE": "many"}, False),  # who connects says what is wrong
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "x"}, False),
        ({"PMI_RANK": "0", "PMI_SIZE": "2", "MPI4PY_LIBMPI": "/nowhere/libmpi.so"}, False),
    ],
)
def test_mpi_is_loaded_where_a_launcher_started_several_ranks_and_not_started(variables: dict[str, str], loaded: bool) -> None:
    program = """
import sys
from deepex.comm.early import load_mpi
load_mpi()
assert "torch" not in sys.modules
MPI = sys.modules.get("mpi4py.MPI")
print(MPI is not None, MPI is not None and MPI.Is_initialized())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env=rank_environ() | variables, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == [str(loaded), "False"], done.stderr
