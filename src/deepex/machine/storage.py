"""File systems: which one holds a directory, how full it is, whether other nodes see it.

>>> describe_file_system(Path("/scratch/me/run"))
{'directory': '/scratch/me', 'kind': 'lustre', 'mount': '/scratch', 'shared': True, 'total_bytes': …, 'free_bytes': …}
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from deepex.machine.reading import attempt, read_text

# fmt: off
SHARED_KINDS: Final = frozenset(
    (
        "9p", "afs", "beegfs", "beegfs_nodev", "ceph", "cephfs", "cifs", "cvmfs", "daos", "dfuse", "dvs", "fhgfs",
        "gfs2", "glusterfs", "gpfs", "juicefs", "lustre", "mfs", "nfs", "nfs4", "ocfs2", "orangefs", "panfs", "pvfs2",
        "quobyte", "smb3", "smbfs", "sshfs", "vastfs", "virtiofs", "wekafs",
    )
)
# fmt: on


@dataclass(frozen=True, kw_only=True)
class Mount:
    """One line of the kernel's table of mounts."""

    device: str
    point: Path
    kind: str
    options: frozenset[str]


def describe_file_system(directory: Path, root: Path = Path("/")) -> dict[str, Any]:
    """Describe the file system of `directory`, or of its nearest parent that exists."""
    existing = nearest_existing(directory)
    usage = attempt(lambda: os.statvfs(existing))  # first: it makes an automounter mount what the table is to show
    mount = find_mount(existing, read_mounts(root))
    return {
        "directory": str(existing),
        "kind": mount.kind if mount else None,
        "mount": str(mount.point) if mount else None,
        "shared": looks_shared(mount.kind) if mount else None,
        "total_bytes": usage.f_blocks * usage.f_frsize if usage else None,
        "free_bytes": usage.f_bavail * usage.f_frsize if usage else None,
        "writable": attempt(lambda: os.access(existing, os.W_OK)),
    }


def nearest_existing(directory: Path) -> Path:
    """Resolve `directory` and go up until something is there: the directory of a run is described before it is made."""
    path = attempt(directory.resolve) or directory.absolute()
    return next((parent for parent in (path, *path.parents) if attempt(parent.is_dir)), Path("/"))


def read_mounts(root: Path = Path("/")) -> list[Mount]:
    """Read the mounts that this process sees; none where the kernel does not tell."""
    return parse_mounts(read_text(root / "proc/self/mounts") or "")


def parse_mounts(text: str) -> list[Mount]:
    """Parse lines of `device point kind options 0 0`, in which a space is written as an octal number."""
    fields = (line.split() for line in text.splitlines())
    return [
        Mount(
            device=_unescape(part[0]),
            point=Path(_unescape(part[1])),
            kind=part[2],
            options=frozenset(part[3].split(",")),
        )
        for part in fields
        if len(part) >= 4
    ]


def find_mount(path: Path, mounts: Sequence[Mount]) -> Mount | None:
    """Find the mount that holds `path`: the deepest, and of several at one point the last, which covers the others."""
    holding = [mount for mount in mounts if path.is_relative_to(mount.point)]
    return max(reversed(holding), key=lambda mount: len(mount.point.parts), default=None)


def looks_shared(kind: str) -> bool:
    """Whether a file system of this kind is usually seen by several nodes."""
    return kind.removeprefix("fuse.") in SHARED_KINDS


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
