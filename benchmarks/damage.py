"""What becomes of records that are damaged at random: how many are read, are refused in a sentence, or end in a traceback.

    python benchmarks/damage.py --tries 100000

The records are those of a real run on two ranks, of a packed dataset and of studies (tests/record/damage.py). A damage is a bit
that flips, a span that is lost, doubled or overwritten, a cut, or a value in the place of another: of another type, a number that
is too large, nesting without end. Each damage is told by its seed. A traceback is printed with it.
"""

import argparse
import sys
import tempfile
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from shutil import copytree
from typing import Any, Final

import bench

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.record.damage import KINDS, make_records, try_one

_AT_ONCE: Final = 250


def tried(records: Path, at: int, seeds: range) -> Counter[str]:
    """What became of a file that was damaged in as many ways, by a process that has records of its own."""
    warnings.simplefilter("error")
    with tempfile.TemporaryDirectory() as name:
        folder = copytree(records, Path(name) / "records")
        return Counter(try_one(folder, KINDS[at], seed) for seed in seeds)


def shares(tries: int) -> list[int]:
    """How often each kind is tried: what takes long to read, more rarely."""
    weights = [1 / kind.cost for kind in KINDS]
    return [-(-round(tries * weight / sum(weights)) // _AT_ONCE) * _AT_ONCE for weight in weights]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tries", type=int, default=100_000, help="of all files together [100000]")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="[0]")
    parser.add_argument("--workers", type=int, default=2, help="processes [2]")
    parser.add_argument("--keep", action="store_true", help="write the record to benchmarks/records")
    options = parser.parse_args()
    found: list[Counter[str]] = [Counter() for _ in KINDS]
    with tempfile.TemporaryDirectory() as name, ProcessPoolExecutor(options.workers) as pool:
        make_records(Path(name))
        parts = [
            (at, range(begin, begin + _AT_ONCE))
            for at, many in enumerate(shares(options.tries))
            for begin in range(options.first, options.first + many, _AT_ONCE)
        ]
        for (at, _), counts in zip(
            parts, pool.map(tried, *zip(*((Path(name), *part) for part in parts), strict=True)), strict=True
        ):
            found[at].update(counts)
    rows, result = [], dict[str, Any]()
    for kind, counts in zip(KINDS, found, strict=True):
        odd = {told: many for told, many in counts.items() if told not in ("read", "refused")}
        rows.append([kind.name, f"{counts.total():,}", f"{counts['read']:,}", f"{counts['refused']:,}", f"{sum(odd.values()):,}"])
        result[kind.name] = {"tries": counts.total(), "read": counts["read"], "refused": counts["refused"], "odd": [*odd]}
        sys.stdout.write("".join(f"{told}\n" for told in [*odd][:5]))
    bench.print_table("damaged records", ["file", "damages", "read", "refused in a sentence", "tracebacks"], rows)
    bench.write_record("damage", {"results": result}, keep=options.keep)


if __name__ == "__main__":
    main()
