"""Keras 3 on TensorFlow: a compiled step around `model` and its SGD; several ranks by MultiWorkerMirroredStrategy, through gRPC.

Samples are in memory as tensors, and a step is handed the numbers of its own: `fit` would read them through a tf.data pipeline,
with threads beside those that compute. Weight decay is added to the gradient, as DeepEx and PyTorch have it: Keras's own is
decoupled (Loshchilov & Hutter 2019), which is another optimiser. On one rank it is tried whether XLA compiles the step to
advantage; under the strategy it cannot. Running statistics of batch norm are averaged over ranks in every step: that is the
strategy's own way.
"""

from collections.abc import MutableMapping
from typing import TYPE_CHECKING, final

from typing_extensions import override

from deepex.study.frameworks.base import Framework, Training, UnsupportedTask
from deepex.study.frameworks.jax_flax import free_port, own_address, refuse_other_than_classify

if TYPE_CHECKING:
    from deepex.study.frameworks.workload import Workload
    from deepex.training.config import RunConfig


@final
class Keras(Framework):
    """Keras, with TensorFlow under it."""

    name = "keras"
    packages = ("tensorflow", "keras")
    requirement = "tensorflow keras"

    @override
    def prepare(self, environ: MutableMapping[str, str], *, threads: int) -> None:
        environ["KERAS_BACKEND"] = "tensorflow"
        environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")

    @override
    def check(self, config: "RunConfig", *, ranks: int) -> None:
        super().check(config, ranks=ranks)
        refuse_other_than_classify(self.name, config)
        optim = config.optim
        if optim.momentum and (optim.schedule != "constant" or optim.warmup_epochs):
            raise UnsupportedTask(
                "keras does not train this here: its momentum has the learning rate in it, so that with a rate that changes it is "
                "another optimiser; set optim.schedule=constant and optim.warmup_epochs=0"
            )

    @override
    def build(self, task: "Workload") -> Training:
        from deepex.study.frameworks.layers import describe

        layers = describe(task.network, task.manifest.shape)
        comm = task.comm
        workers = comm.gather(f"{own_address(comm)}:{free_port()}") if comm.size > 1 else []
        from deepex.study.frameworks.keras_training import KerasTraining

        return KerasTraining(task, layers, workers)
