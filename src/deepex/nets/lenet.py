"""LeNet-5 (LeCun 1998) and the larger LeNet that Caffe ships for MNIST.

>>> net = lenet(channels=1, size=(28, 28), classes=10)
>>> sum(parameter.numel() for parameter in net.parameters())
61706
"""

from collections import OrderedDict

from torch import nn

from deepex.nets.geometry import Size, check, grid


def lenet(*, channels: int, size: Size, classes: int) -> nn.Module:
    """Return LeNet-5: 6-16-120-84 with 5×5 kernels; 61,706 parameters at 1×28×28 and 10 classes.

    As is usual today it has ReLU and max pooling where LeCun had a scaled tanh and trainable averages, and every map
    of the second convolution sees all six of the first. The first convolution pads by 2, so that 28×28 is treated as
    his 32×32.
    """
    check("lenet", channels=channels, size=size, classes=classes)
    features = nn.Sequential(
        nn.Conv2d(channels, 6, 5, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
    )
    height, width = grid("lenet", features, size)
    classifier = nn.Sequential(
        nn.Linear(16 * height * width, 120),
        nn.ReLU(inplace=True),
        nn.Linear(120, 84),
        nn.ReLU(inplace=True),
        nn.Linear(84, classes),
    )
    return nn.Sequential(OrderedDict(features=features, flatten=nn.Flatten(), classifier=classifier))


def lenet_caffe(*, channels: int, size: Size, classes: int) -> nn.Module:
    """Return Caffe's MNIST network: 20-50-500; 431,080 parameters at 1×28×28 and 10 classes.

    Its convolutions have no activation of their own, and its poolings round up, both as in Caffe.
    """
    check("lenet-caffe", channels=channels, size=size, classes=classes)
    features = nn.Sequential(
        nn.Conv2d(channels, 20, 5),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.Conv2d(20, 50, 5),
        nn.MaxPool2d(2, ceil_mode=True),
    )
    height, width = grid("lenet-caffe", features, size)
    classifier = nn.Sequential(nn.Linear(50 * height * width, 500), nn.ReLU(inplace=True), nn.Linear(500, classes))
    return nn.Sequential(OrderedDict(features=features, flatten=nn.Flatten(), classifier=classifier))
