"""Which period: what learning loses, and time gains, when replicas meet more rarely; and whether `auto` finds the best one.

    python benchmarks/periods.py --jobs 2                  # all trials that the record does not hold yet, tables and plot
    python benchmarks/periods.py --only lenet,frontier     # of some workloads
    python benchmarks/periods.py --show                    # tables and plot, from the record

Replicas are exact (trials.py), so the epochs to a target are those of as many devices. The time of an epoch follows from how many
steps a sync takes, the `cost`, which is stated and not measured: 1 + cost · syncs / steps, in units of an epoch that never syncs.
`auto` is told the cost (sync.cost) and nothing else. It is that of weights and momentum; what a sync costs with other strategies:
`streaming` sends one of four parts of both at a time, except at the end of an epoch; `background` one of four parts of the weights,
and has a period to hide it in, except there; of what it could hide, 15 % are not.

- A rate is tuned for each workload first, at period 4, and is then the same in all its trials.
- The target is a validation loss, of the mean of the replicas: of the way from that after the first epoch with period 1 to the
  least of any fixed period, 70 % and 85 %. Between the ends of two epochs the loss is taken to fall in a straight line.
- Judged: the time of `auto` to the target over that of the best fixed period, which is picked with hindsight from the same trials,
  so that chance is on its side. The workloads `mlp`, `lenet` and `convnet` served to find the rule, its tolerance and the period
  that it begins with, `pf` to see that its guard must not mind drift that is small, and that the first epoch must not be planned
  before drift is known, `lars` to see whose drift matters; the others did not.
- Late: whether learning minds that the means of `background` come late. With a quarter of the period each weight is sent as often
  as with `weights`, at half the bytes, since that also sends momentum; with an eighth, both send as much. `parts`, `pull` and
  `delay` were found on other networks (slow_network.py's, and the frontier's), how far replicas look ahead on some of these too.
- Hidden: the time of `auto` with `background`, which is told what a part costs, beside that with `weights`, and which of them
  `sync=auto` chooses. It is judged on the workloads `long …`, on which nothing was chosen: epochs of 100 steps or more, for which
  it makes this choice (where there are fewer it takes Muon). There also with a momentum of each replica's own, which is half of
  what `weights` sends.
- Muon: epochs to the targets, and validation losses, of `sync=auto` with `sync.outer=muon`, on the same workloads: why `sync=auto`
  does not take it by itself where an epoch has many steps.
- Frontier: speedup per epoch, R / (1 + cost · syncs / steps), against epochs to the target, over periods, rules and strategies,
  with a cosine schedule, since QSR follows the rate.
"""

import argparse
import itertools
import json
import math
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import bench
import trials as runs
from period_trials import (
    CHOICE_COSTS,
    CHOICE_PERIODS,
    COSTS,
    FRONTIER_COST,
    FRONTIER_PERIODS,
    LATE_PERIODS,
    LEFT,
    PARTS,
    PERIODS,
    SHARE,
    STRATEGIES,
    WORKLOADS,
    sweep,
    tuned_rate,
    tuning,
)
from trials import Epoch, Trial

SHARES: Final = (0.3, 0.15)  # of the way to the least loss, left
BAR: Final = 1.1


def sync_costs(one: Trial, epoch: Epoch, cost: float) -> float:
    """What the syncs of an epoch cost, in steps."""
    strategy = "own" if one.changes.get("sync.momentum") == "local" else one.changes.get("sync.strategy", "weights")
    each = cost * SHARE.get(strategy, 1.0)
    if strategy == "background":
        period = epoch.steps / epoch.syncs
        each = max(0.0, each - period) + LEFT * min(each, period)
    return each * (epoch.syncs - 1) + (cost if strategy != "own" else each)


def reached(one: Trial, target: float, cost: float) -> tuple[float, float]:
    """The epochs, and the time in epochs without syncs, until the validation loss is at most `target`; infinite if it never is."""
    epochs = time = 0.0
    before = math.inf
    for epoch in one.epochs:
        seconds = 1 + sync_costs(one, epoch, cost) / epoch.steps
        if epoch.validation <= target:
            part = (before - target) / (before - epoch.validation) if math.isfinite(before) else 1.0
            return epochs + part, time + part * seconds
        epochs, time, before = epochs + 1, time + seconds, min(before, epoch.validation)
    return math.inf, math.inf


def mean_to(some: Sequence[Trial], target: float, cost: float) -> tuple[float, float]:
    """Epochs and time to the target, the mean over seeds."""
    each = [reached(one, target, cost) for one in some]
    return statistics.mean(epochs for epochs, _ in each), statistics.mean(time for _, time in each)


