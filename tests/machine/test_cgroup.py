from pathlib import Path

import pytest

from deepex.machine.cgroup import Limits, parse_groups, read_limits

GIB = 1 << 30


def make_tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


VERSION_2 = {
    "proc/self/cgroup": "0::/system.slice/slurmstepd.scope/job_7/step_0\n",
    "proc/self/mounts": "cgroup2 /sys/fs/cgroup cgroup2 rw,nosuid,nodev 0 0\n",
}
VERSION_1 = {
    "proc/self/cgroup": "9:memory:/slurm/uid_1/job_7\n3:cpu,cpuacct:/slurm/uid_1/job_7\n1:name=systemd:/\n0::/\n",
    "proc/self/mounts": (
        "cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,relatime,cpu,cpuacct 0 0\n"
        "cgroup /sys/fs/cgroup/memory cgroup rw,relatime,memory 0 0\n"
    ),
}


def test_version_2_takes_the_smallest_limit_of_all_levels(tmp_path: Path) -> None:
    job = "sys/fs/cgroup/system.slice/slurmstepd.scope/job_7"
    root = make_tree(
        tmp_path,
        VERSION_2
        | {
            f"{job}/cpu.max": "350000 100000\n",
            f"{job}/memory.max": f"{16 * GIB}\n",
            f"{job}/memory.current": f"{5 * GIB}\n",
            f"{job}/memory.stat": f"anon {4 * GIB}\ninactive_file {GIB}\n",
            f"{job}/step_0/cpu.max": "max 100000\n",
            f"{job}/step_0/memory.max": "max\n",
        },
    )
    assert read_limits(root) == Limits(num_cores=3.5, memory_bytes=16 * GIB, memory_free_bytes=12 * GIB)


def test_version_1_reads_each_controller_from_its_own_tree(tmp_path: Path) -> None:
    cpu, memory = "sys/fs/cgroup/cpu,cpuacct/slurm/uid_1/job_7", "sys/fs/cgroup/memory/slurm"
    root = make_tree(
        tmp_path,
        VERSION_1
        | {
            f"{cpu}/cpu.cfs_quota_us": "200000\n",
            f"{cpu}/cpu.cfs_period_us": "100000\n",
            f"{memory}/memory.limit_in_bytes": "9223372036854771712\n",
            f"{memory}/uid_1/job_7/memory.limit_in_bytes": f"{8 * GIB}\n",
            f"{memory}/uid_1/job_7/memory.usage_in_bytes": f"{3 * GIB}\n",
            f"{memory}/uid_1/job_7/memory.stat": f"inactive_file 0\ntotal_inactive_file {GIB}\n",
        },
    )
    assert read_limits(root) == Limits(num_cores=2, memory_bytes=8 * GIB, memory_free_bytes=6 * GIB)


def test_a_container_sees_its_limit_at_the_root_although_its_path_is_the_hosts(tmp_path: Path) -> None:
    root = make_tree(tmp_path, VERSION_2 | {"sys/fs/cgroup/cpu.max": "50000 100000\n"})
    assert read_limits(root) == Limits(num_cores=0.5)


@pytest.mark.parametrize("files", [{}, VERSION_1, VERSION_2, VERSION_1 | {"proc/self/cgroup": "nonsense\n\n::\n"}])
def test_nothing_to_read_is_no_limit(tmp_path: Path, files: dict[str, str]) -> None:
    assert read_limits(make_tree(tmp_path, files)) == Limits()


def test_an_unlimited_quota_of_version_1_is_no_limit(tmp_path: Path) -> None:
    cpu = "sys/fs/cgroup/cpu,cpuacct"
    files = VERSION_1 | {f"{cpu}/cpu.cfs_quota_us": "-1\n", f"{cpu}/cpu.cfs_period_us": "100000\n"}
    assert read_limits(make_tree(tmp_path, files)).num_cores is None


def test_groups_are_split_by_controller() -> None:
    assert parse_groups("3:cpu,cpuacct:/a:b\n0::/c\n") == {"cpu": "/a:b", "cpuacct": "/a:b", "": "/c"}
