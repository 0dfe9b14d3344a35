"""The paper's two scientific benchmarks, on the small samples that come with DeepEx or on datasets of any size.

deepex data make atomai packed/atomai --images 27000 && deepex train atomai --set data=packed/atomai
deepex data make pf packed/pf --images 100000 && deepex train pf --set data=packed/pf
"""

from deepex.arena.optimiser.config import OptimConfig
from deepex.training.config import RunConfig


def atomai() -> RunConfig:
    """AtomAI: ResNet-50 tells 27 crystals by their electron diffraction; the paper's network, batch and target. Wants a GPU."""
    optim = OptimConfig(rate=0.05, weight_decay=1e-4)
    return RunConfig(net="resnet50", data="sample:atomai", epochs=60, batch=128, target="validation error <= 0.1", optim=optim)


def atomai_small() -> RunConfig:
    """AtomAI with ResNet-18 and small batches: an epoch of the sample in a minute on 2 cores."""
    optim = OptimConfig(rate=0.02, weight_decay=1e-4)
    return RunConfig(net="resnet18", data="sample:atomai", epochs=4, batch=16, optim=optim)


def pf() -> RunConfig:
    """PF: the convolutional variational autoencoder (26 M weights) on contact maps of a folding protein. Wants a GPU."""
    optim = OptimConfig(rate=1e-4, momentum=0.9)
    return RunConfig(net="cvae", data="sample:pf", task="reconstruct", epochs=50, batch=128, optim=optim)


def pf_small() -> RunConfig:
    """PF with a sixteenth of the CVAE's filters: an epoch of the sample in seconds on 2 cores."""
    optim = OptimConfig(rate=3e-4, momentum=0.9)
    options = {"filters": 8, "features": 64}
    return RunConfig(net="cvae", net_options=options, data="sample:pf", task="reconstruct", epochs=5, batch=64, optim=optim)
