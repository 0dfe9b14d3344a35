"""ResNet-50 (version 1.5) in JAX; as a script, it measures the task on its command line and prints one line of JSON.

With Flax and Optax where they are installed, in plain JAX elsewhere: the same arithmetic, of which XLA makes much the same program.
"""

import json
import statistics
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

from peers.workload import MOMENTUM, PADDING, WARM_UP, Workload

Apply = Callable[[Any, Any, Any], tuple[Any, Any]]  # parameters, statistics, inputs → logits, statistics


def _resnet50(unit: Callable[..., Any], x: Any) -> Any:
    """The features of images (N, H, W, C); `unit(x, outputs, kernel, stride)` is a convolution and its batch norm."""
    import jax
    from jax import lax

    relu = jax.nn.relu
    x = relu(unit(x, 64, 7, 2))
    x = lax.reduce_window(x, -float("inf"), lax.max, (1, 3, 3, 1), (1, 2, 2, 1), ((0, 0), (1, 1), (1, 1), (0, 0)))
    for number, (width, depth) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for position in range(depth):
            stride = 2 if number > 0 and position == 0 else 1
            y = relu(unit(x, width, 1, 1))
            y = relu(unit(y, width, 3, stride))
            y = unit(y, 4 * width, 1, 1)
            x = relu(y + (x if position else unit(x, 4 * width, 1, stride)))
    return x.mean((1, 2))


