"""Wherever the ranks of a job stand, the weights have the same bits."""

import hashlib
import json
from pathlib import Path

import pytest

from tests.cluster.cluster import LAUNCHERS, MPICH, OPENMPI, PLACEMENTS, PMI2, PMIX, Cluster, Launcher, Placement

pytestmark = pytest.mark.cluster

KEYS = ("epochs=1", "samples=256", "batch=16", "validate=none", "threads=1", "deterministic=true", "sampling=0")


def trained(cluster: Cluster, launcher: Launcher, placement: Placement, out: Path) -> str:
    """What the weights are, after a run whose ranks stood where they should."""
    settings = [part for key in KEYS for part in ("--set", key)]
    ended = cluster.launch(launcher, placement, "-m", "deepex", "train", "fashion", *settings, "--out", str(out), "--quiet")
    assert ended.code == 0, str(ended)
    assert [node["ranks"] for node in json.loads((out / "machine.json").read_text())] == placement.ranks
    return hashlib.sha256((out / "weights.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def on_one_host(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> str:
    return trained(cluster, MPICH, PLACEMENTS["4"], tmp_path_factory.mktemp("one") / "run")


def each() -> list[object]:
    """Every placement under every launcher; what is `slow` repeats a placement that another launcher has too."""
    first = {
        (MPICH.name, "3+1"),
        (MPICH.name, "1+2+1"),
        (OPENMPI.name, "2+2"),
        (PMI2.name, "3+1"),
        (PMI2.name, "1+2+1"),
        (PMIX.name, "3+1"),
    }
    cases = [(launcher, placement) for launcher in LAUNCHERS for placement in ("3+1", "1+2+1", "2+2")]
    return [
        pytest.param(launcher, name, id=f"{launcher.name}-{name}", marks=() if (launcher.name, name) in first else pytest.mark.slow)
        for launcher, name in cases
    ]


@pytest.mark.parametrize(("launcher", "placement"), each())
def test_the_weights_do_not_depend_on_the_placement(
    cluster: Cluster, launcher: Launcher, placement: str, on_one_host: str, tmp_path: Path
) -> None:
    assert trained(cluster, launcher, PLACEMENTS[placement], tmp_path / "run") == on_one_host
