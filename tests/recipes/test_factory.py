"""A name in a configuration makes a network, and runs nothing else."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deepex.cli import main
from deepex.data.dataset import PackedDataset
from deepex.data.find import SAMPLES
from deepex.errors import ConfigError
from deepex.recipes.factory import find_factory
from deepex.recipes.network import build_network
from deepex.training.config import RunConfig

MINE = """
import functools, torch
from os import system
from torch import nn
from torch.nn import Linear
from torch.hub import load
from mynet.blocks import Blocks, quoted, hidden, make

class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.dense = nn.Linear(784, classes)
    def forward(self, images):
        return self.dense(images.flatten(1))

class Other:
    pass

def annotated(classes) -> nn.Module: return Net(classes)
def plain(classes): return Net(classes)
def optional(classes) -> "Net | nn.Sequential": return Net(classes)
def number(classes) -> int: return 3
def nothing(classes) -> None: return None
def either(classes) -> Net | int: return Net(classes)
@functools.cache
def cached(classes): return Net(classes)
short = lambda classes: Net(classes)
partly = functools.partial(Net, 10)
ready = Net(10)
"""
BLOCKS = """
from __future__ import annotations
import torch.nn as nn
class Blocks(nn.Sequential): pass
def quoted(classes) -> nn.Sequential: return nn.Sequential()
def hidden(classes) -> Unknown: return nn.Sequential()
def make(classes): return nn.Sequential()
"""
PLAIN = """
def make(classes): return None
def said(classes) -> "Net": return None
"""


@pytest.fixture
def mynet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    files = {
        "mynet/__init__.py": MINE, "mynet/blocks.py": BLOCKS, "mynet/__main__.py": "open('ran', 'w')",
        "flat.py": "from mynet import Net", "noisy.py": "raise SystemExit(3)",
        "torchless.py": PLAIN, "site-packages/installed.py": "import torch\n" + PLAIN,
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="ascii")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    yield tmp_path
    for name in [*sys.modules]:
        if name.split(".")[0] in {"mynet", "flat", "noisy", "torchless", "installed", "failing", "models"}:
            del sys.modules[name]


@pytest.mark.parametrize(
    "path",
    [
        "mynet:Net", "mynet:annotated", "mynet:plain", "mynet:optional", "mynet:cached", "mynet:short", "mynet:Blocks",
        "mynet:quoted", "mynet:hidden", "mynet:make", "mynet.blocks:make", "tests.networks:plain", "deepex.nets.lenet:lenet",
    ],
)  # fmt: skip
def test_what_makes_a_network_is_found(mynet: Path, path: str) -> None:
    assert callable(find_factory(path))


REFUSED = [
    ("os:system", "os belongs to Python itself"),
    ("os.path:join", "os belongs to Python itself"),
    ("subprocess:call", "subprocess belongs to Python itself"),
    ("shutil:rmtree", "shutil belongs to Python itself"),
    ("builtins:exec", "builtins belongs to Python itself"),
    ("functools:partial", "functools belongs to Python itself"),
    ("runpy:run_path", "runpy belongs to Python itself"),
    ("posix:system", "posix belongs to Python itself"),
    ("torch:load", "PyTorch has layers and no networks"),
    ("torch.hub:load", "PyTorch has layers and no networks"),
    ("torch.nn:Linear", "PyTorch has layers and no networks"),
    ("torch.utils.cpp_extension:load", "PyTorch has layers and no networks"),
    ("numpy:load", "it does not say what it returns, and is not in a module of yours"),
    ("numpy.lib.format:read_array", "it does not say what it returns, and is not in a module of yours"),
    ("deepex:train", "of deepex only deepex.nets makes networks"),
    ("deepex.comm.launch:launch", "of deepex only deepex.nets makes networks"),
    ("deepex.recipes.network:build_network", "of deepex only deepex.nets makes networks"),
    ("mynet:system", "that is builtin_function_or_method, neither a function nor a class"),
    ("mynet:load", "load comes from torch.hub and not from mynet"),
    ("mynet:Linear", "Linear comes from torch.nn.modules.linear and not from mynet"),
    ("flat:Net", "Net comes from mynet and not from flat: name it there"),
    ("mynet:Other", "the class Other is no torch.nn.Module"),
    ("mynet:number", "it says that it returns int, not a torch.nn.Module"),
    ("mynet:nothing", "it says that it returns None, not a torch.nn.Module"),
    ("mynet:either", "not a torch.nn.Module"),
    ("mynet:partly", "that is partial, neither a function nor a class"),
    ("mynet:ready", "that is a network already"),
    ("mynet:annotatd", "mynet has no function 'annotatd': did you mean annotated?"),
    ("mynet:torch", "that is module, neither a function nor a class"),
    ("mynet.__main__:x", "mynet.__main__ is a program, which would run"),
    ("noisy:net", "to import noisy raised SystemExit: 3"),
    ("nowhere:net", "'nowhere' cannot be imported"),
    ("torchless:make", "its module does not import torch: write `-> torch.nn.Module`"),
    ("torchless:said", "its module does not import torch"),
    ("installed:make", "it does not say what it returns, and is not in a module of yours"),
    (":net", "which is no such name"),
    ("mynet:", "which is no such name"),
    (".mynet:net", "which is no such name"),
    ("mynet:Net.forward", "which is no such name"),
    ("my net:class", "which is no such name"),
]


@pytest.mark.parametrize(("path", "said"), REFUSED)
def test_what_makes_none_is_refused(mynet: Path, monkeypatch: pytest.MonkeyPatch, path: str, said: str) -> None:
    monkeypatch.chdir(mynet)
    with pytest.raises(ConfigError) as caught:
        find_factory(path)
    assert f"net is {path!r}" in str(caught.value)
    assert said in str(caught.value)
    assert not Path("ran").exists()


@pytest.mark.parametrize("path", ["os:system", "posix:system", "subprocess:getoutput", "mynet:system"])
def test_no_command_of_a_file_is_run(
    mynet: Path, path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (mynet / "theirs.toml").write_text(
        f'net = "{path}"\ndata = "sample:fashion"\n[net_options]\ncommand = "touch ran"\ncmd = "touch ran"\n', encoding="ascii"
    )
    monkeypatch.chdir(mynet)
    monkeypatch.setattr("sys.argv", ["deepex", "train", "theirs.toml", "--out", "run"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, (mynet / "ran").exists(), (mynet / "run").exists()) == (2, False, False)
    assert f"net is {path!r}" in capsys.readouterr().err


@pytest.mark.slow
def test_a_module_of_python_is_not_even_imported() -> None:
    program = (
        "import sys\nfrom deepex.errors import ConfigError\nfrom deepex.recipes.factory import find_factory\n"
        "for name in ('antigravity', 'test.support', 'torch.utils.cpp_extension', 'deepex.cli.train'):\n"
        "    try:\n        find_factory(f'{name}:main')\n"
        "    except ConfigError:\n        print(name, name in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "antigravity False", "test.support False", "torch.utils.cpp_extension False", "deepex.cli.train False"
    ]  # fmt: skip


def test_annotations_of_a_library_are_enough(mynet: Path) -> None:
    (mynet / "site-packages" / "models.py").write_text(
        "from torch import nn\nclass ResNet(nn.Module): pass\ndef resnet18(*, weights=None, **any) -> ResNet: return ResNet()\n",
        encoding="ascii",
    )
    assert isinstance(find_factory("models:resnet18")(), torch.nn.Module)


FAILING = """
from torch import nn
def net(classes):
    raise SystemExit('no licence')
def text(classes):
    return "a network"
def lazy(classes):
    return nn.LazyLinear(classes)
"""


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("net", {}, "called with {'classes': 10} raised SystemExit: no licence (PLACE, line 4, in net); mend it there"),
        ("net", {"width": 3}, "raised TypeError: net() got an unexpected keyword argument 'width'; mend it there"),
        ("text", {}, "returned str; it must return a torch.nn.Module"),
        ("lazy", {}, "'weight' has no shape yet, as it is of a lazy layer"),
    ],
)
def test_what_a_users_function_does_wrong_is_told(mynet: Path, name: str, options: dict[str, Any], said: str) -> None:
    (mynet / "failing.py").write_text(FAILING, encoding="ascii")
    config = RunConfig(net=f"failing:{name}", data="sample:fashion", net_options=options, init="he")
    with pytest.raises(ConfigError) as caught:
        build_network(config, PackedDataset.open(SAMPLES / "fashion").manifest)
    assert said.replace("PLACE", str(mynet / "failing.py")) in str(caught.value)
