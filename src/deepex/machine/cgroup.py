"""What a container or a batch system allows this process, by control groups of version 1 and 2.

    limits = read_limits()
    limits.num_cores, limits.memory_bytes, limits.memory_free_bytes     # 3.5, 17179869184, 12884901888; None: no limit

Limits hold at every level of the tree, so all levels from this process up are read and the smallest counts. Inside a
container the path of the group is often the host's and is not there: then only the levels that exist are read.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from deepex.machine.reading import read_number, read_text
from deepex.machine.storage import Mount, read_mounts

_NO_LIMIT: Final = 1 << 60  # version 1 says "no limit" by the largest multiple of a page


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What is allowed; None where nothing limits."""

    num_cores: float | None = None
    memory_bytes: int | None = None
    memory_free_bytes: int | None = None


def read_limits(root: Path = Path("/")) -> Limits:
    """Read the limits of this process from the files below `root`."""
    groups = parse_groups(read_text(root / "proc/self/cgroup") or "")
    mounts = read_mounts(root)
    cores = [quota for level in _levels(root, mounts, groups, "cpu") if (quota := _quota(level)) is not None]
    memory = [pair for level in _levels(root, mounts, groups, "memory") if (pair := _memory(level)) is not None]
    return Limits(
        num_cores=min(cores, default=None),
        memory_bytes=min((limit for limit, _ in memory), default=None),
        memory_free_bytes=min((free for _, free in memory), default=None),
    )


def parse_groups(text: str) -> dict[str, str]:
    """Parse lines of `number:controllers:path` into controller → path; version 2 has the empty controller."""
    parts = (line.split(":", 2) for line in text.splitlines())
    return {controller: part[2] for part in parts if len(part) == 3 for controller in part[1].split(",")}


def _levels(root: Path, mounts: list[Mount], groups: dict[str, str], controller: str) -> Iterator[Path]:
    """All directories that may limit `controller`, from this process's group to the root of the tree."""
    for mount in mounts:
        if mount.kind == "cgroup2":
            inside = groups.get("")
        elif mount.kind == "cgroup" and controller in mount.options:
            inside = groups.get(controller)
        else:
            continue
        top = root / str(mount.point).lstrip("/")
        path = top / (inside or "/").lstrip("/")
        yield from (level for level in (path, *path.parents) if level.is_relative_to(top))


def _quota(level: Path) -> float | None:
    """Cores' worth of time per period at one level."""
    both = (read_text(level / "cpu.max") or "").split()
    if len(both) == 2 and both[0].isdigit():
        return int(both[0]) / int(both[1])
    quota, period = read_number(level / "cpu.cfs_quota_us"), read_number(level / "cpu.cfs_period_us")
    return quota / period if quota and period and quota > 0 else None


def _memory(level: Path) -> tuple[int, int] | None:
    """Limit at one level, and what of it is free: cached file pages count as free, the kernel drops them on demand."""
    limit = read_number(level / "memory.max") or read_number(level / "memory.limit_in_bytes")
    if limit is None or limit >= _NO_LIMIT:
        return None
    used = read_number(level / "memory.current") or read_number(level / "memory.usage_in_bytes") or 0
    stat = dict(line.split() for line in (read_text(level / "memory.stat") or "").splitlines() if line.count(" ") == 1)
    cached = int(stat.get("total_inactive_file", stat.get("inactive_file", "0")))
    return limit, max(0, min(limit, limit - used + cached))
