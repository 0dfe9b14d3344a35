"""One run, from a configuration and a communicator to a run directory; `deepex.train` joins it with our networks."""

import dataclasses
import os
import socket
from contextlib import ExitStack, suppress
from datetime import datetime
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from deepex.arena.network import beside_tensors
from deepex.comm import Communicator, as_communicator, connect
from deepex.comm.nodes import describe_nodes
from deepex.comm.same import gather_same
from deepex.comm.selection import device_name
from deepex.comm.together import abort_on_failure, together
from deepex.data.feeds import read_counter
from deepex.errors import ConfigError, DataError
from deepex.machine.heap import give_back_heap
from deepex.record import RunDirectory
from deepex.record.run import hold
from deepex.training.build import build
from deepex.training.checkpoint import save_weights
from deepex.training.config import RunConfig
from deepex.training.gather import BuildNetwork, agree, make_job, pick_device, try_order
from deepex.training.job import Job
from deepex.training.notes import describe, note_end, note_failure, note_start
from deepex.training.process import process_settings
from deepex.training.resume import as_begun, check_going_on, find_checkpoints, load, say, step_begun
from deepex.training.same import started_with
from deepex.training.session import Outcome, Session
from deepex.training.usual import torch_as_usual
from deepex.training.watch import Watcher


def run_training(
    config: RunConfig,
    comm: Any,
    build_network: BuildNetwork,
    *,
    out: Path | str | None = None,
    resume: bool = False,
    watcher: Watcher | None = None,
) -> RunDirectory:
    """What `deepex.train` promises, with networks from `build_network`."""
    watcher = watcher or Watcher()
    with torch_as_usual():
        return _connected(config, comm, build_network, out=out, resume=resume, watcher=watcher)


def _connected(
    config: RunConfig, comm: Any, build_network: BuildNetwork, *, out: Path | str | None, resume: bool, watcher: Watcher
) -> RunDirectory:
    communicator = connect(_checked(config).comm, device=_device_type(config)) if comm is None else as_communicator(comm)
    path: Path | None = None
    try:
        with abort_on_failure(communicator, say, lambda text: _log(path, communicator.rank, text)):
            try:
                device = together(communicator, lambda: _device_type(config))
                facts, own = (
                    started_with(config, device, resume=resume, out=out),
                    pick_device(config.device, communicator.place.local_rank),
                )
                rows = gather_same(communicator, facts, [str(out or _default_out(config)), _device_name(own)])
                path = Path(rows[0][0])
                if device == "cuda":
                    communicator.check_sums(own)
                on_device = [row[1] for row in rows].count(rows[communicator.rank][1])
                with ExitStack() as held:
                    return _train(
                        config, communicator, path, held, build_network, ranks_on_device=on_device, resume=resume, watcher=watcher
                    )
            finally:
                watcher.closed()
    finally:
        give_back_heap()
        if communicator is not comm:
            with suppress(Exception):  # while an error is on its way, that error matters
                communicator.close()


def _checked(config: Any) -> RunConfig:
    if not isinstance(config, RunConfig):
        kind = type(config).__name__
        raise ConfigError(f"config is a {kind}; it must be a RunConfig, for example deepex.recipe('fashion'), on every rank")
    return config


def _device_type(config: Any) -> str:
    return pick_device(_checked(config).device, 0).type


def _device_name(device: torch.device) -> str:
    """What tells a rank's accelerator, or its CPU, from those of the others."""
    return device_name(device) if device.type == "cuda" else socket.gethostname()


