"""What the kernel counts for the whole node, whichever process it was: idle cores, disks, network, energy of the processors."""

from pathlib import Path
from typing import Final, final

from deepex.machine.reading import read_number, read_text
from deepex.machine.sampling.source import CounterFiles, Reading

_SECTOR_BYTES: Final = 512  # of /sys/block/*/stat, whatever the disk's own are
_INFINIBAND_WORD_BYTES: Final = 4
_INFINIBAND_KIND: Final = 32  # of /sys/class/net/*/type
_ENERGY_ZONES: Final = ("package", "dram")  # the others are parts of a package, or the whole machine with all of these


def idle(root: Path = Path("/")) -> CounterFiles:
    """Seconds that the logical cores had nothing to do, all of them together."""
    return CounterFiles([root / "proc/uptime"], lambda texts: {"node_idle_seconds": float(texts[0].split()[1])})


def disks(root: Path = Path("/")) -> CounterFiles:
    """Bytes to and from the node's own disks. What has no device behind it is made of other disks."""
    found = [path for path in sorted((root / "sys/block").iterdir()) if (path / "device").exists()]
    if not found:
        raise FileNotFoundError(root / "sys/block")
    return CounterFiles([disk / "stat" for disk in found], _disks)


def network(root: Path = Path("/")) -> CounterFiles:
    """Bytes sent and received, loopback left out.

    A bridge or a bond only repeats what its cards say, so cards alone count where there are any. What goes past the kernel (RDMA)
    is counted by the ports of InfiniBand; then its interfaces for IP, which use the same ports, are left out.
    """
    counters = sorted((root / "sys/class/infiniband").glob("*/ports/*/counters"))
    ports = [path / name for path in counters for name in ("port_xmit_data", "port_rcv_data")]
    names = sorted(path for path in (root / "sys/class/net").iterdir() if path.name != "lo")
    if ports:
        names = [path for path in names if read_number(path / "type") != _INFINIBAND_KIND]
    cards = [path for path in names if (path / "device").exists()] or names
    interfaces = [path / "statistics" / name for path in cards for name in ("rx_bytes", "tx_bytes")]
    if not ports and not interfaces:
        raise FileNotFoundError(root / "sys/class/net")
    scales = [_INFINIBAND_WORD_BYTES] * len(ports) + [1] * len(interfaces)

    def parse(texts: list[bytes]) -> Reading:
        return {"network_bytes": float(sum(int(text) * scale for text, scale in zip(texts, scales, strict=True)))}

    return CounterFiles([*ports, *interfaces], parse)


def packages(root: Path = Path("/")) -> CounterFiles:
    """Energy of the processor packages, and of memory that is counted apart, by RAPL. Many kernels let root alone read it."""
    zones = {zone: (read_text(zone / "name") or "").strip() for zone in sorted((root / "sys/class/powercap").glob("intel-rapl:*"))}
    counted = [zone for zone, name in zones.items() if name.startswith(_ENERGY_ZONES)]
    if not any(name.startswith("package") for name in zones.values()):
        raise FileNotFoundError(root / "sys/class/powercap")
    energy = _Energy([read_number(zone / "max_energy_range_uj") or 0 for zone in counted])
    return CounterFiles([zone / "energy_uj" for zone in counted], energy.parse)


@final
class _Energy:
    """Adds up counters that begin again from zero when they have reached their range: some minutes at full load."""

    def __init__(self, ranges: list[int]) -> None:
        self._ranges, self._last, self._microjoules = ranges, list[int](), 0

    def parse(self, texts: list[bytes]) -> Reading:
        now = [int(text) for text in texts]
        for new, old, most in zip(now, self._last or now, self._ranges, strict=True):
            self._microjoules += new - old if new >= old else max(0, new - old + most)
        self._last = now
        return {"cpu_joules": self._microjoules * 1e-6}


def _disks(texts: list[bytes]) -> Reading:
    rows = [text.split() for text in texts]
    return {
        "disk_read_bytes": float(sum(int(row[2]) for row in rows) * _SECTOR_BYTES),
        "disk_written_bytes": float(sum(int(row[6]) for row in rows) * _SECTOR_BYTES),
    }
