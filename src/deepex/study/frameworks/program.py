"""One rank of a framework's job: `python -P -m deepex.study.frameworks NAME RECIPE --out DIR`, as `deepex train RECIPE` is.

What is written is a run directory that everything reads which reads those of DeepEx. A mistake ends with one line and exit code 2,
a failure with one line and exit code 1; if there is no run directory yet, the reason is in DIR/failure.json.
"""

import argparse
import dataclasses
import json
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NoReturn

from deepex.comm.deadline import fail
from deepex.comm.place import find_place
from deepex.errors import ConfigError, DeepexError, UnknownName, told
from deepex.record import RunDirectory
from deepex.record.files import write_json
from deepex.record.run import hold, refuse_existing_run
from deepex.record.table import parse_assignments, to_table
from deepex.study.frameworks import FRAMEWORKS, available, find
from deepex.study.frameworks.base import Framework, Training

if TYPE_CHECKING:
    from deepex.comm import Communicator
    from deepex.study.frameworks.workload import Workload
    from deepex.training.config import RunConfig
    from deepex.training.watch import Watcher


def main(arguments: Sequence[str] | None = None) -> None:
    """Do what the command line says, and end with its exit code."""
    options = _parser().parse_args(arguments)
    if options.list:
        sys.stdout.write(json.dumps({name: dataclasses.asdict(found) for name, found in available().items()}) + "\n")
        return
    if options.name is None or options.recipe is None or options.out is None:
        _fail(f"NAME ({', '.join(FRAMEWORKS)}), RECIPE and --out DIR are needed, or --list", 2, None, agreed=True)
    try:
        run(options.name, options.recipe, parse_assignments(options.set), Path(options.out))
    except DeepexError as error:
        agreed = error.agreed or isinstance(error, ConfigError | UnknownName)  # every rank has the same command line
        _fail(str(error), error.exit_code, options.out, agreed=agreed)
    except Exception as error:  # noqa: BLE001 - what a framework raises; on several ranks it has ended the job already
        if options.out is not None:
            _log(Path(options.out), 0, traceback.format_exc())
        _fail(f"{options.name} failed: {told(error)}", 1, options.out)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -P -m deepex.study.frameworks", description="Train with another framework.")
    parser.add_argument("name", nargs="?", metavar="NAME", help=", ".join(FRAMEWORKS))
    parser.add_argument("recipe", nargs="?", metavar="RECIPE|FILE.toml", help="what `deepex train` takes")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="set a key of the configuration")
    parser.add_argument("--out", metavar="DIR", help="the run directory to write")
    parser.add_argument("--list", action="store_true", help="print as JSON what is installed, and what to do about the others")
    return parser


def run(name: str, recipe: str, changes: dict[str, Any], out: Path, watcher: "Watcher | None" = None) -> RunDirectory:
    """Train what a recipe with some changes says with the framework `name`, on the ranks that the launcher started."""
    from deepex.comm.early import load_mpi
    from deepex.machine.heap import keep_heap, keep_tensors

    sys.path.append(str(Path.cwd()))  # where `net=module:function` is looked up last, as by `deepex train`
    load_mpi()
    keep_tensors(os.environ)  # before what follows loads PyTorch; the others profit as DeepEx does
    framework = find(name)
    found = framework.available()
    if found.version is None:
        raise ConfigError(f"{name} cannot be compared with: {found.reason}")
    heap = keep_heap(os.environ)
    from deepex.recipes import find_config

    config = find_config(recipe, changes)
    place = find_place(os.environ)
    framework.check(config, ranks=place.size)
    threads = _threads(config, place.local_size)
    framework.prepare(os.environ, threads=threads)
    from deepex.comm import connect
    from deepex.comm.together import abort_on_failure

    comm = connect("auto", device="cpu")
    try:
        with abort_on_failure(comm, _say, lambda text: _log(out, comm.rank, text)):
            facts = {"name": name, "version": found.version, "heap": heap}
            try:
                return _train(framework, config, comm, out, threads=threads, facts=facts, watcher=watcher)
            except BaseException as error:
                _note_failure(out, comm, error)
                raise
    finally:
        with suppress(Exception):  # while an error is on its way, that error matters
            comm.close()