def settings(workload: str, found: Iterable[Trial], kind: str = "") -> dict[str, list[Trial]]:
    """The trials of each name that begins with `kind`, ordered by seed; without those that tuned the rate."""
    some: dict[str, list[Trial]] = {}
    for one in sorted(found, key=lambda one: one.seed):
        if one.workload == workload and one.name.startswith(kind) and not one.name.startswith("rate "):
            some.setdefault(one.name, []).append(one)
    return some


def complete(workload: str, found: Sequence[Trial]) -> bool:
    """Whether all periods, and `auto`, have been tried with the same seeds."""
    wanted = {**settings(workload, found, "weights "), **settings(workload, found, "auto ")}
    seeds = [[one.seed for one in some] for some in wanted.values()]
    number = len(CHOICE_PERIODS + CHOICE_COSTS) if WORKLOADS[workload].role == "choice" else len(PERIODS) + len(COSTS)
    return len(seeds) == number and all(each == seeds[0] for each in seeds)


def targets(fixed: dict[str, list[Trial]]) -> list[float]:
    """The losses to be reached."""
    first = statistics.mean(one.epochs[0].validation for one in fixed["weights 1"])
    least = min(
        statistics.mean(epoch.validation for epoch in epochs)
        for some in fixed.values()
        for epochs in zip(*(one.epochs for one in some), strict=False)
    )
    return [least + share * (first - least) for share in SHARES]


def judged(workload: str, found: Sequence[Trial]) -> list[list[object]]:
    """For each cost and target: the best fixed period, and what `auto` took of its time."""
    fixed = settings(workload, found, "weights ")
    rows: list[list[object]] = []
    for cost, (share, target) in itertools.product(COSTS, zip(SHARES, targets(fixed), strict=True)):
        autos = settings(workload, found, "auto ")[f"auto at {cost:g}"]
        times = {name: mean_to(some, target, cost)[1] for name, some in fixed.items()}
        best = min(times, key=lambda name: times[name])
        mine = mean_to(autos, target, cost)[1]
        each = [
            reached(one, target, cost)[1] / reached(base, target, cost)[1] for one, base in zip(autos, fixed[best], strict=True)
        ]
        near = " ".join(f"{name.split()[1]}:{time / times[best]:.2f}" for name, time in times.items())
        chosen = [round(epoch.steps / epoch.syncs) for epoch in autos[0].epochs]
        cells = [workload, f"{cost:g}", f"{1 - share:.0%}", best.split()[1], f"{times[best]:.2f}", f"{mine:.2f}"]
        rows.append([*cells, f"{mine / times[best]:.2f} ({min(each):.2f}-{max(each):.2f})", f"{min(chosen)}-{max(chosen)}", near])
    return rows


def overall(workload: str, found: Sequence[Trial]) -> float:
    """The time of `auto` over that of the best fixed period, the geometric mean over costs and targets.

    Without those that `auto` came to, and no fixed period with all seeds.
    """
    ratios = [ratio for row in judged(workload, found) if (ratio := float(str(row[6]).split()[0]))]
    return statistics.geometric_mean(ratios) if ratios else math.nan


def late(workload: str, found: Sequence[Trial]) -> list[list[object]]:
    """For each period: the least losses of `weights` and of `background`, and their epochs to the targets."""
    fixed, delayed = settings(workload, found, "weights "), settings(workload, found, "background ")
    goals, rows = targets(fixed), list[list[object]]()
    for period, share in itertools.product(LATE_PERIODS, (0.5, 1.0)):  # of the bytes
        base = round(2 * share * PARTS * period)
        pair = fixed[f"weights {base}"], delayed.get(f"background {period}", [])
        if [one.seed for one in pair[0]] != [one.seed for one in pair[1]]:
            continue
        least = [[min(epoch.validation for epoch in one.epochs) for one in some] for some in pair]
        more = [other / base - 1 for base, other in zip(*least, strict=True)]
        cells = [f"{statistics.mean(losses):.3f}" for losses in least]
        cells.append(f"{statistics.mean(more):+.1%} ({min(more):+.1%} to {max(more):+.1%})")
        cells += [" / ".join(f"{mean_to(some, goal, 0.0)[0]:.1f}" for goal in goals) for some in pair]
        rows.append([workload, period, base, f"{share:g}", *cells])
    return rows


