"""What a run used, as a table of `deepex show`. Reads records only."""

from collections.abc import Sequence
from typing import Any

from deepex.record import PHASES, EpochRecord

_PLACES = (*PHASES, "other")
_COLUMNS = {  # what a resource is called, its unit, and how much of it is one unit
    "cpu_seconds": ("CPU s", 1.0),
    "gpu_busy_seconds": ("GPU busy s", 1.0),
    "read_bytes": ("read MB", 1e6),
    "written_bytes": ("written MB", 1e6),
    "network_bytes": ("network MB", 1e6),
    "cpu_joules": ("CPU J", 1.0),
    "gpu_joules": ("GPU J", 1.0),
}


def print_usage(console: Any, epochs: Sequence[EpochRecord]) -> None:
    """What all ranks together used in an epoch, by phase, and how many cores each kept busy; nothing if nothing was sampled."""
    from rich.table import Table

    steady = [epoch for epoch in epochs if epoch.epoch > 1 and not epoch.partial] or list(epochs)
    sampled = [epoch for epoch in steady if epoch.usage]
    names = [name for name in _COLUMNS if sampled and all(name in epoch.usage for epoch in sampled)]
    if not names:
        return
    table = Table(title=f"what was used, per epoch, by {sampled[0].ranks} rank(s) together", title_justify="left")
    for column in ("phase", "cores of a rank", *(_COLUMNS[name][0] for name in names)):
        table.add_column(column, justify="left" if column == "phase" else "right")
    places = [place for place in _PLACES if any(place in epoch.usage[name] for epoch in sampled for name in names)]
    for place in places:
        amounts = (f"{_mean(sampled, name, (place,)) / _COLUMNS[name][1]:,.2f}" for name in names)
        table.add_row(place, _cores(sampled, place), *amounts, end_section=place == places[-1])
    totals = (f"{_mean(sampled, name, (*_PLACES, 'epoch')) / _COLUMNS[name][1]:,.2f}" for name in names)
    table.add_row("epoch", "", *totals)
    console.print(table)
    for name, words in (("memory_bytes", "memory of a rank"), ("gpu_memory_bytes", "memory in use on a GPU")):
        peaks = [max(values) for epoch in epochs for values in epoch.usage.get(name, {}).values()]
        if peaks:
            console.print(f"{words}, at most: {max(peaks) / 1e6:,.0f} MB")


def _mean(epochs: Sequence[EpochRecord], name: str, places: Sequence[str]) -> float:
    """All ranks' use of a resource in some phases, mean of epochs."""
    return sum(sum(epoch.usage[name].get(place, ())) for epoch in epochs for place in places) / len(epochs)


def _cores(epochs: Sequence[EpochRecord], phase: str) -> str:
    """How many cores a rank keeps busy in a phase; what is outside the phases has no time of its own."""
    seconds = sum(sum(epoch.phases.get(phase, ())) for epoch in epochs)
    if not seconds or any(phase not in epoch.usage.get("cpu_seconds", {}) for epoch in epochs):
        return ""
    return f"{sum(sum(epoch.usage['cpu_seconds'][phase]) for epoch in epochs) / seconds:.2f}"
