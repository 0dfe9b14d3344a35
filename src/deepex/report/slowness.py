"""Who is slow: a table of ranks that others waited for, in all runs.

slow_section(runs)
"""

from collections.abc import Sequence
from statistics import median

from deepex.report.collect import Run
from deepex.report.figure import Section, Table
from deepex.report.words import count, listed, seconds, share
from deepex.speedup.slow import SlowRank, slow_ranks

_MOST_ROWS = 200


def slow_section(runs: Sequence[Run]) -> Section | None:
    """None where no run has several ranks with phases."""
    looked = [run for run in runs if run.ranks > 1 and run.has_phases]
    if not looked:
        return None
    found = [(run, one) for run in looked for one in slow_ranks(run.epochs)]
    lead = (
        "A rank is slow if its own work (input, forward, backward and update, in which no rank waits for another) takes longer "
        "than the median of the others, by more than 8\u00a0% and by more than noise explains. What mending it would save is "
        "the epoch's time with that rank as fast as the median of the others, the rest unchanged."
    )
    if not found:
        return Section(title="Who is slow", lead=[f"No rank stands out in {count(len(looked), 'run')} on two ranks or more.", lead])
    found.sort(key=lambda item: -item[1].saved_seconds / item[1].epoch_seconds)
    return Section(title="Who is slow", lead=[slow_text(found), lead], tables=[_table(found)])


def slow_text(found: Sequence[tuple[Run, SlowRank]]) -> str:
    """The ranks that stand out, in a sentence or two."""
    chronic = [item for item in found if item[1].chronic]
    once = len(found) - len(chronic)
    texts = []
    if chronic:
        run, one = max(chronic, key=lambda item: item[1].saved_seconds)
        whom = listed(sorted({f"rank {one.rank} of {run.name} ({one.phase})" for run, one in chronic}), 4)
        texts.append(
            f"Slow in most epochs: {whom}. Mending rank {one.rank} of {run.name} alone would save {seconds(one.saved_seconds)} of "
            f"each epoch of {seconds(one.epoch_seconds)} ({share(one.saved_seconds / one.epoch_seconds)})."
        )
    if once:
        cost = median(one.saved_seconds for _, one in found if not one.chronic)
        texts.append(f"Slow in few epochs: {count(once, 'rank')}, each of which cost {seconds(cost)} there in the median.")
    return " ".join(texts)


def host_of(run: Run, rank: int) -> str:
    """Where a rank ran, as far as the record tells."""
    if len(run.machines) == 1:
        return str(run.machines[0].get("host"))
    return next((str(machine.get("host")) for machine in run.machines if rank in (machine.get("ranks") or ())), "not known")


def _table(found: Sequence[tuple[Run, SlowRank]]) -> Table:
    rows = [
        [
            run.name,
            one.rank,
            host_of(run, one.rank),
            one.phase,
            "chronic" if one.chronic else "one-off",
            f"{len(one.epochs)} of {one.looked_at}" if one.chronic else listed(map(str, one.epochs)),
            share(one.excess),
            seconds(one.saved_seconds),
            share(one.saved_seconds / one.epoch_seconds),
        ]
        for run, one in found[:_MOST_ROWS]
    ]
    more = f"The {_MOST_ROWS} costliest of {len(found):,} are listed." if len(found) > _MOST_ROWS else ""
    columns = ["run", "rank", "host", "phase", "kind", "epochs", "longer by", "mending saves", "of the epoch"]
    return Table(title="Ranks that others waited for", columns=columns, rows=rows, sentence=more)
