"""Lightning's Trainer, in its `barebones` form, which is meant for measuring its speed.

A fit cannot be paused, and a new one for every epoch would set up everything anew. So one fit runs in a thread, and its source of
batches waits until `epoch` hands it those of the next one. `_go` and `_over` are a baton: the caller owns `_batches` and `_error`
from `_over` to `_go`, the fit from `_go` to `_over`.
"""

import logging
import threading
import warnings
from collections.abc import Iterator, Sequence
from importlib import import_module
from time import perf_counter
from typing import Any, final

import torch
from torch import nn
from typing_extensions import override

from peers.base import BatchLoss, Peer, Samples, settle, wait
from peers.torch_loop import sgd
from peers.workload import RATE, WARM_UP, Unavailable, Workload


class _Closed(Exception):  # noqa: N818 - it ends the fit; nothing is wrong
    pass


@final
class Fit(Peer):
    """One fit without end; a batch is a plan and the number of its row, and preparation is compiled together with the network."""

    def __init__(self, pytorch: Any, workload: Workload, samples: Samples, module: Any) -> None:
        began = perf_counter()
        self.num_samples = workload.num_samples
        self._samples, self._module = samples, module
        self._go, self._over = threading.Semaphore(0), threading.Semaphore(0)
        self._batches: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        self._error: BaseException | None = None
        module.on_train_epoch_end = self._over.release
        device = samples.device
        where = {"accelerator": "gpu", "devices": [device.index or 0]} if device.type == "cuda" else {"accelerator": "cpu"}
        trainer = pytorch.Trainer(max_epochs=-1, precision="bf16-mixed", benchmark=True, barebones=True, **where)
        self._thread = threading.Thread(target=self._fit, args=(trainer,), daemon=True)
        self._thread.start()
        self._run(samples.draw(), [0] * WARM_UP)
        wait(device)
        self.setup_seconds = perf_counter() - began

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The batches of an epoch; without a length, since the warm-up is short."""
        self._go.acquire()
        if self._batches is None:
            raise _Closed
        yield from self._batches

    def _fit(self, trainer: Any) -> None:
        try:
            trainer.fit(self._module, train_dataloaders=self)
        except _Closed:
            pass
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            self._error = error
        self._over.release()

    def _run(self, plan: torch.Tensor, rows: Sequence[int]) -> None:
        self._batches = [(plan, number) for number in torch.tensor(rows, device=plan.device).split(1)]
        self._go.release()
        self._over.acquire()
        if self._error is not None:
            raise RuntimeError("Lightning's fit failed") from self._error

    @override
    def epoch(self) -> None:
        plan = self._samples.draw()
        self._run(plan, range(len(plan)))

    @override
    def loss(self) -> float:
        return float(self._module.last)

    @override
    def close(self) -> None:
        self._batches = None
        self._go.release()
        self._thread.join()
        super().close()


def make_lightning(
    workload: Workload,
    images: torch.Tensor,
    labels: torch.Tensor,
    network: nn.Module,
    *,
    rate: float = RATE,
    compiled: bool = True,
) -> Peer:
    """A LightningModule as its users write it, automatic optimisation included."""
    pytorch = _import_lightning()
    logging.getLogger(pytorch.__name__).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=f"{pytorch.__name__}|pytorch_lightning")
    settle()
    samples = Samples(workload, images, labels)

    class Module(pytorch.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.all_parts = BatchLoss(workload, samples, network)
            self.compute = torch.compile(self.all_parts, dynamic=False, fullgraph=True) if compiled else self.all_parts
            self.last = torch.zeros(())

        def training_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            loss = self.compute(*batch)
            self.last = loss.detach()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self.all_parts.network, rate)

    return Fit(pytorch, workload, samples, Module())


def _import_lightning() -> Any:
    """It comes under two names."""
    errors = []
    for name in ("lightning.pytorch", "pytorch_lightning"):
        try:
            return import_module(name)
        except (ImportError, RuntimeError) as error:  # RuntimeError: a torchvision that does not fit the torch
            errors.append(str(error))
    raise Unavailable(f"lightning: not installed ({'; '.join(errors)})")