def hidden(workload: str, found: Sequence[Trial]) -> list[list[object]]:
    """For each cost and target: the time of `auto` with `weights` and with `background`, and which is the choice of `sync=auto`."""
    rows, some = list[list[object]](), settings(workload, found)
    goals = targets(settings(workload, found, "weights "))
    costs = CHOICE_COSTS if WORKLOADS[workload].role == "choice" else COSTS
    for cost, (share, goal) in itertools.product(costs, zip(SHARES, goals, strict=True)):
        base, other, own = (some.get(f"{kind}auto at {cost:g}", []) for kind in ("", "background ", "own "))
        if [one.seed for one in base] != [one.seed for one in other]:
            continue
        times = [[reached(one, goal, cost)[1] for one in each] for each in (base, other, own)]
        means = [statistics.mean(each) if each else math.nan for each in times]
        ratios = [mine / its for its, mine in zip(*times[:2], strict=True)]
        ratio = f"{means[1] / means[0]:.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        chosen = chooses(workload, base[0].epochs[0].steps, cost)
        rows.append([workload, f"{cost:g}", f"{1 - share:.0%}", *(f"{mean:.2f}" for mean in means), ratio, chosen])
    return rows


def muon(workload: str, found: Sequence[Trial]) -> list[list[object]]:
    """Epochs to the targets, the least loss and the last, of means of weights at each step and of Muon."""
    some, rows = settings(workload, found), list[list[object]]()
    goals = targets(settings(workload, found, "weights "))
    for name in ("weights 1", "muon"):
        each = some.get(name, [])
        validated = [[epoch.validation for epoch in one.epochs] for one in each]
        if each:
            cells = [", ".join(f"{reached(one, goal, 0.0)[0]:.1f}" for one in each) for goal in goals]
            cells += [f"{statistics.mean(pick):.3f}" for pick in (map(min, validated), (losses[-1] for losses in validated))]
            rows.append([workload, name, *cells])
    return rows


def chooses(workload: str, steps: int, cost: float) -> str:
    """What `sync=auto` takes where it does not take Muon."""
    from deepex.sync.config import SyncConfig
    from deepex.sync.how.auto import timed

    if WORKLOADS[workload].changes.get("optim.momentum") == 0.0:
        return "weights"
    found = timed(SyncConfig(strategy="auto", period="auto"), steps=steps, cost=cost, part=cost * SHARE["background"])
    return found[0].strategy if found is not None else "weights"


def frontier(found: Sequence[Trial]) -> list[list[object]]:
    """For each strategy and period: epochs to the target, speedup per epoch, and both together."""
    some = settings("frontier", found)
    target = targets({name: each for name, each in some.items() if name.split()[1] in map(str, FRONTIER_PERIODS[:6])})[-1]
    rows: list[list[object]] = []
    for name, each in some.items():
        epochs, time = mean_to(each, target, FRONTIER_COST)
        replicas = each[0].replicas
        speedup = replicas * epochs / time if math.isfinite(time) else math.nan
        rows.append([*name.split(), epochs, speedup, replicas / time])
    return rows


def plot(rows: Sequence[Sequence[Any]], path: Path) -> None:
    """Draw the frontier."""
    try:
        import matplotlib as mpl
    except ImportError:
        sys.exit("the plot needs matplotlib: pip install matplotlib")
    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "deepex", "svg.fonttype": "none", "font.size": 8})
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for marker, strategy in zip("osv^DX", STRATEGIES, strict=True):
        points = [row for row in rows if row[0] == strategy and math.isfinite(row[2])]
        axes.scatter([row[2] for row in points], [row[3] for row in points], marker=marker, s=25, label=strategy)
        for _, period, epochs, speedup, _ in points:
            axes.annotate(period, (epochs, speedup), xytext=(3, 3), textcoords="offset points", fontsize=6)
    ends = [row[2] for row in rows if math.isfinite(row[2])]
    least, most = min(ends), max(ends)
    best = max(row[4] for row in rows)
    for share in (1.0, 0.75, 0.5, 0.25):
        axes.plot([least, most], [share * best * least, share * best * most], color="0.8", linewidth=0.8, zorder=0)
    axes.set(
        xlabel="epochs to the target", ylabel="speedup per epoch", ylim=(0, 1.1 * max(row[3] for row in rows if row[3] == row[3]))
    )
    axes.set_title(f"steeper is better: learning speedup is proportional to the slope; a sync takes {FRONTIER_COST:g} steps")
    axes.legend(loc="lower right")
    figure.savefig(path, metadata={"Date": None})
    print(f"plot: {path}")


