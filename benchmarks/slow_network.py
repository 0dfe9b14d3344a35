"""What a sync costs on a slow network, and how much of it a strategy hides behind the computing.

    python benchmarks/slow_network.py                                   # as root: it makes network namespaces (network.py)
    python benchmarks/slow_network.py --hosts 2 --rate 100mbit --seeds 1 2 3 4 5
    deepex data pack /usr/share/datasets/fashion-mnist packed/fashion && python benchmarks/slow_network.py --data packed/fashion

Hosts with one rank each, joined by links of a chosen rate, train a small convolutional network on Fashion-MNIST over gloo (on the
sample, unless `--data` says otherwise; the slower the link, the longer the epochs must be):
with `sync.strategy=weights`, which stands still while the weights travel, and with another (`--strategy`, by default `background`:
the collective of one period runs while the next one computes). First a run on the same hosts without a limit, with one sync per
epoch, tells the seconds Y of a step; then an all-reduce of the run's own bytes on the slow link tells the seconds S of a sync; the
period is H = 2.5 S / Y steps, rounded up to a multiple of four, so that there is enough computing to hide a sync behind. A strategy
that sends one of four parts at each sync has a quarter of this period, so that both send the same bytes. Runs of both strategies
then take turns, seed by seed. With `--strategy auto` both find their periods themselves, and average momentum, as usual.

- Hidden: 1 - blocked(other) / blocked(weights), where blocked is the phase `sync` of an epoch, mean over ranks.
- Saved: the wall seconds per epoch by which the other is faster, divided by blocked(weights). It is less than what is hidden if the
  collective takes cores, or caches, from the computing.
- The end of an epoch needs weights that all share, so those of one of its n syncs, at least, cannot be hidden: at best 1 - 1/n is,
  or 1 - 1/2n where as much momentum travels with them, which has until the end of the validation.
- Learning: training loss and validation error after the last epoch, same seed and same epochs; the difference with its 95 %
  interval over seeds (Student's t), and over all seeds and hosts together. Then the same in the same time: the other strategy
  trains once more, for as many epochs as it has time for (the nearest whole number, so both times are told).

All hosts are this one machine: with more hosts than cores a step is slower, in all runs alike. Each host is kept on its share of
the cores; on 2 cores, 3 hosts are as fast as 4, because what a fourth would take is kept busy. Nothing else may run: a
period that was chosen while steps were slow is too short when they are not, so a step that is a quarter slower or faster than at
first is told. The first epoch of a run is not timed. It needs root, and the Debian packages iproute2 and util-linux.
"""

import argparse
import itertools
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import bench
from deepex import recipe
from deepex.errors import ConfigError
from deepex.record import EpochRecord, RunDirectory
from network import NetworkError, SlowNetwork, ideal_seconds, measure_sum, parse_rate

if TYPE_CHECKING:
    from torch import nn

BASE: Final = "weights"
SETTINGS: Final = {
    "net": "slow_network:network",
    "comm": "gloo",
    "threads": 1,
    "batch": 16,
    "layout": "channels_last",  # not left to a trial, which could end differently from run to run
    "optim.schedule": "cosine",
    "sync.momentum": "local",  # so that all strategies send as many bytes
}
COMPUTE_PER_SYNC: Final = 2.5  # ranks that take turns on a core are not at the same step
PARTS: Final = {"background": 4, "streaming": 4}  # that a sync sends one of: sync.parts
# Student's t, 97.5 %, by degrees of freedom; beyond these the last is close enough.
STUDENT: Final = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.16, 2.145, 2.131)


def network(*, channels: int, size: tuple[int, int], classes: int) -> "nn.Module":
    """Four convolutions and two dense layers: 263,506 parameters at 1×28×28, and much computing for each."""
    from torch import nn

    def convolution(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(inplace=True)]

    features = [*convolution(channels, 24), *convolution(24, 24), nn.MaxPool2d(2), *convolution(24, 48), *convolution(48, 48)]
    height, width = size[0] // 4, size[1] // 4
    dense = [nn.Linear(48 * height * width, 96), nn.ReLU(inplace=True), nn.Linear(96, classes)]
    return nn.Sequential(*features, nn.MaxPool2d(2), nn.Flatten(), *dense)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one run tells: per timed epoch, and of the last one."""

    strategy: str
    chosen: str
    seed: int
    samples: int
    syncs: int
    sync_bytes: int
    blocked_seconds: list[float]
    epoch_seconds: list[float]
    step_seconds: list[float]
    loss: float
    error: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured before the strategies: seconds of a step and of a sync, and the period that follows."""

    step_seconds: float
    sync_seconds: float
    ideal_seconds: float
    sync_bytes: int

    @property
    def period(self) -> int:
        """The steps that take 2.5 times as long as a sync, or a few more: a multiple of the parts."""
        most = max(PARTS.values())
        return most * math.ceil(COMPUTE_PER_SYNC * self.sync_seconds / self.step_seconds / most)


