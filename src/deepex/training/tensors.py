"""Tensors in a safetensors file: written and read piece by piece, with a checksum of each in the same pass.

    checksums = write(path, {"arena": state})
    checksum = read_into(path, "arena", state)

The library's own writer leaves a temporary file of its own when it is killed, makes files that nobody else may read, and wants all
tensors in host memory. The format is simple: 8 bytes with the length of the header, the header in JSON, then the tensors' bytes at
the offsets that it tells.
"""

import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, Final

import torch

from deepex.record.files import write_atomic

_TYPES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
_PIECE: Final = 1 << 22  # numbers at a time
_ALIGNED: Final = 8
_LONGEST_HEADER: Final = 100 << 20  # as the library has it


class SizeError(ValueError):
    """A tensor of another size than is wanted; `checksum` is of what is there."""

    def __init__(self, message: str, checksum: int) -> None:
        super().__init__(message)
        self.checksum = checksum


def write(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Write the tensors, atomically, and give the checksum of each."""
    checksums: dict[str, int] = {}

    def fill(temporary: Path) -> None:
        with temporary.open("wb") as file:
            file.write(_header(tensors))
            for name, tensor in tensors.items():
                checksums[name] = 0
                for piece in _pieces(tensor.detach().contiguous()):
                    memory = _memory(piece.cpu())
                    file.write(memory)
                    checksums[name] = zlib.crc32(memory, checksums[name])

    write_atomic(path, fill)
    return checksums


def read_into(path: Path, name: str, target: torch.Tensor) -> int:
    """Read a tensor straight into the contiguous `target`, without a copy of it beside, and give its checksum.

    What is wrong with the file is an OSError, ValueError, KeyError or TypeError.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        begin, end = json.loads(file.read(min(length, _LONGEST_HEADER)))[name]["data_offsets"]
        file.seek(8 + length + begin)
        if end - begin != target.nbytes:
            raise SizeError(f"{name} has {end - begin} bytes and not {target.nbytes}", zlib.crc32(file.read(end - begin)))
        return _read(file, target)


def _read(file: BinaryIO, target: torch.Tensor) -> int:
    checksum = 0
    for piece in _pieces(target):
        host = piece if piece.device.type == "cpu" else torch.empty_like(piece, device="cpu")
        memory = _memory(host)
        if file.readinto(memory) != len(memory):  # type: ignore[attr-defined] # every binary file has it
            raise ValueError("it is too short")
        checksum = zlib.crc32(memory, checksum)
        if host is not piece:
            piece.copy_(host)
    return checksum


def _header(tensors: Mapping[str, torch.Tensor]) -> bytes:
    table, offset = {}, 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        table[name] = {"dtype": _TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    return len(text).to_bytes(8, "little") + text


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    return iter(tensor.view(-1).split(_PIECE))


def _memory(piece: torch.Tensor) -> memoryview:
    memory: memoryview = piece.view(torch.uint8).numpy().data if piece.numel() else memoryview(bytearray())
    return memory
