"""Run and study directories as training writes them, with known speedups and seeded noise, made in milliseconds."""

import json
import random
from dataclasses import asdict, dataclass, field
from math import exp, log2
from pathlib import Path
from typing import Any

from deepex.record import EpochRecord, PlannedRun, RunDirectory, Score, StudyDirectory
from deepex.record.files import write_json

SHARES = {"input": 0.08, "forward": 0.3, "backward": 0.52, "update": 0.1}
TARGET = "validation error <= 0.2"


def machine(host: str = "node17") -> dict[str, Any]:
    return {
        "host": host,
        "system": {"name": "Linux", "distribution": "Debian GNU/Linux 12", "architecture": "x86_64"},
        "cpu": {"model": "EPYC 9654", "num_cores_usable": 96},
        "memory": {"total_bytes": 810_000_000_000},
        "gpus": [{"name": "NVIDIA H200"}] * 4,
        "versions": {"python": "3.11.7", "deepex": "0.1.0", "torch": "2.11.0", "mpi4py": "4.1.2", "nccl": None},
        "commit": "04b2c78aa0c3e7d1f2",
    }


@dataclass(frozen=True, kw_only=True)
class Made:
    """What a run shall be like. One rank needs `work` seconds for an epoch; a sync takes `sync` seconds for each doubling."""

    ranks: int = 1
    epochs: int = 8
    seed: int = 1
    work: float = 8.0
    sync: float = 0.05
    noise: float = 0.02
    learns: float = 0.5
    samples: int = 60_000
    measured: bool = True
    usage: bool = False
    drift: bool = False
    phases: bool = True
    validation: bool = True
    rmse: bool = False
    delays: dict[tuple[int, int], tuple[str, float]] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    hosts: tuple[str, ...] = ("node17",)


def config_of(made: Made) -> dict[str, Any]:
    base: dict[str, Any] = {"net": "lenet", "data": "sample:fashion", "task": "classify", "epochs": made.epochs, "batch": 32}
    base |= {"replicas": made.ranks, "seed": made.seed, "target": TARGET, "precision": "fp32", "threads": 1}
    tables = {"optim": {"method": "sgd", "rate": 0.02}, "sync": {"strategy": "weights", "period": "epoch"}}
    return {**base, **{key: value for key, value in made.config.items() if key not in tables}, **_merged(tables, made.config)}


def _merged(tables: dict[str, dict[str, Any]], changes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: {**table, **changes.get(name, {})} for name, table in tables.items()}


def state_of(made: Made) -> dict[str, Any]:
    return {
        "ranks": made.ranks,
        "nodes": len(made.hosts),
        "replicas": made.ranks,
        "comm": {"kind": "mpi", "reason": "installed"},
        "network": {"name": "lenet", "parameters": 61706},
        "dataset": {"name": "fashion", "digest": "76"},
        "samples": {"train": made.samples, "validation": 2000},
        **made.state,
    }


def epoch_of(made: Made, number: int, chance: random.Random) -> EpochRecord:
    ranks = range(made.ranks)
    warm = 1.6 if number == 1 else 1.0
    own = {
        name: [made.work / made.ranks * share * warm * (1 + chance.gauss(0, made.noise)) for _ in ranks]
        for name, share in SHARES.items()
    }
    for (rank, epoch), (phase, seconds) in made.delays.items():
        if epoch == number:
            own[phase][rank] += seconds
    total = [sum(values[rank] for values in own.values()) for rank in ranks]
    own["sync"] = [max(total) - one + made.sync * log2(2 * made.ranks) for one in total]
    wall = max(total) + made.sync * log2(2 * made.ranks)
    value = 0.08 + 0.7 * exp(-made.learns * number / made.ranks**0.25) * (1 + chance.gauss(0, made.noise))
    measure = "rmse" if made.rmse else "error"
    train = Score(loss=3 * value, samples=made.samples, measures={measure: value})
    held = Score(loss=3.1 * value, samples=2000, seconds=0.3, measures={measure: 1.05 * value}) if made.validation else None
    return EpochRecord(
        epoch=number,
        samples=made.samples,
        steps=made.samples // (32 * made.ranks),
        syncs=1,
        rate=0.02,
        train=train,
        validation=held,
        seconds=wall,
        phases=own if made.phases else {name: [0.0] * made.ranks for name in own},
        wall=[wall] * made.ranks,
        measured=made.measured,
        drift={"all": 0.02 / number**0.5} if made.drift else {},
        moved={"all": 0.05 / number} if made.drift else {},
        usage=_usage(own) if made.usage else {},
    )


