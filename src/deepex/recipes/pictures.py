"""Recipes on pictures: Fashion-MNIST comes as a sample, the others are packed from what you have.

deepex train fashion --ranks 2
deepex data pack imagenet/ packed/imagenet --resize 256 --crop 256 --channels 3 && deepex train imagenet
deepex data pack cifar-10-batches-bin/ packed/cifar10 && deepex train cifar10
deepex data pack mnist/ packed/mnist && deepex train mnist
"""

from deepex.arena.optimiser.config import OptimConfig
from deepex.data.augment import AugmentConfig
from deepex.training.config import RunConfig


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
    return RunConfig(net="cvae", data="sample:fashion", task="reconstruct", epochs=10, batch=128, optim=optim)


def mnist() -> RunConfig:
    """LeNet on MNIST, packed into packed/mnist; the target is Caffe's 1 % error."""
    optim = OptimConfig(rate=0.01, weight_decay=5e-4)
    return RunConfig(net="lenet-caffe", data="packed/mnist", epochs=12, batch=64, target="validation error <= 0.01", optim=optim)


def cifar10() -> RunConfig:
    """The Cifar ConvNet of the Stampede2 study on CIFAR-10, packed into packed/cifar10; shifted by 4 pixels and mirrored."""
    optim = OptimConfig(rate=0.01, weight_decay=4e-3)
    augment = AugmentConfig(pad=4, flip=True)
    return RunConfig(net="convnet", data="packed/cifar10", epochs=40, batch=100, augment=augment, optim=optim)


def imagenet() -> RunConfig:
    """ResNet-50 on ImageNet, packed at 256×256 into packed/imagenet, random crops of 224: the paper's network and batch."""
    optim = OptimConfig(rate=0.1, weight_decay=1e-4, schedule="cosine", warmup_epochs=5)
    augment = AugmentConfig(crop=224, flip=True)
    return RunConfig(net="resnet50", data="packed/imagenet", epochs=90, batch=32, augment=augment, optim=optim)