def _train(
    framework: Framework,
    config: "RunConfig",
    comm: "Communicator",
    out: Path,
    *,
    threads: int,
    facts: dict[str, Any],
    watcher: "Watcher | None",
) -> RunDirectory:
    from deepex.comm.nodes import describe_nodes
    from deepex.comm.together import AgreedError, together
    from deepex.machine.heap import give_back_heap
    from deepex.record.clock import NoClock
    from deepex.study.frameworks.base import UnsupportedTask
    from deepex.study.frameworks.recorder import Recorder
    from deepex.study.frameworks.workload import make_workload
    from deepex.training.usage import UsageWatch
    from deepex.training.watch import Watcher

    together(comm, lambda: refuse_existing_run(out))
    task = together(comm, lambda: make_workload(config, comm, threads=threads))
    began = perf_counter()
    try:
        training = framework.build(task)
    except UnsupportedTask as error:  # every rank finds the same
        raise AgreedError(error) from error
    give_back_heap()  # else the run would carry what reading and trials took
    table = to_table(_as_trained(task))
    with hold(out) if comm.rank == 0 else nullcontext():
        state = {"framework": {**facts, "settings": training.settings}, "setup_seconds": perf_counter() - began}
        machines = describe_nodes(comm, out.parent, os.environ)
        together(comm, lambda: _create(out, table, machines, _state(task, training) | state, comm))
        run = RunDirectory(out)
        with UsageWatch(config.sampling, task.device, comm, run, NoClock()) as usage:
            recorder = Recorder(task, run, usage, watcher or Watcher())
            recorder.begin()
            training.run(recorder.told)
        training.close()
        if comm.rank == 0:
            run.set_state(status="finished", reason=recorder.reason)
        comm.barrier()
    return run


def _create(out: Path, table: dict[str, Any], machines: list[Any], state: dict[str, Any], comm: "Communicator") -> None:
    if comm.rank == 0:
        RunDirectory.create(out, table, machines, state)
        (out / "failure.json").unlink(missing_ok=True)  # of an attempt before


def _as_trained(task: "Workload") -> "RunConfig":
    """The configuration with what the framework does: one replica per rank, gradients averaged in every step."""
    from deepex.sync.config import SyncConfig

    data = task.config.data
    data = data if data.startswith("sample:") else str(Path(data).resolve())
    return dataclasses.replace(task.config, replicas=task.comm.size, data=data, sync=SyncConfig(strategy="gradients"))


def _state(task: "Workload", training: Training) -> dict[str, Any]:
    """What run.json tells of any run; see `choices` in training/gather.py."""
    comm, manifest = task.comm, task.manifest
    parameters = sum(parameter.numel() for parameter in task.network.parameters())
    return {
        "ranks": comm.size,
        "nodes": comm.place.num_nodes,
        "replicas": comm.size,
        "comm": {"kind": training.settings.get("collectives", "none"), "reason": "the framework's own"},
        "device": task.device.type,
        "threads": task.threads,
        "placement": {"kind": "device", "reason": "all samples in memory, standardised beforehand"},
        "layout": {"kind": training.settings.get("layout", "channels_last"), "reason": "see framework.settings"},
        "sync": {"strategy": "gradients", "outer": "none", "reason": "the framework's own"},
        "network": {"name": task.config.net, "parameters": parameters},
        "dataset": {"name": manifest.name, "digest": manifest.digest},
        "measures": [dataclasses.asdict(measure) for measure in task.task.measures],
        "samples": {name: part.count for name, part in manifest.parts.items()},
    }


def _threads(config: "RunConfig", local_size: int) -> int:
    """Threads of a rank, as DeepEx chooses them."""
    from deepex.machine.hardware import describe_cpu

    cores = describe_cpu()["num_cores_usable"] or 1
    return config.threads or (1 if config.deterministic else max(1, cores // local_size))


def _note_failure(out: Path, comm: "Communicator", error: BaseException) -> None:
    """Note why the run ended. A rank that fails alone does it for rank 0, which it is about to end."""
    from deepex.comm.together import AgreedError

    agreed = isinstance(error, AgreedError)
    reason = str(error) if agreed else told(error)
    if not agreed and comm.size > 1:
        reason = f"rank {comm.rank}: {reason}"
    if comm.rank == 0 or not agreed:
        with suppress(DeepexError, OSError):
            _write_failure(out, reason, comm.rank)


def _write_failure(out: Path, reason: str, rank: int = 0) -> None:
    """Tell it in run.json, or beside where that would be, but not in that of a run before."""
    run = RunDirectory(out)
    if (out / "run.json").exists():
        if run.state.get("status") == "running":
            run.set_failed(reason, rank)
        return
    out.mkdir(parents=True, exist_ok=True)
    own = out / f".failure-rank{rank}.json"
    write_json(own, {"status": "failed", "reason": reason})
    own.replace(out / "failure.json")


def _fail(message: str, code: int, out: str | None, *, agreed: bool = False) -> NoReturn:
    """Print one line and end, and note the reason where no run could."""
    with suppress(DeepexError, OSError):
        if out is not None and find_place(os.environ).rank == 0:
            _write_failure(Path(out), message)
    fail(message, code, agreed=agreed)


def _say(message: str) -> None:
    sys.stderr.write(f"deepex: {message}\n")
    sys.stderr.flush()


def _log(out: Path, rank: int, text: str) -> None:
    with suppress(OSError):
        out.mkdir(parents=True, exist_ok=True)
        (out / f"failure-rank{rank}.txt").write_text(text, encoding="utf-8")