def _usage(phases: dict[str, list[float]]) -> dict[str, dict[str, list[float]]]:
    busy = {"input": 0.7, "forward": 3.6, "backward": 3.8, "update": 2.0, "sync": 1.0}
    gpu = {"input": 0.1, "forward": 0.92, "backward": 0.96, "update": 0.8, "sync": 0.05}
    some = next(iter(phases.values()))
    return {
        "cpu_seconds": {name: [value * busy[name] for value in values] for name, values in phases.items()},
        "gpu_busy_seconds": {name: [value * gpu[name] for value in values] for name, values in phases.items()},
        "memory_bytes": {"epoch": [2.1e9 for _ in some]},
        "gpu_memory_bytes": {name: [7.4e9 for _ in values] for name, values in phases.items()},
        "read_bytes": {"input": [4.7e7 for _ in some]},
        "joules": {"epoch": [300 * sum(values[rank] for values in phases.values()) for rank in range(len(some))]},
    }


def _machines(made: Made) -> list[dict[str, Any]]:
    """As many ranks on each node, in their order."""
    each = -(-made.ranks // len(made.hosts))
    return [machine(host) | {"ranks": [*range(k * each, min((k + 1) * each, made.ranks))]} for k, host in enumerate(made.hosts)]


def write_run(path: Path, made: Made, *, status: str = "finished", reason: str = "all epochs done") -> Path:
    run = RunDirectory.create(path, config_of(made), _machines(made), state_of(made))
    chance = random.Random(f"{made.seed}-{made.ranks}-{made.work}")
    lines = [json.dumps(asdict(epoch_of(made, number, chance))) + "\n" for number in range(1, made.epochs + 1)]
    (path / "epochs.jsonl").write_text("".join(lines), encoding="utf-8")  # at once: `append` waits for the disk each time
    run.set_state(status=status, reason=reason)
    return path


def write_study(
    path: Path, kind: str, runs: list[tuple[dict[str, Any], Made]], *, recipe: str = "fashion", targets: list[str] | None = None
) -> Path:
    """Each pair is what the run varies and what it is like; equal ones are repeats."""
    plan, seen = [], {}
    for varied, made in runs:
        key = json.dumps(varied)
        seen[key] = seen.get(key, 0) + 1
        name = "-".join(str(value).replace("/", "_") for value in varied.values()) + f"-r{seen[key]}"
        plan.append(PlannedRun(name=name, varied=varied, repeat=seen[key], ranks=made.ranks, command=("deepex", "train", recipe)))
    study = StudyDirectory.create(
        path, plan=plan, machine=[machine()], kind=kind, recipe=recipe, settings=[], options={}, targets=targets or []
    )
    for planned, (_, made) in zip(plan, runs, strict=True):
        write_run(study.run_path(planned), made)
    study.set_state(status="finished", reason="")
    return path


def repeated(varied: dict[str, Any], made: Made, repeats: int = 3) -> list[tuple[dict[str, Any], Made]]:
    return [(varied, Made(**{**vars(made), "seed": 10 * made.seed + k})) for k in range(repeats)]


def strong(path: Path, *, ranks: tuple[int, ...] = (1, 2, 4, 8), more: dict[str, Any] | None = None) -> Path:
    targets = [TARGET, "train error <= 0.3"]
    runs = [one for p in ranks for one in repeated({"ranks": p}, Made(ranks=p, **{"usage": True, "drift": p > 1, **(more or {})}))]
    return write_study(path, "strong", runs, targets=targets)


def weak(path: Path) -> Path:
    runs = [
        one
        for p in (1, 2, 4, 8)
        for one in repeated({"ranks": p, "samples": 10_000 * p}, Made(ranks=p, work=2.0 * p, samples=10_000 * p, sync=0.1))
    ]
    return write_study(path, "weak", runs)


def sync(path: Path) -> Path:
    runs = []
    for i, (strategy, period) in enumerate(
        [("weights", 1), ("weights", 16), ("weights", "epoch"), ("hierarchical", 16), ("outer", 64)]
    ):
        made = Made(ranks=4, sync=0.5 / (i + 1), learns=0.5 - 0.06 * i, epochs=14, drift=True)
        runs += repeated({"strategy": strategy, "period": period}, made)
    return write_study(path, "sync", runs)


def threads(path: Path) -> Path:
    runs = []
    for onednn in (True, False):
        for p in (1, 2, 4):
            for t in (1, 2, 4):
                varied = {"threads": t, "ranks": p, "onednn": onednn, "layout": "channels_last" if onednn else "contiguous"}
                work = 8.0 / min(t * p, 5) ** 0.7 * p * (1.0 if onednn else 1.7)
                runs += repeated(varied, Made(ranks=p, work=work, epochs=4, validation=False), 2)
    return write_study(path, "threads", runs)


def variability(path: Path) -> Path:
    return write_study(path, "variability", [({"seed": k}, Made(ranks=4, seed=k, work=8.0 + 0.1 * (k % 3))) for k in range(1, 11)])


def storage(path: Path) -> Path:
    runs = []
    for i, placement in enumerate(("device", "host", "stream")):
        for j, form in enumerate(("packed", "hdf5")):
            for directory in ("/scratch/data", "/home/data"):
                made = Made(ranks=2, work=6.0 + i + 2 * j, epochs=4)
                runs += repeated({"placement": placement, "format": form, "directory": directory}, made, 2)
    return write_study(path, "storage", runs)


def frameworks(path: Path) -> Path:
    runs = []
    for i, name in enumerate(("deepex", "pytorch-ddp", "lightning", "jax", "keras")):
        made = Made(
            ranks=2,
            work=6.0 * (1 + 0.4 * i),
            phases=name == "deepex",
            state={"framework": {"name": name, "version": "1.0"}},
            usage=name == "deepex",
        )
        runs += repeated({"framework": name}, made)
    return write_study(path, "frameworks", runs)


def transfer(path: Path) -> Path:
    chance = random.Random(5)
    plan = [
        PlannedRun(name="all", varied={}, repeat=1, ranks=4, command=("deepex.study.transfer", "--comm", "auto", "--seconds", "1"))
    ]
    study = StudyDirectory.create(
        path, plan=plan, machine=[machine()], kind="transfer", recipe="", settings=[], options={}, targets=[]
    )
    paths = [
        ("host-device pinned", "host-device", 5e-6, 55e9, 1, "cuda"),
        ("rank-rank mpi", "point-to-point", 1e-6, 9e9, 2, "mpi"),
        ("all-reduce mpi 4 ranks", "all-reduce", 6e-6, 4e9, 4, "mpi"),
        ("all-reduce nccl 4 ranks", "all-reduce", 2e-5, 1.2e11, 4, "nccl"),
    ]
    tables = []
    for name, kind, latency, bandwidth, ranks, comm in paths:
        for power in range(3, 29, 2):
            times = [(latency + 2**power / bandwidth) * (1 + abs(chance.gauss(0, 0.05))) for _ in range(5)]
            tables.append({"path": name, "kind": kind, "bytes": 2**power, "seconds": times, "ranks": ranks, "comm": comm})
        line = {"latency_seconds": latency, "bandwidth_bytes_per_second": bandwidth, "worst_deviation": 0.2}
        tables.append({"path": name, "kind": kind, "ranks": ranks, "comm": comm, "fit": line, "note": "as it is"})
    where = study.run_path(plan[0])
    where.mkdir(parents=True)
    write_json(where / "measurements.json", tables)
    return path


STUDIES = {
    "strong": strong,
    "weak": weak,
    "sync": sync,
    "threads": threads,
    "variability": variability,
    "storage": storage,
    "frameworks": frameworks,
    "transfer": transfer,
}


def write_all(folder: Path) -> Path:
    """A folder with a study of each kind."""
    for kind, write in STUDIES.items():
        write(folder / kind)
    return folder
