"""How a run goes on: the checkpoint that it takes, and what must be as it was.

found = find_checkpoints(path, config, comm, resume=True)      # the newest first; damaged ones are left out
position = load(session, found, path)                          # the newest that is whole to its last number
"""

import dataclasses
import sys
from functools import partial
from pathlib import Path
from typing import Any

from deepex.comm import Communicator
from deepex.comm.together import AgreedError, together
from deepex.errors import DamagedError, RunError
from deepex.record import RunDirectory
from deepex.record.run import refuse_existing_run
from deepex.record.table import from_table
from deepex.training import checkpoint as checkpoints
from deepex.training.config import RunConfig
from deepex.training.job import Job
from deepex.training.parts import Parts
from deepex.training.session import Session


def find_checkpoints(path: Path, config: RunConfig, comm: Communicator, *, resume: bool) -> list[checkpoints.Checkpoint]:
    """The checkpoints that a run may go on from, the newest first; none for a new one."""
    if not resume:
        refuse_existing_run(path)
        return []
    run = RunDirectory.open(path)
    if config.replicas not in (0, run.state["replicas"]):
        raise RunError(f"{path} was trained with {run.state['replicas']} replicas; it cannot go on with {config.replicas}")
    found = checkpoints.usable(path / "checkpoints", say if comm.rank == 0 else lambda _: None)
    _check_own(run, found)
    if not found:
        _check_none_is_lost(run)
    _check_position(path, config, found[0] if found else None)
    return found


def _check_own(run: RunDirectory, found: list[checkpoints.Checkpoint]) -> None:
    """Refuse what another run has learnt: it may be of the same network."""
    for checkpoint in found:
        if run.id and checkpoint.header.get("run", "") not in ("", run.id):
            raise RunError(
                f"checkpoint {checkpoint.path} is of another run than {run.path}: take it and its .json away, or restore the "
                "run's own"
            )


def _check_none_is_lost(run: RunDirectory) -> None:
    """Refuse to begin anew, over its records, a run that has written a checkpoint."""
    done, every = len(run.epochs()), run.config.get("checkpoint", {}).get("epochs", 1)
    finished = run.state.get("status") == "finished"
    if finished or done > every or not run.checkpoints.is_dir():  # one that was killed may have had no time for its first
        raise RunError(
            f"{run.path} has done {done} epoch{'s' * (done != 1)}, but there is no checkpoint in {run.checkpoints}: restore it, or "
            "begin a new run"
        )


def _check_position(path: Path, config: RunConfig, checkpoint: checkpoints.Checkpoint | None) -> None:
    """Refuse a configuration that does not go on where the checkpoint is."""
    run = RunDirectory.open(path)
    _check_epochs(path, config, checkpoint)
    _check_records(run, checkpoint)
    for key in ("batch", "seed", "samples") if _is_within_epoch(checkpoint) else ():
        if (begun := run.config.get(key, 0)) != getattr(config, key):
            raise RunError(
                f"{path} stopped in the middle of an epoch, whose other samples are told by the {key} {begun}; it cannot "
                f"go on with {getattr(config, key)}: resume it without, to the end of the epoch at least, or begin a new run"
            )


def check_going_on(path: Path, job: Job, checkpoint: checkpoints.Checkpoint | None) -> None:
    """Refuse what does not go on where the checkpoint is, on what the run began with."""
    _check_position(path, job.config, checkpoint)
    _check_dataset(path, job, checkpoint)


def as_begun(config: RunConfig, run: RunDirectory) -> RunConfig:
    """Take what is left to us as the run has it: replicas, and the layout, which a trial might choose differently this time."""
    replicas = config.replicas or run.state["replicas"]
    layout = run.config["layout"] if config.layout == "auto" else config.layout
    return dataclasses.replace(config, replicas=replicas, layout=layout)


def step_begun(job: Job, run: RunDirectory) -> str:
    """How the run's steps were run before, if on such a device."""
    return str(run.state.get("step", {}).get("kind", "")) if run.state.get("device") == job.device.type else ""


