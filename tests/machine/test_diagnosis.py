from typing import Any

import pytest

from deepex.machine.diagnosis import find_problems, make_plan

H200 = {"index": 0, "name": "NVIDIA H200", "visible": True, "compute_capability": "9.0", "driver": "570.86"}
GOOD_DISK = {"directory": "/d", "total_bytes": 10**12, "free_bytes": 10**11, "writable": True}


def facts(**changes: Any) -> dict[str, Any]:
    """A machine without problems: one GPU, 8 cores."""
    found: dict[str, Any] = {
        "machine": {
            "cpu": {"num_cores_usable": 16, "num_cores_usable_physical": 8, "num_cores_logical": 16},
            "gpus": [H200],
            "versions": {"torch": "2.13.0", "cuda": "13.0"},
            "threads": {"variables": {}},
        },
        "mpi": {
            "started": True,
            "thread_level": "MULTIPLE",
            "mpiexec": "/b",
            "cuda_aware": True,
            "cuda_aware_reason": "asked",
        },
        "backends": {"cuda_usable": True, "nccl": True, "gloo": True, "architectures": ["sm_80", "sm_90"]},
        "file_systems": {"current": GOOD_DISK, "temporary": GOOD_DISK, "shared_memory": GOOD_DISK},
        "plan": {"device": "cuda", "ranks": 1},
    }
    for path, value in changes.items():
        target = found
        *parents, last = path.split("__")
        for name in parents:
            target = target[name]
        target[last] = value
    return found


@pytest.mark.parametrize(
    ("vendor", "launcher", "remedy"),
    [
        ("MPICH", "slurm", "start with srun --mpi=pmi2, or"),
        ("Open MPI", "slurm", "start with srun --mpi=pmix, or"),
        ("Cray MPICH", "slurm", "start with /b, or"),
        ("MPICH", "openmpi", "start with /b, or"),
    ],
)
@pytest.mark.parametrize("world", [{"size": 1, "error": None}, {"size": None, "error": "it broke"}])
def test_a_launcher_of_another_library_is_fatal(vendor: str, launcher: str, remedy: str, world: dict[str, Any]) -> None:
    found = facts(mpi__vendor=vendor) | {"world": world, "place": {"size": 4, "launcher": launcher}}
    (problem,) = find_problems(found)
    assert problem.severity == "fatal"
    seen = "MPI sees 1" if world["size"] else "MPI could not start there (it broke)"
    assert f"the launcher ({launcher}) started 4 ranks, but {seen}" in problem.sentence
    assert remedy in problem.sentence
    assert problem.sentence.endswith("in MPI4PY_LIBMPI.")
    assert find_problems(found | {"world": {"size": 4, "error": None}}) == find_problems(found | {"world": None}) == []


def test_a_good_machine_has_no_problems() -> None:
    assert find_problems(facts()) == []


@pytest.mark.parametrize(
    ("changes", "severity", "words"),
    [
        ({"machine__versions": {"torch": None}}, "fatal", "pip install torch"),
        ({"machine__gpus": []}, "note", "no NVIDIA GPU is here"),
        ({"machine__versions": {"torch": "2.13.0+cpu", "cuda": None}}, "warning", "built without CUDA"),
        ({"machine__gpus": [H200 | {"visible": False}]}, "warning", "CUDA_VISIBLE_DEVICES hides every GPU"),
        ({"backends__cuda_usable": False}, "warning", "driver 570.86 may be too old"),
        ({"backends__architectures": ["sm_100", "sm_120"]}, "warning", "no code for NVIDIA H200"),
        (
            {"mpi": {"started": False, "error": "it broke"}},
            "warning",
            "MPI could not start, so only one rank can train (it broke)",
        ),
        ({"mpi__thread_level": "FUNNELED"}, "warning", "cannot synchronise in the background"),
        ({"mpi__mpiexec": None}, "note", "site's launcher"),
        ({"mpi__cuda_aware": False}, "note", "NCCL is used"),
        ({"mpi__cuda_aware": None, "backends__nccl": False}, "note", "MPI copies through host memory"),
        (
            {"machine__threads__variables": {"OMP_NUM_THREADS": "8,2"}, "plan__ranks": 8},
            "warning",
            "8 ranks want 64 of 16 cores: unset it (DeepEx then gives each rank its share), or set it to 2",
        ),
        ({"machine__cpu__num_cores_usable": 2}, "note", "may use 2 of 16 logical cores"),
        (
            {"file_systems__shared_memory": GOOD_DISK | {"total_bytes": 32 * 10**6, "free_bytes": 32 * 10**6}},
            "warning",
            "--shm-size",
        ),
        ({"file_systems__current": GOOD_DISK | {"free_bytes": 5 * 10**8}}, "warning", "0.50 of 1000.0 GB free"),
        (
            {"file_systems__temporary": GOOD_DISK | {"writable": False}},
            "warning",
            "the temporary directory /d is not writable",
        ),
    ],
)
def test_each_problem_is_a_sentence_with_a_remedy(changes: dict[str, Any], severity: str, words: str) -> None:
    problems = find_problems(facts(**changes))
    assert [problem.severity for problem in problems] == [severity]
    assert words in problems[0].sentence
    assert problems[0].sentence.endswith(".")


@pytest.mark.parametrize("architectures", [[], ["sm_90a"], ["sm_80", "compute_80"], ["sm_90", "sm_100"]])
def test_code_for_the_gpu_or_for_any_later_one_runs(architectures: list[str]) -> None:
    assert find_problems(facts(backends__architectures=architectures)) == []


def test_the_worst_comes_first_and_unset_threads_are_no_problem() -> None:
    found = facts(mpi__mpiexec=None, mpi__thread_level="SINGLE", plan__ranks=8)
    assert [problem.severity for problem in find_problems(found)] == ["warning", "note"]


def test_facts_that_could_not_be_read_are_no_problem() -> None:
    nothing = {"directory": "/d", "total_bytes": None, "free_bytes": None, "writable": None}
    found = facts(machine={"versions": {"torch": "2"}}, file_systems={"current": nothing}, plan__device="cpu")
    assert find_problems(found) == []


def test_the_plan_is_one_rank_per_gpu_or_physical_core() -> None:
    machine = facts()["machine"]
    machine["gpus"] = [H200, H200, H200 | {"visible": False}]
    plan = make_plan(machine, cuda_usable=True)
    assert (plan.device, plan.ranks, plan.threads_per_rank) == ("cuda", 2, 4)
    plan = make_plan(machine, cuda_usable=False)
    assert (plan.device, plan.ranks, plan.threads_per_rank) == ("cpu", 8, 1)
    assert make_plan({"cpu": None}, cuda_usable=False).ranks == 1
