"""What the kernel and the driver count. RAPL, InfiniBand and bonds are not on every machine: their files are made here."""

import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path
from time import process_time

import pytest

from deepex.machine.sampling import gpu as gpu_module
from deepex.machine.sampling import open_sources
from deepex.machine.sampling.gpu import GpuSource, open_gpu
from deepex.machine.sampling.node import disks, idle, network, packages
from deepex.machine.sampling.process import memory, processor, storage
from deepex.machine.sampling.source import UsageSource
from deepex.machine.storage import describe_file_system


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n", encoding="utf-8")


def used(source: UsageSource, work: Callable[[], object]) -> dict[str, float]:
    """How far each counter moved while `work` ran."""
    before = source.read()
    kept = work()
    after = source.read()
    del kept
    return {name: after[name] - before[name] for name in before}


# This process


def burn(seconds: float) -> None:
    """Keep a core busy for so many of its own seconds, in another thread."""

    def spin() -> None:
        ends = process_time() + seconds
        while process_time() < ends:
            pass

    thread = threading.Thread(target=spin)
    thread.start()
    thread.join()


def test_the_seconds_of_all_threads_are_seen() -> None:
    assert used(processor(), lambda: burn(0.2))["cpu_seconds"] == pytest.approx(0.2, abs=0.1)


def test_memory_is_seen_while_it_is_held() -> None:
    """Of pages that are surely new: a heap may have some that it kept."""
    size = 64 << 20

    def hold() -> mmap.mmap:
        pages = mmap.mmap(-1, size)
        for start in range(0, size, mmap.PAGESIZE):
            pages[start] = 1
        return pages

    grown = used(memory(), hold)["memory_bytes"]
    assert size * 0.9 < grown < size * 1.5


def test_bytes_that_go_to_the_disk_are_seen(tmp_path: Path) -> None:
    kind = describe_file_system(tmp_path)["kind"]
    if kind in ("tmpfs", "overlay", "ramfs"):
        pytest.skip(f"the temporary directory is on {kind}, where nothing goes to a disk")
    size = 4 << 20

    def save() -> None:
        with (tmp_path / "some").open("wb") as file:
            file.write(os.urandom(size))
            file.flush()
            os.fsync(file.fileno())

    assert size <= used(storage(), save)["written_bytes"] < 2 * size


def test_bytes_of_the_page_cache_are_no_reading(tmp_path: Path) -> None:
    (tmp_path / "some").write_bytes(bytes(4 << 20))
    assert used(storage(), (tmp_path / "some").read_bytes)["read_bytes"] < 1 << 20


