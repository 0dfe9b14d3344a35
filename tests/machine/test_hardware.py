import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deepex.machine import hardware
from deepex.machine.cgroup import Limits
from deepex.machine.hardware import cpu_model, describe_cpu, describe_gpus, describe_memory, is_visible


@pytest.mark.parametrize(
    ("cpuinfo", "model"),
    [
        (
            "processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: Intel(R) Xeon(R) Platinum 8480+\n",
            "Intel(R) Xeon(R) Platinum 8480+",
        ),
        ("processor\t: 0\ncpu\t\t: POWER9, altivec supported\nclock\t\t: 3800MHz\n", "POWER9, altivec supported"),
        ("processor\t: 0\nCPU implementer\t: 0x46\nCPU part\t: 0x001\n", "Fujitsu A64FX"),
        ("processor\t: 0\nCPU implementer\t: 0x99\nCPU part\t: 0x123\n", "ARM implementer 0x99 part 0x123"),
        ("", None),
    ],
)
def test_the_model_is_found_on_every_architecture(cpuinfo: str, model: str | None) -> None:
    assert cpu_model(cpuinfo) == model


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """Two sockets of four cores with two hardware threads each: logical cores 0-7, and 8-15 on the same cores."""
    for core in range(16):
        topology = tmp_path / f"sys/devices/system/cpu/cpu{core}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{core % 8},{core % 8 + 8}\n")
        (topology / "physical_package_id").write_text(f"{core % 8 // 4}\n")
    (tmp_path / "sys/devices/system/cpu/cpufreq").mkdir()
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:  1000 kB\nMemAvailable:  800 kB\nHugePages_Total:  0\n")
    return tmp_path


@pytest.mark.parametrize(
    ("affinity", "limit", "expected"),
    [
        (range(16), None, (16, 8)),
        (range(8), None, (8, 8)),
        ([0, 8, 1, 9], None, (4, 2)),
        (range(16), 3.5, (3, 3)),
        ([0, 8], 6.0, (2, 1)),
        (range(16), 0.5, (1, 1)),
        ([], None, (16, 8)),
    ],
)
def test_usable_cores_respect_affinity_and_limit(
    node: Path, monkeypatch: pytest.MonkeyPatch, affinity: Any, limit: float | None, expected: tuple[int, int]
) -> None:
    monkeypatch.setattr(hardware, "_affinity", lambda: set(affinity))
    monkeypatch.setattr(hardware, "read_limits", lambda _: Limits(num_cores=limit))
    cpu = describe_cpu(node)
    assert (cpu["num_sockets"], cpu["num_cores_physical"], cpu["num_cores_logical"]) == (2, 8, 16)
    assert (cpu["num_cores_usable"], cpu["num_cores_usable_physical"]) == expected


def test_without_a_topology_the_system_is_asked(tmp_path: Path) -> None:
    cpu = describe_cpu(tmp_path)
    assert cpu["num_sockets"] is cpu["model"] is cpu["num_cores_physical"] is None
    assert 1 <= cpu["num_cores_usable_physical"] <= cpu["num_cores_logical"]


@pytest.mark.parametrize(
    ("limits", "total", "available"),
    [
        (Limits(), 1000, 800),
        (Limits(memory_bytes=500 * 1024, memory_free_bytes=100 * 1024), 500, 100),
        (Limits(memory_bytes=5000 * 1024, memory_free_bytes=0), 1000, 0),
    ],
)
def test_memory_is_cut_to_the_limit(
    node: Path, monkeypatch: pytest.MonkeyPatch, limits: Limits, total: int, available: int
) -> None:
    monkeypatch.setattr(hardware, "read_limits", lambda _: limits)
    memory = describe_memory(node)
    assert (memory["total_bytes"], memory["available_bytes"]) == (total * 1024, available * 1024)


@pytest.mark.parametrize(
    ("value", "visible"),
    [
        (None, True),
        ("0,1", True),
        ("1", True),
        ("0", False),
        ("", False),
        ("-1,1", False),
        ("GPU-ab", True),
        ("GPU-c", False),
    ],
)
def test_cuda_visible_devices_names_gpus_by_number_or_identifier(value: str | None, visible: bool) -> None:
    environ = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    assert is_visible(1, "GPU-abcd", environ) is visible


class FakeNvmlError(Exception):
    pass


def _raise(*_: object) -> None:
    raise FakeNvmlError


def fake_nvml(**changes: Any) -> SimpleNamespace:
    functions: dict[str, Any] = {
        "NVMLError": FakeNvmlError,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda _: "NVIDIA H200",
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
        "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(total=150_754_820_096),
        "nvmlDeviceGetCudaComputeCapability": lambda _: (9, 0),
        "nvmlSystemGetDriverVersion": lambda: "570.86.15",
        "nvmlDeviceGetEnforcedPowerLimit": lambda _: 700_000,
    }
    return SimpleNamespace(**functions | changes)


def test_gpus_are_described_and_what_the_driver_refuses_is_null(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(nvmlDeviceGetEnforcedPowerLimit=_raise))
    gpus = describe_gpus({"CUDA_VISIBLE_DEVICES": "1"})
    assert [gpu["visible"] for gpu in gpus] == [False, True]
    assert gpus[0]["compute_capability"] == "9.0"
    assert gpus[0]["memory_bytes"] == 150_754_820_096
    assert gpus[0]["power_limit_watts"] is None


def test_a_lost_gpu_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = lambda index: index or _raise()  # noqa: E731
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(nvmlDeviceGetHandleByIndex=handle))
    assert [gpu["index"] for gpu in describe_gpus({})] == [1]


def test_no_driver_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(nvmlInit=_raise))
    assert describe_gpus({}) == []
