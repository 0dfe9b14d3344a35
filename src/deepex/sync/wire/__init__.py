"""Codes for what travels at a sync, one file each."""

from typing import Final

from deepex.record.options import load_kinds
from deepex.sync.wire.code import Code

WIRES: Final = ["bf16", "int8"]


def wires() -> dict[str, Code]:
    """Every code by its name in `sync.wire`; `fp32` is none."""
    return {kind.name: kind() for kind in (module.KIND for module in load_kinds(__name__, WIRES))}
