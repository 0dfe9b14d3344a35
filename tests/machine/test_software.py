from pathlib import Path

import pytest

from deepex.machine.software import describe_commit, describe_job, describe_threads, describe_versions

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def make_package(tree: Path) -> Path:
    package = tree / "src" / "deepex"
    package.mkdir(parents=True)
    return package


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_branch_is_followed_to_its_commit(tmp_path: Path) -> None:
    write(tmp_path / ".git/HEAD", "ref: refs/heads/feature/x\n")
    write(tmp_path / ".git/refs/heads/feature/x", f"{COMMIT}\n")
    assert describe_commit(make_package(tmp_path)) == COMMIT


def test_a_branch_may_be_packed(tmp_path: Path) -> None:
    write(tmp_path / ".git/HEAD", "ref: refs/heads/main\n")
    write(
        tmp_path / ".git/packed-refs",
        f"# pack-refs with: peeled\n{'f' * 40} refs/heads/mainly\n{COMMIT} refs/heads/main\n",
    )
    assert describe_commit(make_package(tmp_path)) == COMMIT


def test_a_detached_head_is_the_commit(tmp_path: Path) -> None:
    write(tmp_path / ".git/HEAD", f"{COMMIT}\n")
    assert describe_commit(make_package(tmp_path)) == COMMIT


def test_a_second_work_tree_points_to_the_first(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    write(first / ".git/worktrees/second/HEAD", "ref: refs/heads/main\n")
    write(first / ".git/worktrees/second/commondir", "../..\n")
    write(first / ".git/refs/heads/main", f"{COMMIT}\n")
    write(second / ".git", f"gitdir: {first}/.git/worktrees/second\n")
    assert describe_commit(make_package(second)) == COMMIT


def test_a_branch_without_commits_has_none(tmp_path: Path) -> None:
    write(tmp_path / ".git/HEAD", "ref: refs/heads/main\n")
    assert describe_commit(make_package(tmp_path)) is None


def test_a_package_installed_inside_another_project_does_not_report_its_commit(tmp_path: Path) -> None:
    write(tmp_path / ".git/HEAD", f"{COMMIT}\n")
    installed = tmp_path / "site-packages" / "deepex"
    installed.mkdir(parents=True)
    assert describe_commit(installed) is None


@pytest.mark.parametrize(
    ("environ", "job"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "12", "JOB_ID": "3"}, {"scheduler": "slurm", "id": "12"}),
        ({"PBS_JOBID": "7.server"}, {"scheduler": "pbs", "id": "7.server"}),
        ({"LSB_JOBID": "9"}, {"scheduler": "lsf", "id": "9"}),
        ({"SLURM_JOB_ID": ""}, None),
    ],
)
def test_the_batch_job_is_found(environ: dict[str, str], job: dict[str, str] | None) -> None:
    assert describe_job(environ) == job


def test_versions_and_threads_are_those_of_this_process() -> None:
    import torch

    versions = describe_versions()
    assert versions["torch"] == torch.__version__
    assert {"deepex", "python", "cuda", "cudnn", "nccl", "numpy", "mpi4py", "triton", "mpi"} <= versions.keys()
    threads = describe_threads({"OMP_NUM_THREADS": "4", "HOME": "/"})
    assert threads["variables"] == {"OMP_NUM_THREADS": "4"}
    assert threads["num_torch_threads"] == torch.get_num_threads()