def _sides(kernel: int) -> list[tuple[int, int]]:
    return [(kernel // 2, kernel // 2)] * 2


def _flax_network(shape: tuple[int, int, int], classes: int) -> tuple[Any, Any, Apply]:
    """Parameters, statistics and network in Flax."""
    import jax
    from flax import linen
    from jax import numpy as jnp

    class Network(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            def unit(x: Any, outputs: int, kernel: int, stride: int) -> Any:
                sizes = {"kernel_size": (kernel, kernel), "strides": (stride, stride), "padding": _sides(kernel)}
                he = linen.initializers.variance_scaling(2.0, "fan_out", "normal")
                x = linen.Conv(outputs, **sizes, use_bias=False, dtype=jnp.bfloat16, kernel_init=he)(x)
                return linen.BatchNorm(use_running_average=False, momentum=0.9, epsilon=1e-5, dtype=jnp.bfloat16)(x)

            return linen.Dense(classes, dtype=jnp.bfloat16)(_resnet50(unit, x)).astype(jnp.float32)

    network = Network()
    variables = jax.jit(network.init)(jax.random.key(0), jnp.zeros((1, *shape), jnp.bfloat16))

    def apply(parameters: Any, statistics: Any, x: Any) -> tuple[Any, Any]:
        logits, changed = network.apply({"params": parameters, "batch_stats": statistics}, x, mutable=["batch_stats"])
        return logits, changed["batch_stats"]

    return variables["params"], variables["batch_stats"], apply


def _plain_network(shape: tuple[int, int, int], classes: int) -> tuple[Any, Any, Apply]:
    """Parameters, statistics and network in JAX alone."""
    import jax
    import numpy as np
    from jax import lax
    from jax import numpy as jnp

    def convolve(x: Any, kernel: Any, stride: int) -> Any:
        form, sides = ("NHWC", "HWIO", "NHWC"), _sides(kernel.shape[0])
        return lax.conv_general_dilated(x, kernel.astype(x.dtype), (stride, stride), sides, dimension_numbers=form)

    sizes: list[tuple[int, int, int, int]] = []

    def note(x: Any, outputs: int, kernel: int, stride: int) -> Any:
        sizes.append((kernel, kernel, x.shape[-1], outputs))
        return convolve(x, jnp.zeros(sizes[-1]), stride)

    features = jax.eval_shape(lambda x: _resnet50(note, x), jax.ShapeDtypeStruct((1, *shape), jnp.bfloat16)).shape[-1]
    chance = np.random.default_rng(0)

    def draw(size: tuple[int, ...], deviation: float) -> Any:
        return jnp.asarray(chance.normal(0, deviation, size), jnp.float32)

    units = [(draw(s, (2 / (s[0] * s[1] * s[3])) ** 0.5), jnp.ones(s[3]), jnp.zeros(s[3])) for s in sizes]
    running = [(jnp.zeros(s[3]), jnp.ones(s[3])) for s in sizes]

    def apply(parameters: Any, statistics: Any, x: Any) -> tuple[Any, Any]:
        own, old, new = iter(parameters["units"]), iter(statistics), []

        def unit(x: Any, outputs: int, kernel: int, stride: int) -> Any:  # noqa: ARG001 - the weights have the sizes
            weight, gain, shift = next(own)
            y = convolve(x, weight, stride).astype(jnp.float32)
            mean = y.mean((0, 1, 2))
            variance = jnp.maximum((y * y).mean((0, 1, 2)) - mean * mean, 0)
            new.append(tuple(0.9 * before + 0.1 * now for before, now in zip(next(old), (mean, variance), strict=True)))
            gain = gain * lax.rsqrt(variance + 1e-5)
            return (y * gain + (shift - mean * gain)).astype(x.dtype)

        weight, bias = (part.astype(jnp.bfloat16) for part in parameters["dense"])
        return (_resnet50(unit, x) @ weight + bias).astype(jnp.float32), new

    return {"units": units, "dense": (draw((features, classes), features**-0.5), jnp.zeros(classes))}, running, apply


def _momentum(rate: float, *, plain: bool) -> tuple[Callable[[Any], Any], Callable[..., tuple[Any, Any]]]:
    """Optax's SGD, or the same by hand: (initial state of parameters), (gradients, state, parameters → parameters, state)."""
    import jax
    from jax import numpy as jnp

    if plain:

        def by_hand(gradients: Any, trace: Any, parameters: Any) -> tuple[Any, Any]:
            trace = jax.tree.map(lambda t, g: MOMENTUM * t + g, trace, gradients)
            return jax.tree.map(lambda p, t: p - rate * t, parameters, trace), trace

        return lambda parameters: jax.tree.map(jnp.zeros_like, parameters), by_hand
    import optax

    rule = optax.sgd(rate, momentum=MOMENTUM)

    def update(gradients: Any, state: Any, parameters: Any) -> tuple[Any, Any]:
        updates, state = rule.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state

    return rule.init, update


def _make_epoch(workload: Workload, rate: float, *, plain: bool) -> Callable[[int], float]:
    """A function that trains `num_steps` steps, waits for them and returns the last loss."""
    import jax
    import numpy as np
    from jax import lax
    from jax import numpy as jnp

    channels, height, width = workload.shape
    chance, pad = np.random.default_rng(0), PADDING if workload.augment else 0
    raw = chance.integers(0, 256, (workload.count, height, width, channels), dtype=np.uint8)
    mean, deviation = ((np.asarray(f((0, 1, 2), dtype=np.float64), np.float32)) for f in (raw.mean, raw.std))
    images = jnp.asarray(np.pad(raw, ((0, 0), (pad, pad), (pad, pad), (0, 0))))
    labels = jnp.asarray(np.arange(workload.count) % workload.classes, jnp.int32)
    parameters, running, apply = (_plain_network if plain else _flax_network)((height, width, channels), workload.classes)
    begin, update = _momentum(rate, plain=plain)

    @jax.jit
    def draw(key: Any) -> tuple[Any, ...]:
        order, corner, flip = jax.random.split(key, 3)
        size = (workload.num_steps, workload.batch)
        chosen = jax.random.permutation(order, workload.count)[: workload.num_samples].reshape(size)
        return chosen, jax.random.randint(corner, (*size, 2), 0, 2 * pad + 1), jax.random.bernoulli(flip, shape=size)

    def one_sample(images: Any, chosen: Any, corner: Any, flip: Any) -> Any:
        image = lax.dynamic_slice(images, (chosen, corner[0], corner[1], 0), (1, height, width, channels))[0]
        return jnp.where(flip, image[:, ::-1], image) if pad else image

    # The data are arguments: what a function closes over becomes a constant of the program.
    def step(state: tuple[Any, ...], images: Any, labels: Any, plan: tuple[Any, ...]) -> tuple[Any, ...]:
        parameters, running, memory, number, _loss = state
        chosen, corner, flip = (lax.dynamic_index_in_dim(part, number, keepdims=False) for part in plan)
        batch = jax.vmap(one_sample, (None, 0, 0, 0))(images, chosen, corner, flip)
        inputs = ((batch.astype(jnp.float32) - mean) / deviation).astype(jnp.bfloat16)

        def loss_of(parameters: Any) -> tuple[Any, Any]:
            logits, changed = apply(parameters, running, inputs)
            right = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[chosen][:, None], axis=1)
            return -right.mean(), changed

        (loss, running), gradients = jax.value_and_grad(loss_of, has_aux=True)(parameters)
        parameters, memory = update(gradients, memory, parameters)
        return parameters, running, memory, number + 1, loss

    step = jax.jit(step, donate_argnums=0)
    held = [(parameters, running, begin(parameters), jnp.int32(0), jnp.float32(0))]
    keys = iter(range(10**9))

    def epoch(num_steps: int) -> float:
        plan = draw(jax.random.key(next(keys)))
        state = (*held.pop()[:3], jnp.int32(0), jnp.float32(0))
        for _ in range(num_steps):
            state = step(state, images, labels, plan)
        held.append(state)
        return float(state[-1])

    return epoch


def _has_flax() -> bool:
    """Whether Flax and Optax are there and fit the JAX; an older Flax fails on a newer JAX while it is imported."""
    try:
        import flax.linen
        import optax
    except (ImportError, AttributeError):
        return False
    return bool(flax.linen and optax)


def main() -> None:
    """Read the task from the command line, print the result as one line of JSON."""
    task = json.loads(sys.argv[1])
    workload = Workload(**task["workload"])
    import jax

    try:
        device = jax.devices()[0]
    except (RuntimeError, AssertionError) as error:  # it asserts where no plugin of the platform is installed
        print(json.dumps({"unavailable": str(error) or "no plugin for it"}))
        return
    plain = task["plain"] or not _has_flax()
    began = perf_counter()
    epoch = _make_epoch(workload, task["rate"], plain=plain)
    losses, seconds = [epoch(min(WARM_UP, workload.num_steps))], []
    setup = perf_counter() - began
    for _ in range(task["repeats"] + 2):
        began = perf_counter()
        losses.append(epoch(workload.num_steps))
        seconds.append(perf_counter() - began)
    result = {
        "images_per_second": workload.num_samples / statistics.median(seconds[2:]),
        "seconds": seconds[2:],
        "num_samples": workload.num_samples,
        "setup_seconds": setup,
        "peak_bytes": (device.memory_stats() or {}).get("peak_bytes_in_use", 0),
        "loss": losses[-1],
        "first_loss": losses[0],
        "network": "plain JAX" if plain else "Flax",
        "jax": jax.__version__,
        "device": device.device_kind,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
