"""`int8`: one scale for each `BLOCK` numbers; the largest of them is 127.

For users: docs/synchronisation.md#wire
"""

from typing import Final, final

import torch
from typing_extensions import override

from deepex.sync.wire.code import BLOCK, Code


@final
class Int8Code(Code):
    """One byte for each number, and four for each block."""

    name = "int8"
    dtype = torch.int8

    @override
    def num_scales(self, count: int) -> int:
        return count // BLOCK

    @override
    def encode(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = values.view(-1, BLOCK)
        scales = blocks.abs().amax(1, keepdim=True).div_(127)
        codes = torch.div(blocks, scales.clamp(min=1e-38)).round_().to(torch.int8)
        return codes.view(-1), scales.view(-1)

    @override
    def decode(self, codes: torch.Tensor, scales: torch.Tensor, *, out: torch.Tensor) -> None:
        out.copy_(codes)
        out.view(-1, BLOCK).mul_(scales[:, None])


KIND: Final = Int8Code
