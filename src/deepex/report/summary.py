"""The report in words: what each study or group of runs shows, and never more than that.

summary_section(collection, experiments, gained)
"""

from collections.abc import Sequence
from statistics import median

from deepex.report.collect import Collection
from deepex.report.convergence import score_text
from deepex.report.experiment import Experiment
from deepex.report.figure import MOST_LINES, Section, Table
from deepex.report.frontier import best_setting
from deepex.report.gain import Gain, gain_text
from deepex.report.settings import against, fastest
from deepex.report.storage import storage_figures
from deepex.report.threads import thread_figures
from deepex.report.transfer import transfer_figures
from deepex.report.weak import weak_efficiency
from deepex.report.words import count, listed, seconds, share, within
from deepex.speedup.statistics import middle

_MOST = 8
KINDS = {
    "strong": "Strong scaling",
    "weak": "Weak scaling",
    "sync": "Ways to sync",
    "threads": "Threads and kernels",
    "variability": "Variability",
    "storage": "Storage and input",
    "transfer": "Moving data",
    "frameworks": "Frameworks",
    "settings": "Settings compared",
    "runs": "Training",
}


def heading(experiment: Experiment, *, several: bool) -> str:
    """What a section is called; with its directory where several are alike."""
    name = KINDS.get(experiment.kind, f"Study: {experiment.kind}")
    what = experiment.title or experiment.name
    return f"{name}: {what}" + (f" ({experiment.name})" if several and experiment.name != what else "")


def summary_section(collection: Collection, experiments: Sequence[Experiment], gained: Sequence[Sequence[Gain]]) -> Section:
    """Verdicts; then what failed, has not ended or cannot be read."""
    runs = collection.all_runs()
    found = [(_head(one), verdicts(one, gains)) for one, gains in zip(experiments, gained, strict=True)]
    items = [(head, texts) for head, texts in found if texts]
    lead = [
        f"This report is made of {count(len(runs), 'run')}"
        + (f" and {count(len(collection.studies), 'study', 'studies')}" if collection.studies else "")
        + "."
    ]
    if runs:
        lead[0] += (
            " The first epoch of a run warms up and is left out of all times, unless it is alone; so are epochs that were "
            f"resumed in their middle. {_repeats(experiments)} Intervals are of 95\u00a0%, by resampling repeats and the epochs "
            "within them."
        )
    tables = []
    if collection.problems:
        rows = [[one.name, one.status, one.reason] for one in collection.problems]
        kinds = listed(
            f"{sum(one.status == kind for one in collection.problems)} {kind}" for kind in dict.fromkeys(r[1] for r in rows)
        )
        tables.append(
            Table(
                title=f"Not finished, failed or unreadable: {kinds}",
                columns=["run", "status", "why"],
                rows=rows,
                folded=len(rows) > 20,
            )
        )
    return Section(title="Summary", lead=lead, items=items, tables=tables)


def _head(experiment: Experiment) -> str:
    return f"{KINDS.get(experiment.kind, experiment.kind)}: {experiment.title or experiment.name}"


def verdicts(experiment: Experiment, gained: Sequence[Gain]) -> list[str]:
    """A few sentences for one experiment."""
    if experiment.kind == "transfer":
        return [figure.sentence.partition(" Points are")[0] for figure in transfer_figures(experiment.measurements)]
    if experiment.kind == "threads":
        return [figure.sentence for figure in thread_figures(experiment)][:_MOST]
    if experiment.kind == "weak":
        return _weak(experiment)
    if experiment.kind == "storage" and len(experiment.groups) > 1:
        return [fastest(experiment.groups), *(figure.sentence for figure in storage_figures(experiment)[1:])]
    texts = [gain_text(gain) for gain in gained[:_MOST]]
    if len(gained) > _MOST:
        texts.append(f"{len(gained) - _MOST} more are in the figures' tables.")
    apart = len(experiment.ladders()) - MOST_LINES
    if gained and apart > 0:
        texts.append(f"{apart:,} more settings ran on several numbers of ranks and are in no figure over ranks.")
    best = _best(experiment) if experiment.kind in ("sync", "settings", "frameworks") else []
    return texts + _times(experiment, gained) + best


def _weak(experiment: Experiment) -> list[str]:
    base, *rest = sorted(experiment.groups, key=lambda group: group.ranks)
    texts = []
    for group in rest:
        kept = weak_efficiency(base, group)
        rate = f"{share(kept.value)} of the rate per rank of {count(base.ranks, 'rank')}"
        texts.append(f"{group.label}{group.sharing}: {rate} {within(kept, share)}.")
    return texts


def _times(experiment: Experiment, gained: Sequence[Gain]) -> list[str]:
    """Where no ladder tells: what an epoch takes, or how settings compare."""
    if not experiment.runs or gained:
        return []
    if len(experiment.groups) == 1:
        group = experiment.groups[0]
        time = middle(group.seconds)
        last = [run.epochs[-1] for run in group.runs]
        held = [value for epoch in last if (value := epoch.score("validation", experiment.measure.name)) is not None]
        train = [value for epoch in last if (value := epoch.score("train", experiment.measure.name)) is not None]
        value = median(held or train)
        part = "validation" if held else "training"
        ends = f"{score_text(experiment.measure, value)}{' in the median' if len(last) > 1 else ''}"
        text = (
            f"{count(group.ranks, 'rank')}: an epoch takes {seconds(time.value)} {within(time, seconds)}; "
            f"the {part} {experiment.measure.name} ends at {ends} after {count(last[0].epoch, 'epoch')}."
        )
        return [text]
    return [fastest(experiment.groups)]


def _best(experiment: Experiment) -> list[str]:
    texts = []
    for target in experiment.targets if len(experiment.groups) > 1 else []:
        best = best_setting(experiment, target)
        if best is None:
            texts.append(f"No setting reached {target} in every repeat.")
            continue
        reached = {group.label: times for group in experiment.groups if (times := group.seconds_to(target)) is not None}
        gained = against(reached.pop(best[0].label), reached)
        texts.append(f"{best[0].label} reached {target} in the least time, {seconds(best[1].value)}{gained}.")
    return texts


def _repeats(experiments: Sequence[Experiment]) -> str:
    many = [len(group.runs) for experiment in experiments for group in experiment.groups]
    if not many:
        return ""
    least, most = min(many), max(many)
    if most == 1:
        return "Every setting ran once: intervals cover how epochs differ, not how runs do."
    return f"Every setting has {least if least == most else f'{least} to {most:,}'} repeats."
