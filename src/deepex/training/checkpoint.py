"""Checkpoints: one write of the arena's state, atomic, the newest few kept.

    save(run.checkpoints, Position(epoch=3, step=32), arena, network, …)
    checkpoint = usable(run.checkpoints, say)[0]     # the newest; damaged ones are left out
    restore(checkpoint, arena, network)

`NAME.safetensors` holds the arena's state as one flat tensor (and the network's integer buffers); `NAME.json` says where in the run
it was taken and how the flat tensor is laid out. The .json is written last: a checkpoint without it does not exist. It has a
checksum of all that it says, and of every tensor; a DamagedError tells that one of them does not match. Checkpoints are
taken at a sync only, so any number of ranks that divides the replicas can resume. What replicas do not share (states of the
optimiser that are `local`, weights with a strategy that lets them differ) has a file for each, written by its rank; what a strategy
holds beside the arena, the same for all (outer momentum), is with the arena's state.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from deepex.arena.arena import Arena
from deepex.comm import Communicator
from deepex.errors import ConfigError, DamagedError, RunError
from deepex.record.files import read_json, write_json
from deepex.record.table import check_types
from deepex.sync.agreement import KeptState
from deepex.training.tensors import SizeError, read_into, write

_SCHEMA: Final = 3  # before there was one state, momentum; it was "local" or "shared"
_MOST: Final = 1 << 53  # of what is counted
_POSITION: Final = {"epoch", "step", "syncs", "sums"}
_LATER: Final = {"apart", "lost", "worst", "own_crc32", "shared_crc32", "momenta_crc32", "rule"}  # of the first schema


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """A checkpoint every `epochs` epochs, and within an epoch after every `syncs` syncs (0: not); the newest `keep` are kept."""

    epochs: int = 1
    syncs: int = 0
    keep: int = 2

    def __post_init__(self) -> None:
        check_types(self, "checkpoint.")
        for name, least in (("epochs", 1), ("syncs", 0), ("keep", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"checkpoint.{name} is {getattr(self, name)}; it must be at least {least}")


@dataclass(frozen=True)
class Position:
    """How far a run is: `epoch` whole epochs, and `step` steps into the next, of which `syncs`, `sums`, `apart` and `lost` so far.

    `sums` has the loss, the sum of each measure and the samples, over all ranks; `apart` what was seen of drift: the number of
    syncs and the mean squares over them; `lost` how often a replica was left out. `worst` is the highest training loss of the whole
    epochs.
    """

    epoch: int = 0
    step: int = 0
    syncs: int = 0
    sums: tuple[float, ...] = (0.0, 0.0, 0.0)
    apart: tuple[float, ...] = ()
    lost: int = 0
    worst: float = 0.0


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint on disk: the path of its tensors, and what its .json says."""

    path: Path
    header: dict[str, Any]

    @property
    def position(self) -> Position:
        """Where in the run it was taken."""
        header = self.header
        so_far = tuple(header["sums"]), tuple(header.get("apart", ())), header.get("lost", 0), header.get("worst", 0.0)
        return Position(header["epoch"], header["step"], header["syncs"], *so_far)


def save(
    directory: Path,
    position: Position,
    arena: Arena,
    network: nn.Module,
    *,
    comm: Communicator,
    replicas: int,
    kept: KeptState,
    rule: dict[str, Any],
    keep: int,
    run: str = "",
) -> Path:
    """Write a checkpoint; `kept` is what there is beside the arena, `rule` what the period rule has learnt, `run` whose it is.

    Collective if replicas have something of their own.
    """
    path = directory / f"epoch{position.epoch:06d}-step{position.step:06d}.safetensors"
    own = {}
    for what, tensors in kept.own.items():
        first = comm.rank * len(tensors)
        mine = [write(_own_path(path, what, first + index), {what: tensor})[what] for index, tensor in enumerate(tensors)]
        own[what] = [checksum for rank in comm.gather(mine) for checksum in rank]  # all have written theirs
    if comm.rank == 0:
        shared = {f"shared:{name}": tensor for name, tensor in kept.shared.items()}
        header = {
            "schema": _SCHEMA,
            "run": run,
            "epoch": position.epoch,
            "step": position.step,
            "syncs": position.syncs,
            "sums": position.sums,
            "apart": position.apart,
            "lost": position.lost,
            "worst": position.worst,
            "replicas": replicas,
            "local": [name for name in arena.states if name in kept.own],
            "own_crc32": own,
            "crc32": write(path, {"arena": arena.kept, **_counters(network), **shared}),
            "rule": rule,
            "bytes": path.stat().st_size,
            "layout": arena.layout.to_json(),
        }
        write_json(path.with_suffix(".json"), {**header, "sha256": _digest(header)})
        _forget_old(directory, keep)
    return path