def test_memory_is_what_is_resident(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/statm", "1000 30 20 1 0 900 0")
    assert memory(tmp_path).read() == {"memory_bytes": 30.0 * os.sysconf("SC_PAGE_SIZE")}


def test_storage_by_its_files(tmp_path: Path) -> None:
    path = tmp_path / "proc/self/io"
    write(path, "rchar: 1\nwchar: 2\nsyscr: 3\nsyscw: 4\nread_bytes: 4096\nwrite_bytes: 8192\ncancelled_write_bytes: 5")
    source = storage(tmp_path)
    assert source.read() == {"read_bytes": 4096.0, "written_bytes": 8192.0}
    path.write_text(path.read_text(encoding="utf-8").replace("8192", "16384"), encoding="utf-8")
    assert source.read() == {"read_bytes": 4096.0, "written_bytes": 16384.0}, "the file stays open, and is read anew"


# The node


def test_idle_cores_and_disks_by_their_files(tmp_path: Path) -> None:
    write(tmp_path / "proc/uptime", "100.25 371.5")
    assert idle(tmp_path).read() == {"node_idle_seconds": 371.5}
    stat = "  10   0   {}  3  20  0  {}  4  0  5  6"
    write(tmp_path / "sys/block/sda/stat", stat.format(2, 5))
    write(tmp_path / "sys/block/nvme0n1/stat", stat.format(20, 50))
    write(tmp_path / "sys/block/dm-0/stat", stat.format(22, 55))
    for disk in ("sda", "nvme0n1"):
        (tmp_path / "sys/block" / disk / "device").mkdir()
    assert disks(tmp_path).read() == {"disk_read_bytes": 22 * 512.0, "disk_written_bytes": 55 * 512.0}


def make_interface(root: Path, name: str, received: int, sent: int, *, card: bool, kind: int = 1) -> None:
    folder = root / "sys/class/net" / name
    write(folder / "statistics/rx_bytes", received)
    write(folder / "statistics/tx_bytes", sent)
    write(folder / "type", kind)
    if card:
        (folder / "device").mkdir()


def test_the_network_without_loopback_and_what_repeats_others(tmp_path: Path) -> None:
    make_interface(tmp_path, "lo", 1 << 40, 1 << 40, card=False)
    make_interface(tmp_path, "veth0", 10, 20, card=False)
    assert network(tmp_path).read() == {"network_bytes": 30.0}, "in a container there is no card"
    make_interface(tmp_path, "eth0", 100, 200, card=True)
    make_interface(tmp_path, "eth1", 1000, 2000, card=True)
    make_interface(tmp_path, "bond0", 1100, 2200, card=False)
    assert network(tmp_path).read() == {"network_bytes": 3300.0}


def test_infiniband_counts_what_goes_past_the_kernel(tmp_path: Path) -> None:
    make_interface(tmp_path, "lo", 1, 1, card=False)
    make_interface(tmp_path, "eth0", 100, 200, card=True)
    make_interface(tmp_path, "ib0", 1 << 30, 1 << 30, card=True, kind=32)
    counters = tmp_path / "sys/class/infiniband/mlx5_0/ports/1/counters"
    write(counters / "port_xmit_data", 1000)
    write(counters / "port_rcv_data", 500)
    assert network(tmp_path).read() == {"network_bytes": 300.0 + 4 * 1500}


def make_zone(root: Path, name: str, kind: str, microjoules: int, most: int = 1000_000_000) -> Path:
    zone = root / "sys/class/powercap" / name
    write(zone / "name", kind)
    write(zone / "max_energy_range_uj", most)
    write(zone / "energy_uj", microjoules)
    return zone / "energy_uj"


def test_energy_of_packages_and_their_memory_with_wrap_around(tmp_path: Path) -> None:
    package = make_zone(tmp_path, "intel-rapl:0", "package-0", 990_000_000)
    make_zone(tmp_path, "intel-rapl:0:0", "core", 5)
    dram = make_zone(tmp_path, "intel-rapl:0:1", "dram", 7_000_000)
    make_zone(tmp_path, "intel-rapl:1", "psys", 5)
    source = packages(tmp_path)
    assert source.read() == {"cpu_joules": 0.0}
    write(package, 999_000_000)
    write(dram, 8_000_000)
    assert source.read() == {"cpu_joules": 10.0}
    write(package, 4_000_000)
    assert source.read() == {"cpu_joules": pytest.approx(15.0)}, "5 J over the end of its range"
    assert source.read() == {"cpu_joules": pytest.approx(15.0)}


def test_energy_that_only_root_may_read_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    energy = make_zone(tmp_path, "intel-rapl:0", "package-0", 1)
    opened = os.open

    def refused(path: Path, *words: int) -> int:
        if Path(path) == energy:
            raise PermissionError(path)
        return opened(path, *words)

    write(tmp_path / "proc/uptime", "1.0 2.0")
    monkeypatch.setattr(os, "open", refused)
    readings = [source.read() for source in open_sources(first=True, root=tmp_path)]
    assert sorted(name for reading in readings for name in reading) == ["cpu_seconds", "node_idle_seconds"]


def test_only_the_first_rank_of_a_node_reads_for_the_node() -> None:
    def names(*, first: bool) -> set[str]:
        return {name for source in open_sources(first=first) for name in source.read()}

    assert {"cpu_seconds", "memory_bytes"} <= names(first=False) < names(first=True)
    assert names(first=False) <= {"cpu_seconds", "memory_bytes", "read_bytes", "written_bytes"}


def test_files_are_closed() -> None:
    before = len(os.listdir("/proc/self/fd"))
    sources = open_sources(first=True)
    assert len(os.listdir("/proc/self/fd")) > before
    for source in sources:
        source.close()
    assert len(os.listdir("/proc/self/fd")) == before


# The GPU


class Nvml:
    """Stands in for pynvml, because most machines that run these tests have no GPU; tests/gpu has the same with a real one."""

    class NVMLError(Exception):
        pass

    def __init__(self, *, has_counter: bool = True) -> None:
        self.has_counter, self.users = has_counter, 0
        self.millijoules, self.milliwatts, self.gpu, self.used = 5_000_000, 200_000, 50, 1 << 30

    def nvmlInit(self) -> None:  # noqa: N802 - as it is called there
        self.users += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.users -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid != "GPU-1":
            raise self.NVMLError("not found")
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:  # noqa: N802
        if not self.has_counter:
            raise self.NVMLError("not supported")
        return self.millijoules

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:  # noqa: N802
        return self.milliwatts

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> "Nvml":  # noqa: N802
        if self.gpu < 0:
            raise self.NVMLError("lost")
        return self

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> "Nvml":  # noqa: N802
        return self


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(gpu_module, "perf_counter", lambda: now[0])
    return now


def test_a_gpu_by_its_counters(time: list[float]) -> None:
    nvml = Nvml()
    gpu = GpuSource(nvml, "GPU-1")
    before = gpu.read()
    time[0] += 2.0
    nvml.millijoules += 7_500
    nvml.used = 3 << 30
    after = gpu.read()
    assert after["gpu_joules"] - before["gpu_joules"] == pytest.approx(7.5)
    assert after["gpu_busy_seconds"] - before["gpu_busy_seconds"] == pytest.approx(1.0)
    assert after["gpu_memory_bytes"] == 3 << 30
    gpu.close()
    assert nvml.users == 0


def test_a_gpu_without_an_energy_counter(time: list[float]) -> None:
    nvml = Nvml(has_counter=False)
    gpu = GpuSource(nvml, "GPU-1")
    time[0] += 1.0
    nvml.milliwatts = 400_000
    assert gpu.read()["gpu_joules"] == pytest.approx(300.0)
    time[0] += 1.0
    assert gpu.read()["gpu_joules"] == pytest.approx(700.0)


def test_what_a_gpu_does_not_tell_is_absent(time: list[float]) -> None:
    nvml = Nvml()
    gpu = GpuSource(nvml, "GPU-1")
    nvml.gpu = -1
    assert sorted(gpu.read()) == ["gpu_joules", "gpu_memory_bytes"]


def test_an_unknown_gpu_leaves_the_driver_alone() -> None:
    nvml = Nvml()
    with pytest.raises(Nvml.NVMLError):
        GpuSource(nvml, "GPU-2")
    assert nvml.users == 0
    assert open_gpu("GPU-of-no-machine") is None
