"""A configuration that is built in Python is checked as one from a file is."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from deepex.arena.optimiser.config import OptimConfig
from deepex.data.augment import AugmentConfig
from deepex.data.direct import Hdf5Config
from deepex.errors import ConfigError
from deepex.record.schema import Config, checked
from deepex.record.table import from_table, to_table
from deepex.sync.config import SyncConfig
from deepex.training.checkpoint import CheckpointConfig
from deepex.training.config import RunConfig

LEAST: dict[str, Any] = {"net": "lenet", "data": "sample:fashion"}


@pytest.mark.parametrize(
    ("kind", "values", "said"),
    [
        (RunConfig, {"batch": "32"}, "key 'batch' is '32' (str); it must be int, for example 32"),
        (RunConfig, {"batch": True}, "key 'batch' is True (bool); it must be int"),
        (RunConfig, {"epochs": 1.5}, "key 'epochs' is 1.5 (float); it must be int, for example 10"),
        (RunConfig, {"seed": None}, "key 'seed' is None (NoneType); it must be int"),
        (RunConfig, {"seed": 10**400}, "key 'seed' is a number of 1329 bits; it must fit in 64: set a smaller one"),
        (RunConfig, {"seed": 10**5000}, "key 'seed' is a number of 16610 bits"),
        (RunConfig, {"data": Path("packed")}, "key 'data' is PosixPath('packed') (PosixPath); it must be str"),
        (RunConfig, {"verify": 1}, "key 'verify' is 1 (int); it must be bool, for example True"),
        (RunConfig, {"device": "gpu"}, "key 'device' is 'gpu'; it must be one of: auto, cpu, cuda"),
        (RunConfig, {"sampling": float("nan")}, "key 'sampling' is nan; it must be a finite number"),
        (RunConfig, {"target": [0.1]}, "key 'target' is [0.1] (list); it must be str or float"),
        (RunConfig, {"sync": 16}, "key 'sync' is 16; it is a table: set its keys, for example sync.strategy"),
        (RunConfig, {"optim": {"rat": 1}}, "unknown key 'optim.rat'; did you mean optim.rate"),
        (RunConfig, {"net_options": [1]}, "key 'net_options' is [1] (list); it must be a table"),
        (RunConfig, {"net_options": {"act": {"kind": [torch.nn.ReLU]}}}, "key 'net_options.act.kind' is <class"),
        (RunConfig, {"net_options": {"width": None}}, "key 'net_options.width' is None (NoneType); it must be text, a number"),
        (SyncConfig, {"period": [1]}, "key 'sync.period' is [1] (list); it must be int or str"),
        (SyncConfig, {"outer_rate": float("inf")}, "key 'sync.outer_rate' is inf; it must be a finite number"),
        (OptimConfig, {"rate": float("inf")}, "key 'optim.rate' is inf; it must be a finite number"),
        (OptimConfig, {"rate": 10**400}, "key 'optim.rate' is a number of 1329 bits"),
        (OptimConfig, {"rate": torch.tensor(0.1)}, "key 'optim.rate' is tensor(0.1000) (Tensor); it must be float"),
        (OptimConfig, {"decay_epochs": [30, float("nan")]}, "key 'optim.decay_epochs' is nan"),
        (OptimConfig, {"decay_epochs": 30}, "key 'optim.decay_epochs' is 30 (int); it must be a list"),
        (AugmentConfig, {"crop": 8.0}, "key 'augment.crop' is 8.0 (float); it must be int"),
        (CheckpointConfig, {"keep": "all"}, "key 'checkpoint.keep' is 'all' (str); it must be int, for example 2"),
        (Hdf5Config, {"validation": "0.1"}, "key 'data_options.validation' is '0.1' (str); it must be float"),
    ],
)
def test_a_value_of_the_wrong_type_is_told_with_its_key(kind: Any, values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        kind(**(LEAST if kind is RunConfig else {}) | values)
    assert said in str(caught.value)


@pytest.mark.parametrize("rate", [10**400, float("inf"), float("nan")])
def test_a_number_that_no_setting_can_mean_is_told_of_a_file_too(rate: float) -> None:
    with pytest.raises(ConfigError, match=r"key 'optim\.rate' is .*; it must"):
        from_table(RunConfig, LEAST | {"optim": {"rate": rate}})


def test_what_a_file_may_say_may_be_said_in_python() -> None:
    config = RunConfig(**LEAST, optim=OptimConfig(rate=1, decay_epochs=[30, 60]), sync="auto", net_options={"a": [1, {"b": 2.5}]})
    assert (type(config.optim.rate), config.optim.decay_epochs, config.sync) == (float, (30.0, 60.0), SyncConfig(strategy="auto"))
    assert from_table(RunConfig, to_table(config)) == config


NUMBERS = [
    (prefix + one.name, kind, one.name)
    for prefix, kind in (("", RunConfig), ("optim.", OptimConfig), ("checkpoint.", CheckpointConfig), ("augment.", AugmentConfig))
    for one in dataclasses.fields(kind)
    if type(one.default) in (int, float)
]


@pytest.mark.parametrize("value", [1, 1e6, 2**53, 1e17, 2**63, 2**64 - 1, 1e19, 1e300])
@pytest.mark.parametrize(("key", "kind", "name"), NUMBERS, ids=[key for key, *_ in NUMBERS])
def test_what_a_run_may_begin_with_may_be_read_of_its_record(key: str, kind: Any, name: str, value: float) -> None:
    table, _, last = key.rpartition(".")
    value = type(kind.__dataclass_fields__[name].default)(value)
    try:
        config = from_table(RunConfig, LEAST | ({table: {last: value}} if table else {last: value}))
    except ConfigError:
        return
    checked(Config, to_table(config), Path("config.toml"))


def test_threads_that_no_node_has_are_refused() -> None:
    with pytest.raises(ConfigError, match="threads is 100000; it must be at most 4096"):
        RunConfig(**LEAST, threads=100_000)
