"""Jobs that cannot start: they end soon, and a line says which rank on which host did not find the others, or why it failed."""

import re
from pathlib import Path

import pytest

from tests.cluster.cluster import MPICH, PLACEMENTS, PMI2, PMIX, SRUN, Cluster, Launcher
from tests.cluster.hosts import Ended
from tests.mpi import own_lines

pytestmark = pytest.mark.cluster

ENDS = 60.0  # seconds after which a job that lacks a rank is taken to hang; half of it is what the default may take
SHORT = "8"  # seconds that ranks wait for each other, where a test does not want to wait for the default
TRAIN = ("-m", "deepex", "train", "fashion", "--set", "epochs=1", "--set", "samples=256", "--set", "validate=none", "--quiet")

# What the last rank does instead of its work; the others do theirs.
EXITS = "exit 1"
KILLED = "kill -9 $$"
SLEEPS = "exec sleep 1000"


def wrapper(instead: str) -> list[str]:
    rank = "${PMI_RANK:-${OMPI_COMM_WORLD_RANK:-$SLURM_PROCID}}"
    return ["sh", "-c", f'if [ "{rank}" = 3 ]; then {instead}; fi; exec "$@"', "sh"]


def names_rank_and_host(ended: Ended) -> bool:
    """Whether a rank that waits in vain says so; mpiexec may end those that wait before they do, but then tells what it saw."""
    ours = any(re.match(r"deepex: rank \d on n\d: ", line) for line in own_lines(ended.stderr))
    return ours or bool(re.search(r"PID \d+ RUNNING AT n2", ended.stdout))


# Not with mpiexec: it ends a rank that sleeps on another host, or waits for it, as it happens.
@pytest.mark.parametrize(
    ("launcher", "instead"),
    [
        pytest.param(PMI2, KILLED, id="srun --mpi=pmi2-is killed"),
        pytest.param(PMIX, SLEEPS, id="srun --mpi=pmix-sleeps"),
        pytest.param(MPICH, EXITS, id="mpiexec of MPICH-exits", marks=pytest.mark.slow),
        pytest.param(MPICH, KILLED, id="mpiexec of MPICH-is killed", marks=pytest.mark.slow),
        pytest.param(PMI2, EXITS, id="srun --mpi=pmi2-exits", marks=pytest.mark.slow),
        pytest.param(PMI2, SLEEPS, id="srun --mpi=pmi2-sleeps", marks=pytest.mark.slow),
        pytest.param(PMIX, EXITS, id="srun --mpi=pmix-exits", marks=pytest.mark.slow),
        pytest.param(PMIX, KILLED, id="srun --mpi=pmix-is killed", marks=pytest.mark.slow),
    ],
)
def test_a_job_whose_last_rank_does_not_come_ends(cluster: Cluster, launcher: Launcher, instead: str, tmp_path: Path) -> None:
    # By default srun waits for a task that sleeps, whatever code the others end with.
    environ = {"DEEPEX_START_SECONDS": SHORT, "SLURM_KILL_BAD_EXIT": "1" if instead == SLEEPS else "0"}
    where = PLACEMENTS["3+1"]
    ended = cluster.launch(launcher, where, *TRAIN, "--out", str(tmp_path), seconds=ENDS, wrapper=wrapper(instead), **environ)
    assert ended.code, str(ended)  # not always ours: launchers tell the code of a rank that they have ended themselves
    assert names_rank_and_host(ended), str(ended)
    assert cluster.left() == {}


@pytest.mark.slow
def test_the_usual_time_to_start_ends_a_job_too(cluster: Cluster, tmp_path: Path) -> None:
    where, sleeps = PLACEMENTS["3+1"], ["env", "-u", "DEEPEX_START_SECONDS", *wrapper(SLEEPS)]
    ended = cluster.launch(PMI2, where, *TRAIN, "--out", str(tmp_path), seconds=ENDS, wrapper=sleeps, SLURM_KILL_BAD_EXIT="1")
    assert ended.code, str(ended)
    assert names_rank_and_host(ended), str(ended)
    assert cluster.left() == {}


@pytest.mark.parametrize(
    "launcher",
    [
        PMI2,
        pytest.param(MPICH, marks=pytest.mark.slow),
        pytest.param(PMIX, marks=pytest.mark.slow),
    ],
    ids=lambda launcher: launcher.name,
)
def test_a_rank_that_lacks_a_library_is_named(cluster: Cluster, launcher: Launcher, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch_cpu.so: cannot open shared object file')\n")
    hides = f'PYTHONPATH="{tmp_path}:$PYTHONPATH"; exec "$@"'
    ended = cluster.launch(
        launcher, PLACEMENTS["3+1"], *TRAIN, "--out", str(tmp_path / "run"), seconds=ENDS, wrapper=wrapper(hides)
    )
    assert ended.code in (1, 2), str(ended)
    assert "rank 3 on n2: ImportError: libtorch_cpu.so" in own_lines(ended.stderr)[0], str(ended)
    assert cluster.left() == {}


def test_ranks_that_srun_does_not_join_say_so_once(cluster: Cluster, tmp_path: Path) -> None:
    """Without --mpi each rank finds itself alone."""
    ended = cluster.launch(SRUN, PLACEMENTS["2+2"], *TRAIN, "--out", str(tmp_path / "run"), seconds=ENDS)
    assert ended.code in (1, 2), str(ended)
    (line,) = own_lines(ended.stderr)
    assert "--mpi=" in line
    assert cluster.left() == {}
