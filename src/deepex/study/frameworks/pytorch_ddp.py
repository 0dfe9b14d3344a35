"""PyTorch's DistributedDataParallel, over NCCL where every rank has a GPU, else over gloo; on one rank, plain PyTorch.

It gets what is best for it: samples on the device, fused SGD, gradients as views of its buckets, no broadcast of batch-norm
statistics (rank 0's are sent before validation, as it would have done before every step); and, found by trial for each network:
the memory order, `static_graph`, gradients set to None or to zero, and on a GPU whether to compile, and to replay what was compiled
as CUDA graphs ("reduce-overhead", not under DDP).
"""

from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature
from itertools import cycle
from time import perf_counter
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from deepex.comm.distributed import DistributedCommunicator
from deepex.study.frameworks.base import Framework, RankEpoch, Sums, Told, Training, loop
from deepex.study.frameworks.pytorch import Step, TorchData, make_sgd, own_network, set_rate, settle
from deepex.study.frameworks.trial import fastest
from deepex.study.frameworks.workload import Workload

# PyTorch 2.13 has a new name for that.
NO_BUFFERS: dict[str, Any] = {
    "forward_sync_buffers"
    if "forward_sync_buffers" in signature(DistributedDataParallel).parameters
    else "broadcast_buffers": False
}


@final
class PytorchDdp(Framework):
    """PyTorch itself."""

    name = "pytorch"
    packages = ("torch",)
    requirement = "torch"

    @override
    def build(self, task: Workload) -> Training:
        settle(task)
        group = join_group(task)
        found = _best(task)
        return _Ddp(task, group, TorchData(task, channels_last=found["channels_last"]), found)


def join_group(task: Workload) -> DistributedCommunicator | None:
    """Make torch.distributed's default group of all ranks; None where there is one rank, or a launcher's group already."""
    if task.comm.size == 1 or dist.is_initialized():
        return None
    own = task.device.type == "cuda" and task.comm.place.local_size <= torch.cuda.device_count()
    return DistributedCommunicator("nccl" if own else "gloo", bootstrap=task.comm)


def collectives() -> str:
    """Who carries the gradients."""
    return str(dist.get_backend()) if dist.is_initialized() else "none"


def send_buffers(network: nn.Module) -> None:
    """Give all ranks the batch-norm statistics of rank 0."""
    if dist.is_initialized():
        for buffer in network.buffers():
            dist.broadcast(buffer, 0)


def orders(task: Workload) -> list[bool]:
    """The memory orders to be tried: whether channels-last."""
    if task.config.layout != "auto":
        return [task.config.layout == "channels_last"]
    if task.device.type == "cuda":
        return [True]
    return [False] if task.config.deterministic else [False, True]


def best_order(task: Workload) -> bool:
    """Whether channels-last is the faster memory order."""
    return bool(_best(task, only=("channels_last",))["channels_last"])


def _best(task: Workload, only: Sequence[str] | None = None) -> dict[str, Any]:
    """The fastest settings, one after another; nothing that the trials train is kept."""
    several, on_gpu = task.comm.size > 1, task.device.type == "cuda"
    choices: dict[str, list[Any]] = {
        "channels_last": orders(task),
        "static_graph": [False, True] if several else [False],
        "set_to_none": [True, False],
        "compiled": ["no", "default", *([] if several else ["reduce-overhead"])] if on_gpu else ["no"],
    }
    best = {name: values[0] for name, values in choices.items()}
    if task.config.deterministic:
        return best
    before = torch.random.get_rng_state()
    data = {order: TorchData(task, channels_last=order) for order in choices["channels_last"]}
    for name, values in choices.items():
        if len(values) > 1 and (only is None or name in only):
            settings = {value: {**best, name: value} for value in values}
            best[name] = fastest({value: _trial(task, data[s["channels_last"]], s) for value, s in settings.items()}, task.comm)
    torch.random.set_rng_state(before)
    return best


def _trial(task: Workload, data: TorchData, settings: dict[str, Any]) -> Callable[[], None]:
    """Steps of a copy of the network."""
    trained = _Ddp(task, None, data, settings)
    steps, sums = cycle(list(data.steps(0))[:3]), data.sums()

    def step() -> None:
        trained.step(next(steps), sums)
        sums.tolist()  # waits for the device

    return step


@final
class _Ddp(Training):
    """A copy of the task's network under DDP."""

    def __init__(self, task: Workload, group: DistributedCommunicator | None, data: TorchData, settings: dict[str, Any]) -> None:
        self._task, self._group, self._data = task, group, data
        self._network = own_network(task, data)
        self._optimiser = make_sgd(self._network, task)
        self._zero = partial(self._optimiser.zero_grad, set_to_none=settings["set_to_none"])
        mode = settings["compiled"]
        model: Any = self._network if mode == "no" else torch.compile(self._network, dynamic=False, mode=mode)
        if task.comm.size > 1:
            model = DistributedDataParallel(
                model, gradient_as_bucket_view=True, static_graph=settings["static_graph"], **NO_BUFFERS
            )
        self._model = model
        layout = "channels_last" if settings["channels_last"] else "contiguous"
        self.settings = {**settings, "layout": layout, "collectives": collectives(), "optimiser": "torch.optim.SGD, fused"}

    @override
    def run(self, told: Told) -> None:
        loop(self._task.config.epochs, self._epoch, told)

    @override
    def close(self) -> None:
        if self._group is not None:
            del self._model
            self._group.close()

    def step(self, step: Step, sums: torch.Tensor) -> None:
        """One step."""
        self._zero()
        self._data.loss(self._model, step, sums).backward()
        set_rate(self._optimiser, step.rate)
        self._optimiser.step()

    def _epoch(self, number: int) -> RankEpoch:
        began, sums = perf_counter(), self._data.sums()
        for step in self._data.steps(number):
            self.step(step, sums)
        loss, *measures = sums.tolist()
        seconds = perf_counter() - began
        send_buffers(self._network)
        validation, validation_seconds = self._data.validate(self._network)
        train = Sums(loss=loss, measures=measures, samples=len(self._data.images))
        return RankEpoch(train=train, seconds=seconds, validation=validation, validation_seconds=validation_seconds)