def usable(directory: Path, say: Callable[[str], None] = lambda _: None) -> list[Checkpoint]:
    """The checkpoints of a run that look whole, the newest first; `say` hears of those that do not."""
    headers = _headers(directory)
    found, damage = [], []
    for header in reversed(headers):
        try:
            found.append(_open(header))
        except RunError as error:
            damage.append(str(error))
    if damage and not found:
        raise DamagedError(f"{damage[0]}; the run has no other checkpoint: restore it, or begin a new run")
    for text in damage:
        say(f"{text}; it is left out")
    return found


def newest(directory: Path) -> Checkpoint | None:
    """Find the newest checkpoint of a run that looks whole."""
    return next(iter(usable(directory)), None)


def set_aside(directory: Path, taken: Checkpoint) -> None:
    """Rename the headers of what is newer than the checkpoint that is `taken`: what is damaged must not outlive what is whole."""
    newer = _headers(directory)[_headers(directory).index(taken.path.with_suffix(".json")) + 1 :]
    for header in newer:
        header.rename(header.with_suffix(".json.damaged"))


def _open(path: Path) -> Checkpoint:
    """Read and check a header, and see that the file of its tensors has the size that it tells."""
    header = read_json(path)
    problem = next(_problems(header), None)
    if problem is not None:
        raise DamagedError(f"checkpoint {path} is damaged: {problem}")
    tensors = path.with_suffix(".safetensors")
    there = tensors.stat().st_size if tensors.is_file() else None
    if there != header["bytes"]:
        what = "is missing" if there is None else f"has {there} bytes"
        raise DamagedError(f"checkpoint {tensors} {what}, but {path.name} says {header['bytes']} bytes")
    return Checkpoint(tensors, header)


def _problems(header: object) -> Iterator[str]:
    """Why this cannot be what was written."""
    if not isinstance(header, dict):
        yield f"it holds {type(header).__name__}, not a table"
        return
    told = header.get("sha256")
    if header.get("schema") == 1 and told is None:  # written before there was a checksum of it
        yield from _problems_of_first(header)
    elif header.get("schema") not in (2, _SCHEMA) or told is None:
        yield f"its schema is {header.get('schema')!r}, and this DeepEx reads {_SCHEMA}"
        return
    elif told != _digest({key: value for key, value in header.items() if key != "sha256"}):
        yield "what it says does not match its checksum"
        return
    yield from _problems_of_position(header)
    yield from _problems_of_states(header)


def _problems_of_first(header: dict[str, Any]) -> Iterator[str]:
    wanted = {*_POSITION, "schema", "replicas", "momentum", "bytes", "crc32", "layout"}
    if missing := sorted(wanted - {*header}):
        yield f"it has no {missing[0]!r}"
    if unknown := sorted({*header} - wanted - _LATER):
        yield f"it has {unknown[0]!r}, which nobody wrote"
    if not _is_count(header.get("crc32")):
        yield f"its 'crc32' is {header.get('crc32')!r}, not a checksum"
    shared, own, momenta = (header.get(key) for key in ("shared_crc32", "own_crc32", "momenta_crc32"))
    if not (shared is None or (isinstance(shared, dict) and all(map(_is_count, shared.values())))):
        yield f"its 'shared_crc32' is {shared!r}, not a table of checksums"
    lists = [*(own.values() if isinstance(own, dict) else [own] if own else []), *([momenta] if momenta is not None else [])]
    if not all(isinstance(one, list) and len(one) == header.get("replicas") and all(map(_is_count, one)) for one in lists):
        yield "its checksums of what each replica has are not one for each"
    layout = header.get("layout")
    slots = [layout.get(region) for region in ("weights", "frozen", "buffers")] if isinstance(layout, dict) else [None]
    if not all(isinstance(one, list) and all(map(_is_slot, one)) for one in slots):
        yield "its 'layout' is not what was written"


def _problems_of_position(header: dict[str, Any]) -> Iterator[str]:
    for key, least in (("epoch", 0), ("step", 0), ("syncs", 0), ("lost", 0), ("replicas", 1), ("bytes", 1)):
        value = header.get(key, least)
        if type(value) is not int or not least <= value < _MOST:
            yield f"its {key!r} is {value!r}, not a whole number of at least {least}"
    sums, apart = header.get("sums"), header.get("apart", [])
    if not isinstance(sums, list) or len(sums) < 3 or not all(map(_is_number, sums)):
        yield f"its 'sums' is {sums!r}, not three numbers or more"
    if not isinstance(apart, list) or not all(
        type(value) in (int, float) for value in apart
    ):  # replicas may be infinitely far apart
        yield f"its 'apart' is {apart!r}, not a list of numbers"
    if not _is_number(header.get("worst", 0.0)):
        yield f"its 'worst' is {header['worst']!r}, not a number"
    for key in ("layout", "rule", "own_crc32"):
        if not isinstance(header.get(key, {}), dict):
            yield f"its {key!r} is not a table"


