"""PyTorch's own loop: eager, compiled, compiled and captured in a CUDA graph; and timm's ResNet-50 and optimiser in it.

The capture is the "whole-network capture" of PyTorch's notes on CUDA graphs.
"""

from collections.abc import Callable
from time import perf_counter
from typing import Any, final

import torch
from torch import nn
from typing_extensions import override

from peers.base import BatchLoss, Peer, Samples, settle, wait
from peers.workload import MOMENTUM, RATE, WARM_UP, Unavailable, Workload


def sgd(network: nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(network.parameters(), lr=rate, momentum=MOMENTUM, fused=True)


@final
class Loop(Peer):
    """A Python iteration per step. With a `mode` of torch.compile, preparation, network, loss and their gradient are compiled.

    What is compiled takes the plan and the step's number, which lie in fixed places on the device, and the number is moved on
    there. `captured` puts the whole step into one CUDA graph, replayed per batch, with no other launch. Without a GPU the same step
    just runs. A mode that makes CUDA graphs itself cannot be captured.
    """

    def __init__(
        self,
        workload: Workload,
        images: torch.Tensor,
        labels: torch.Tensor,
        network: nn.Module,
        *,
        rate: float = RATE,
        mode: str | None = None,
        captured: bool = False,
        optimise: Callable[[nn.Module, float], torch.optim.Optimizer] = sgd,
    ) -> None:
        settle()
        began = perf_counter()
        self.num_samples, self._device = workload.num_samples, images.device
        self._samples = Samples(workload, images, labels)
        all_parts = BatchLoss(workload, self._samples, network)
        self._optimiser = optimise(all_parts.network, rate)
        self._compute: Callable[..., torch.Tensor] = (
            torch.compile(all_parts, mode=mode, dynamic=False, fullgraph=True) if mode else all_parts
        )
        self._plan = self._samples.draw()
        self._number = torch.zeros(1, dtype=torch.int64, device=self._device) if captured or mode else None
        self._replay = self._static_step
        if captured and self._device.type == "cuda":
            self._capture()
        else:
            self._warm_up()
        wait(self._device)
        self.setup_seconds = perf_counter() - began

    def _step(self, *batch: torch.Tensor) -> None:
        self._optimiser.zero_grad(set_to_none=True)
        # Each weight is cast once per step, so that autocast's cache could only let a cast outlive a capture.
        with torch.autocast(self._device.type, torch.bfloat16, cache_enabled=False):
            loss = self._compute(*batch)
        loss.backward()
        self._optimiser.step()
        self._last = loss.detach()

    def _static_step(self) -> None:
        assert self._number is not None
        self._step(self._plan, self._number)
        self._number.add_(1)

    def _warm_up(self) -> None:
        for _ in range(WARM_UP):
            if self._number is None:
                self._step(self._plan[0])
            else:
                self._number.zero_()
                self._static_step()

    def _capture(self) -> None:
        """Warm up on a side stream, as a capture wants it; the graph then allocates its gradients in its own memory."""
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            self._warm_up()
        torch.cuda.current_stream(self._device).wait_stream(side)
        self._optimiser.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._static_step()
        self._replay = graph.replay

    @override
    def epoch(self) -> None:
        if self._number is None:
            for row in self._samples.draw().unbind(0):
                self._step(row)
            return
        self._plan.copy_(self._samples.draw())
        self._number.zero_()
        for _ in range(len(self._plan)):
            self._replay()

    @override
    def loss(self) -> float:
        return float(self._last)


def make_timm(
    workload: Workload, images: torch.Tensor, labels: torch.Tensor, network: nn.Module | None = None, **options: Any
) -> Peer:
    """A loop with timm's network and optimiser: its train.py --amp --amp-dtype bfloat16 --channels-last --torchcompile."""
    del network  # timm has its own
    if workload.net != "resnet50" or workload.task != "classify":
        raise Unavailable(f"timm: not applicable to {workload.net} with task {workload.task}, only to ResNet-50")
    try:
        import timm
        from timm.optim import create_optimizer_v2
    except (ImportError, RuntimeError) as error:  # RuntimeError: a torchvision that does not fit the torch
        raise Unavailable(f"timm: not installed ({error})") from error

    def optimise(net: nn.Module, rate: float) -> torch.optim.Optimizer:
        # Its "sgd" is Nesterov's; its name for plain momentum is "momentum".
        return create_optimizer_v2(net, opt="momentum", lr=rate, momentum=MOMENTUM, weight_decay=0.0, fused=True)

    own = timm.create_model("resnet50", in_chans=workload.shape[0], num_classes=workload.classes)
    return Loop(workload, images, labels, own, optimise=optimise, **{"mode": "default", **options})
