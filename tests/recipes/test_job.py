"""What a run directory tells of the dataset."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import deepex
from deepex.comm.solo import SoloCommunicator
from deepex.data.dataset import PackedDataset
from deepex.record import RunDirectory
from deepex.training.config import RunConfig
from tests import networks

MakeData = Callable[[int], Path]


def as_input(raw: torch.Tensor, data: dict[str, Any]) -> torch.Tensor:
    """What run.json says about a network's input, done to raw images (n, height, width, channels)."""
    low, high = data["scale"]
    images = (raw.permute(0, 3, 1, 2).float() - low) / (high - low)
    if not data["standardised"]:
        return images
    mean, deviation = (torch.tensor(data[key]).view(1, -1, 1, 1) for key in ("mean", "deviation"))
    return (images - mean) / deviation


def test_a_trained_network_is_used_without_its_dataset(make_data: MakeData, tmp_path: Path) -> None:
    data = make_data(192)
    config = RunConfig(net="tests.networks:plain", data=str(data), epochs=1, batch=8, layout="contiguous")
    run = RunDirectory.open(deepex.train(config, SoloCommunicator(), out=tmp_path / "run").path)
    told = run.state["data"]
    channels, *size = told["shape"]
    network = networks.plain(channels, tuple(size), len(told["classes"]))
    network.load_state_dict(load_file(run.path / "weights.safetensors"))
    raw, labels = map(torch.from_numpy, PackedDataset.open(data).part("validation").read(0, 64))
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(network(as_input(raw, told)), labels)
    assert told["classes"] == list(PackedDataset.open(data).manifest.classes)
    assert float(loss) == pytest.approx(run.epochs()[-1].validation.loss, rel=1e-5)


def test_what_is_not_standardised_says_so(make_data: MakeData, tmp_path: Path) -> None:
    config = RunConfig(
        net="cvae", net_options={"filters": 4, "features": 8}, data=str(make_data(48)), task="reconstruct", epochs=1, batch=8
    )
    told = deepex.train(config, SoloCommunicator(), out=tmp_path / "run").state["data"]
    assert (told["standardised"], told["scale"], told["shape"]) == (False, [0.0, 255.0], [1, 28, 28])
