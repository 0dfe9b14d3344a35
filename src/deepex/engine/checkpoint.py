"""Checkpoints: one write of the arena's state, atomic, the newest few kept.

    save(run.checkpoints, Position(epoch=3, step=32), arena, network, …)
    checkpoint = newest(run.checkpoints)
    restore(checkpoint, arena, network)

`NAME.safetensors` holds the arena's state as one flat tensor (and the network's integer buffers); `NAME.json` says where in the run
it was taken and how the flat tensor is laid out. The .json is written last: a checkpoint without it does not exist. Checkpoints are
taken at a sync only, so any number of ranks that divides the replicas can resume. What replicas do not share (momentum that is
`local`, weights with a strategy that lets them differ) has a file for each, written by its rank; what a strategy holds beside the
arena, the same for all (outer momentum), is with the arena's state.
"""

import errno
import json
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from deepex.comm import Communicator
from deepex.engine.arena import Arena
from deepex.errors import ConfigError, RunError
from deepex.record.files import read_json, write_atomic, write_json
from deepex.record.table import check_types
from deepex.sync.agreement import State

_PIECE: Final = 1 << 22  # numbers that are read at a time
_LONGEST_HEADER: Final = 100 << 20  # as safetensors itself has it


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

    `sums` has the loss, the tally of the measure and the samples, over all ranks; `apart` what was seen of drift: the number of
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
    kept: State,
    rule: dict[str, Any],
    keep: int,
) -> Path:
    """Write a checkpoint; `kept` is what there is beside the arena, `rule` what the period rule has learnt.

    Collective if replicas have something of their own.
    """
    path = directory / f"epoch{position.epoch:06d}-step{position.step:06d}.safetensors"
    checksums = {}
    for what, tensors in kept.own.items():
        mine, first = [], comm.rank * len(tensors)
        for index, tensor in enumerate(tensors):
            held = tensor.cpu().contiguous()
            _write(_own_path(path, what, first + index), {what: held})
            mine.append(_checksum(held))
        checksums[what] = [checksum for rank in comm.gather(mine) for checksum in rank]  # all have written theirs
    if comm.rank == 0:
        state, shared = arena.state.cpu(), {name: tensor.cpu() for name, tensor in kept.shared.items()}
        counters = {f"counter:{n}": b.cpu() for n, b in _counters(network)}
        _write(path, {"arena": state, **counters, **{f"shared:{name}": tensor for name, tensor in shared.items()}})
        header = {
            "schema": 1,
            "epoch": position.epoch,
            "step": position.step,
            "syncs": position.syncs,
            "sums": position.sums,
            "apart": position.apart,
            "lost": position.lost,
            "worst": position.worst,
            "replicas": replicas,
            "momentum": "local" if "momentum" in kept.own else "shared",
            "own_crc32": checksums,
            "shared_crc32": {name: _checksum(tensor) for name, tensor in shared.items()},
            "rule": rule,
            "bytes": path.stat().st_size,
            "crc32": _checksum(state),
            "layout": arena.layout.to_json(),
        }
        write_json(path.with_suffix(".json"), header)
        _forget_old(directory, keep)
    return path


def newest(directory: Path) -> Checkpoint | None:
    """Find the newest whole checkpoint of a run."""
    headers = _headers(directory)
    if not headers:
        return None
    header = read_json(headers[-1])
    path = headers[-1].with_suffix(".safetensors")
    found = path.stat().st_size if path.is_file() else None
    if found != header.get("bytes"):
        what = "is missing" if found is None else f"has {found} bytes"
        raise RunError(
            f"checkpoint {path} {what}, but {headers[-1].name} says {header.get('bytes')} bytes: restore it, or delete "
            f"{headers[-1].name} to resume from the checkpoint before"
        )
    return Checkpoint(path, header)


def restore(checkpoint: Checkpoint, arena: Arena, network: nn.Module) -> None:
    """Read the state of a checkpoint into the arena of the same network; every rank reads for itself."""
    _check_layout(checkpoint, arena)
    _check(checkpoint, checkpoint.path, _read_into(checkpoint.path, "arena", arena.state), checkpoint.header["crc32"])
    for name, buffer in _counters(network):
        _read_into(checkpoint.path, f"counter:{name}", buffer)


def restore_momenta(checkpoint: Checkpoint, momenta: list[torch.Tensor], first: int, shared: torch.Tensor) -> None:
    """Read the momentum of this rank's replicas, of which `first` is the first.

    Where the policy has changed: replicas that shared one, restored in the arena, each begin with it; that of replicas which had
    their own is the mean of them.
    """
    if checkpoint.header["momentum"] != "local":
        for momentum in momenta:
            momentum.copy_(shared)
        return
    for index, momentum in enumerate(momenta):
        _read_own(checkpoint, "momentum", first + index, momentum)
    if not momenta:
        replicas, one = checkpoint.header["replicas"], torch.empty_like(shared)
        shared.zero_()
        for replica in range(replicas):
            _read_own(checkpoint, "momentum", replica, one)
            shared.add_(one, alpha=1 / replicas)


