"""What is recorded of a validation is what the delivered network scores: with dropout off, and with its running statistics."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

import deepex
from deepex.comm.solo import SoloCommunicator
from deepex.data.dataset import PackedDataset
from tests import networks


def test_a_validation_scores_the_network_as_it_is_delivered(make_data: Callable[[int], Path], tmp_path: Path) -> None:
    keys = {"net": "tests.networks:normed", "data": str(make_data(64)), "epochs": 2, "batch": 8, "layout": "contiguous"}
    run = deepex.train(deepex.recipe("fashion", keys), SoloCommunicator(), out=tmp_path / "run")
    part, seen = PackedDataset.open(make_data(64)).part("validation"), run.state["data"]
    images, labels = part.read(0, part.count)
    inputs = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255
    inputs = (inputs - seen["mean"][0]) / seen["deviation"][0]
    network = networks.normed(1, 10).eval()
    network.load_state_dict(load_file(run.path / "weights.safetensors"))
    with torch.no_grad():
        output = network(inputs)
    target = torch.from_numpy(labels).long()
    validation = run.epochs()[-1].validation
    assert validation is not None
    assert validation.loss == pytest.approx(float(functional.cross_entropy(output, target)), rel=1e-4)
    assert validation.measures["error"] == pytest.approx(float((output.argmax(1) != target).float().mean()))
