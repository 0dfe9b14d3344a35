"""Learning speedup: epochs to a target that are exact, times of an epoch that are measured or predicted.

    deepex data make atomai packed/atomai --images 218454 && deepex data make pf packed/pf --images 218454
    python benchmarks/learning.py --speed --data atomai=packed/atomai pf=packed/pf --seeds 1,2,3 --keep    # on a GPU: hours
    python benchmarks/learning.py --plan plan.json --data pf=packed/pf --jobs 4       # trials of your own, into the record
    python benchmarks/learning.py --show                                             # the tables, from the record

A trial (trials.py) is a workload (`atomai`: ResNet-50 on electron diffraction; `pf`: the CVAE on contact maps), a number of
replicas, settings and a seed. The name `paper` is the paper's setting: a fixed rate, batch 128, one mean of the weights per epoch;
what other names mean is in their settings. A plan is a list of tables with `workload`, `name`, `replicas` and `set`, and `seeds`
where they are not those of the command; without one, `PLAN` is it. Trials that the record holds are not run again, except those
that were ended for want of time or had other settings.

Cut-offs are 20 % and 10 % of the training error (AtomAI), and 20 % and 10 % above the least training RMSE that any trial came to
(PF, whose RMSE does not come near 0.1 with three latent variables). An epoch's error is over the samples as they were seen, as in
the paper, and is looked at when the epoch ends. The time of an epoch on P GPUs is

    T(P) = ⌈N / (P·b)⌉ · t_step(b) + syncs · (t_sync(P) + t_outer)

with the constants in `MACHINES`; in the background, of the sync of a part what a period does not hide. `--speed` measures an H200's
t_step(b) and t_outer, alone on the GPU. S_p = T(1) / T(P) and S_L = S_p · epochs(1) / epochs(P), against the best setting of one
GPU (`paper`: against its own).
"""

import argparse
import functools
import itertools
import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import bench
import trials as runs
from period_trials import LEFT, PARTS
from trials import Trial

