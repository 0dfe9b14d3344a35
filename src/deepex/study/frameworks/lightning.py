"""Lightning's Trainer in its `barebones` form, which its makers give for measuring speed: nothing is logged, saved or drawn.

Ranks are those of our launcher, told by an environment plugin: left to itself, Lightning asks mpi4py wherever that is installed,
and freezes (its issue 20049). DDP has the settings of pytorch_ddp.py that need no trial; the memory order is tried, by bare steps.
"""

import logging
import warnings
from collections.abc import Iterator
from importlib import import_module
from time import perf_counter
from typing import TYPE_CHECKING, Any, final

from typing_extensions import override

from deepex.study.frameworks.base import Framework, RankEpoch, Sums, Told, Training

if TYPE_CHECKING:
    from deepex.study.frameworks.workload import Workload


@final
class Lightning(Framework):
    """Lightning, automatic optimisation included, as its users write it."""

    name = "lightning"
    packages = ("lightning", "torch")
    requirement = "lightning"

    @override
    def build(self, task: "Workload") -> Training:
        from deepex.study.frameworks.pytorch import settle

        settle(task)
        return _Fit(task, import_module("lightning.pytorch"))


@final
class _Fit(Training):
    """One fit. Its source of batches tells when an epoch begins, its module when the last step of one is done."""

    def __init__(self, task: "Workload", pytorch: Any) -> None:
        from deepex.study.frameworks.pytorch import TorchData, own_network
        from deepex.study.frameworks.pytorch_ddp import best_order, collectives, join_group

        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", module="lightning")
        self._task, self._group = task, join_group(task)
        last = best_order(task)
        self._data = TorchData(task, channels_last=last)
        self._network = own_network(task, self._data)
        self._module = _make_module(pytorch, task, self._data, self._network)
        self._trainer = _make_trainer(pytorch, task)
        self.settings = {
            "collectives": collectives(),
            "layout": "channels_last" if last else "contiguous",
            "trainer": "barebones",
            "static_graph": task.comm.size > 1,
            "optimiser": "torch.optim.SGD, fused, automatic optimisation",
        }

    @override
    def run(self, told: Told) -> None:
        module, rank = self._module, self._task.comm.rank
        source = _Batches(self._task, self._data, module)

        def ended() -> None:
            from deepex.study.frameworks.pytorch_ddp import send_buffers

            loss, *measures = module.sums.tolist()
            seconds = perf_counter() - source.began
            send_buffers(self._network)
            validation, validation_seconds = self._data.validate(self._network)
            train = Sums(loss=loss, measures=measures, samples=self._task.shards.size(rank))
            epoch = RankEpoch(train=train, seconds=seconds, validation=validation, validation_seconds=validation_seconds)
            self._trainer.should_stop = not told(epoch)

        module.on_train_epoch_end = ended
        self._trainer.fit(module, train_dataloaders=source)

    @override
    def close(self) -> None:
        del self._trainer, self._module
        if self._group is not None:
            self._group.close()


@final
class _Batches:
    """The steps of one epoch after another; a batch is a step's samples, its share and its rate."""

    def __init__(self, task: "Workload", data: Any, module: Any) -> None:
        self._task, self._data, self._module = task, data, module
        self.began = 0.0

    def __len__(self) -> int:
        return self._task.steps

    def __iter__(self) -> Iterator[Any]:
        self.began = perf_counter()
        self._module.sums = self._data.sums()
        yield from self._data.steps(self._module.current_epoch)  # Lightning may ask more than once before it begins


def _make_module(pytorch: Any, task: "Workload", data: Any, network: Any) -> Any:
    from deepex.study.frameworks.pytorch import make_sgd, set_rate

    class Module(pytorch.LightningModule):  # type: ignore[misc] # untyped
        def __init__(self) -> None:
            super().__init__()
            self.network, self.sums = network, data.sums()

        def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
            return batch  # it is there

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            set_rate(self.optimizers().optimizer, batch.rate)

        def training_step(self, batch: Any) -> Any:
            return data.loss(self.network, batch, self.sums)

        def configure_optimizers(self) -> Any:
            return make_sgd(self.network, task)

    return Module()


def _make_trainer(pytorch: Any, task: "Workload") -> Any:
    on_gpu = task.device.type == "cuda"
    where: dict[str, Any] = (
        {"accelerator": "gpu", "devices": [task.device.index or 0]} if on_gpu else {"accelerator": "cpu", "devices": 1}
    )
    if task.comm.size > 1:
        where |= {"strategy": _make_strategy(task), "num_nodes": task.comm.place.num_nodes}
        where["devices"] = task.comm.place.local_size
    # Precision and benchmark are the process's: autocast is in the loss, as for plain PyTorch.
    return pytorch.Trainer(
        max_epochs=task.config.epochs, barebones=True, use_distributed_sampler=False, inference_mode=True, **where
    )


def _make_strategy(task: "Workload") -> Any:
    from deepex.study.frameworks.pytorch_ddp import NO_BUFFERS, collectives

    environments: Any = import_module("lightning.pytorch.plugins.environments")
    strategies: Any = import_module("lightning.pytorch.strategies")
    place = task.comm.place

    class OurRanks(environments.LightningEnvironment):  # type: ignore[misc] # untyped
        """The ranks of the group that runs already."""

        creates_processes_externally = True

        def world_size(self) -> int:
            return place.size

        def set_world_size(self, size: int) -> None:
            return

        def global_rank(self) -> int:
            return place.rank

        def set_global_rank(self, rank: int) -> None:
            return

        def local_rank(self) -> int:
            return place.local_rank

        def node_rank(self) -> int:
            return place.node

    options = {"gradient_as_bucket_view": True, "static_graph": True, **NO_BUFFERS}
    return strategies.DDPStrategy(cluster_environment=OurRanks(), process_group_backend=collectives(), **options)
