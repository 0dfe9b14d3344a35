"""The chapters of a report, from a collection of runs.

sections = chapters(collect([Path("studies/strong")]))
"""

from collections.abc import Sequence
from typing import Final

from deepex.report.collect import Collection
from deepex.report.convergence import convergence_figures
from deepex.report.drift import drift_figures
from deepex.report.experiment import Experiment, experiments
from deepex.report.figure import Figure, Section
from deepex.report.frameworks import framework_figures, framework_table
from deepex.report.frontier import frontier_figures
from deepex.report.gain import Gain, gains
from deepex.report.machine import machine_section
from deepex.report.phases import phase_figures
from deepex.report.scaling import scaling_figures
from deepex.report.settings import setting_figures
from deepex.report.slowness import slow_section
from deepex.report.storage import storage_figures, storage_table
from deepex.report.summary import KINDS, heading, summary_section
from deepex.report.threads import thread_figures
from deepex.report.transfer import transfer_figures, transfer_table
from deepex.report.usage import usage_figures, usage_table
from deepex.report.variability import variability_figures
from deepex.report.weak import weak_figures
from deepex.report.words import count

_TO_TARGETS: Final = ("strong", "sync", "settings", "frameworks")  # the kinds that tell what a target takes


def chapters(collection: Collection) -> list[Section]:
    """Summary, machine, a chapter for each experiment, who is slow. What has no data is left out."""
    order = list(KINDS)
    found = sorted(experiments(collection), key=lambda one: order.index(one.kind) if one.kind in order else len(order))
    gained = [gains(one) if one.kind not in ("weak", "threads", "transfer") else [] for one in found]
    runs = collection.all_runs()
    parts = [summary_section(collection, found, gained)]
    parts += [machine_section(runs, found)] if runs else []
    several = len({(one.kind, one.title) for one in found}) < len(found)
    parts += [_chapter(one, gain, several=several) for one, gain in zip(found, gained, strict=True)]
    slow = slow_section(runs)
    return [*parts, slow] if slow else parts


def _chapter(experiment: Experiment, gained: Sequence[Gain], *, several: bool) -> Section:
    if not experiment.runs:
        figures, lines = transfer_figures(experiment.measurements), transfer_table(experiment.measurements)
        closing = [lines] if lines else []
        return Section(title=heading(experiment, several=several), lead=[_lead(experiment)], figures=figures, closing=closing)
    tables = [framework_table(experiment)] if experiment.kind == "frameworks" else []
    read = storage_table(experiment) if experiment.kind == "storage" else None
    used = usage_table(experiment)
    return Section(
        title=heading(experiment, several=several),
        lead=[_lead(experiment)],
        figures=_figures(experiment, gained),
        tables=tables,
        closing=[table for table in (read, used) if table],
    )


def _figures(experiment: Experiment, gained: Sequence[Gain]) -> list[Figure]:
    """First what the kind is about, then what every training has."""
    kind = experiment.kind
    own = {
        "weak": weak_figures,
        "sync": frontier_figures,
        "threads": thread_figures,
        "variability": variability_figures,
        "storage": storage_figures,
        "frameworks": framework_figures,
        "settings": setting_figures,
    }
    figures = scaling_figures(experiment, gained)
    figures += own[kind](experiment) if kind in own else []
    figures += variability_figures(experiment) if kind == "runs" and len(experiment.runs) > 2 else []
    figures += transfer_figures(experiment.measurements)
    figures += phase_figures(experiment)
    learning = [] if kind in ("threads", "storage") else [*convergence_figures(experiment), *drift_figures(experiment)]
    return figures + learning + usage_figures(experiment)


def _lead(experiment: Experiment) -> str:
    groups, runs = len(experiment.groups), len(experiment.runs)
    if not runs:
        return f"{count(len(experiment.measurements), 'measurement')}."
    text = f"{count(runs, 'run')} in {count(groups, 'setting')}"
    if experiment.kind not in _TO_TARGETS:
        return f"{text}."
    why = " (chosen afterwards: what every setting came to that learnt)" if experiment.afterwards else ""
    return text + (f"; cut-offs: {', '.join(map(str, experiment.targets))}{why}." if experiment.targets else ".")