PAPER: Final = "paper"
SIZES: Final = {"atomai": (120, 85), "pf": (28, 28)}
REPLICAS: Final = (1, 2, 8, 32, 128, 512, 1536)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is learnt. `cuts`: the cut-offs, as they are or, if `relative`, over the least that any trial came to."""

    measure: str
    cuts: tuple[float, float]
    relative: bool
    weights: float  # millions

    @property
    def sync_bytes(self) -> float:
        """What a sync sums: fp32, momentum apart (it is reset, or there is none)."""
        return 4e6 * self.weights


TASKS: Final = {
    "atomai": Task(measure="error", cuts=(0.2, 0.1), relative=False, weights=23.6),
    "pf": Task(measure="rmse", cuts=(1.2, 1.1), relative=True, weights=26.4),
}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine for T(P). Bandwidths are per GPU within a node and per node between them, one direction, in bytes/s.

    `rates`: images/s of one GPU, which hold at any batch, but no step is shorter than `least_steps`; without
    them, steps are as measured.
    `flat_sync`: seconds of a sync between nodes that was measured there, whatever the number.
    """

    gpus: int
    inside: float
    between: float
    share: float  # of the bandwidths that a collective reaches
    latency: float  # of one message
    matrix_flops: float = math.inf
    rates: dict[str, float] = field(default_factory=dict)
    least_steps: dict[str, float] = field(default_factory=dict)
    flat_sync: float = 0.0

    def sync_seconds(self, nbytes: float, ranks: int) -> float:
        """An all-reduce: reduce-scatter and gather in the node, a ring or tree between nodes on what each GPU then holds."""
        inside, nodes = min(ranks, self.gpus), -(-ranks // self.gpus)
        if nodes > 1 and self.flat_sync:
            return self.flat_sync
        sent = 2 * nbytes * ((inside - 1) / inside / self.inside + (nodes - 1) / nodes / self.between)
        return sent / self.share + 2 * self.latency * math.log2(max(ranks, 1))


V100: Final = {"atomai": 300.0, "pf": 9000.0}  # from the paper's efficiency, and from where its PF computes as long as it syncs
SUMMIT: Final = Machine(
    gpus=6,
    inside=50e9,
    between=23e9,
    share=0.9,
    latency=5e-6,
    rates=V100,
    least_steps={"atomai": 0.004, "pf": 0.0005},
    matrix_flops=40e12,
)  # NVLink and dual EDR as OLCF tells; small steps are bound by the launches of their kernels
MACHINES: Final = {
    "Summit": SUMMIT,
    "Summit, sync as in the paper": Machine(**{**vars(SUMMIT), "flat_sync": 0.30}),
    "H200 cluster": Machine(gpus=8, inside=450e9, between=400e9, share=0.7, latency=5e-6),  # NVLink 4, 8 × 400 Gbit/s per node
}


# What is run.


_ENOUGH: Final = {"atomai": "train error <= 0.1", "pf": "train rmse <= 0.155"}  # no cut-off is below


def _muon(batch: int, rate: float, epochs: int, schedule: str = "") -> dict[str, Any]:
    muon = {"sync.outer": "muon", "sync.outer_rate": rate, "sync.period": 1, "sync.momentum": "reset"}
    return {"batch": batch, "epochs": epochs, **muon, **({"optim.schedule": schedule} if schedule else {})}


_PAPER_EPOCHS: Final = {
    "atomai": {1: 4, 2: 4, 8: 6, 32: 8, 128: 10, 512: 12, 1536: 12},
    "pf": {1: 4, 2: 4, 8: 6, 32: 8, 128: 12, 512: 24, 1536: 48},
}
_MUON: Final[dict[str, dict[int, tuple[Any, ...]]]] = {
    "atomai": {2: (32, 0.02, 3), 8: (32, 0.02, 3), 32: (32, 0.02, 3), 128: (32, 0.02, 4), 512: (16, 0.03, 5), 1536: (8, 0.03, 7)},
    "pf": {
        2: (32, 0.02, 3),
        8: (32, 0.02, 3),
        32: (32, 0.02, 3),
        128: (64, 0.04, 5),
        512: (16, 0.05, 6),
        1536: (32, 0.06, 8, "cosine"),
    },
}  # batch, rate, epochs: the best of what was tried
_SMALL_BATCH: Final = {"atomai": 64, "pf": 32}  # the best for one replica
_COST: Final = {"atomai": 0.1, "pf": 4.0}  # of a sync, in steps of these batches, on Summit
_AUTO: Final = {
    "atomai": {2: (64, 4), 8: (64, 4), 32: (64, 4), 128: (32, 4), 512: (16, 5), 1536: (8, 7)},
    "pf": {2: (32, 4), 8: (32, 4), 32: (32, 4), 128: (64, 5), 512: (32, 8), 1536: (32, 10)},
}  # batch, epochs
_FULL_BATCH: Final = {("atomai", 1536): 127}  # of the paper's setting: 196,587 samples are a few short of 1,536 × 128
_FAST: Final = {"precision": "bf16", "layout": "channels_last"}  # as the seconds are measured


def _auto(workload: str, batch: int, epochs: int) -> dict[str, Any]:
    return {"batch": batch, "epochs": epochs, "sync.strategy": "auto", "sync.cost": _COST[workload]}


def _paper(workload: str, replicas: int, epochs: int) -> dict[str, Any]:
    batch = _FULL_BATCH.get((workload, replicas))
    return {"epochs": epochs, **({"batch": batch} if batch else {})}


def _plan(workload: str) -> list[dict[str, Any]]:
    """Trials stop where nobody asks for more, except where one replica shows what can be reached."""
    rows: list[tuple[str, int, dict[str, Any]]] = [
        ("sgd", 1, {"batch": _SMALL_BATCH[workload], "epochs": _PAPER_EPOCHS[workload][1]}),
        *(("auto", replicas, _auto(workload, *chosen)) for replicas, chosen in _AUTO[workload].items()),
        *(("muon", replicas, _muon(*chosen)) for replicas, chosen in _MUON[workload].items()),
        *((PAPER, replicas, _paper(workload, replicas, epochs)) for replicas, epochs in _PAPER_EPOCHS[workload].items()),
    ]
    enough = {"target": _ENOUGH[workload]}
    relative = TASKS[workload].relative
    return [
        {
            "workload": workload,
            "name": name,
            "replicas": replicas,
            "set": _FAST | changes | ({} if relative and replicas == 1 else enough),
        }
        for name, replicas, changes in rows
    ]


PLAN: Final = [row for workload in TASKS for row in _plan(workload)]


def read_plan(path: Path) -> list[dict[str, Any]]:
    """The trials of a plan; one that is none ends the program with a sentence."""
    wanted = "a plan is a JSON list of tables with workload, name, replicas and set, and seeds if they are others"
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        sys.exit(f"{path} cannot be read ({error}): {wanted}")
    for number, row in enumerate(rows if isinstance(rows, list) else [None], 1):
        if not isinstance(row, dict) or {"workload", "name", "replicas", "set"} - row.keys():
            sys.exit(f"{path}: number {number} is no trial: {wanted}")
    return rows


def planned(rows: Sequence[dict[str, Any]], data: dict[str, str], seeds: Sequence[int]) -> list[Trial]:
    """The trials of a plan whose data is there."""
    return [
        Trial(
            workload=row["workload"],
            name=row["name"],
            seed=seed,
            recipe=row["workload"],
            measure=TASKS[row["workload"]].measure,
            changes={"data": data[row["workload"]], "replicas": row["replicas"], **row["set"]},
        )
        for row in rows
        if row["workload"] in data
        for seed in row.get("seeds", seeds)
    ]


def epochs_to(trial: Trial, cut: float) -> int | None:
    """The epochs until the training measure is at most `cut`."""
    return next((number for number, epoch in enumerate(trial.epochs, 1) if epoch.train <= cut), None)


# Speed of one GPU.


def measure_speed(batches: Sequence[int]) -> dict[str, Any]:
    """Seconds of a step at each batch, and of an outer step by Muon, on this GPU with nothing else running."""
    from deepex.sync.config import SyncConfig
    from gpu import SMALL, TINY, deepex_epochs, timed
    from peers import Workload

    found: dict[str, Any] = {}
    for task, net, shape, classes, objective in (
        ("atomai", "resnet50", SMALL, 27, "classify"),
        ("pf", "cvae", TINY, 2, "reconstruct"),
    ):
        steps: dict[str, float] = {}
        for batch in batches:
            workload = Workload(
                name=task, net=net, shape=shape, classes=classes, batch=batch, objective=objective, augment=False, count=100 * batch
            )
            _, _, data = bench.random_data(shape, classes, workload.count)
            epoch, _ = deepex_epochs(workload, data)
            steps[str(batch)] = min(bench.in_turns({"": timed(epoch)}, 5)[""]) / 100
        syncs = []
        for outer in ("none", "muon"):  # what an outer step adds to a sync
            sync = SyncConfig(period=1, outer=outer, momentum="reset")
            epoch, _ = deepex_epochs(workload, data, replicas=2, sync=sync)
            syncs.append(min(bench.in_turns({"": timed(epoch)}, 5)[""]) / 50)
        found[task] = {"step_seconds": steps, "outer_seconds": syncs[1] - syncs[0]}
        print(f"{task}: {found[task]}", flush=True)
    return found


# What follows from it.


def cut_offs(task: Task, trials: Sequence[Trial]) -> tuple[float, ...]:
    """The cut-offs as numbers."""
    if not task.relative:
        return task.cuts
    best = min(epoch.train for trial in trials for epoch in trial.epochs)
    return tuple(cut * best for cut in task.cuts)


def epoch_seconds(machine: Machine, trial: Trial, speed: dict[str, Any], number: int = 0) -> float:
    """T(P) of a trial's epoch, by default of the first."""
    task, batch = TASKS[trial.workload], int(trial.changes.get("batch", 128))
    steps, syncs = trial.epochs[number].steps, trial.epochs[number].syncs
    if trial.workload in machine.rates:
        step = max(batch / machine.rates[trial.workload], machine.least_steps[trial.workload])
        outer = muon_flops(trial.workload) / machine.matrix_flops
    else:
        step, outer = step_seconds(speed["step_seconds"], batch), speed["outer_seconds"]
    if trial.outer != "muon":
        outer = 0.0
    sync = machine.sync_seconds(task.sync_bytes, trial.replicas) if trial.replicas > 1 else 0.0
    if trial.strategy == "background":
        part, period = machine.sync_seconds(task.sync_bytes / PARTS, trial.replicas), steps / syncs * step
        return float(steps * step + (syncs - 1) * (max(0.0, part - period) + LEFT * min(part, period)) + sync)
    return float(steps * step + syncs * (sync + outer))


@functools.cache
def muon_flops(workload: str) -> float:
    """The operations of an outer step by Muon."""
    from deepex import nets
    from deepex.sync.outer import muon

    network = nets.build("resnet50" if workload == "atomai" else "cvae", channels=1, size=SIZES[workload], classes=27)
    return muon.muon_flops(weight.shape for weight in network.parameters())


def step_seconds(measured: dict[str, float], batch: int) -> float:
    """The seconds of a step, on the straight line between the batches that were measured."""
    known = sorted((int(size), seconds) for size, seconds in measured.items())
    for (low, fast), (high, slow) in itertools.pairwise(known):
        if batch <= high:
            return fast + (slow - fast) * (max(batch, low) - low) / (high - low)
    return known[-1][1] * batch / known[-1][0]


def times_to(machine: Machine, trials: Sequence[Trial], cut: float, speed: dict[str, Any]) -> list[float] | None:
    """The predicted seconds to a cut-off, of each seed; None if one did not come there."""
    reached = [(epochs_to(trial, cut), trial) for trial in trials]
    if any(count is None for count, _ in reached):
        return None
    return [sum(epoch_seconds(machine, trial, speed, number) for number in range(count or 0)) for count, trial in reached]


def rows(workload: str, machine: Machine, trials: Sequence[Trial], speed: dict[str, Any]) -> list[list[object]]:
    """For each number of replicas: the paper's setting, and the one of the others that comes to the cut-offs first."""
    task, cuts = TASKS[workload], cut_offs(TASKS[workload], trials)
    settings: dict[tuple[int, str], list[Trial]] = defaultdict(list)
    for trial in trials:
        if trial.epochs:
            settings[trial.replicas, trial.name].append(trial)
    found: list[list[object]] = []
    bases: dict[tuple[bool, float], list[Trial]] = {}
    for paper, replicas in itertools.product((True, False), REPLICAS):
        some = {
            name: each
            for (count, name), each in settings.items()
            if count == replicas and (name == PAPER if paper else name != PAPER or count == 1)
        }
        for cut, share in zip(cuts, task.cuts, strict=True):
            timed = {name: times for name, each in some.items() if (times := times_to(machine, each, cut, speed))}
            label = f"{share - task.relative:.0%}"
            if not timed:
                if some:
                    epochs, name = max((len(each[0].epochs), name) for name, each in some.items())
                    faster = _speedup(machine, some[name], bases.get((paper, cut)), speed)
                    found.append([replicas, name, label, f"> {epochs}", "", faster, "-"])
                continue
            name = min(timed, key=lambda name: (-min(len(timed[name]), 3), statistics.mean(timed[name])))
            if replicas == 1:
                bases[paper, cut] = some[name]
            base = bases.get((paper, cut))
            epochs_each = sorted(epochs_to(trial, cut) or 0 for trial in some[name])
            cells: list[object] = [replicas, name, label, " ".join(map(str, epochs_each)), f"{statistics.mean(timed[name]):.3g}"]
            cells.append(_speedup(machine, some[name], base, speed))
            if base is not None:
                before = times_to(machine, base, cut, speed) or []
                pairs = [one / other for one, other in itertools.product(before, timed[name])]
                cells.append(f"{statistics.mean(before) / statistics.mean(timed[name]):.1f} ({min(pairs):.1f}-{max(pairs):.1f})")
            else:
                cells.append("-")
            found.append(cells)
    return found


def _speedup(machine: Machine, trials: Sequence[Trial], base: Sequence[Trial] | None, speed: dict[str, Any]) -> str:
    """S_p."""
    if not base:
        return "-"
    return f"{epoch_seconds(machine, base[0], speed) / epoch_seconds(machine, trials[0], speed):.4g}"


def show(found: Sequence[Trial], speeds: dict[str, Any]) -> str:
    """All tables."""
    tables = []
    for workload, (name, machine) in itertools.product(TASKS, MACHINES.items()):
        trials = [trial for trial in found if trial.workload == workload]
        speed = speeds.get(workload)
        if trials and (machine.rates or speed):
            cuts = ", ".join(f"{cut:.4g}" for cut in cut_offs(TASKS[workload], trials))
            title = f"{workload}, {max(trial.samples for trial in trials):,} samples, {name}; {TASKS[workload].measure} of {cuts}"
            columns = ["replicas", "setting", "cut-off", "epochs of each seed", "seconds", "S_p", "S_L (least-most)"]
            tables.append(bench.format_table(title, columns, rows(workload, machine, trials, speed or {})))
    return "\n".join(tables)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", default=[], metavar="WORKLOAD=PATH", help="packed datasets; only these are learnt")
    parser.add_argument("--plan", help="JSON with trials; without it, those of this program")
    parser.add_argument("--seeds", default="1", help="with commas between")
    parser.add_argument("--jobs", type=int, default=1, help="trials at the same time, on the same GPU")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds, after which trials end with their epoch")
    parser.add_argument("--again", action="store_true", help="also trials that the record holds")
    parser.add_argument("--speed", action="store_true", help="measure the seconds of a step, and of an outer step")
    parser.add_argument("--keep", action="store_true", help="write the record into benchmarks/records")
    parser.add_argument("--show", action="store_true", help="only print the tables")
    options = parser.parse_args()
    data = dict(word.split("=", 1) for word in options.data)
    if unknown := set(data) - set(TASKS):
        sys.exit(f"no workload is called {', '.join(sorted(unknown))}; there are {', '.join(TASKS)}")
    path = bench.RECORDS / "learning.json"
    record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"trials": [], "speed": {}}
    found, speeds = {trial.key: trial for trial in map(Trial.from_json, record["trials"])}, record["speed"]

    def write() -> None:
        bench.write_record(
            "learning", {"trials": [each.to_json() for each in found.values()], "speed": speeds}, keep=options.keep, quiet=True
        )

    if not options.show:
        if options.speed:
            bench.need_gpu()
            speeds = measure_speed((4, 8, 16, 32, 128))
            write()
        rows = read_plan(Path(options.plan)) if options.plan else PLAN
        asked = planned(rows, data, [int(seed) for seed in options.seeds.split(",")])
        for trial in runs.run(
            [one for one in asked if options.again or not (one.key in found and found[one.key].answers(one))],
            jobs=options.jobs,
            limit=options.limit,
        ):
            found[trial.key] = trial
            print(trial.told(), flush=True)
            write()
    print(show(list(found.values()), speeds))


if __name__ == "__main__":
    main()
