"""What the kernel counts for this process.

The bytes are those that the process made the storage move (`read_bytes` and `write_bytes` of /proc/self/io), not those that it
asked for: what the page cache held costs no I/O, and what MPI says through pipes and sockets is no file. Bytes written count when a
page is made dirty, which is before it reaches the disk.
"""

import os
from pathlib import Path
from time import process_time

from deepex.machine.sampling.source import CounterFiles, Reading


def processor(_root: Path = Path("/")) -> CounterFiles:
    """Seconds that the threads of this process ran."""
    return CounterFiles([], lambda _: {"cpu_seconds": process_time()})


def memory(root: Path = Path("/")) -> CounterFiles:
    """Resident memory of this process; pages that it shares with other ranks are in it."""
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    return CounterFiles([root / "proc/self/statm"], lambda texts: {"memory_bytes": float(int(texts[0].split()[1]) * page_bytes)})


def storage(root: Path = Path("/")) -> CounterFiles:
    """Bytes that this process made the storage read and write."""
    return CounterFiles([root / "proc/self/io"], _storage)


def _storage(texts: list[bytes]) -> Reading:
    words = texts[0].split()
    facts = dict(zip(words[::2], words[1::2], strict=True))
    return {"read_bytes": float(facts[b"read_bytes:"]), "written_bytes": float(facts[b"write_bytes:"])}
