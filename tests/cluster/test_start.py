"""Jobs that cannot start: they end soon, and say which rank on which host is missing."""

import re
from pathlib import Path

import pytest

from tests.cluster.cluster import MPICH, PLACEMENTS, PMI2, PMIX, SRUN, Cluster, Launcher
from tests.cluster.hosts import Ended
from tests.mpi import own_lines

pytestmark = pytest.mark.cluster

ENDS = 30.0  # seconds in which a job must end that lacks a rank
TRAIN = ("-m", "deepex", "train", "fashion", "--set", "epochs=1", "--set", "samples=256", "--set", "validate=none", "--quiet")

# What the last rank does instead of its work; the others do theirs.
INSTEAD = {
    "exits": "exit 1",
    "is killed": "kill -9 $$",
    "lacks a library": 'PYTHONPATH="$BROKEN:$PYTHONPATH"; exec "$@"',
    "sleeps": "exec sleep 1000",
}


def wrapper(instead: str, broken: Path) -> list[str]:
    rank = "${PMI_RANK:-${OMPI_COMM_WORLD_RANK:-$SLURM_PROCID}}"
    return ["sh", "-c", f'BROKEN={broken}; if [ "{rank}" = 3 ]; then {instead}; fi; exec "$@"', "sh"]


def named(ended: Ended) -> list[str]:
    """The lines that name rank 3 and its host; srun calls a rank a task."""
    lines = f"{ended.stdout}\n{ended.stderr}".splitlines()
    return [line for line in lines if re.search(r"\b(rank|task)s? 3\b", line, re.IGNORECASE) and re.search(r"\bn2\b", line)]


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A directory that hides the installed torch."""
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch_cpu.so: cannot open shared object file')\n")
    return tmp_path


@pytest.mark.parametrize("instead", INSTEAD.values(), ids=INSTEAD.keys())
@pytest.mark.parametrize("launcher", [MPICH, PMI2, PMIX], ids=lambda launcher: launcher.name)
def test_a_job_without_its_last_rank_ends_and_names_it(
    cluster: Cluster, launcher: Launcher, instead: str, broken: Path, tmp_path: Path
) -> None:
    ended = cluster.launch(
        launcher, PLACEMENTS["3+1"], *TRAIN, "--out", str(tmp_path / "run"), seconds=ENDS, wrapper=wrapper(instead, broken)
    )
    # A launcher may make a code of its own of a signal.
    assert ended.code in (1, 2) or (ended.code and instead == INSTEAD["is killed"]), str(ended)
    assert named(ended), str(ended)
    assert cluster.left() == {}


def test_ranks_that_srun_does_not_join_say_so_once(cluster: Cluster, tmp_path: Path) -> None:
    """Without --mpi each rank finds itself alone."""
    ended = cluster.launch(SRUN, PLACEMENTS["2+2"], *TRAIN, "--out", str(tmp_path / "run"), seconds=ENDS)
    assert ended.code in (1, 2), str(ended)
    (line,) = own_lines(ended.stderr)
    assert "--mpi=" in line
    assert cluster.left() == {}
