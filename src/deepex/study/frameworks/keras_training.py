"""The training of Keras: its compiled step, and the loop over it."""

from time import perf_counter
from typing import Any, Final, final

import keras
import numpy as np
import tensorflow as tf
from typing_extensions import override

from deepex.study.frameworks.base import RankEpoch, Sums, Told, Training, loop
from deepex.study.frameworks.keras_network import make_keras
from deepex.study.frameworks.layers import Layer
from deepex.study.frameworks.trial import fastest
from deepex.study.frameworks.workload import Workload

_LEAST_VALIDATED: Final = 64


@final
class KerasTraining(Training):
    """A model of Keras; with `workers`, the addresses of all ranks, one of several copies."""

    def __init__(self, task: Workload, layers: tuple[Layer, ...], workers: list[str]) -> None:
        self._task = task
        _settle(task)
        self._strategy = _make_strategy(task, workers)
        channels, height, width = task.manifest.shape
        optim = task.config.optim
        with self._strategy.scope():
            self._model = make_keras(layers, (height, width, channels))
            self._optimiser = keras.optimizers.SGD(task.rates(0)[0], momentum=optim.momentum, nesterov=optim.nesterov)
            self._optimiser.build(self._model.trainable_variables)
        samples, held = task.train(), task.validation()
        self._images, self._labels = tf.constant(samples.images), tf.constant(samples.labels)
        self._held = tf.constant(held.images), tf.constant(held.labels)
        self._sums = tf.Variable(tf.zeros(2))
        self._score = tf.function(self._scored)
        several = task.comm.size > 1
        # XLA has no deterministic gradient of max pooling.
        compiled = not several and not task.config.deterministic and self._try()
        self._step = self._compile(compiled=compiled)
        self._warm_up()
        self.settings = {
            "collectives": "gRPC, by MultiWorkerMirroredStrategy" if several else "none",
            "xla": compiled,
            "layout": "channels_last",
            "optimiser": "keras.optimizers.SGD, weight decay in the gradient",
        }

    @override
    def run(self, told: Told) -> None:
        loop(self._task.config.epochs, self._epoch, told)

    @override
    def close(self) -> None:
        self._task.comm.barrier()  # a worker that ends first is missed by the others

    def _compile(self, *, compiled: bool) -> Any:
        """The step of all ranks: the numbers of this one's samples, and 1 / the samples of all."""

        def step(chosen: Any, part: Any) -> None:
            total = self._strategy.run(self._stepped, (chosen, part))
            self._sums.assign_add(total)

        return tf.function(step, jit_compile=compiled, reduce_retracing=True)

    def _stepped(self, chosen: Any, part: Any) -> Any:
        """The optimiser sums gradients over the ranks, so that each loss is a part of the mean over all samples."""
        images, labels = tf.gather(self._images, chosen), tf.gather(self._labels, chosen)
        weights, decay = self._model.trainable_variables, self._task.config.optim.weight_decay
        ranks = self._task.comm.size
        with tf.GradientTape() as tape:
            loss, wrong = _totals(self._model(images, training=True), labels)
            scaled = loss * part
        gradients = tape.gradient(scaled, weights)
        if decay:
            decayed = [variable.name == "kernel" for variable in weights]
            gradients = [
                gradient + decay / ranks * weight if decays else gradient
                for gradient, weight, decays in zip(gradients, weights, decayed, strict=True)
            ]
        self._optimiser.apply_gradients(zip(gradients, weights, strict=True))
        return tf.stack([loss, wrong])

    def _epoch(self, number: int) -> RankEpoch:
        began = perf_counter()
        order, lengths = self._task.plan(number)
        self._sums.assign(tf.zeros(2))
        for chosen, total in zip(np.split(order, np.cumsum(lengths)[:-1]), self._task.totals, strict=True):
            self._step(tf.constant(chosen), tf.constant(1 / total, tf.float32))
        loss, wrong = self._sums.numpy().tolist()
        seconds = perf_counter() - began
        validation, validation_seconds = self._validate()
        train = Sums(loss=loss, measures=[wrong], samples=len(order))
        return RankEpoch(train=train, seconds=seconds, validation=validation, validation_seconds=validation_seconds)

    def _validate(self) -> tuple[Sums, float]:
        began, sums = perf_counter(), np.zeros(2)
        (images, labels), batch = self._held, max(self._task.config.batch, _LEAST_VALIDATED)
        for start in range(0, len(images), batch):
            sums += self._score(images[start : start + batch], labels[start : start + batch]).numpy()
        return Sums(loss=float(sums[0]), measures=[float(sums[1])], samples=len(images)), perf_counter() - began

    def _scored(self, images: Any, labels: Any) -> Any:
        return tf.stack(_totals(self._model(images, training=False), labels))

    def _variables(self) -> list[Any]:
        return [*self._model.variables, *self._optimiser.variables]

    def _try(self) -> bool:
        """Whether XLA makes the step faster."""
        before = [variable.numpy() for variable in self._variables()]
        chosen = tf.constant(self._task.plan(0)[0][: self._task.lengths(0)[0]])
        steps = {compiled: self._compile(compiled=compiled) for compiled in (False, True)}

        def trial(step: Any) -> Any:
            def once() -> None:
                step(chosen, tf.constant(0.0))
                self._sums.numpy()

            return once

        found = fastest({compiled: trial(step) for compiled, step in steps.items()}, self._task.comm)
        self._restore(before)
        return found

    def _warm_up(self) -> None:
        """Trace and compile everything that an epoch needs; all variables are put back."""
        before = [variable.numpy() for variable in self._variables()]
        order, lengths = self._task.plan(0)
        for step in sorted({(own, total) for own, total in zip(lengths, self._task.totals, strict=True)}):
            self._step(tf.constant(order[: step[0]]), tf.constant(1 / step[1], tf.float32))
        self._validate()
        self._restore(before)

    def _restore(self, values: list[Any]) -> None:
        for variable, value in zip(self._variables(), values, strict=True):
            variable.assign(value)


def _totals(logits: Any, labels: Any) -> tuple[Any, Any]:
    """Loss and wrong answers, summed."""
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    wrong = tf.cast(tf.not_equal(tf.argmax(logits, -1), labels), tf.float32)
    return tf.reduce_sum(losses), tf.reduce_sum(wrong)


def _settle(task: Workload) -> None:
    threading = tf.config.threading
    threading.set_intra_op_parallelism_threads(task.threads)
    threading.set_inter_op_parallelism_threads(2 if task.comm.size > 1 else 1)  # one may wait for the others
    on_gpu = task.device.type == "cuda"
    devices = tf.config.list_physical_devices("GPU")
    tf.config.set_visible_devices([devices[task.device.index or 0]] if on_gpu else [], "GPU")
    tf.config.experimental.enable_tensor_float_32_execution(False)
    if task.config.deterministic:
        keras.utils.set_random_seed(task.config.seed)
        tf.config.experimental.enable_op_determinism()


def _make_strategy(task: Workload, workers: list[str]) -> Any:
    if not workers:
        return tf.distribute.get_strategy()
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": workers}), task_type="worker", task_id=task.comm.rank, rpc_layer="grpc"
    )
    return tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver)
