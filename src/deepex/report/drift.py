"""How far replicas were apart when they met, and how far their mean had come since.

drift_figures(experiment)
"""

from statistics import median

from deepex.report.collect import Run
from deepex.report.experiment import Experiment
from deepex.report.figure import MOST_LINES, Figure, View, axes, line, thin
from deepex.report.words import count, listed, share


def drift_figures(experiment: Experiment) -> list[Figure]:
    """A line for each group that has replicas; the longest run of each stands for it."""
    chosen = [
        (group.label or group.runs[0].name, max(group.runs, key=lambda run: len(run.epochs)))
        for group in experiment.groups
        if any("all" in epoch.drift for run in group.runs for epoch in run.epochs)
    ]
    chosen = thin(chosen, MOST_LINES)
    if not chosen:
        return []
    views = [_view(chosen, "drift", "drift"), _view(chosen, "moved", "moved since the sync before")]
    last = [f"{share(_last(run))} with {name}" for name, run in chosen]
    sentence = f"In the last epochs a replica was away from the mean, as a share of its norm, by {listed(last)}."
    rows = [
        [name, epoch.epoch, epoch.drift["all"], epoch.moved.get("all"), epoch.syncs, epoch.lost]
        for name, run in chosen
        for epoch in thin([e for e in run.epochs if "all" in e.drift])
    ]
    lost = sum(epoch.lost for _, run in chosen for epoch in run.epochs)
    return [
        Figure(
            title="Drift of replicas",
            sentence=sentence + (f" A replica was left out of a sync {count(lost, 'time')}, having gone astray." if lost else ""),
            alt=f"Line chart over epochs of how far replicas were from their mean. {sentence}",
            columns=["runs", "epoch", "drift", "moved", "syncs", "left out"],
            rows=rows,
            views=views,
            height=320,
        )
    ]


def _view(chosen: list[tuple[str, Run]], field: str, label: str) -> View:
    traces = []
    for i, (name, run) in enumerate(chosen):
        epochs = thin([epoch for epoch in run.epochs if "all" in getattr(epoch, field)])
        values = [getattr(epoch, field)["all"] for epoch in epochs]
        traces.append(line(name, [e.epoch for e in epochs], values, series=i, hover="epoch %{x}: %{y:.2%}"))
    layout = axes("epoch", "share of the norm", yaxis={"tickformat": ".2~%", "rangemode": "tozero"})
    return View(label=label, traces=traces, layout=layout)


def _last(run: Run) -> float:
    return median([epoch.drift["all"] for epoch in run.epochs if "all" in epoch.drift][-3:])
