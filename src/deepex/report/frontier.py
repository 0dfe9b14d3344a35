"""Ways to sync compared: how fast an epoch is against how many epochs the target takes. Up and to the left is better.

frontier_figures(experiment)
"""

from statistics import median
from typing import Final

from deepex.record import Target
from deepex.report.experiment import Experiment, Group
from deepex.report.figure import Figure, View, axes, line
from deepex.report.words import number, seconds
from deepex.speedup.statistics import Interval, middle, ratio

_MOST: Final = 60


def frontier_figures(experiment: Experiment) -> list[Figure]:
    """One figure for each target that at least two settings reached."""
    return [figure for target in experiment.targets if (figure := _frontier(experiment, target)) is not None]


def best_setting(experiment: Experiment, target: Target) -> tuple[Group, Interval] | None:
    """The setting that reached the target in the least time, and that time."""
    reached = [(group, times) for group in experiment.groups if (times := group.seconds_to(target)) is not None]
    if not reached:
        return None
    group, times = min(reached, key=lambda item: median(map(median, item[1])))
    return group, middle(times)


def _speedup(base: Group, group: Group, *, precise: bool) -> Interval:
    """Of very many settings only the value: their intervals would take minutes and could not be told apart."""
    if precise:
        return ratio(base.seconds, group.seconds)
    value = median(map(median, base.seconds)) / median(map(median, group.seconds))
    return Interval(value=value, low=value, high=value, repeats=len(group.runs))


def _frontier(experiment: Experiment, target: Target) -> Figure | None:
    base = experiment.groups[0]
    reached = [group for group in experiment.groups if group.seconds_to(target) is not None]
    best = best_setting(experiment, target)
    if len(reached) < 2 or best is None:
        return None
    fast = [_speedup(base, group, precise=len(reached) <= _MOST) for group in reached]
    epochs = [median(value for value in group.epochs_to(target) if value is not None) for group in reached]
    at = reached.index(best[0])
    texts = [
        f"{group.label}: {number(gain.value)} times as fast per epoch, {number(steps)} epochs, "
        f"{seconds(median(map(median, times)))}"
        for group, gain, steps in zip(reached, fast, epochs, strict=True)
        if (times := group.seconds_to(target)) is not None
    ]
    hover = "%{text}"
    values = [gain.value for gain in fast]
    traces = [
        line("settings", epochs, values, text=texts, mode="markers", hover=hover),
        line("least time to the target", [epochs[at]], [values[at]], text=[texts[at]], mode="markers", series=1, hover=hover),
    ]
    traces[1]["marker"] = {"symbol": "star", "size": 16}
    missing = len(experiment.groups) - len(reached)
    sentence = (
        f"{best[0].label} reaches {target} in the least time, {seconds(best[1].value)}; "
        f"per epoch it is {number(values[at])} times as fast as {base.label}."
        + (f" {missing} of {len(experiment.groups)} settings did not reach the target every time." if missing else "")
    )
    return Figure(
        title=f"Speed of an epoch against epochs to {target}",
        sentence=sentence,
        alt=f"Scatter chart with a point for each of {len(reached)} settings. {sentence}",
        columns=[
            "setting",
            "per-epoch speedup",
            "low",
            "high",
            "epochs to the target (median)",
            "seconds to the target",
            "repeats",
        ],
        rows=[
            [
                group.label,
                gain.value,
                gain.low,
                gain.high,
                steps,
                median(map(median, group.seconds_to(target) or [])),
                len(group.runs),
            ]
            for group, gain, steps in zip(reached, fast, epochs, strict=True)
        ],
        views=[View(traces=traces, layout=axes("epochs to the target", f"per-epoch speedup over {base.label}"))],
    )
