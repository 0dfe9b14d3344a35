"""What the other tests take for granted of the hosts."""

from pathlib import Path
from time import sleep

import pytest

from tests.cluster.cluster import NAMES, Cluster
from tests.cluster.hosts import Hosts

pytestmark = pytest.mark.cluster


def test_hosts_have_their_own_names_and_memory_and_the_same_files(cluster: Cluster, tmp_path: Path) -> None:
    first, second, _ = cluster.hosts.compute
    assert first.run(["touch", "/dev/shm/memory", str(tmp_path / "file")], seconds=20).code == 0
    assert second.run(["ls", "/dev/shm", str(tmp_path)], seconds=20).stdout.split() == ["/dev/shm:", f"{tmp_path}:", "file"]
    names = [cluster.run([str(cluster.hosts.ssh), name, "hostname"]).stdout.strip() for name in NAMES]
    assert names == list(NAMES)


def test_slurm_starts_one_task_on_each_host(cluster: Cluster) -> None:
    assert sorted(cluster.run(["srun", "-N3", "hostname"]).stdout.split()) == list(NAMES)


def test_nothing_is_left_of_closed_hosts(tmp_path: Path) -> None:
    with Hosts(tmp_path, ("alone",)) as hosts:
        (host,) = hosts.compute
        daemon = host.start(["sh", "-c", "echo started; exec sleep 1000"], tmp_path / "log")
        while not (tmp_path / "log").read_text():
            sleep(0.05)
        running = host.processes()
        assert len(running) >= 3  # its first process, the sshd, the daemon
    assert daemon.poll() is not None
    assert not [pid for pid in running if Path(f"/proc/{pid}").exists()]
