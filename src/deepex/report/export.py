"""Records for other programs: CSV, MLPerf's log lines, Extra-P's JSON.

    export(collect([Path("studies/strong")]), "csv")

`csv`: a line for each epoch of each run. `mlperf`: the lines that MLPerf's tools parse (:::MLLOG and JSON), a run after another;
they tell of a training, and make no submission of it. `extrap`: seconds of steady epochs and of their phases over ranks, one point
for each number of ranks with all its epochs as values, for Extra-P's modeler.
"""

import csv
import io
import json
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, Final

from deepex.errors import RunError, UnknownName
from deepex.record import PHASES, EpochRecord
from deepex.record.measure import LOSS, Measure
from deepex.record.target import Target
from deepex.report.collect import Collection, Run


def export(collection: Collection, kind: str) -> str:
    """The text of one of `FORMATS`."""
    if kind not in FORMATS:
        raise UnknownName("export format", kind, FORMATS)
    return FORMATS[kind](collection)


def to_csv(collection: Collection) -> str:
    """A line for each epoch of each run, with what the run varies."""
    runs = collection.all_runs()
    varied = list(dict.fromkeys(key for run in runs for key in run.varied if key != "ranks"))
    measures = dict.fromkeys(measure.name for run in runs for measure in (LOSS, *run.measures))
    scores = [(part, measure) for part in ("train", "validation") for measure in measures]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    fixed = ("ranks", "replicas", "batch", "epoch", "samples", "seconds", "measured", "partial", "rate", "syncs")
    head = ["run", "status", *(f"set_{key}" if key in fixed else key for key in varied), *fixed]
    writer.writerow([*head, *(f"{phase}_seconds" for phase in PHASES), *(f"{part}_{measure}" for part, measure in scores)])
    for run in runs:
        for epoch in run.epochs:
            own = [run.name, run.status, *(run.varied.get(key, "") for key in varied), epoch.ranks]
            own += [run.state.get("replicas", ""), run.config.get("batch", ""), epoch.epoch, epoch.samples, epoch.seconds]
            own += [epoch.measured, epoch.partial, epoch.rate, epoch.syncs]
            times = [epoch.phase_seconds(phase) for phase in PHASES]
            writer.writerow([*own, *times, *("" if (v := epoch.score(*which)) is None else v for which in scores)])
    return text.getvalue()


def to_mlperf(collection: Collection) -> str:
    """MLPerf's log lines of each run. Moments within a run are summed up from its epochs' times."""
    return "".join(line for run in collection.all_runs() for line in _mlperf(run))


def _mlperf(run: Run) -> Iterator[str]:
    started = datetime.fromisoformat(run.state["started"]).timestamp()
    moment = started + float(run.state.get("setup_seconds") or 0)
    config, replicas = run.config, int(run.state.get("replicas") or run.ranks)
    yield _line(started, "INTERVAL_START", "init_start", None, run=run.name)
    about = {
        "submission_benchmark": f"{config.get('net')} on {config.get('data')}",
        "submission_platform": f"{run.ranks} rank(s)",
        "seed": config.get("seed"),
        "global_batch_size": replicas * int(config.get("batch", 0)),
        "opt_name": config.get("optim", {}).get("method"),
        "opt_base_learning_rate": config.get("optim", {}).get("rate"),
        "train_samples": run.epochs[0].samples,
    }
    for key, value in about.items():
        yield _line(moment, "POINT_IN_TIME", key, value, run=run.name)
    yield _line(moment, "INTERVAL_END", "init_stop", None, run=run.name)
    yield _line(moment, "INTERVAL_START", "run_start", None, run=run.name)
    for epoch in run.epochs:
        yield _line(moment, "INTERVAL_START", "epoch_start", None, run=run.name, epoch_num=epoch.epoch)
        moment += epoch.seconds
        yield _line(moment, "INTERVAL_END", "epoch_stop", None, run=run.name, epoch_num=epoch.epoch)
        if epoch.validation is not None:
            yield _line(moment, "INTERVAL_START", "eval_start", None, run=run.name, epoch_num=epoch.epoch)
            moment += epoch.validation.seconds or 0.0
            yield _line(moment, "POINT_IN_TIME", *_evaluated(run.measure, epoch), run=run.name, epoch_num=epoch.epoch)
            yield _line(moment, "INTERVAL_END", "eval_stop", None, run=run.name, epoch_num=epoch.epoch)
    goal = config.get("target")  # without one, a run that finished did what was asked of it
    reached = not goal or Target.parse(str(goal)).reached(run.epochs[-1])
    ended = "success" if run.status == "finished" and reached else "aborted"
    yield _line(moment, "INTERVAL_END", "run_stop", None, run=run.name, status=ended)


def _evaluated(measure: Measure, epoch: EpochRecord) -> tuple[str, float | None]:
    """MLPerf knows accuracies: of a share that should be low, the rest. Anything else has its own name."""
    value = epoch.score("validation", measure.name)
    if value is not None and measure.is_share and measure.better == "lower":
        return "eval_accuracy", 1 - value
    return f"eval_{measure.name}", value


def _line(moment: float, event: str, key: str, value: Any, **metadata: Any) -> str:
    table = {
        "namespace": "",
        "time_ms": round(1000 * moment),
        "event_type": event,
        "key": key,
        "value": value,
        "metadata": metadata,
    }
    return f":::MLLOG {json.dumps(table)}\n"


def to_extrap(collection: Collection) -> str:
    """Seconds over ranks. What else a study varies is told by the name: Extra-P takes it for a kernel of its own."""
    measured: dict[str, dict[int, list[float]]] = {}
    for run in collection.all_runs():
        rest = ", ".join(f"{key} {value}" for key, value in run.varied.items() if key not in ("ranks", "seed"))
        root = f"train ({rest})" if rest else "train"
        for epoch in run.steady:
            _point(measured, root, run.ranks, epoch.seconds)
            for phase in PHASES if run.has_phases else ():
                _point(measured, f"{root}->{phase}", run.ranks, epoch.phase_seconds(phase))
    if not measured:
        raise RunError("Extra-P's format is for trainings, and there are none here: give runs, or a study that trains")
    tables = {
        name: {"time": [{"point": [ranks], "values": values} for ranks, values in sorted(points.items())]}
        for name, points in measured.items()
    }
    return json.dumps({"parameters": ["ranks"], "measurements": tables}, indent=1) + "\n"


def _point(measured: dict[str, dict[int, list[float]]], name: str, ranks: int, seconds: float) -> None:
    measured.setdefault(name, {}).setdefault(ranks, []).append(seconds)


FORMATS: Final[dict[str, Callable[[Collection], str]]] = {"csv": to_csv, "mlperf": to_mlperf, "extrap": to_extrap}
