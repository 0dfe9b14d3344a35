"""The training of JAX: its compiled steps, and the loop over them.

Arrays of all ranks are sharded over the mesh's one axis, `ranks`; what all share is there once on each.
"""

from functools import partial
from time import perf_counter
from typing import Any, Final, final

import jax
import numpy as np
import optax
from jax import numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from typing_extensions import override

from deepex.study.frameworks.base import RankEpoch, Sums, Told, Training, loop
from deepex.study.frameworks.flax_network import make_flax
from deepex.study.frameworks.layers import Layer
from deepex.study.frameworks.trial import fastest
from deepex.study.frameworks.workload import Workload

_SHARED, _OWN = PartitionSpec(), PartitionSpec("ranks")
_LEAST_VALIDATED: Final = 64


@final
class JaxTraining(Training):
    """A network of Flax, sharded by its samples over the ranks."""

    def __init__(self, task: Workload, layers: tuple[Layer, ...]) -> None:
        self._task = task
        self._network, variables = make_flax(layers)
        self._mesh = Mesh(np.array(jax.devices()[: task.comm.size]), ("ranks",))
        optim = task.config.optim
        decays = {layer: {name: name == "kernel" for name in values} for layer, values in variables["params"].items()}
        momentum = optax.trace(optim.momentum, nesterov=optim.nesterov) if optim.momentum else optax.identity()
        self._optimiser = optax.chain(optax.add_decayed_weights(optim.weight_decay, mask=decays), momentum)
        params, statistics = variables["params"], variables.get("batch_stats", {})
        self._state = self._share((params, statistics, self._optimiser.init(params)))
        samples = task.train()
        room = task.shards.size(0) - len(samples.images)  # shards differ by one sample, arrays of the mesh do not
        self._images = self._spread(np.pad(samples.images, ((0, room), (0, 0), (0, 0), (0, 0))))
        self._labels = self._spread(np.pad(samples.labels.astype(np.int32), (0, room)))
        self._held = task.validation()
        self._score = jax.jit(self._scored)
        flat = task.comm.size > 1 and not task.config.deterministic and self._try()
        self._step = self._compile(flat=flat)
        self._warm_up()
        carrier = "nccl" if task.device.type == "cuda" else "gloo"
        self.settings = {
            "collectives": f"{carrier}, by XLA" if task.comm.size > 1 else "none",
            "one_vector": flat,
            "layout": "channels_last",
            "optimiser": "optax.trace, optax.add_decayed_weights",
        }

    @override
    def run(self, told: Told) -> None:
        loop(self._task.config.epochs, self._epoch, told)

    @override
    def close(self) -> None:
        if self._task.comm.size > 1:
            self._task.comm.barrier()
            jax.distributed.shutdown()

    def _share(self, tree: Any) -> Any:
        place = NamedSharding(self._mesh, _SHARED)
        return jax.tree.map(lambda array: jax.make_array_from_process_local_data(place, np.asarray(array)), tree)

    def _spread(self, own: Any) -> jax.Array:
        return jax.make_array_from_process_local_data(NamedSharding(self._mesh, _OWN), own)

    def _compile(self, *, flat: bool) -> Any:
        """The step: state, sums, samples, this epoch's order and mask; number, rate and 1 / samples of a step → state, sums."""
        specs = (_SHARED, _OWN, _OWN, _OWN, _SHARED)
        body = partial(self._stepped, flat=flat)
        spread = jax.shard_map(body, mesh=self._mesh, in_specs=specs, out_specs=(_SHARED, _OWN), check_vma=False)
        return jax.jit(spread, donate_argnums=(0, 1))

    def _stepped(self, state: Any, sums: Any, samples: Any, plan: Any, numbers: Any, *, flat: bool) -> tuple[Any, Any]:
        """One step on this rank; `order` is (1, steps, batch), and `mask`, where there is one, tells which of it are samples."""
        (params, statistics, memory), (images, labels), (order, mask), (step, rate, part) = state, samples, plan, numbers
        chosen = order[0, step]
        some, true = images[chosen], labels[chosen]
        present = None if mask is None else mask[0, step]

        def loss_of(params: Any) -> Any:
            shape = None if present is None else present[:, None, None, None]
            variables = {"params": params, "batch_stats": statistics} if statistics else {"params": params}
            logits, changed = self._network.apply(variables, some, True, shape, mutable=["batch_stats"])
            loss, wrong = _totals(logits, true, present)
            return loss * part, (changed.get("batch_stats", {}), jnp.stack([loss, wrong]))

        (_, (statistics, own)), gradients = jax.value_and_grad(loss_of, has_aux=True)(params)
        if self._task.comm.size > 1:
            weighted = jax.tree.map(lambda value: value / self._task.comm.size, statistics)
            gradients, statistics = _sum((gradients, weighted), flat=flat)
        updates, memory = self._optimiser.update(gradients, memory, params)
        params = jax.tree.map(lambda value, update: value - rate * update, params, updates)
        return (params, statistics, memory), sums + own[None]

    def _plan(self, epoch: int) -> list[tuple[Any, Any, range]]:
        """Orders and masks of the steps that are full on all ranks, and of each that is not; and which steps these are."""
        task = self._task
        order, lengths = task.plan(epoch)
        batch, full = task.config.batch, sum(total == task.config.batch * task.comm.size for total in task.totals)
        plans: list[tuple[Any, Any, range]] = []
        if full:
            plans.append((self._spread(order[: full * batch].reshape(1, full, batch).astype(np.int32)), None, range(full)))
        for step in range(full, task.steps):
            most, own = max(task.lengths(rank)[step] for rank in (0, task.comm.size - 1)), lengths[step]
            start = sum(lengths[:step])
            row = np.zeros((1, 1, most), np.int32)
            row[0, 0, :own] = order[start : start + own]
            masked = task.totals[step] < most * task.comm.size
            mask = self._spread((np.arange(most) < own)[None, None]) if masked else None
            plans.append((self._spread(row), mask, range(step, step + 1)))
        return plans

    def _train(self, state: Any, plans: Any, rates: list[float], compiled: Any) -> tuple[Any, Any]:
        sums, samples = self._spread(np.zeros((1, 2), np.float32)), (self._images, self._labels)
        for order, mask, steps in plans:
            for number, step in enumerate(steps):
                numbers = np.int32(number), np.float32(rates[step]), np.float32(1 / self._task.totals[step])
                state, sums = compiled(state, sums, samples, (order, mask), numbers)
        return state, sums

    def _epoch(self, number: int) -> RankEpoch:
        began = perf_counter()
        self._state, sums = self._train(self._state, self._plan(number), self._task.rates(number), self._step)
        loss, wrong = np.asarray(sums.addressable_data(0))[0].tolist()
        seconds = perf_counter() - began
        validation, validation_seconds = self._validate()
        train = Sums(loss=loss, measures=[wrong], samples=sum(self._task.lengths(self._task.comm.rank)))
        return RankEpoch(train=train, seconds=seconds, validation=validation, validation_seconds=validation_seconds)

    def _validate(self) -> tuple[Sums, float]:
        began = perf_counter()
        params, statistics, _ = jax.tree.map(lambda array: array.addressable_data(0), self._state)
        batch, count = max(self._task.config.batch, _LEAST_VALIDATED), len(self._held.images)
        sums = np.zeros(2)
        for start in range(0, count, batch):
            some, true = self._held.images[start : start + batch], self._held.labels[start : start + batch].astype(np.int32)
            sums += np.asarray(self._score(params, statistics, some, true))
        return Sums(loss=float(sums[0]), measures=[float(sums[1])], samples=count), perf_counter() - began

    def _scored(self, params: Any, statistics: Any, images: Any, labels: Any) -> Any:
        variables = {"params": params, "batch_stats": statistics} if statistics else {"params": params}
        return jnp.stack(_totals(self._network.apply(variables, images, False, None), labels, None))

    def _try(self) -> bool:
        """Whether gradients are summed faster as one vector."""
        order, _, steps = self._plan(0)[0]

        def trial(*, flat: bool) -> Any:
            compiled, kept = self._compile(flat=flat), [jax.tree.map(jnp.copy, self._state)]

            def step() -> None:
                kept[0], sums = self._train(kept[0], [(order, None, steps[:1])], [0.0], compiled)
                jax.block_until_ready(sums)

            return step

        return fastest({flat: trial(flat=flat) for flat in (False, True)}, self._task.comm)

    def _warm_up(self) -> None:
        """Compile everything that an epoch needs, on copies of the state."""
        for order, mask, steps in self._plan(0):
            copied = jax.tree.map(jnp.copy, self._state)
            _, sums = self._train(copied, [(order, mask, steps[:1])], self._task.rates(0), self._step)
            jax.block_until_ready(sums)
        self._validate()


def _totals(logits: Any, labels: Any, present: Any) -> tuple[Any, Any]:
    """Loss and wrong answers, summed over the samples that are present."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    wrong = (logits.argmax(-1) != labels).astype(jnp.float32)
    if present is None:
        return losses.sum(), wrong.sum()
    return jnp.where(present, losses, 0).sum(), jnp.where(present, wrong, 0).sum()


def _sum(tree: Any, *, flat: bool) -> Any:
    """The sum over all ranks."""
    if not flat:
        return jax.lax.psum(tree, "ranks")
    vector, unravel = ravel_pytree(tree)
    return unravel(jax.lax.psum(vector, "ranks"))