def _problems_of_states(header: dict[str, Any]) -> Iterator[str]:
    if header["schema"] != _SCHEMA:
        if header.get("momentum") not in ("local", "shared"):
            yield f"its 'momentum' is {header.get('momentum')!r}, neither 'local' nor 'shared'"
        return
    layout, local, own = header.get("layout", {}), header.get("local"), header.get("own_crc32", {})
    names = layout.get("states")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or len({*names}) < len(names):
        yield f"its states are {names!r}, not a list of different names"
    elif not isinstance(local, list) or [name for name in names if name in local and name in own] != local:
        yield f"its 'local' is {local!r}, not a list of states that each replica has of its own"


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _MOST


def _is_slot(value: object) -> bool:
    return isinstance(value, list) and len(value) == 4 and isinstance(value[0], str)


def _is_number(value: object) -> bool:
    return (type(value) is int and abs(value) < _MOST) or (type(value) is float and math.isfinite(value))


def _digest(header: dict[str, Any]) -> str:
    """Of what a header says, however it is written down."""
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()


def restore(checkpoint: Checkpoint, arena: Arena, network: nn.Module) -> None:
    """Read the state of a checkpoint into the arena of the same network; every rank reads for itself."""
    _check_layout(checkpoint, arena)
    _read(checkpoint, checkpoint.path, "arena", arena.kept, _checksums(checkpoint)["arena"])
    if (order := _states(checkpoint)) != [*arena.states]:
        found = dict(zip(order, [state.clone() for state in arena.states.values()], strict=True))
        for name, state in arena.states.items():
            state.copy_(found[name])
    for name, buffer in _counters(network).items():
        _read(checkpoint, checkpoint.path, name, buffer, _checksums(checkpoint).get(name))


def restore_states(checkpoint: Checkpoint, stored: dict[str, list[torch.Tensor]], first: int, arena: Arena) -> None:
    """Read the states of which each of this rank's replicas has its own; `first` is the first of them.

    Where the policy has changed: replicas that shared a state, restored in the arena, each begin with it; that of replicas which
    had their own is the mean of them.
    """
    local = _local(checkpoint)
    for name, shared in arena.states.items():
        own = stored.get(name, [])
        for index, state in enumerate(own):
            if name in local:
                _read_own(checkpoint, name, first + index, state)
            else:
                state.copy_(shared)
        if name in local and not own:
            _read_mean(checkpoint, name, shared)


def _read_mean(checkpoint: Checkpoint, name: str, shared: torch.Tensor) -> None:
    replicas, one = checkpoint.header["replicas"], torch.empty_like(shared)
    shared.zero_()
    for replica in range(replicas):
        _read_own(checkpoint, name, replica, one)
        shared.add_(one, alpha=1 / replicas)


def _states(checkpoint: Checkpoint) -> list[str]:
    """The states of its optimiser, in the order of memory; before the third schema there was no other than momentum."""
    header = checkpoint.header
    return list(header["layout"]["states"]) if header["schema"] == _SCHEMA else ["momentum"]


def _local(checkpoint: Checkpoint) -> list[str]:
    """Those of which each replica has its own."""
    header = checkpoint.header
    return list(header["local"]) if header["schema"] == _SCHEMA else ["momentum"] * (header["momentum"] == "local")


def restore_state(checkpoint: Checkpoint, state: KeptState, first: int) -> bool:
    """Read what a strategy kept beside the arena, of this rank's replicas those from `first` on; whether there was anything."""
    shared = {name.removeprefix("shared:"): sum_ for name, sum_ in _checksums(checkpoint).items() if name.startswith("shared:")}
    own = [what for what in checkpoint.header.get("own_crc32", {}) if what not in _states(checkpoint)]
    if unknown := sorted({*own} - {*state.own}):
        raise RunError(
            f"checkpoint {checkpoint.path} has {', '.join(unknown)} of each replica, which this sync.strategy does not know: "
            "resume with the run's own strategy"
        )
    for name, checksum in shared.items():
        if name in state.shared:
            _read(checkpoint, checkpoint.path, f"shared:{name}", state.shared[name], checksum)
    for what in own:
        for index, tensor in enumerate(state.own[what]):
            _read_own(checkpoint, what, first + index, tensor)
    return bool(own or {*shared} & {*state.shared})


def _own_path(path: Path, what: str, replica: int) -> Path:
    return path.with_name(f"{path.stem}-{what}{replica:06d}.safetensors")


