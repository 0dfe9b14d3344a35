"""Print how far outputs of translated networks are from PyTorch's, relatively; in a process of its own, since libraries clash.

python -m tests.study.frameworks.outputs jax
"""

import json
import os
import sys
from typing import Any

import numpy as np
import torch
from torch import nn

from deepex.nets import build
from deepex.study.frameworks import find
from deepex.study.frameworks.layers import describe

CASES = [
    ("lenet", (1, 28, 28)),
    ("lenet", (3, 33, 29)),
    ("lenet-caffe", (1, 28, 28)),
    ("lenet-caffe", (2, 31, 30)),  # whose poolings round up
    ("resnet18", (1, 28, 28)),
    ("resnet50", (3, 40, 37)),
]


def network_of(name: str, shape: tuple[int, int, int]) -> nn.Module:
    torch.manual_seed(0)
    return build(name, channels=shape[0], size=shape[1:], classes=10)


def output(framework: str, layers: Any, images: Any, *, training: bool) -> Any:
    if framework == "jax":
        from deepex.study.frameworks.flax_network import make_flax

        flax, variables = make_flax(layers)
        return flax.apply(variables, images, training, None, mutable=["batch_stats"])[0]
    from deepex.study.frameworks.keras_network import make_keras

    return make_keras(layers, images.shape[1:])(images, training=training)


def main(framework: str) -> None:
    find(framework).prepare(os.environ, threads=1)
    found = {}
    for name, shape in CASES:
        built = network_of(name, shape)
        layers, images = describe(built, shape), torch.randn(4, *shape)
        for training in (False, True):
            theirs = output(framework, layers, images.permute(0, 2, 3, 1).numpy(), training=training)
            with torch.no_grad():
                expected = built.train(training)(images).numpy()
            difference = np.abs(np.asarray(theirs) - expected).max() / np.abs(expected).max()
            found[f"{name} {shape} {training}"] = float(difference)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
