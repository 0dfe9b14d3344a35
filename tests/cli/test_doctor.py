import json
import os
import subprocess
import sys
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import deepex.machine
from deepex.cli import doctor as module
from tests.full import examples
from tests.mpi import run_deepex, run_ranks

MPI = {
    "started": True,
    "vendor": "MPICH",
    "version": "4.3.1",
    "library_version": "MPICH Version: 4.3.1",
    "standard": "4.1",
    "library": "/opt/mpi/lib/libmpi.so",
    "mpiexec": "/opt/mpi/bin/mpiexec",
    "thread_level": "MULTIPLE",
    "cuda_aware": False,
    "cuda_aware_reason": "asked",
    "error": None,
}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the command with an MPI that is told, not started; the real one is probed in tests/machine."""
    for name in [name for name in os.environ if name.startswith(("PMI", "OMPI_", "SLURM_"))]:
        monkeypatch.delenv(name)
    app = typer.Typer()
    app.command()(module.doctor)

    def invoke(*arguments: str, mpi: dict[str, Any] | None = None) -> Any:
        monkeypatch.setattr(deepex.machine, "probe_mpi", lambda: MPI | (mpi or {}))
        return CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})

    return invoke


def test_json_is_one_object_and_nothing_else(run: Any) -> None:
    result = run("--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.output)
    keys = {"machine", "mpi", "backends", "file_systems", "plan", "place", "choice", "world", "problems", "can_train"}
    assert facts.keys() == keys
    assert facts["choice"]["here"] == {"kind": "solo", "reason": facts["choice"]["here"]["reason"]}
    assert facts["plan"]["ranks"] >= 1
    assert facts["can_train"] is True


def test_the_report_says_what_would_be_chosen(run: Any) -> None:
    result = run()
    assert result.exit_code == 0, result.output
    for words in ("MPICH 4.3.1", "thread level MULTIPLE", "CUDA-aware: no (asked)", "--ranks", "per rank", "placement"):
        assert words in result.output


def test_an_mpi_that_does_not_start_is_a_warning_with_a_remedy(run: Any) -> None:
    result = run(mpi={"started": False, "vendor": None, "error": "[it] broke"})
    assert result.exit_code == 0, result.output
    assert "[it] broke" in result.output  # brackets are not markup
    assert "MPI4PY_LIBMPI" in result.output


def test_without_torch_training_cannot_work(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = {"error": "no torch", "cuda_usable": False, "nccl": False, "gloo": False, "architectures": []}
    monkeypatch.setattr(module, "_backends", lambda: missing)
    real = deepex.machine.describe
    monkeypatch.setattr(deepex.machine, "describe", lambda **names: real(**names) | {"versions": {"torch": None}})
    result = run()
    assert result.exit_code == 1
    assert "fatal: torch could not be imported (no torch)" in result.output


def test_only_the_first_rank_of_a_job_reports(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setenv("PMI_SIZE", "2")
    result = run()
    assert (result.exit_code, result.output) == (0, "")


def test_stale_variables_of_a_launcher_are_told(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_RANK", "5")
    monkeypatch.setenv("PMI_SIZE", "2")
    result = run("--json")
    assert result.exit_code == 0, result.output
    assert "unset the stale variables" in json.loads(result.output)["problems"][0]["sentence"]


# A launcher of another library leaves its variables, and MPI starts alone; so does srun without the --mpi that is wanted.
HYDRA = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
OPEN_MPI = {
    f"OMPI_COMM_WORLD_{name}": value for name, value in (("RANK", "0"), ("SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_SIZE", "2"))
}
SRUN = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_NODES": "1"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "launcher"), [(HYDRA, "mpich"), (OPEN_MPI, "openmpi"), (SRUN, "slurm")], ids=["hydra", "Open MPI", "srun"]
)
def test_a_launcher_that_the_mpi_does_not_know_is_fatal(variables: dict[str, str], launcher: str) -> None:
    done = run_deepex("doctor", "--json", **variables)
    facts = json.loads(done.stdout)
    assert (done.returncode, facts["world"]["size"], facts["can_train"]) == (1, 1, False), done.stderr
    found = [problem["sentence"] for problem in facts["problems"] if problem["severity"] == "fatal"]
    assert len(found) == 1
    assert f"the launcher ({launcher}) started 2 ranks, but MPI sees 1" in found[0]
    assert "MPI4PY_LIBMPI" in found[0]
    how = {"MPICH": "srun --mpi=pmi2", "Open MPI": "srun --mpi=pmix"}[facts["mpi"]["vendor"]]
    assert (how if launcher == "slurm" else facts["mpi"]["mpiexec"]) in found[0]
    other = run_deepex(
        "doctor", **{name: "1" if value == "0" and name != "SLURM_STEP_ID" else value for name, value in variables.items()}
    )
    assert (other.returncode, other.stdout) == (0, ""), "one of them reports"


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("ranks", examples([2], [2, 3]))
def test_ranks_of_the_library_s_own_launcher_are_seen(ranks: int) -> None:
    done = run_ranks(ranks, "-m", "deepex", "doctor", "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert (facts["world"], facts["place"]["size"]) == ({"size": ranks, "error": None}, ranks)
    assert not [problem for problem in facts["problems"] if "launcher" in problem["sentence"]]


def test_importing_the_command_loads_nothing_heavy() -> None:
    heavy = "{'torch', 'mpi4py', 'pynvml', 'numpy', 'rich.table'}"
    program = f"import sys; sys.path[:] = {sys.path!r}; import deepex.cli.doctor; print({heavy} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
