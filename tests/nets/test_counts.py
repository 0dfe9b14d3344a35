"""Parameter counts, each as published and as a sum over the layers that was written down apart from the networks."""

import pytest
import torch

from deepex.nets import build


def conv(inputs: int, outputs: int, kernel: int, groups: int = 1) -> int:
    return inputs // groups * outputs * kernel**2 + outputs


def dense(inputs: int, outputs: int) -> int:
    return inputs * outputs + outputs


def normed(inputs: int, outputs: int, kernel: int) -> int:
    """A convolution without bias, and the batch norm's weight and bias."""
    return inputs * outputs * kernel**2 + 2 * outputs


def vgg(*depths: int) -> int:
    total, inputs = 0, 3
    for width, depth in zip((64, 128, 256, 512, 512), depths, strict=True):
        for _ in range(depth):
            total += conv(inputs, width, 3)
            inputs = width
    return total + dense(512 * 7 * 7, 4096) + dense(4096, 4096) + dense(4096, 1000)


def basic(*depths: int) -> int:
    """The first block of each stage but the first has a projection."""
    total = normed(3, 64, 7)
    for inputs, width, depth in zip((64, 64, 128, 256), (64, 128, 256, 512), depths, strict=True):
        total += normed(inputs, width, 3) + (2 * depth - 1) * normed(width, width, 3)
        total += normed(inputs, width, 1) if inputs != width else 0
    return total + dense(512, 1000)


def bottleneck(*depths: int, channels: int = 3, classes: int = 1000) -> int:
    """The first block of every stage has a projection, because the channels grow fourfold."""
    total = normed(channels, 64, 7)
    for inputs, width, depth in zip((64, 256, 512, 1024), (64, 128, 256, 512), depths, strict=True):
        total += normed(inputs, width, 1) + (depth - 1) * normed(4 * width, width, 1)
        total += depth * (normed(width, width, 3) + normed(width, 4 * width, 1))
        total += normed(inputs, 4 * width, 1)
    return total + dense(2048, classes)


def inception(inputs: int, *widths: int) -> int:
    one, before3, three, before5, five, pooled = widths
    branches = conv(inputs, one, 1) + conv(inputs, before3, 1) + conv(before3, three, 3)
    return branches + conv(inputs, before5, 1) + conv(before5, five, 5) + conv(inputs, pooled, 1)


LENET = conv(1, 6, 5) + conv(6, 16, 5) + dense(16 * 5 * 5, 120) + dense(120, 84) + dense(84, 10)
LENET_CAFFE = conv(1, 20, 5) + conv(20, 50, 5) + dense(50 * 4 * 4, 500) + dense(500, 10)
ALEXNET = (
    *(conv(3, 96, 11), conv(96, 256, 5, 2), conv(256, 384, 3), conv(384, 384, 3, 2), conv(384, 256, 3, 2)),
    *(dense(256 * 6 * 6, 4096), dense(4096, 4096), dense(4096, 1000)),
)
CIFAR = conv(3, 32, 5) + conv(32, 32, 5) + conv(32, 64, 5)
GOOGLENET = (
    *(conv(3, 64, 7), conv(64, 64, 1), conv(64, 192, 3)),
    *(inception(192, 64, 96, 128, 16, 32, 32), inception(256, 128, 128, 192, 32, 96, 64)),
    *(inception(480, 192, 96, 208, 16, 48, 64), inception(512, 160, 112, 224, 24, 64, 64)),
    *(inception(512, 128, 128, 256, 24, 64, 64), inception(512, 112, 144, 288, 32, 64, 64)),
    inception(528, 256, 160, 320, 32, 128, 128),
    *(inception(832, 256, 160, 320, 32, 128, 128), inception(832, 384, 192, 384, 48, 128, 128)),
    dense(1024, 1000),
)
CVAE_ENCODER = conv(1, 128, 3) + 2 * conv(128, 128, 3) + dense(100352, 128) + 2 * dense(128, 3)
CVAE_DECODER = dense(3, 128) + dense(128, 100352) + 2 * conv(128, 128, 3) + conv(128, 1, 3)

IMAGENET = (3, 224, 224, 1000)
PUBLISHED = [
    ("lenet", (1, 28, 28, 10), 61_706, LENET),
    ("lenet-caffe", (1, 28, 28, 10), 431_080, LENET_CAFFE),
    ("alexnet", (3, 227, 227, 1000), 60_965_224, sum(ALEXNET)),
    ("alexnet", IMAGENET, 60_965_224, sum(ALEXNET)),
    ("caffenet", (3, 227, 227, 1000), 60_965_224, sum(ALEXNET)),
    ("vgg11", IMAGENET, 132_863_336, vgg(1, 1, 2, 2, 2)),
    ("vgg13", IMAGENET, 133_047_848, vgg(2, 2, 2, 2, 2)),
    ("vgg16", IMAGENET, 138_357_544, vgg(2, 2, 3, 3, 3)),
    ("vgg19", IMAGENET, 143_667_240, vgg(2, 2, 4, 4, 4)),
    ("resnet18", IMAGENET, 11_689_512, basic(2, 2, 2, 2)),
    ("resnet34", IMAGENET, 21_797_672, basic(3, 4, 6, 3)),
    ("resnet50", IMAGENET, 25_557_032, bottleneck(3, 4, 6, 3)),
    ("resnet101", IMAGENET, 44_549_160, bottleneck(3, 4, 23, 3)),
    ("resnet152", IMAGENET, 60_192_808, bottleneck(3, 8, 36, 3)),
    # AtomAI: the paper's 89 MB (FACTS row 8). 25,557,032 − 2·64·49 (one input channel) − 973·2049 (27 classes).
    ("resnet50", (1, 120, 85, 27), 23_557_083, bottleneck(3, 4, 6, 3, channels=1, classes=27)),
    ("googlenet", IMAGENET, 6_998_552, sum(GOOGLENET)),
    ("convnet", (3, 32, 32, 10), 145_578, CIFAR + dense(64 * 4 * 4, 64) + dense(64, 10)),
    ("convnet-full", (3, 32, 32, 10), 89_578, CIFAR + dense(64 * 4 * 4, 10)),
    ("cvae", (1, 28, 28, 1), 26_384_647, CVAE_ENCODER + CVAE_DECODER),
]


def count(name: str, channels: int, height: int, width: int, classes: int, **options: object) -> int:
    with torch.device("meta"):
        net = build(name, channels=channels, size=(height, width), classes=classes, **options)
    return sum(parameter.numel() for parameter in net.parameters())


@pytest.mark.parametrize(("name", "input_and_classes", "published", "summed"), PUBLISHED)
def test_count_is_the_published_one(name: str, input_and_classes: tuple[int, int, int, int], published: int, summed: int) -> None:
    assert count(name, *input_and_classes) == published == summed


def test_batch_norm_adds_a_weight_and_a_bias_per_channel() -> None:
    channels = 2 * 64 + 2 * 128 + 3 * 256 + 6 * 512
    assert count("vgg16", *IMAGENET, batch_norm=True) == 138_357_544 + 2 * channels == 138_365_992


def test_larger_images_keep_the_published_count() -> None:
    assert count("vgg16", 3, 448, 320, 1000) == 138_357_544
    assert count("alexnet", 3, 384, 256, 1000) == 60_965_224


def test_smaller_images_shrink_the_first_dense_layer() -> None:
    assert count("vgg16", 3, 32, 32, 10) == vgg(2, 2, 3, 3, 3) - (49 - 1) * 512 * 4096 - 990 * 4097
