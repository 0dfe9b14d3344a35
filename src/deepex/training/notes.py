"""What a run directory says of a run beside its epochs: how it was set up, what was chosen and why, and how it ended.

    state = describe(parts, heap=heap, seconds=2.5)
    note_start(run, parts.job, state, machines, resumed=None)
    note_end(run, "finished", "10 epochs done")

Rank 0 writes; a rank that fails alone does it for rank 0, which it is about to end.
"""

import dataclasses
from contextlib import suppress
from typing import Any

from deepex.comm import Communicator
from deepex.comm.together import AgreedError
from deepex.data.feeds import read_counter
from deepex.errors import DeepexError, told
from deepex.record import EpochRecord, RunDirectory
from deepex.record.files import write_text
from deepex.record.table import differences, dump_toml, to_table
from deepex.training.checkpoint import Position
from deepex.training.job import Job
from deepex.training.parts import Parts


def describe(parts: Parts, *, heap: str, seconds: float) -> dict[str, Any]:
    """What was chosen and built, and what this rank has read for that in so many seconds: the first epoch counts from here."""
    job, comm, arena, reasons = parts.job, parts.comm, parts.arena, parts.job.plan.reasons
    config, threads, manifest = job.config, job.plan.threads, job.dataset.manifest
    opens, num_bytes = read_counter.take()
    return {
        "ranks": comm.size,
        "nodes": comm.place.num_nodes,
        "replicas": job.replicas,
        "comm": {"kind": comm.kind, "reason": comm.reason},
        "device": str(job.device.type),
        "threads": threads[comm.rank],
        **({"threads_by_rank": list(threads)} if len({*threads}) > 1 else {}),
        "placement": dataclasses.asdict(job.placement),
        "layout": {"kind": config.layout, "reason": reasons["layout"]},
        "sync": {"strategy": config.sync.strategy, "outer": config.sync.outer, "reason": reasons["sync"]},
        "network": {"name": config.net, "parameters": arena.num_parameters},
        "dataset": {"name": manifest.name, "digest": manifest.digest},
        "measures": [dataclasses.asdict(measure) for measure in parts.task.measures],
        "samples": {name: part.count for name, part in manifest.parts.items()} | {"train": job.shards.count},
        "data": _what_the_network_saw(parts),
        "heap": heap,
        "setup_seconds": seconds,
        "setup_usage": {"opens": opens, "data_bytes": num_bytes},
        "arena_bytes": arena.memory.nbytes,
        "sync_bytes": parts.meeting.agreement.nbytes,
        "arena_shared": comm.shares(arena.memory),
        "step": {**dataclasses.asdict(parts.runner.choice), **parts.step_by_rank},
        "statistics": {"kind": "running" if parts.statistics is None else "estimated", "reason": reasons["statistics"]},
    }


def _what_the_network_saw(parts: Parts) -> dict[str, Any]:
    """What a trained network needs of its dataset: how raw values became its input, and what its outputs stand for.

    A pixel is scaled from `scale` to 0…1. If it is `standardised`, `mean` is then subtracted, and the rest divided by `deviation`.
    """
    manifest = parts.job.dataset.manifest
    return {
        "shape": list(parts.job.input_shape),
        "classes": list(manifest.classes),
        "scale": list(manifest.scale),
        "mean": list(manifest.mean),
        "deviation": list(manifest.deviation),
        "standardised": parts.task.standardise,
        **(manifest.source if manifest.order == "dealt" else {}),  # a packed dataset keeps its own manifest
    }


def note_start(run: RunDirectory, job: Job, state: dict[str, Any], machines: list[Any], *, resumed: Position | None) -> None:
    """Begin the run directory, or note in it that the run goes on from where it is `resumed`.

    Not before all is built: of a run that cannot begin nothing is left, and one that cannot go on is left as it was.
    """
    table = to_table(dataclasses.replace(job.config, replicas=job.replicas, data=job.data_path))
    if resumed is None:
        RunDirectory.create(run.path, table, machines, state)
        return
    _keep_reasons(state, run.state)
    changed, resumes = run.state.get("changed", []), [*run.state.get("resumed", []), state["ranks"]]
    if keys := differences(run.config, table):
        changed = [*changed, {"epoch": resumed.epoch, "step": resumed.step, "keys": keys}]
    run.set_state(status="running", reason="", resumed=resumes, changed=changed, **state)
    write_text(run.path / "config.toml", dump_toml(table))
    run.forget_after(resumed.epoch)


def _keep_reasons(state: dict[str, Any], begun: dict[str, Any]) -> None:
    """Where a run that goes on has what it began with, the reason is that of the beginning."""
    for name in ("layout", "sync"):
        old = begun.get(name, {})
        if {**old, "reason": ""} == {**state[name], "reason": ""}:
            state[name] = old


def note_end(run: RunDirectory, status: str, reason: str) -> None:
    """Note how the run ended."""
    run.set_state(status=status, reason=reason, input_share=_input_share(run.epochs()))


def _input_share(epochs: list[EpochRecord]) -> dict[str, float | None]:
    """The input phase's share of the time, mean over ranks: of the first epoch, which reads the files, and of all later ones."""
    shares = [epoch.phase_seconds("input") / (sum(epoch.wall) / epoch.ranks) for epoch in epochs if not epoch.partial]
    first, later = shares[:1], shares[1:]
    return {"first_epoch": first[0] if first else None, "steady": sum(later) / len(later) if later else None}


def note_failure(run: RunDirectory, comm: Communicator, error: BaseException) -> None:
    """Note why the run ended."""
    agreed = isinstance(error, AgreedError)
    reason = str(error) if agreed else told(error)
    if not agreed and comm.size > 1:
        reason = f"rank {comm.rank}: {reason}"
    if comm.rank == 0 or not agreed:
        with suppress(DeepexError, OSError):  # a full disk, say, which is the error that is on its way
            run.set_failed(reason, comm.rank)