def restore_state(checkpoint: Checkpoint, state: State, first: int) -> bool:
    """Read what a strategy kept beside the arena, of this rank's replicas those from `first` on; whether there was anything."""
    shared = checkpoint.header.get("shared_crc32", {})
    own = [what for what in checkpoint.header.get("own_crc32", {}) if what != "momentum"]
    if unknown := sorted({*own} - {*state.own}):
        raise RunError(
            f"checkpoint {checkpoint.path} has {', '.join(unknown)} of each replica, which this sync.strategy does not know: "
            "resume with the run's own strategy"
        )
    for name, checksum in shared.items():
        if name in state.shared:
            _check(checkpoint, checkpoint.path, _read_into(checkpoint.path, f"shared:{name}", state.shared[name]), checksum)
    for what in own:
        for index, tensor in enumerate(state.own[what]):
            _read_own(checkpoint, what, first + index, tensor)
    return bool(own or {*shared} & {*state.shared})


def _own_path(path: Path, what: str, replica: int) -> Path:
    return path.with_name(f"{path.stem}-{what}{replica:06d}.safetensors")


def _read_own(checkpoint: Checkpoint, what: str, replica: int, tensor: torch.Tensor) -> None:
    path, header = _own_path(checkpoint.path, what, replica), checkpoint.header
    found, checksums = _read_into(path, what, tensor), header.get("own_crc32", {}).get(what, header.get("momenta_crc32"))
    if checksums is not None:  # the oldest checkpoints have none
        _check(checkpoint, path, found, checksums[replica])


def _check(checkpoint: Checkpoint, path: Path, found: int, expected: int) -> None:
    if found != expected:
        raise RunError(
            f"checkpoint {path} is damaged: its checksum does not match; delete "
            f"{checkpoint.path.with_suffix('.json').name} to resume from the checkpoint before"
        )


def save_weights(path: Path, arena: Arena, network: nn.Module) -> None:
    """Write the network as plain named tensors, for `network.load_state_dict(safetensors.torch.load_file(path))`."""
    tensors = {name: tensor.cpu().contiguous() for name, tensor in arena.named_tensors()}
    owned = {id(value): name for name, value in (*network.named_parameters(), *network.named_buffers())}
    for name, value in (
        *network.named_parameters(remove_duplicate=False),
        *network.named_buffers(remove_duplicate=False),
    ):
        if name not in tensors:  # a tied name, or a counter
            tied = tensors.get(owned[id(value)])
            tensors[name] = value.detach().cpu().contiguous() if tied is None else tied.clone()
    _write(path, tensors)


def _write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    def write(temporary: Path) -> None:
        try:
            save_file(tensors, temporary)
        except SafetensorError as error:
            code = re.search(r"os error (\d+)", str(error))
            raise OSError(int(code[1]) if code else errno.EIO, str(error)) from error

    write_atomic(path, write)


def _read_into(path: Path, name: str, target: torch.Tensor) -> int:
    """Read a tensor of a safetensors file straight into `target`, without a copy of it beside, and give its checksum."""
    try:
        with path.open("rb") as file:
            return _stream(file, name, target)
    except (OSError, ValueError, KeyError, TypeError) as error:
        remedy = "restore it or resume an earlier one, with the run's own settings"
        raise RunError(f"checkpoint file {path} cannot be read: {error}; {remedy}") from error


def _stream(file: BinaryIO, name: str, target: torch.Tensor) -> int:
    """The format: 8 bytes with the length of the header, the header in JSON, then the tensors at the offsets that it tells."""
    length = int.from_bytes(file.read(8), "little")
    begin, end = json.loads(file.read(min(length, _LONGEST_HEADER)))[name]["data_offsets"]
    if end - begin != target.nbytes:
        raise ValueError(f"{name} has {end - begin} bytes and not {target.nbytes}")
    file.seek(8 + length + begin)
    checksum = 0
    for piece in target.view(-1).split(_PIECE):
        host = piece if piece.device.type == "cpu" else torch.empty_like(piece, device="cpu")
        memory = host.numpy().view("u1").data
        if file.readinto(memory) != len(memory):  # type: ignore[attr-defined] # every binary file has it
            raise ValueError("it is too short")
        checksum = zlib.crc32(memory, checksum)
        if host is not piece:
            piece.copy_(host)
    return checksum


def _checksum(state: torch.Tensor) -> int:
    return zlib.crc32(state.numpy().data)


def _counters(network: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, buffer) for name, buffer in network.named_buffers() if not buffer.is_floating_point()]


def _check_layout(checkpoint: Checkpoint, arena: Arena) -> None:
    ours, theirs = arena.layout.to_json(), checkpoint.header["layout"]
    if ours == theirs:
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
    for path in directory.glob(".epoch*.part"):
        path.unlink()