def _train(
    config: RunConfig,
    comm: Communicator,
    path: Path,
    held: ExitStack,
    build_network: BuildNetwork,
    *,
    ranks_on_device: int,
    resume: bool,
    watcher: Watcher,
) -> RunDirectory:
    """Settle, build, run. Each line that begins with `together`, or is marked, is collective."""
    run = RunDirectory(path)
    held.enter_context(read_counter.counting())  # what else the process reads is no part of the run
    if resume:
        together(comm, lambda: _hold(RunDirectory.open(path).path, held, comm))
    found = together(comm, lambda: find_checkpoints(path, config, comm, resume=resume))
    if resume:
        config = together(comm, lambda: as_begun(config, run))
    job = together(comm, lambda: make_job(config, comm, build_network, ranks_on_device=ranks_on_device))
    if resume:
        job = dataclasses.replace(job, begun=together(comm, lambda: step_begun(job, run)))
        together(comm, lambda: check_going_on(path, job, found[0] if found else None))
    together(comm, lambda: _verify(job, comm))
    if comm.rank == 0:
        _warn(job)
    job = agree(job, comm, checkpoint=found[0].path.name if found else None)  # collective
    with process_settings(job, job.plan.threads[comm.rank], os.environ) as heap:
        job = try_order(job, comm)  # collective
        machines = describe_nodes(comm, path.parent, os.environ)  # collective
        if not resume:
            together(comm, lambda: _hold(path, held, comm))
        began = perf_counter()
        parts = build(job, comm, resuming=bool(found))  # collective
        with Session(parts, run, watcher) as session:
            position = load(session, found, path)  # collective
            state, here = describe(parts, heap=heap, seconds=perf_counter() - began), position if resume else None
            together(comm, lambda: note_start(run, parts.job, state, machines, resumed=here) if comm.rank == 0 else None)
            if comm.rank == 0:
                watcher.began(run.state)
            try:
                outcome = session.train(position)  # collective
                _deliver(session, run, outcome)  # collective
            except BaseException as error:
                note_failure(run, comm, error)
                raise
        if comm.rank == 0:
            watcher.ended(outcome.status, outcome.reason)
        comm.barrier()
    return run


def _hold(path: Path, held: ExitStack, comm: Communicator) -> None:
    """Keep other jobs out of the run directory until `held` is closed; rank 0 does."""
    if comm.rank > 0:
        return
    existed = path.exists()
    held.enter_context(hold(path))
    if not existed:
        held.callback(_discard_empty, path)


def _discard_empty(path: Path) -> None:
    """Take away a directory that we have made and in which no run has begun, so that nothing is left of a mistake.

    A disk that fills up may have left some of what is there before `run.json`.
    """
    if any((path / name).exists() for name in ("run.json", "epochs.jsonl")):
        return
    with suppress(OSError):
        (path / "checkpoints").rmdir()
    for part in (path / "config.toml", path / "machine.json", path / ".lock", *path.glob(".*.part")):
        with suppress(OSError):
            part.unlink()
    with suppress(OSError):
        path.rmdir()


def _verify(job: Job, comm: Communicator) -> None:
    """See that every file is there and of its size, each rank some of them. What is in a file is checked when it is read."""
    bad = job.dataset.missing(comm.rank, comm.size)
    if bad:
        more = f" (and {len(bad) - 1} more: see `deepex data verify`)" if len(bad) > 1 else ""
        raise DataError(f"{bad[0]}{more}")


def _warn(job: Job) -> None:
    if keeps := beside_tensors(job.network):
        what = f"the modules {', '.join(map(repr, keeps[:4]))}" if len(keeps) > 1 else f"the module {keeps[0]!r}"
        say(
            f"{what} of the network has a get_extra_state(): what that gives is in no checkpoint and not in weights.safetensors, "
            "and a run that is resumed begins without it; keep it in buffers"
        )


def _deliver(session: Session, run: RunDirectory, outcome: Outcome) -> None:
    """Write what a finished run has learnt, and how the run ended."""
    parts = session.parts
    if outcome.status == "finished":
        with session.delivered(outcome.position.epoch - 1):
            if parts.comm.rank == 0:
                save_weights(run.path / "weights.safetensors", parts.arena, parts.network)
    if parts.comm.rank == 0:
        note_end(run, outcome.status, outcome.reason)


def _default_out(config: RunConfig) -> Path:
    return Path("runs") / f"{config.net.replace(':', '-')}-{datetime.now().astimezone():%Y%m%d-%H%M%S}"


def _log(path: Path | None, rank: int, text: str) -> None:
    with suppress(OSError):
        if path is not None and path.is_dir():
            (path / f"failure-rank{rank}.txt").write_text(text, encoding="utf-8")
