"""How much runs of one setting differ: in the time of an epoch, by rank and by run, from epoch to epoch, and in what they learn.

variability_figures(experiment)
"""

from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from deepex.record.measure import Measure
from deepex.report.collect import Run
from deepex.report.convergence import score_text
from deepex.report.experiment import Experiment
from deepex.report.figure import Figure, View, axes, boxes, categories, quantile, thin
from deepex.report.words import count, number, seconds, share

_MOST_BOXES = 40
_OWN = ("input", "forward", "backward", "update")


def variability_figures(experiment: Experiment) -> list[Figure]:
    """For the largest group of repeats."""
    runs = max(experiment.groups, key=lambda group: len(group.runs)).runs
    figures = [_by_run(runs), _jitter(runs)]
    if runs[0].has_phases and runs[0].ranks > 1:
        figures.insert(1, _by_rank(runs))
    scores = _scores(runs, experiment.measure)
    return [*figures, _accuracy(scores, experiment.measure)] if len(scores) > 2 else figures


def _by_run(runs: Sequence[Run]) -> Figure:
    samples = {name: [epoch.seconds for epoch in run.steady] for name, run in zip(_names(runs), runs, strict=True)}
    middles = sorted(median(values) for values in samples.values())
    ratio = middles[-1] / middles[0]
    within = median((quantile(v, 0.75) - quantile(v, 0.25)) / median(v) for v in samples.values())
    sentence = (
        f"The median epoch of {count(len(runs), 'run')} takes from {seconds(middles[0])} to {seconds(middles[-1])}, a factor of "
        f"{number(ratio)}; within a run the middle half of the epochs lies within {share(within)}."
    )
    shown = samples if len(samples) <= _MOST_BOXES else {"medians of all runs": middles}
    return _box_figure("Seconds per epoch, by run", sentence, shown, x="run", y="seconds per epoch", series=0)


def _by_rank(runs: Sequence[Run]) -> Figure:
    """A rank's own work, without the wait in `sync` that makes all ranks equal."""
    ranks = range(min(run.ranks for run in runs))
    own = {str(rank): [sum(epoch.phases[name][rank] for name in _OWN) for run in runs for epoch in run.steady] for rank in ranks}
    middles = {rank: median(values) for rank, values in own.items()}
    slow, fast = max(middles, key=lambda rank: middles[rank]), min(middles, key=lambda rank: middles[rank])
    sentence = (
        f"Without waiting for others, rank {slow} works longest in an epoch ({seconds(middles[slow])} in the median) and "
        f"rank {fast} shortest ({seconds(middles[fast])}), {share(middles[slow] / max(middles[fast], 1e-12) - 1)} apart."
    )
    shown = {str(rank): own[str(rank)] for rank in thin(ranks, _MOST_BOXES)}
    return _box_figure("Seconds of own work per epoch, by rank", sentence, shown, x="rank", y="seconds of own work", series=1)


def _jitter(runs: Sequence[Run]) -> Figure:
    steps = {}
    for name, run in zip(_names(runs), runs, strict=True):
        times = [epoch.seconds for epoch in run.steady]
        usual = median(times)
        changes = [abs(after - before) / usual for before, after in pairwise(times)]
        steps[name] = changes or [0.0]
    everything = [value for values in steps.values() for value in values]
    sentence = (
        f"From one epoch to the next the time changes by {share(median(everything))} in the median, and by more than "
        f"{share(quantile(everything, 0.95))} once in twenty."
    )
    shown = steps if len(steps) <= _MOST_BOXES else {"all runs": everything}
    return _box_figure("Jitter from epoch to epoch", sentence, shown, x="run", y="change, as a share of the epoch", series=2)


def _names(runs: Sequence[Run]) -> list[str]:
    """The last part of each name; whole and numbered where that is not enough to tell them apart."""
    short = [run.name.rpartition("/")[2] for run in runs]
    return short if len(set(short)) == len(short) else [f"{at}: {run.name}" for at, run in enumerate(runs, start=1)]


def _scores(runs: Sequence[Run], measure: Measure) -> dict[str, float]:
    last = min(run.epochs[-1].epoch for run in runs)
    found = {}
    for name, run in zip(_names(runs), runs, strict=True):
        epoch = next(one for one in run.epochs if one.epoch == last) if any(e.epoch == last for e in run.epochs) else run.epochs[-1]
        value = epoch.score("validation", measure.name)
        value = epoch.score("train", measure.name) if value is None else value
        if value is not None:
            found[name] = value
    return found


def _accuracy(scores: dict[str, float], measure: Measure) -> Figure:
    values = list(scores.values())
    sentence = (
        f"After equally many epochs the {measure.name} of {count(len(values), 'run')} lies between "
        f"{score_text(measure, min(values))} and {score_text(measure, max(values))}, "
        f"in the median at {score_text(measure, median(values))}."
    )
    box = {
        "type": "box",
        "y": thin(sorted(values)),
        "boxpoints": "all",
        "jitter": 0.5,
        "pointpos": -1.6,
        "name": "",
        "hovertemplate": "%{y:.4g}<extra></extra>",
        "meta": {"series": 3, "role": "box"},
    }
    form = {"tickformat": ".3~%"} if measure.is_share else {}
    return Figure(
        title=f"Distribution of the {measure.name}",
        sentence=sentence,
        alt=f"Box and points of the {measure.name} over runs. {sentence}",
        columns=["run", measure.name],
        rows=[[name, value] for name, value in scores.items()],
        views=[View(traces=[box], layout=axes("all runs", measure.name, yaxis=form))],
        height=320,
    )


def _box_figure(title: str, sentence: str, samples: dict[str, list[float]], *, x: str, y: str, series: int) -> Figure:
    form = {"tickformat": ".2~%"} if "share" in y else {}
    return Figure(
        title=title,
        sentence=sentence + " Boxes hold the middle half, whiskers reach to the 5th and the 95th percentile.",
        alt=f"Box chart with {count(len(samples), 'box', 'boxes')}. {sentence}",
        columns=[x, "5 %", "25 %", "median", "75 %", "95 %", "values"],
        rows=[[name, *(quantile(v, q) for q in (0.05, 0.25, 0.5, 0.75, 0.95)), len(v)] for name, v in samples.items()],
        views=[
            View(
                traces=[boxes("", list(samples), list(samples.values()), series=series)],
                layout=axes(x, y, xaxis=categories(), yaxis=form),
            )
        ],
        height=340,
    )
