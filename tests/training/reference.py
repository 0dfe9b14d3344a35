"""Local SGD, plain and slow and obviously right: R full copies of the network in float64, and nothing shared between them."""

import copy
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from deepex.data.dataset import PackedDataset
from deepex.data.feeds.order import epoch_order
from deepex.data.feeds.shard import Shards
from deepex.recipes.network import build_network
from deepex.sync.when.rule import stretches
from deepex.training.config import RunConfig


def train_reference(config: RunConfig, replicas: int) -> dict[str, torch.Tensor]:  # noqa: C901 - in one piece it reads as the definition
    """The state dict after all epochs. Knows SGD with momentum, Nesterov and weight decay at a constant rate."""
    dataset = PackedDataset.open(Path(config.data))
    part, manifest = dataset.part("train"), dataset.manifest
    images, labels = (torch.from_numpy(array) for array in part.read(0, part.count))
    inputs = (images.permute(0, 3, 1, 2).double() / 255 - manifest.mean[0]) / manifest.deviation[0]
    first = build_network(config, manifest).double().train()
    networks = [copy.deepcopy(first) for _ in range(replicas)]
    momenta = [{name: torch.zeros_like(p) for name, p in first.named_parameters()} for _ in range(replicas)]
    shards = Shards(part.count, replicas, config.batch)
    rule = config.sync.rule()
    for epoch in range(config.epochs):
        for start, stop in stretches(rule, 0, shards.steps):
            seen, gradients = [0] * replicas, []
            for r in range(replicas):
                keys = {"seed": config.seed, "replica": r, "epoch": epoch, "sample_bytes": manifest.sample_bytes}
                order = torch.from_numpy(epoch_order(shards.bounds(r), part.bounds, **keys))
                if config.sync.momentum == "reset" and config.sync.strategy == "weights":
                    momenta[r] = {name: torch.zeros_like(v) for name, v in momenta[r].items()}
                for step in range(start, stop):
                    batch = order[step * config.batch : (step + 1) * config.batch]
                    if len(batch) == 0:
                        continue
                    seen[r] += len(batch)
                    networks[r].zero_grad()
                    functional.cross_entropy(networks[r](inputs[batch]), labels[batch]).backward()
                    if config.sync.strategy == "weights":
                        _update(config, networks[r], momenta[r], {n: p.grad for n, p in networks[r].named_parameters()})
                gradients.append({n: p.grad.clone() if p.grad is not None else None for n, p in networks[r].named_parameters()})
            shares = [count / sum(seen) for count in seen]
            if config.sync.strategy == "gradients":
                mean = {
                    name: sum(share * g[name] for share, g in zip(shares, gradients, strict=True) if share) for name in gradients[0]
                }
                for network, momentum in zip(networks, momenta, strict=True):
                    _update(config, network, momentum, mean)
            _agree(networks, shares)
            if config.sync.momentum == "average":
                for name in momenta[0]:
                    value = sum(share * m[name] for share, m in zip(shares, momenta, strict=True))
                    for momentum in momenta:
                        momentum[name] = value.clone()
    return networks[0].state_dict()


@torch.no_grad()
def _update(config: RunConfig, network: nn.Module, momentum: dict, gradients: dict) -> None:
    optim = config.optim
    norms = {name for name, m in network.named_modules() if isinstance(m, nn.BatchNorm2d)}
    for name, parameter in network.named_parameters():
        owner, _, kind = name.rpartition(".")
        decay = 0.0 if kind == "bias" or owner in norms else optim.weight_decay
        gradient = gradients[name] + decay * parameter
        momentum[name] = optim.momentum * momentum[name] + gradient
        step = gradient + optim.momentum * momentum[name] if optim.nesterov else momentum[name]
        parameter.sub_(step, alpha=optim.rate)


@torch.no_grad()
def _agree(networks: list[nn.Module], shares: list[float]) -> None:
    states = [network.state_dict() for network in networks]
    for name, value in states[0].items():
        if value.is_floating_point():
            mean = sum(share * state[name] for share, state in zip(shares, states, strict=True))
            for state in states:
                state[name].copy_(mean)
