"""`bf16`: each number rounded to 8 bits of precision.

For users: docs/synchronisation.md#wire
"""

from typing import Final, final

import torch
from typing_extensions import override

from deepex.sync.wire.code import Code


@final
class Bf16Code(Code):
    """Two bytes for each number."""

    name = "bf16"
    dtype = torch.bfloat16

    @override
    def encode(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return values.to(torch.bfloat16), values.new_empty(0)

    @override
    def decode(self, codes: torch.Tensor, scales: torch.Tensor, *, out: torch.Tensor) -> None:
        out.copy_(codes)


KIND: Final = Bf16Code
