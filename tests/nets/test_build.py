import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import deepex.nets
from deepex.errors import ConfigError, UnknownName
from deepex.nets import build, networks

IMAGE = {"channels": 1, "size": (28, 28), "classes": 10}


def test_names_are_complete() -> None:
    assert len(networks()) == len(set(networks())) == 17
    assert {"lenet", "alexnet", "caffenet", "vgg16", "resnet50", "googlenet", "convnet", "cvae"} <= set(networks())


def test_unknown_network_names_the_near_ones() -> None:
    with pytest.raises(UnknownName, match="unknown network 'resnt18'; did you mean resnet18"):
        build("resnt18", **IMAGE)


def test_unknown_option_names_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"cvae has no option 'laten'.*filters \(128\), features \(128\), latent \(3\)"):
        build("cvae", **IMAGE, laten=2)
    with pytest.raises(ConfigError, match=r"lenet has no option 'dropout'.*none"):
        build("lenet", **IMAGE, dropout=0.1)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("vgg11", {"batch_norm": "false"}, "vgg11 got batch_norm = 'false'; it must be of type bool"),
        ("cvae", {"latent": True}, "cvae got latent = True; it must be of type int"),
        ("cvae", {"latent": 0}, "cvae got latent = 0; it must be at least 1"),
        ("cvae", {"filters": -1}, "cvae got filters = -1; it must be at least 1"),
        ("googlenet", {"dropout": 1.0}, "googlenet got dropout = 1.0"),
        ("alexnet", {"dropout": -0.5}, "alexnet got dropout = -0.5"),
    ],
)
def test_bad_option_value_is_a_config_error(name: str, options: dict[str, object], message: str) -> None:
    with torch.device("meta"), pytest.raises(ConfigError, match=message):
        build(name, channels=1, size=(224, 224), classes=10, **options)


@pytest.mark.parametrize("name", networks())
def test_nonsense_input_is_a_config_error(name: str) -> None:
    with torch.device("meta"):
        with pytest.raises(ConfigError, match=f"{name} got channels = 0"):
            build(name, channels=0, size=(224, 224), classes=2)
        with pytest.raises(ConfigError, match=rf"{name} got images of size \(224, 0\)"):
            build(name, channels=1, size=(224, 0), classes=2)
        with pytest.raises(ConfigError, match=rf"{name} got images of size \(3, 224, 224\)"):
            build(name, channels=1, size=(3, 224, 224), classes=2)  # type: ignore[arg-type]
        if name != "cvae":
            with pytest.raises(ConfigError, match=f"{name} got classes = 0"):
                build(name, channels=1, size=(224, 224), classes=0)


def test_a_whole_number_is_a_fine_share() -> None:
    with torch.device("meta"):
        build("googlenet", channels=1, size=(64, 64), classes=2, dropout=0)


@pytest.mark.parametrize(
    ("name", "share"), [("alexnet", 0.5), ("caffenet", 0.5), ("vgg11", 0.5), ("vgg19", 0.5), ("googlenet", 0.4)]
)
def test_dropout_is_as_published(name: str, share: float) -> None:
    with torch.device("meta"):
        net = build(name, channels=3, size=(64, 64), classes=10)
    assert {module.p for module in net.modules() if isinstance(module, torch.nn.Dropout)} == {share}


@pytest.mark.slow
def test_importing_nets_loads_of_deepex_the_errors_alone() -> None:
    """What `deepex` itself loads is not the matter of this test, so it is compared with a bare import."""
    program = (
        "import sys, torch, deepex.errors\n"
        "before = set(sys.modules)\n"
        "import deepex.nets\n"
        "print(*sorted(set(sys.modules) - before))\n"
    )
    source = str(Path(deepex.nets.__file__).parents[2])
    loaded = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert loaded
    assert {name for name in loaded if not name.startswith("deepex.nets")} == set()
