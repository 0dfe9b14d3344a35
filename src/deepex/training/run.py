"""One run, from a configuration and a communicator to a run directory; `deepex.train` joins it with our networks."""

import dataclasses
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
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
from deepex.comm.together import AgreedError, abort_on_failure, together
from deepex.data.feeds import read_counter
from deepex.errors import ConfigError, DataError, DeepexError, told
from deepex.machine.cache import keep_compiled
from deepex.machine.heap import give_back_heap, keep_heap
from deepex.record import EpochRecord, RunDirectory
from deepex.record.files import write_text
from deepex.record.run import hold
from deepex.record.table import differences, dump_toml, to_table
from deepex.training import checkpoint as checkpoints
from deepex.training.config import RunConfig
from deepex.training.gather import BuildNetwork, agree, choices, make_job, pick_device, try_order
from deepex.training.job import Job
from deepex.training.resume import absolute, as_begun, find_checkpoints, keep_reasons, load, say, step_begun
from deepex.training.same import started_with
from deepex.training.trainer import Outcome, Trainer
from deepex.training.usual import round_products, torch_as_usual
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
    together(comm, lambda: _verify(job, comm))
    if comm.rank == 0:
        _warn(job)
    job = agree(job, comm, checkpoint=found[0].path.name if found else None)
    with _settings(config, job, job.plan.threads[comm.rank]) as heap:
        job = try_order(job, comm)
        machines = describe_nodes(comm, path.parent, os.environ)
        if not resume:
            together(comm, lambda: _hold(path, held, comm))
        began = perf_counter()
        trainer = Trainer(job, comm, run, watcher)
        try:
            position = load(trainer, found, path, job, comm, resume=resume)
            job = trainer.job  # settled to the last
            state = choices(job, comm, comm_reason=comm.reason, threads=job.plan.threads[comm.rank]) | {"heap": heap}
            state |= _setup(trainer, comm, perf_counter() - began) | _threads_by_rank(job)
            here = position if resume else None
            together(comm, lambda: _note_start(run, job, state, machines, here) if comm.rank == 0 else None)
        except BaseException:
            trainer.close()
            raise
        if comm.rank == 0:
            watcher.began(run.state)
        try:
            outcome = trainer.run(position)
            _finish(trainer, job, comm, run, outcome)
        except BaseException as error:
            _note_failure(run, comm, error)
            raise
        if comm.rank == 0:
            watcher.ended(outcome.status, outcome.reason)
        comm.barrier()
    return run


def _setup(trainer: Trainer, comm: Communicator, seconds: float) -> dict[str, Any]:
    """What was built, and what this rank has read for it: the first epoch counts from here."""
    opens, num_bytes = read_counter.take()
    learner = trainer.learner
    estimated = learner.statistics is not None
    return {
        "setup_seconds": seconds,
        "setup_usage": {"opens": opens, "data_bytes": num_bytes},
        "arena_bytes": learner.arena.memory.nbytes,
        "sync_bytes": learner.sync_bytes,
        "arena_shared": comm.shares(learner.arena.memory),
        "step": {**dataclasses.asdict(learner.runner.choice), **learner.step_by_rank},
        "statistics": {"kind": "estimated" if estimated else "running", "reason": trainer.job.plan.reasons["statistics"]},
    }


def _threads_by_rank(job: Job) -> dict[str, list[int]]:
    """The threads of every rank, where they differ."""
    threads = job.plan.threads
    return {"threads_by_rank": list(threads)} if len({*threads}) > 1 else {}


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


def _note_start(
    run: RunDirectory, job: Job, state: dict[str, Any], machines: list[Any], resumed: checkpoints.Position | None
) -> None:
    """Begin the run directory, or note in it that the run goes on from where it is `resumed`; rank 0 does.

    Not before all is built: of a run that cannot begin nothing is left, and one that cannot go on is left as it was.
    """
    if resumed is None:
        RunDirectory.create(run.path, _table(job), machines, state)
        return
    keep_reasons(state, run.state)
    changed, resumes = run.state.get("changed", []), [*run.state.get("resumed", []), state["ranks"]]
    if keys := differences(run.config, _table(job)):
        changed = [*changed, {"epoch": resumed.epoch, "step": resumed.step, "keys": keys}]
    run.set_state(status="running", reason="", resumed=resumes, changed=changed, **state)
    write_text(run.path / "config.toml", dump_toml(_table(job)))
    run.forget_after(resumed.epoch)


