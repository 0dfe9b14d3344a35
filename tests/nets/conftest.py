from collections.abc import Iterator

import pytest
import torch

# From the layers by hand, last to first. AlexNet: 1 ← 3 ← 7 ← 15 by three 3/2 poolings, 63 = 14·4 + 11 − 2·2.
# GoogLeNet, whose poolings round up: 2 ← 4 ← 8 ← 16, and 31 by the first stride.
LEAST = {
    **dict.fromkeys(["alexnet", "caffenet"], 63),
    **dict.fromkeys(["convnet", "convnet-full"], 8),
    **dict.fromkeys(["vgg11", "vgg13", "vgg16", "vgg19"], 32),
    **dict.fromkeys(["resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "cvae"], 1),
    "googlenet": 31,
    "lenet": 12,
    "lenet-caffe": 13,
}


@pytest.fixture(autouse=True)
def one_thread_and_one_seed() -> Iterator[None]:
    """The machines that run the tests are shared; small tensors gain nothing from threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def least() -> dict[str, int]:
    """The smallest height and width of each network."""
    return LEAST
