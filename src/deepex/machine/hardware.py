"""Processor, memory and GPUs: what the node has, and what of it this process may use.

>>> describe_cpu()["num_cores_usable_physical"]     # after affinity and control groups
16
>>> [gpu["name"] for gpu in describe_gpus(os.environ)]     # [] where there is no driver
['NVIDIA H200']
"""

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from deepex.machine.cgroup import Limits, read_limits
from deepex.machine.reading import attempt, read_number, read_text

_ARM_CORES: Final = {  # an ARM kernel tells numbers alone; these are the ones of HPC machines
    ("0x41", "0xd0c"): "Arm Neoverse N1",
    ("0x41", "0xd40"): "Arm Neoverse V1",
    ("0x41", "0xd49"): "Arm Neoverse N2",
    ("0x41", "0xd4f"): "Arm Neoverse V2 (NVIDIA Grace, AWS Graviton4)",
    ("0x43", "0x0af"): "Marvell ThunderX2",
    ("0x46", "0x001"): "Fujitsu A64FX",
    ("0x48", "0xd01"): "HiSilicon Kunpeng 920",
    ("0xc0", "0xac3"): "Ampere-1",
}


def describe_cpu(root: Path = Path("/")) -> dict[str, Any]:
    """Describe the processors. A logical core is what the system schedules on; two may share a physical one."""
    cores = _physical_cores(root)
    allowed = _affinity() or set(cores)
    limit = (attempt(lambda: read_limits(root)) or Limits()).num_cores
    usable = _at_most(len(allowed) or os.cpu_count(), limit)
    usable_physical = _at_most(len({cores[core] for core in allowed if core in cores}), limit)
    return {
        "model": cpu_model(_head(root / "proc/cpuinfo")),
        "num_sockets": _num_sockets(root),
        "num_cores_physical": len(set(cores.values())) or None,
        "num_cores_logical": len(cores) or os.cpu_count(),
        "num_cores_usable": usable,
        "num_cores_usable_physical": usable_physical or usable,
        "num_cores_limit": limit,
    }


def describe_memory(root: Path = Path("/")) -> dict[str, Any]:
    """Describe the memory of the node, cut to what a control group allows."""
    node = meminfo(read_text(root / "proc/meminfo") or "")
    limits = attempt(lambda: read_limits(root)) or Limits()
    total, available = node.get("MemTotal"), node.get("MemAvailable")
    return {
        "node_bytes": total,
        "limit_bytes": limits.memory_bytes,
        "total_bytes": _smaller(total, limits.memory_bytes),
        "available_bytes": _smaller(available, limits.memory_free_bytes),
    }


def describe_gpus(environ: Mapping[str, str]) -> list[dict[str, Any]]:
    """Describe the GPUs that the NVIDIA driver shows; `visible` says whether CUDA_VISIBLE_DEVICES leaves them to us."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        gpus = (attempt(partial(_describe_gpu, pynvml, index, environ)) for index in range(pynvml.nvmlDeviceGetCount()))
        return [gpu for gpu in gpus if gpu]  # a GPU that fell off its bus must not hide the others
    finally:
        pynvml.nvmlShutdown()


def meminfo(text: str) -> dict[str, int]:
    """Parse lines of `MemTotal: 25 kB` into bytes."""
    parts = (line.split() for line in text.splitlines())
    return {part[0].rstrip(":"): int(part[1]) * 1024 for part in parts if len(part) == 3 and part[2] == "kB"}


def cpu_model(cpuinfo: str) -> str | None:
    """Find the processor's name in the text of /proc/cpuinfo: x86, POWER and ARM each write it another way."""
    pairs = (line.split(":", 1) for line in cpuinfo.splitlines() if ":" in line)
    facts: dict[str, str] = {}
    for name, value in pairs:
        facts.setdefault(name.strip(), value.strip())
    arm = facts.get("CPU implementer"), facts.get("CPU part")
    named = facts.get("model name") or facts.get("cpu") or _ARM_CORES.get((str(arm[0]), str(arm[1])))
    return named or (f"ARM implementer {arm[0]} part {arm[1]}" if arm[0] else None)


def is_visible(index: int, uuid: str | None, environ: Mapping[str, str]) -> bool:
    """Whether CUDA shows a GPU, given by number or by the start of its identifier."""
    value = environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return True
    for entry in (part.strip() for part in value.split(",")):
        if entry.startswith("-"):
            return False  # CUDA stops reading at the first invalid entry
        if entry == str(index) or (entry.startswith("GPU-") and uuid is not None and uuid.startswith(entry)):
            return True
    return False


def _describe_gpu(nvml: Any, index: int, environ: Mapping[str, str]) -> dict[str, Any]:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    uuid = attempt(lambda: nvml.nvmlDeviceGetUUID(handle))
    capability = attempt(lambda: nvml.nvmlDeviceGetCudaComputeCapability(handle))
    return {
        "index": index,
        "name": attempt(lambda: nvml.nvmlDeviceGetName(handle)),
        "uuid": uuid,
        "visible": is_visible(index, uuid, environ),
        "memory_bytes": attempt(lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).total)),
        "compute_capability": f"{capability[0]}.{capability[1]}" if capability else None,
        "driver": attempt(nvml.nvmlSystemGetDriverVersion),
        "power_limit_watts": attempt(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000),
    }


def _physical_cores(root: Path) -> dict[int, str]:
    """Logical core → the list of logical cores that share its physical core, which names it."""
    topology = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/topology/thread_siblings_list")
    siblings = {int(path.parent.parent.name[3:]): read_text(path) for path in topology}
    return {core: text.strip() for core, text in siblings.items() if text}


def _num_sockets(root: Path) -> int | None:
    packages = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/topology/physical_package_id")
    return len({number for path in packages if (number := read_number(path)) is not None}) or None


def _affinity() -> set[int]:
    """Return the logical cores that the launcher left to this process. Some systems do not tell."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def _smaller(*numbers: int | None) -> int | None:
    return min((number for number in numbers if number is not None), default=None)


def _at_most(count: int | None, limit: float | None) -> int | None:
    return count if not count or limit is None else max(1, min(count, int(limit)))


def _head(path: Path) -> str:
    """Read the first processor's entry: for the whole file the kernel would ask every core for its clock."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(4096)
    except OSError:
        return ""