def report(found: Sequence[Trial], where: Path) -> None:
    """Tables and plot of what there is."""
    columns = ["workload", "a sync, steps", "of the way", "best fixed", "its time", "auto's"]
    columns += ["ratio (of each seed)", "auto chose", "all over the best"]
    hides = [name for name, task in WORKLOADS.items() if task.role != "frontier" and complete(name, found)]
    done = [name for name in hides if WORKLOADS[name].role != "choice"]
    for role in ("tuned", "judged"):
        rows = [row for name in done if WORKLOADS[name].role == role for row in judged(name, found)]
        if rows:
            bench.print_table(f"`auto` against the best fixed period; workloads: {role}", columns, rows)
    rows = [[name, WORKLOADS[name].role, f"{tuned_rate(name, found):g}", f"{overall(name, found):.2f}"] for name in done]
    bench.print_table(
        f"all costs and targets together; bar {BAR}", ["workload", "role", "rate", "auto's time over the best's"], rows
    )
    rows = [row for name in done for row in late(name, found)]
    columns = ["workload", "period of a part", "of weights", "bytes over weights'", "loss, weights", "background"]
    columns += ["difference (of each seed)"]
    columns += [f"epochs to {' / '.join(f'{1 - share:.0%}' for share in SHARES)}, weights", "background"]
    bench.print_table("background against syncs that wait: the least validation loss, mean over seeds", columns, rows)
    rows = [row for name in hides for row in hidden(name, found)]
    columns = ["workload", "a sync, steps", "of the way", "weights", "background", "weights, own momentum"]
    columns += ["background over weights (of each seed)", "sync=auto"]
    bench.print_table("`auto` with syncs that wait and in the background: time to the target", columns, rows)
    rows = [row for name in hides if WORKLOADS[name].role == "choice" for row in muon(name, found)]
    columns = ["workload", "at each step", *(f"epochs to {1 - share:.0%}" for share in SHARES), "least loss", "last loss"]
    bench.print_table("Muon at each step: epochs of each seed, validation losses, mean over seeds", columns, rows)
    if settings("frontier", found):
        points = frontier(found)
        shown = [[*row[:2], *(f"{value:.2f}" for value in row[2:])] for row in points]
        columns = ["strategy", "period", "epochs to the target", "speedup per epoch", "learning speedup"]
        title = f"the frontier, rate {tuned_rate('frontier', found):g}, a sync of {FRONTIER_COST:g} steps"
        bench.print_table(title, columns, shown)
        plot(points, where / "frontier.svg")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(WORKLOADS), help="workloads, with commas between")
    parser.add_argument("--seeds", default="1,2,3", help="with commas between")
    parser.add_argument("--jobs", type=int, default=1, help="trials at the same time")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds, after which trials end with their epoch")
    parser.add_argument("--again", metavar="NAME", help="also trials that the record holds whose names begin so")
    parser.add_argument("--keep", action="store_true", help="write the record and the plot into benchmarks/records")
    parser.add_argument("--show", action="store_true", help="only print the tables and draw the plot")
    return parser.parse_args()


def held(path: Path, names: Sequence[str], again: str | None) -> list[Trial]:
    """The trials of a record, without those that time cut short, and those of these workloads that are to be run again."""
    trials = [Trial.from_json(one) for one in json.loads(path.read_text(encoding="utf-8"))["trials"]] if path.exists() else []
    return [one for one in trials if not (one.cut or (again and one.workload in names and one.name.startswith(again)))]


def main() -> None:
    options = parse()
    names = options.only.split(",")
    if unknown := set(names) - set(WORKLOADS):
        sys.exit(f"no workload is called {', '.join(sorted(unknown))}; there are {', '.join(WORKLOADS)}")
    where = bench.RECORDS if options.keep or options.show else Path("runs/benchmarks")
    path = where / "periods.json"
    found = held(path, names, options.again)

    def run(asked: Iterable[Trial]) -> None:
        known = {one.key for one in found}
        for one in runs.run([one for one in asked if one.key not in known], jobs=options.jobs, limit=options.limit):
            found.append(one)
            print(one.told(), flush=True)
            bench.write_record("periods", {"trials": [each.to_json() for each in found]}, keep=options.keep, quiet=True)

    if not options.show:
        run(one for name in names for one in tuning(name))
        seeds = [int(seed) for seed in options.seeds.split(",")]
        run(one for name in names for one in sweep(name, tuned_rate(name, found), seeds))
    report(found, where)


if __name__ == "__main__":
    main()