def _table(job: Job) -> dict[str, Any]:
    """The configuration with which the run can be repeated."""
    return to_table(dataclasses.replace(job.config, replicas=job.replicas, data=absolute(job.config.data)))


def _finish(trainer: Trainer, job: Job, comm: Communicator, run: RunDirectory, outcome: Outcome) -> None:
    if outcome.status == "finished":
        with trainer.delivered(outcome.position.epoch - 1):
            if comm.rank == 0:
                checkpoints.save_weights(run.path / "weights.safetensors", trainer.learner.arena, job.network)
    if comm.rank == 0:
        run.set_state(input_share=_input_share(run.epochs()))
    _note_end(run, comm, outcome.status, outcome.reason)


def _input_share(epochs: list[EpochRecord]) -> dict[str, float | None]:
    """The input phase's share of the time, mean over ranks: of the first epoch, which reads the files, and of all later ones."""
    shares = [epoch.phase_seconds("input") / (sum(epoch.wall) / epoch.ranks) for epoch in epochs if not epoch.partial]
    first, later = shares[:1], shares[1:]
    return {"first_epoch": first[0] if first else None, "steady": sum(later) / len(later) if later else None}


def _note_failure(run: RunDirectory, comm: Communicator, error: BaseException) -> None:
    """Note why the run ended. A rank that fails alone does it for rank 0, which it is about to end."""
    agreed = isinstance(error, AgreedError)
    reason = str(error) if agreed else told(error)
    if not agreed and comm.size > 1:
        reason = f"rank {comm.rank}: {reason}"
    if comm.rank == 0 or not agreed:
        with suppress(DeepexError, OSError):  # a full disk, say, which is the error that is on its way
            run.set_failed(reason, comm.rank)


def _note_end(run: RunDirectory, comm: Communicator, status: str, reason: str) -> None:
    if comm.rank == 0:
        run.set_state(status=status, reason=reason)


@contextmanager
def _settings(config: RunConfig, job: Job, threads: int) -> Iterator[str]:
    """The process-wide switches that a run needs; those of torch are put back afterwards, because the process may be the caller's.

    Gives what was done about the heap; that cannot be put back.
    """
    before = (
        torch.get_num_threads(),
        torch.get_deterministic_debug_mode(),
        torch.backends.cudnn.benchmark,
    )
    onednn = torch.backends.mkldnn.enabled
    torch.set_num_threads(threads)
    # Bits are promised on CPUs. Not `use_deterministic_algorithms`, which loads Inductor to tell it: seconds of every start.
    strictness = "warn" if job.device.type == "cuda" else "error"
    torch.set_deterministic_debug_mode(strictness if config.deterministic else "default")
    torch.backends.cudnn.benchmark = not config.deterministic
    put_back = round_products(tf32=config.precision == "tf32")
    if job.device.type == "cuda":
        torch.cuda.set_device(job.device)
    torch.backends.mkldnn.enabled = config.onednn and torch.backends.mkldnn.is_available()  # type: ignore[assignment] # annotated as what stands behind it
    if config.precision == "bf16" and job.device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        # As PyTorch does itself at the first product, which fails, with a page of its stack.
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment] # annotated as what stands behind it
    heap = keep_heap(os.environ) if job.device.type == "cpu" else "the C library's own way: the work is on the GPU"
    if config.step == "compiled":
        keep_compiled(os.environ)  # stays named there, as Inductor's own choice would
    try:
        yield heap
    finally:
        torch.set_num_threads(before[0])
        torch.set_deterministic_debug_mode(before[1])
        torch.backends.cudnn.benchmark = before[2]
        put_back()
        torch.backends.mkldnn.enabled = onednn


def _default_out(config: RunConfig) -> Path:
    return Path("runs") / f"{config.net.replace(':', '-')}-{datetime.now().astimezone():%Y%m%d-%H%M%S}"


def _log(path: Path | None, rank: int, text: str) -> None:
    with suppress(OSError):
        if path is not None and path.is_dir():
            (path / f"failure-rank{rank}.txt").write_text(text, encoding="utf-8")
