"""The trials of periods.py: workloads, the networks that only they have, and which periods and strategies are tried on them."""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from trials import Trial

if TYPE_CHECKING:
    from torch import nn

PERIODS: Final = (1, 2, 4, 8, 16, 32, "epoch")
COSTS: Final = (3.0, 30.0)  # of a sync, in steps
TUNED_AT: Final = 4
FRONTIER_COST: Final = 10.0  # of all weights
PARTS: Final = 4  # sync.parts
SHARE: Final = {
    "streaming": 1 / PARTS,
    "background": 1 / PARTS / 2,
    "own": 1 / 2,
}  # of the bytes of weights and momentum, in a sync
LEFT: Final = 0.15  # of a sync that a period could hide: 0.13 to 0.2 over slowed networks (slow_network.py)
CHOICE_PERIODS: Final = (1, 4, 16, 64)
CHOICE_COSTS: Final = (3.0, 10.0, 30.0, 100.0)
OWN_COSTS: Final = (10.0, 30.0)
STRATEGIES: Final[dict[str, dict[str, Any]]] = {
    "weights": {},
    "slowmo": {"sync.outer": "slowmo"},
    "nesterov": {"sync.outer": "nesterov"},
    "elastic": {"sync.strategy": "elastic"},
    "streaming": {"sync.strategy": "streaming", "sync.cost": FRONTIER_COST * SHARE["streaming"]},
    "background": {"sync.strategy": "background", "sync.cost": FRONTIER_COST * SHARE["background"]},
}
LATE_PERIODS: Final = (2, 4)  # of a part
FRONTIER_PERIODS: Final = (1, 2, 4, 8, 16, "epoch", "adacomm", "qsr", "auto")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is learnt; `rates` are tried. `role`: `tuned` (the rule was found on it), `judged`, `choice` or `frontier`."""

    role: str
    recipe: str
    net: str
    replicas: int
    batch: int
    epochs: int
    rates: tuple[float, ...]
    changes: dict[str, Any] = field(default_factory=dict)


def _on_fashion(role: str, net: str, *rates: float, replicas: int, batch: int, epochs: int = 12, **changes: Any) -> Workload:
    return Workload(
        role=role, recipe="fashion", net=net, replicas=replicas, batch=batch, epochs=epochs, rates=rates, changes=changes
    )


def _on_diffraction(role: str, net: str, *, replicas: int, epochs: int) -> Workload:
    decay = {"optim.schedule": "cosine", "optim.final": 0.1}  # or its loss goes up and down by more than periods differ by
    rates = (0.003, 0.01, 0.03)
    return Workload(
        role=role, recipe="atomai-small", net=net, replicas=replicas, batch=8, epochs=epochs, rates=rates, changes=decay
    )


WORKLOADS: Final = {
    "mlp": _on_fashion("tuned", "period_trials:mlp", 0.02, 0.05, 0.1, replicas=16, batch=8),
    "lenet": _on_fashion("tuned", "lenet-caffe", 0.01, 0.03, 0.1, replicas=8, batch=16),
    "convnet": _on_fashion("tuned", "convnet", 0.003, 0.01, 0.03, replicas=8, batch=16, epochs=10),
    "batch-norm": _on_fashion("judged", "period_trials:normed", 0.01, 0.03, 0.1, replicas=16, batch=8),
    "lenet-5": _on_fashion("judged", "lenet", 0.01, 0.03, 0.1, replicas=32, batch=4),
    "lars": _on_fashion("tuned", "period_trials:normed", 1.0, 3.0, 10.0, replicas=8, batch=16, **{"optim.method": "lars"}),
    "plain": _on_fashion("judged", "lenet-caffe", 0.03, 0.1, 0.3, replicas=16, batch=8, **{"optim.momentum": 0.0}),
    "pf": Workload(role="tuned", recipe="pf-small", net="cvae", replicas=8, batch=32, epochs=8, rates=(1e-4, 3e-4, 1e-3)),
    "diffraction": _on_diffraction("judged", "period_trials:mlp", replicas=4, epochs=16),
    "long mlp": _on_fashion("choice", "period_trials:mlp", 0.01, 0.03, 0.1, replicas=4, batch=8, epochs=6),
    "long lenet": _on_fashion("choice", "lenet", 0.01, 0.03, 0.1, replicas=8, batch=4, epochs=6),
    "long batch-norm": _on_fashion("choice", "period_trials:normed", 0.01, 0.03, 0.1, replicas=4, batch=8, epochs=6),
    "long convnet": _on_fashion("choice", "convnet", 0.003, 0.01, 0.03, replicas=2, batch=16, epochs=6),
    "long diffraction": _on_diffraction("choice", "period_trials:normed", replicas=2, epochs=8),
    "frontier": _on_fashion(
        "frontier", "lenet", 0.01, 0.03, 0.1, replicas=8, batch=16, **{"optim.schedule": "cosine", "optim.final": 0.1}
    ),
}


def mlp(*, channels: int, size: tuple[int, int], classes: int) -> "nn.Module":
    """Two hidden layers of 128."""
    from torch import nn

    inputs = channels * size[0] * size[1]
    hidden = [nn.Linear(inputs, 128), nn.ReLU(inplace=True), nn.Linear(128, 128), nn.ReLU(inplace=True)]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(128, classes))


def normed(*, channels: int, size: tuple[int, int], classes: int) -> "nn.Module":
    """Two convolutions with batch norm and two dense layers."""
    from torch import nn

    def convolution(inputs: int, outputs: int) -> list[nn.Module]:
        layers = [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs)]
        return [*layers, nn.ReLU(inplace=True), nn.MaxPool2d(2)]

    dense = [nn.Linear(16 * (size[0] // 4) * (size[1] // 4), 64), nn.ReLU(inplace=True), nn.Linear(64, classes)]
    return nn.Sequential(*convolution(channels, 8), *convolution(8, 16), nn.Flatten(), *dense)


def trial(workload: str, name: str, seed: int, **changes: Any) -> Trial:
    """A trial of a workload."""
    task = WORKLOADS[workload]
    usual = {"threads": 1, "layout": "channels_last", "sync.period": TUNED_AT}
    own = {"net": task.net, "replicas": task.replicas, "batch": task.batch, "epochs": task.epochs, **task.changes}
    return Trial(workload=workload, name=name, seed=seed, recipe=task.recipe, measure="loss", changes={**usual, **own, **changes})


def tuning(workload: str) -> list[Trial]:
    """One trial for each rate."""
    return [trial(workload, f"rate {rate:g}", 1, **{"optim.rate": rate}) for rate in WORKLOADS[workload].rates]


def tuned_rate(workload: str, found: Iterable[Trial]) -> float:
    """The rate with which the least validation loss was reached; that of the trials that are there."""
    losses = {
        one.changes["optim.rate"]: min(epoch.validation for epoch in one.epochs)
        for one in found
        if one.workload == workload and one.name.startswith("rate ") and one.epochs and not one.note
    }
    return float(min(losses, key=lambda rate: losses[rate]))


def sweep(workload: str, rate: float, seeds: Sequence[int]) -> list[Trial]:
    """All periods, and `auto`, or all points of the frontier, at one rate."""
    fixed: dict[str, Any] = {"optim.rate": rate}
    if WORKLOADS[workload].role == "frontier":
        rules = {"sync.base": TUNED_AT, "sync.alpha": rate * math.sqrt(TUNED_AT), "sync.cost": FRONTIER_COST}
        return [
            trial(workload, f"{name} {period}", seed, **{**fixed, **rules, **strategy, "sync.period": period})
            for seed, (name, strategy), period in itertools.product(seeds, STRATEGIES.items(), FRONTIER_PERIODS)
        ]
    choice = WORKLOADS[workload].role == "choice"
    asked = [(f"weights {period}", {"sync.period": period}) for period in (CHOICE_PERIODS if choice else PERIODS)]
    if not choice:
        asked += [(f"background {period}", {"sync.strategy": "background", "sync.period": period}) for period in LATE_PERIODS]
    costs = CHOICE_COSTS if choice else COSTS
    hides = {"sync.strategy": "background", "sync.period": "auto"}
    asked += [(f"background auto at {cost:g}", {**hides, "sync.cost": cost * SHARE["background"]}) for cost in costs]
    own = {"sync.momentum": "local", "sync.period": "auto"}
    asked += [(f"own auto at {cost:g}", {**own, "sync.cost": cost * SHARE["own"]}) for cost in (OWN_COSTS if choice else ())]
    asked += [(f"auto at {cost:g}", {"sync.period": "auto", "sync.cost": cost}) for cost in costs]
    asked += [("muon", {"sync.strategy": "auto", "sync.outer": "muon", "sync.period": None})] if choice else []
    return [trial(workload, name, seed, **fixed, **changes) for seed, (name, changes) in itertools.product(seeds, asked)]