def _check_epochs(path: Path, config: RunConfig, checkpoint: checkpoints.Checkpoint | None) -> None:
    done = checkpoint.position if checkpoint is not None else checkpoints.Position()
    if (done.epoch, done.step) > (config.epochs, 0):
        least = done.epoch + (done.step > 0)
        more = " and a part of the next" if done.step else ""
        raise RunError(
            f"{path} has done {done.epoch} epochs{more}, and epochs is {config.epochs}: set it to {least} at least, or begin "
            "a new run"
        )


def _check_records(run: RunDirectory, checkpoint: checkpoints.Checkpoint | None) -> None:
    """Refuse to leave a gap in the records of a run: those of an epoch are written before its checkpoint."""
    done, recorded = checkpoint.position.epoch if checkpoint is not None else 0, len(run.epochs())
    if recorded < done:
        raise RunError(
            f"{run.path / 'epochs.jsonl'} has {recorded} epoch{'s' * (recorded != 1)}, but {done} were done: restore it, or begin "
            "a new run"
        )


def _is_within_epoch(checkpoint: checkpoints.Checkpoint | None) -> bool:
    return checkpoint is not None and checkpoint.position.step > 0


def _check_dataset(path: Path, job: Job, checkpoint: checkpoints.Checkpoint | None) -> None:
    """See that a run goes on with what it began with, unless it is told to take something else from the next epoch on."""
    run = RunDirectory.open(path)
    began = run.state.get("dataset", {}).get("digest")
    if began in (None, job.dataset.manifest.digest):
        return
    if _is_within_epoch(checkpoint):
        raise RunError(
            f"{path} stopped in the middle of an epoch on another dataset than is in {job.config.data}; resume it on that one, to "
            "the end of the epoch at least, or begin a new run"
        )
    if run.config["data"] == job.data_path:
        raise RunError(
            f"{path} was trained on another dataset than is in {job.config.data} now, so that its parts may be mixed; restore the "
            "dataset, begin a new run, or say with --set data=DIR that it shall go on with another one"
        )


def load(session: Session, found: list[checkpoints.Checkpoint], path: Path) -> checkpoints.Position:
    """Take over the newest checkpoint that is whole, or the initial weights; every rank takes the same. Collective."""
    parts, comm = session.parts, session.parts.comm
    for index, checkpoint in enumerate(found):
        together(comm, partial(check_going_on, path, parts.job, checkpoint))
        try:
            position, kept = together(comm, partial(_restore, checkpoint, parts))
        except AgreedError as refused:
            if not isinstance(refused.error, DamagedError) or index + 1 == len(found):
                raise
            if comm.rank == 0:
                say(f"{refused.error}; going on from the checkpoint before, {found[index + 1].path.name}")
            continue
        if comm.rank == 0:
            checkpoints.set_aside(path / "checkpoints", checkpoint)
        session.resume(kept=kept)
        return position
    return checkpoints.Position()


def _restore(checkpoint: checkpoints.Checkpoint, parts: Parts) -> tuple[checkpoints.Position, bool]:
    """Read a checkpoint: where it was taken, and whether it had something beside the arena.

    Without communication, so that all ranks can take the one before if it is damaged.
    """
    first = parts.mine[0]
    checkpoints.restore(checkpoint, parts.arena, parts.network)
    checkpoints.restore_states(checkpoint, parts.states.stored(), first, parts.arena)
    kept = checkpoints.restore_state(checkpoint, parts.meeting.agreement.state(), first)
    parts.rule.restore(checkpoint.header.get("rule", {}))
    position, drift = checkpoint.position, parts.meeting.drift
    if position.apart and drift is not None:
        try:
            drift.restore(round(position.apart[0]), position.apart[1:])
        except RuntimeError as error:  # of another length
            raise DamagedError(f"checkpoint {checkpoint.path} is damaged: its 'apart' is {position.apart}") from error
    return position, kept


def resumed_config(path: Path, changes: dict[str, Any]) -> RunConfig:
    """The configuration of the run in `path`, with `changes` to its table."""
    return from_table(RunConfig, {**RunDirectory.open(path).config, **changes})


def say(message: str) -> None:
    """Tell the person at the terminal."""
    sys.stderr.write(f"deepex: {message}\n")
    sys.stderr.flush()
