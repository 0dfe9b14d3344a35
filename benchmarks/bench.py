"""What the benchmarks share: repeated, interleaved measurements, a table, a record.

An absolute time on a shared machine means little; a ratio of two things measured in turns in one run, repeated, does. So `in_turns`
runs the contestants A B C, B C A, C A B …, and a result is a ratio of medians with a 95 % interval from resampling the turns.
Beside it stands the ratio of the fast quarters: other users of a machine can only add to a time, and do so in bursts.
"""

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepex.training.learner import Learner

RECORDS = Path(__file__).parent / "records"
LEGEND = "ratio of medians (95 % interval); of fast quarters"  # what `show_ratio` shows


def need_gpu(instead: str = "") -> None:
    """End here, with a sentence, if there is none."""
    import torch

    if not torch.cuda.is_available():
        print(f"there is no GPU here: `deepex doctor` tells what torch sees{instead}", file=sys.stderr)
        sys.exit(2)


def in_turns(contestants: dict[str, Callable[[], float]], repeats: int, *, warm_ups: int = 2) -> dict[str, list[float]]:
    """Each contestant's measurements; a contestant returns its own seconds. Rounds of warm-up are thrown away."""
    found: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for turn in range(-warm_ups, repeats):
        first = turn % len(names)  # nobody always follows the same neighbour's leftovers in the caches
        for name in (*names[first:], *names[:first]):
            value = contestants[name]()
            if turn >= 0:
                found[name].append(value)
    return found


def ratio(values: Sequence[float], base: Sequence[float], *, resamples: int = 2000) -> dict[str, float]:
    """The ratio of the medians of `values` and `base`, taken in the same turns; its 95 % interval; that of the fast quarters."""
    turns, chance = range(len(values)), random.Random(0)
    drawn = []
    for _ in range(resamples):
        some = chance.choices(turns, k=len(turns))
        drawn.append(statistics.median(values[k] for k in some) / statistics.median(base[k] for k in some))
    drawn.sort()
    return {
        "ratio": statistics.median(values) / statistics.median(base),
        "low": drawn[int(0.025 * resamples)],
        "high": drawn[int(0.975 * resamples)],
        "fast_quarter": fast(values) / fast(base),
    }


def fast(values: Sequence[float]) -> float:
    """The mean of the fast quarter."""
    return statistics.mean(sorted(values)[: max(1, len(values) // 4)])


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table that pastes well."""
    print(format_table(title, columns, rows))


def format_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """The same, as text."""
    cells = [[str(cell) for cell in row] for row in (columns, *rows)]
    widths = [max(len(row[k]) for row in cells) for k in range(len(columns))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(["", title, "", *lines])


def show_ratio(found: dict[str, float]) -> str:
    """A ratio of medians with its interval, then that of the fast quarters, for a table."""
    return f"{found['ratio']:.3f} ({found['low']:.3f}-{found['high']:.3f}); {found['fast_quarter']:.3f}"


def made(kind: str, data: str, images: int) -> dict[str, Any]:
    """Make the dataset with `deepex data make` on all cores, and time it, start included; one that is there already is used."""
    if Path(data).exists():
        return {"note": "not timed: it was there already"}
    words = ["data", "make", kind, data, "--images", str(images), "--workers", str(len(os.sched_getaffinity(0)))]
    began = perf_counter()
    subprocess.run([sys.executable, "-m", "deepex", *words], check=True)
    seconds = perf_counter() - began
    rate = images / seconds
    print(f"deepex {' '.join(words)}: {seconds:.0f} s, {rate:.0f} images/s, {rate / int(words[-1]):.1f} per core", flush=True)
    command = " ".join(["deepex", *("OUT" if word == data else word for word in words)])
    return {"command": command, "seconds": seconds, "images_per_second": rate, "images_per_second_and_core": rate / int(words[-1])}


def random_data(shape: tuple[int, int, int], classes: int, count: int) -> tuple[Any, Any, str]:
    """Random samples (count, H, W, C) and their labels, and the same as a packed dataset: for what measures speed alone."""
    import numpy as np

    from deepex.data.pack import pack

    folder = Path(tempfile.mkdtemp())
    images = np.random.default_rng(0).integers(0, 256, (count, *shape[1:], shape[0]), dtype=np.uint8)
    labels = np.arange(count) % classes
    np.savez(folder / "some.npz", images=images, labels=labels)
    pack(folder / "some.npz", folder / "packed", classes=[str(k) for k in range(classes)], validation=0.0, layout="NHWC")
    return images, labels, str(folder / "packed")


def write_record(name: str, result: dict[str, Any], *, keep: bool, folder: str = "", quiet: bool = False) -> None:
    """Write the result with machine, versions and commit; `keep` puts it among the published records, in `folder` there."""
    from deepex.machine import describe

    where = (RECORDS if keep else Path("runs") / "benchmarks") / folder
    where.mkdir(parents=True, exist_ok=True)
    record = {
        "benchmark": name,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe(environ=os.environ),
        **result,
    }
    record["machine"].pop("file_system", None)
    path = where / f"{name}.json"
    new = path.with_suffix(".new")  # whoever is killed here keeps the record that was
    new.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    new.rename(path)
    if not quiet:
        print(f"record: {path}")


def on_two_ranks(description: str, work: Callable[..., None], *, repeats: int) -> None:
    """Run `work(repeats, keep=…)` in two processes of one job, one thread each; they inherit the environment."""
    options = arguments(description, repeats=repeats, rank_role=0)
    if not options.rank_role:
        from deepex.comm.launch import launch

        sys.exit(launch(2, [sys.executable, *sys.argv, "--rank-role", "1"], os.environ))
    settle(threads=1)
    work(options.repeats, keep=options.keep)


def run_epoch(learner: "Learner", number: int) -> None:
    """Run an epoch as a session does, without its record."""
    from deepex.training.session import run_stretch

    learner.begin_epoch(number, 0)
    for stretch in learner.stretches():
        learner.look(run_stretch(learner, stretch))


def epochs(learner: "Learner") -> Callable[[], float]:
    """The learner's epochs; a call gives the seconds of one, its sync and the reading of its sums included."""
    numbers = itertools.count()

    def epoch() -> float:
        began = perf_counter()
        run_epoch(learner, next(numbers))
        learner.parts.clock.seconds()
        learner.parts.runner.sums.tolist()
        return perf_counter() - began

    return epoch


def settle(threads: int) -> None:
    """The settings of a DeepEx run, for all contestants: threads, and a heap that keeps what is freed."""
    import torch

    from deepex.machine.heap import keep_heap

    torch.set_num_threads(threads)
    keep_heap(os.environ)


def arguments(description: str, **defaults: int) -> argparse.Namespace:
    """The options that every benchmark has, and its own numbers."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--keep", action="store_true", help="write the record into benchmarks/records")
    for name, value in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    return parser.parse_args()
