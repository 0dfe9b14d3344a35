"""The peers do the work that they are timed for: all samples, augmented as told, and the loss falls."""

import statistics
import sys

import pytest
import torch
from torch import nn

from deepex.nets import build
from peers import PEERS, Unavailable, Workload, make_peer, measure_jax, peak_bytes
from peers.base import Peer, Samples

WORKLOAD = Workload(
    name="tiny", net="lenet", shape=(1, 16, 12), classes=4, batch=8, task="classify", augment=True, count=35
)  # fmt: skip
UNCOMPILED = {"eager": {}, "compile": {"mode": None}, "compile+graph": {"mode": None}}


@pytest.fixture(autouse=True)
def _global_settings_come_back(monkeypatch):
    """Peers set what suits the GPU for the whole process; the other tests want theirs."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
    precision = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(precision)


def make_data(workload: Workload) -> tuple[torch.Tensor, torch.Tensor]:
    """Images whose brightness tells their class."""
    channels, height, width = workload.shape
    labels = torch.arange(workload.count) % workload.classes
    noise = torch.randint(0, 40, (workload.count, height, width, channels), generator=torch.Generator().manual_seed(0))
    return (noise + 60 * labels.view(-1, 1, 1, 1)).to(torch.uint8), labels


def make(name: str, workload: Workload, rate: float, **options: int) -> Peer:
    torch.manual_seed(0)
    channels, *size = workload.shape
    network = build(workload.net, channels=channels, size=tuple(size), classes=workload.classes, **options)
    return make_peer(name, workload, *make_data(workload), network, rate=rate, **UNCOMPILED[name])


@pytest.mark.parametrize("name", UNCOMPILED)
def test_peer_learns(name):
    peer = make(name, WORKLOAD, 0.03)
    before = peer.loss()
    for _ in range(25):
        peer.epoch()
    assert peer.num_samples == 32  # the last partial batch is dropped
    assert peer.setup_seconds > 0
    assert peer.loss() < before / 2
    peer.close()


@pytest.mark.parametrize("name", UNCOMPILED)
def test_autoencoder_learns(name):
    workload = Workload(
        name="tiny", net="cvae", shape=(1, 6, 6), classes=2, batch=8, task="reconstruct", augment=False, count=16
    )  # fmt: skip
    peer = make(name, workload, 1e-3, filters=8)
    before, later = peer.loss(), []
    for _ in range(10):
        peer.epoch()
        later.append(float(peer.loss()))
    assert statistics.mean(later[5:]) < 0.9 * before, "batches differ, by less"


def test_the_given_network_is_left_as_it_is():
    network = build("lenet", channels=1, size=(16, 12), classes=4)
    before = [parameter.clone() for parameter in network.parameters()]
    make_peer("eager", WORKLOAD, *make_data(WORKLOAD), network, rate=0.03).epoch()
    assert all(torch.equal(a, b) for a, b in zip(before, network.parameters(), strict=True))


def test_an_epoch_has_every_sample_at_most_once_in_a_new_order():
    samples = Samples(WORKLOAD, *make_data(WORKLOAD))
    first, second = samples.draw(), samples.draw()
    assert first.shape == (4, 4, 8)
    assert first[:, 0].unique().numel() == WORKLOAD.num_samples
    assert not torch.equal(first[:, 0], second[:, 0])
    assert first[:, 1:3].min() == 0
    assert first[:, 1:3].max() == 8
    assert set(first[:, 3].flatten().tolist()) == {0, 1}


@pytest.mark.parametrize("flip", [False, True])
def test_a_sample_is_padded_cropped_flipped_and_standardised(flip):
    images, labels = make_data(WORKLOAD)
    row = torch.tensor([[3] * 8, [1] * 8, [6] * 8, [int(flip)] * 8])
    inputs, chosen = Samples(WORKLOAD, images, labels).batch(row)
    values = images.double()
    padded = nn.functional.pad(values[3, :, :, 0], (4, 4, 4, 4))
    crop = padded[1:17, 6:18].flip(1) if flip else padded[1:17, 6:18]
    expected = (crop - values.mean()) / values.std(correction=0)
    torch.testing.assert_close(inputs[0, 0], expected.float(), rtol=1e-5, atol=1e-5)
    assert inputs.shape == (8, 1, 16, 12)
    assert inputs.stride(1) == 1  # channels-last, which one channel does not show by itself
    assert chosen.tolist() == [3] * 8


def test_without_augmentation_images_are_in_0_to_1():
    workload = Workload(
        name="tiny", net="cvae", shape=(1, 6, 6), classes=2, batch=4, task="reconstruct", augment=False, count=4
    )  # fmt: skip
    images, labels = make_data(workload)
    samples = Samples(workload, images, labels)
    row = samples.draw()[0]
    torch.testing.assert_close(samples.batch(row)[0][:, 0], images[row[0], :, :, 0].float() / 255)


def test_what_does_not_apply_says_so():
    with pytest.raises(Unavailable, match="timm: not applicable to lenet"):
        make_peer("timm", WORKLOAD, *make_data(WORKLOAD), None)
    with pytest.raises(Unavailable, match="jax: not applicable to lenet"):
        measure_jax(WORKLOAD, 1)
    with pytest.raises(Unavailable, match="measure_jax"):
        make_peer("jax", WORKLOAD, *make_data(WORKLOAD), None)
    with pytest.raises(ValueError, match="no full batch"):
        Workload(**{**vars(WORKLOAD), "count": 7})


@pytest.mark.parametrize(("name", "module"), [("lightning", "lightning.pytorch"), ("timm", "timm")])
def test_what_is_missing_says_so(name, module, monkeypatch):
    for missing in (module, "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, missing, None)
    workload = Workload(**{**vars(WORKLOAD), "net": "resnet50"})
    network = build("lenet", channels=1, size=(16, 12), classes=4)
    with pytest.raises(Unavailable, match=f"{name}: not installed"):
        make_peer(name, workload, *make_data(workload), network)


def test_names_and_memory():
    assert PEERS == ("eager", "compile", "compile+graph", "lightning", "timm", "jax")
    assert peak_bytes() >= 0