def _read_own(checkpoint: Checkpoint, what: str, replica: int, tensor: torch.Tensor) -> None:
    header = checkpoint.header
    checksums = header.get("own_crc32", {}).get(what, header.get("momenta_crc32"))
    expected = checksums[replica] if checksums is not None else None  # the oldest checkpoints have none
    _read(checkpoint, _own_path(checkpoint.path, what, replica), what, tensor, expected)


def _checksums(checkpoint: Checkpoint) -> dict[str, int]:
    """Of the tensors that are the same for all replicas, by name."""
    header = checkpoint.header
    if header["schema"] > 1:
        found: dict[str, int] = header["crc32"]
        return found
    return {"arena": header["crc32"], **{f"shared:{name}": one for name, one in header.get("shared_crc32", {}).items()}}


def _read(checkpoint: Checkpoint, path: Path, name: str, target: torch.Tensor, expected: int | None) -> None:
    """Read a tensor; `expected` is its checksum, None where none was written."""
    if expected is None and checkpoint.header["schema"] > 1:
        raise RunError(
            f"checkpoint {checkpoint.path} has no {name}, which this network keeps: resume with the run's own configuration"
        )
    try:
        found = read_into(path, name, target)
    except OSError as error:
        kind = DamagedError if isinstance(error, FileNotFoundError) else RunError  # what passes is no damage
        raise kind(f"checkpoint file {path} cannot be read: {error.strerror}; see that it can, and resume again") from error
    except SizeError as error:
        if error.checksum == expected:
            raise RunError(f"checkpoint file {path} is of another run: {error}; resume with the run's own settings") from error
        raise DamagedError(f"checkpoint file {path} cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"checkpoint file {path} cannot be read: {error}") from error
    if expected is not None and found != expected:
        raise DamagedError(f"checkpoint {path} is damaged: the checksum of {name} does not match")


def save_weights(path: Path, arena: Arena, network: nn.Module) -> None:
    """Write the network as plain named tensors, for `network.load_state_dict(safetensors.torch.load_file(path))`."""
    held = dict(arena.named_tensors())
    names = {id(value): name for name, value in (*network.named_parameters(), *network.named_buffers())}
    tensors = {}
    for name, value in network.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor):  # a module may keep something else too
            tensors[name] = held.get(name, held.get(names.get(id(value), ""), value))  # where it is tied, or is a counter
    write(path, tensors)


def _counters(network: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers of whole numbers, those of the moment too; the arena has the others."""
    return {f"counter:{name}": buffer for name, buffer in network.named_buffers() if not buffer.is_floating_point()}


def _check_layout(checkpoint: Checkpoint, arena: Arena) -> None:
    ours, theirs = arena.layout.to_json(), checkpoint.header["layout"] | {"states": _states(checkpoint)}
    if {*ours["states"]} != {*theirs["states"]}:
        kept, wanted = (" and ".join(layout["states"]) or "nothing" for layout in (theirs, ours))
        raise RunError(
            f"checkpoint {checkpoint.path} is of another optimiser: it has {kept} of each weight, and this one keeps {wanted}; "
            "resume with the run's own optim.method"
        )
    if ours | {"states": theirs["states"]} == theirs:
        return
    for region in ("weights", "frozen", "buffers"):
        mine, other = ({slot[0]: slot[1] for slot in layout[region]} for layout in (ours, theirs))
        for name in (*mine, *other):
            if mine.get(name) != other.get(name):
                raise RunError(
                    f"checkpoint {checkpoint.path} is of another network: {name} is {other.get(name, 'not there')} in it and "
                    f"{mine.get(name, 'not there')} in this one; resume with the run's own configuration"
                )
    raise RunError(f"checkpoint {checkpoint.path} is laid out differently: resume with the same `layout` and dtype")


def _headers(directory: Path) -> list[Path]:
    """The .json of each checkpoint, the newest last: by the numbers in their names, which may outgrow their zeros."""
    return sorted(directory.glob("epoch*-step*.json"), key=lambda path: [int(number) for number in re.findall(r"\d+", path.stem)])


def _forget_old(directory: Path, keep: int) -> None:
    """Delete all but the newest `keep`; the .json first, so that what is left of a kill in between is no checkpoint.

    Also what a kill left half-written: nobody else writes here now.
    """
    for header in _headers(directory)[:-keep]:
        header.unlink()
    kept = {header.stem for header in _headers(directory)}
    for path in directory.glob("epoch*.safetensors"):
        if "-".join(path.stem.split("-")[:2]) not in kept:
            path.unlink()
    for path in (*directory.glob(".epoch*.part"), *directory.glob(".tmp*")):
        path.unlink()
