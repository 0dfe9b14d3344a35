"""How long the commands take that should be instant, each in a fresh process.

    python benchmarks/startup.py

The files are in the page cache (a first round is thrown away); python's own start, in the same environment, is there to compare.
"""

import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from time import perf_counter

import bench

BARS = {"import deepex": 0.3, "deepex --help": 0.3}


def timed(command: list[str]) -> float:
    """Seconds from starting the process to its end."""
    began = perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return perf_counter() - began


def main() -> None:
    options = bench.arguments(__doc__, repeats=20)
    deepex = str(Path(sys.executable).with_name("deepex"))
    with tempfile.TemporaryDirectory() as folder:
        run = f"{folder}/run"
        timed([deepex, "train", "fashion", "--quiet", "--out", run, "--set", "epochs=2", "--set", "net=lenet"])
        commands = {
            "python": [sys.executable, "-c", "pass"],
            "import deepex": [sys.executable, "-c", "import deepex"],
            "deepex --help": [deepex, "--help"],
            "deepex train --help": [deepex, "train", "--help"],
            "deepex show RUN": [deepex, "show", run],
        }
        found = bench.in_turns({name: partial(timed, command) for name, command in commands.items()}, options.repeats)
    rows, ratios = [], {}
    for name, seconds in found.items():
        ratios[name] = bench.ratio(seconds, found["python"])
        bar = f"{BARS[name]:.1f}" if name in BARS else ""
        shown = "" if name == "python" else bench.show_ratio(ratios[name])
        rows.append([name, f"{min(seconds):.3f}", f"{statistics.median(seconds):.3f}", bar, shown])
    bench.print_table(
        f"seconds of a fresh process, {options.repeats} turns; {bench.LEGEND}",
        ["command", "best", "median (bar 0.3 s for import and --help)", "bar", "over python's own start"],
        rows,
    )
    bench.write_record("startup", {"seconds": found, "over_python": ratios}, keep=options.keep)


if __name__ == "__main__":
    main()