def train(hosts: SlowNetwork, out: Path, seed: int, epochs: int, data: str, *, strategy: str, period: int | str) -> Run:
    """Train on the hosts, one rank each, and read the run directory; in `period` steps each weight is sent once."""
    sync = {"strategy": strategy, "period": period // PARTS.get(strategy, 1) if isinstance(period, int) else period}
    momentum = {"sync.momentum": "average"} if period == "auto" else {}  # as a user would
    changes = {
        **SETTINGS,
        **momentum,
        "data": data,
        "seed": seed,
        "epochs": epochs,
        **{f"sync.{key}": value for key, value in sync.items()},
    }
    words = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    done = hosts.run([sys.executable, "-m", "deepex", "train", "fashion", "--quiet", "--out", str(out), *words], _environ())
    if done.code:
        raise NetworkError(f"a run of {hosts.hosts} hosts ended with code {done.code}:\n{done.output.strip()}")
    directory = RunDirectory.open(out)
    records = directory.epochs()
    timed, last = records[1:] or records, records[-1]
    assert last.validation is not None
    assert last.validation.get("error") is not None
    return Run(
        strategy=strategy,
        chosen=directory.state["sync"]["reason"],
        seed=seed,
        samples=last.samples,
        syncs=last.syncs,
        sync_bytes=directory.state["sync_bytes"],
        blocked_seconds=[record.phase_seconds("sync") for record in timed],
        epoch_seconds=[record.seconds for record in timed],
        step_seconds=[_step_seconds(record) for record in timed],
        loss=last.train.loss,
        error=last.validation.get("error"),
    )


def _step_seconds(record: EpochRecord) -> float:
    return (record.phase_seconds("input") + record.phase_seconds("compute")) / record.steps


def _environ() -> dict[str, str]:
    """This environment, in which the ranks find `slow_network:network`."""
    paths = [os.environ.get("PYTHONPATH", ""), str(Path(__file__).parent)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}


def make_plan(hosts: int, rate: str, folder: Path, epochs: int, data: str) -> tuple[Plan, Run]:
    """Measure step and sync, each where nothing else disturbs it; also the run that paid nothing for the network."""
    with SlowNetwork(hosts, rate=None) as free:
        reference = train(free, folder / "free", 1, epochs, data, strategy=BASE, period="epoch")
    with SlowNetwork(hosts, rate) as slow:
        seconds = statistics.median(measure_sum(slow, reference.sync_bytes, _environ()))
    plan = Plan(
        step_seconds=min(reference.step_seconds),
        sync_seconds=seconds,
        ideal_seconds=ideal_seconds(reference.sync_bytes, hosts, parse_rate(rate)),
        sync_bytes=reference.sync_bytes,
    )
    return plan, reference


def in_turns(
    hosts: int, rate: str, period: int | str, folder: Path, *, strategy: str, seeds: Sequence[int], epochs: int, data: str
) -> Iterator[list[Run]]:
    """For each seed the run of `weights` and that of the other strategy; who goes first changes."""
    with SlowNetwork(hosts, rate) as slow:
        for seed in seeds:
            pair: list[Run | None] = [None, None]
            for place in (0, 1) if seed % 2 else (1, 0):
                name = (BASE, strategy)[place]
                pair[place] = train(slow, folder / f"{place}-{seed}", seed, epochs, data, strategy=name, period=period)
            yield [run for run in pair if run is not None]


def in_the_same_time(
    pairs: Sequence[list[Run]], hosts: int, rate: str, period: int | str, folder: Path, *, epochs: int, data: str
) -> list[list[Run]]:
    """The pairs, with runs of the other strategy that are as long in time; the same ones if that is as many epochs."""
    longer = epochs_in_time(pairs, epochs)
    if longer == epochs:
        return list(pairs)
    with SlowNetwork(hosts, rate) as slow:
        return [
            [base, train(slow, folder / f"2-{other.seed}", other.seed, longer, data, strategy=other.strategy, period=period)]
            for base, other in pairs
        ]


def epochs_in_time(pairs: Sequence[Sequence[Run]], epochs: int) -> int:
    """How many epochs the other strategy has time for, to the nearest, while `weights` has `epochs`."""
    base, other = epoch_seconds(pairs)
    return max(1, round(epochs * base / other))


def epoch_seconds(pairs: Sequence[Sequence[Run]]) -> list[float]:
    """The median seconds of an epoch, of `weights` and of the other."""
    return [statistics.median(value for pair in pairs for value in pair[place].epoch_seconds) for place in (0, 1)]


def difference(pairs: Sequence[Sequence[Run]], measure: str) -> dict[str, float | None]:
    """How much more the other has than `weights`: the mean over pairs of one seed, and its 95 % interval; one pair has none."""
    values = [getattr(other, measure) - getattr(base, measure) for base, other in pairs]
    mean, count = statistics.mean(values), len(values)
    if count == 1:
        return {"mean": mean, "low": None, "high": None}
    half = STUDENT[min(count - 1, len(STUDENT)) - 1] * statistics.stdev(values) / math.sqrt(count)
    return {"mean": mean, "low": mean - half, "high": mean + half}


def differences(pairs: Sequence[Sequence[Run]]) -> dict[str, Any]:
    """How much more the other has of each measure."""
    return {name: difference(pairs, name) for name in ("loss", "error")}


def summarise(pairs: Sequence[Sequence[Run]]) -> dict[str, Any]:
    """The ratios and differences of one number of hosts."""
    blocked = [[value for pair in pairs for value in pair[place].blocked_seconds] for place in (0, 1)]
    left = bench.ratio(blocked[1], blocked[0])
    seconds = epoch_seconds(pairs)
    return {
        "blocked_seconds_per_sync": [statistics.median(values) / pairs[0][0].syncs for values in blocked],
        "hidden": {"share": 1 - left["ratio"], "low": 1 - left["high"], "high": 1 - left["low"]},
        "epoch_seconds": seconds,
        "saved": (seconds[0] - seconds[1]) / statistics.median(blocked[0]),
        **differences(pairs),
    }


def measure(hosts: int, options: argparse.Namespace) -> tuple[dict[str, Any], list[list[Run]], list[list[Run]]]:
    """All that is measured on one number of hosts; the pairs of runs with the same epochs, and in the same time."""
    with tempfile.TemporaryDirectory(prefix="deepex-") as folder:
        plan, free = make_plan(hosts, options.rate, Path(folder), epochs=2, data=options.data)
        period = plan.period if options.strategy != "auto" else "auto"
        print(
            f"{hosts} hosts: a step takes {1000 * plan.step_seconds:.1f} ms; an all-reduce of {plan.sync_bytes / 1e6:.2f} MB "
            f"{1000 * plan.sync_seconds:.0f} ms, {plan.sync_seconds / plan.ideal_seconds:.2f} of the ideal; period {period}",
            flush=True,
        )
        wanted = {"strategy": options.strategy, "seeds": options.seeds, "epochs": options.epochs, "data": options.data}
        pairs = list(in_turns(hosts, options.rate, period, Path(folder), **wanted))
        timed = in_the_same_time(pairs, hosts, options.rate, period, Path(folder), epochs=options.epochs, data=options.data)
    changed = statistics.median(value for base, _ in pairs for value in base.step_seconds) / plan.step_seconds
    if not 0.75 < changed < 1.25:
        print(f"{hosts} hosts: a step of {BASE} took {changed:.2f} of its time at first: something else runs on this machine")
    found = {
        "hosts": hosts,
        "ranks_per_core": hosts / len(os.sched_getaffinity(0)),
        **vars(plan),
        "period": period,
        "steps_over_first": changed,
        "samples": free.samples,
        "free": vars(free),
        "runs": [vars(run) for pair in pairs for run in pair],
        **summarise(pairs),
        "same_time": same_time(pairs, timed, options.epochs),
    }
    return found, pairs, timed


def same_time(pairs: Sequence[Sequence[Run]], timed: Sequence[Sequence[Run]], epochs: int) -> dict[str, Any]:
    """What the runs in the same time tell."""
    counts = [epochs, epochs_in_time(pairs, epochs)]
    return {
        "epochs": counts,
        "seconds": [count * seconds for count, seconds in zip(counts, epoch_seconds(timed), strict=True)],
        "runs": [vars(other) for _, other in timed],
        **differences(timed),
    }


def at_best(base: dict[str, Any], weights_bytes: int) -> float:
    """What can be hidden of the syncs of a run of `weights`: all but the weights of an epoch's last."""
    return 1 - weights_bytes / base["sync_bytes"] / base["syncs"]


def timing_row(found: dict[str, Any]) -> list[object]:
    blocked, seconds, hidden = found["blocked_seconds_per_sync"], found["epoch_seconds"], found["hidden"]
    return [
        found["hosts"],
        f"{found['ranks_per_core']:g}",
        found["period"],
        found["runs"][0]["syncs"],
        f"{1000 * found['ideal_seconds']:.0f}",
        *(f"{1000 * value:.0f}" for value in blocked),
        f"{hidden['share']:.1%} ({hidden['low']:.1%} to {hidden['high']:.1%})",
        f"{at_best(found['runs'][0], found['sync_bytes']):.1%}",
        f"{statistics.median(found['free']['epoch_seconds']):.2f}",
        *(f"{value:.2f}" for value in seconds),
        f"{found['saved']:.1%}",
    ]


def learning_row(name: object, pairs: Sequence[Sequence[Run]]) -> list[object]:
    cells: list[object] = [name, len(pairs)]
    for measure_name in ("loss", "error"):
        cells += [f"{statistics.mean(getattr(pair[place], measure_name) for pair in pairs):.4f}" for place in (0, 1)]
        found = difference(pairs, measure_name)
        interval = f" ({found['low']:+.4f} to {found['high']:+.4f})" if found["low"] is not None else ""
        cells.append(f"{found['mean']:+.4f}{interval}")
    return cells


def report(
    results: Sequence[dict[str, Any]],
    pairs: Sequence[list[list[Run]]],
    timed: Sequence[list[list[Run]]],
    options: argparse.Namespace,
) -> None:
    other = options.strategy
    title = f"a sync on links of {options.rate}, {results[0]['sync_bytes'] / 1e6:.2f} MB, one rank per host; medians of epochs"
    columns = ["hosts", "ranks per core", "period", "syncs per epoch", "ideal ms", f"{BASE} blocked ms", f"{other} blocked ms"]
    columns += ["hidden (bar 80 %)", "at best", "epoch s, free link", f"epoch s, {BASE}", f"epoch s, {other}", "saved / blocked"]
    bench.print_table(title, columns, [timing_row(found) for found in results])
    columns = ["hosts", "seeds", f"loss, {BASE}", f"loss, {other}", "difference (95 %)"]
    columns += [f"error, {BASE}", f"error, {other}", "difference (95 %; bar: reaches 0)"]
    names = [str(found["hosts"]) for found in results]
    times = [
        f"{found['hosts']}: {' and '.join(map(str, found['same_time']['epochs']))} epochs, "
        f"{' and '.join(f'{value:.0f}' for value in found['same_time']['seconds'])} s"
        for found in results
    ]
    for when, labels, some in ((f"after {options.epochs} epochs", names, pairs), ("in the same time", times, timed)):
        rows = [learning_row(label, each) for label, each in zip(labels, some, strict=True)]
        rows += [learning_row("all", list(itertools.chain(*some)))] if len(some) > 1 else []
        bench.print_table(f"{when}: training loss and validation error, mean over seeds", columns, rows)


def parse(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="write the record into benchmarks/records")
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 3, 4], help="numbers of hosts, each measured in turn")
    parser.add_argument("--rate", default="200mbit", help="of each link, in both directions, as tc takes it")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--data", default="sample:fashion", help="a packed dataset")
    parser.add_argument("--strategy", default="background", help=f"what is compared with {BASE}")
    return parser.parse_args()


def main() -> None:
    options = parse(__doc__)
    try:
        recipe("fashion", {"sync.strategy": options.strategy, "sync.period": 2})  # a mistake costs nothing yet
        measured = [measure(hosts, options) for hosts in options.hosts]
    except (NetworkError, ConfigError) as error:
        sys.exit(str(error))
    results, pairs, timed = ([each[place] for each in measured] for place in range(3))
    report(results, pairs, timed, options)
    result = {
        "rate": options.rate,
        "strategies": [BASE, options.strategy],
        "settings": SETTINGS,
        "epochs": options.epochs,
        "samples": results[0]["samples"],
        "results": results,
        "all": differences(list(itertools.chain(*pairs))),
        "all_same_time": differences(list(itertools.chain(*timed))),
    }
    bench.write_record("slow_network" if options.strategy != "auto" else "slow_network_auto", result, keep=options.keep)


if __name__ == "__main__":
    main()
