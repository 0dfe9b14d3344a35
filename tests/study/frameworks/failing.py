"""A network that fails in the middle of an epoch, on rank 1 alone."""

import os

from torch import Tensor, nn

from deepex.comm.place import find_place


class Failing(nn.Sequential):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training and len(x) > 1:
            self.steps += 1
        if self.steps == 3 and find_place(os.environ).rank == 1:
            raise ArithmeticError("the third step went wrong")
        out: Tensor = super().forward(x)
        return out


def network(channels: int, size: tuple[int, int], classes: int) -> nn.Module:
    return Failing(nn.Flatten(), nn.Linear(channels * size[0] * size[1], classes))
