"""Recipes on the shipped sample of Fashion-MNIST: 6,000 real images of ten kinds of clothing, 28×28.

deepex train fashion --ranks 2
deepex train fashion --set data=DIR       # the whole dataset, packed with `deepex data pack`
"""

from deepex.engine.config import RunConfig
from deepex.engine.optim import OptimConfig


def fashion() -> RunConfig:
    """LeNet on Fashion-MNIST: a network that learns in seconds on a laptop."""
    return RunConfig(net="lenet-caffe", data="sample:fashion", epochs=6, batch=32, optim=OptimConfig(rate=0.02, weight_decay=5e-4))


def fashion_resnet() -> RunConfig:
    """ResNet-18 on Fashion-MNIST: batch norm, residual connections, 11 M weights."""
    optim = OptimConfig(rate=0.05, weight_decay=5e-4, schedule="cosine")
    return RunConfig(net="resnet18", data="sample:fashion", epochs=4, batch=32, optim=optim)


def fashion_cvae() -> RunConfig:
    """The paper's convolutional variational autoencoder (26 M weights) on Fashion-MNIST; wants a GPU."""
    optim = OptimConfig(rate=1e-4, momentum=0.9)
    return RunConfig(net="cvae", data="sample:fashion", objective="reconstruct", epochs=10, batch=128, optim=optim)
