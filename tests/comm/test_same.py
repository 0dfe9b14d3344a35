"""Ranks that do not run the same say so, all with one error."""

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import deepex
from deepex.comm import as_communicator
from deepex.comm.launch import launcher_prefix
from deepex.errors import ConfigError
from deepex.record.table import parse_assignments
from tests.full import examples
from tests.mpi import HANGS, ROOT, own_lines, rank_environ
from tests.pool import RankPool

pytestmark = pytest.mark.ranks
MakeData = Callable[[int], Path]

TRAIN = ("train", "fashion", "--set", "epochs=1", "--set", "samples=64", "--set", "batch=8", "--set", "validate=none", "--quiet")
# Rank 1 has one more setting than the others.
OTHERWISE = 'if [ "${PMI_RANK:-$OMPI_COMM_WORLD_RANK}" = 1 ]; then shift; exec "$@" --set "$0"; else shift; exec "$@"; fi'


def train(setting: str, out: Path) -> subprocess.CompletedProcess[str]:
    prefix, extra = launcher_prefix(2)
    command = [*prefix, "sh", "-c", OTHERWISE, setting, "-", sys.executable, "-m", "deepex", *TRAIN, "--out", str(out)]
    return subprocess.run(command, cwd=ROOT, env=rank_environ(**extra), capture_output=True, text=True, timeout=HANGS, check=False)


DIFFERENT = {
    "seed=5": "seed is 1 on rank 0 on .*, and 5 on rank 1 on ",
    "net=lenet": 'net is "lenet-caffe" on rank 0 on .*, and "lenet" on rank 1 on ',
    "batch=4": "batch is 8 on rank 0 .*, and 4 on rank 1 ",
    "epochs=2": "epochs is 1 on rank 0 .*, and 2 on rank 1 ",
    "sync.period=2": "sync.period is not set on rank 0 .*, and 2 on rank 1 ",
    "comm=gloo": 'comm is "auto" on rank 0 .*, and "gloo" on rank 1 ',
    "optim.rate=0.5": "optim.rate is .* on rank 0 .*, and 0.5 on rank 1 ",
}


@pytest.mark.slow
@pytest.mark.parametrize("setting", examples(["comm=gloo"], [*DIFFERENT]))
def test_another_setting_on_one_rank_is_told_once(setting: str, tmp_path: Path) -> None:
    ended = train(setting, tmp_path / "run")
    assert ended.returncode == 2, ended.stderr
    (line,) = own_lines(ended.stderr)
    assert re.search(f"the ranks do not run the same: {DIFFERENT[setting]}", line)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_ranks_may_have_different_numbers_of_threads(tmp_path: Path) -> None:
    """As on nodes of different sizes; the record tells them."""
    done = train("threads=2", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "run.json").read_text())["threads_by_rank"] == [1, 2]


def train_embedded(comm: Any, out: list[str], keys: list[dict[str, Any]], nodes: list[int] | None = None) -> str:
    """A program's own call, with what each rank is given; `trained`, or the error. `nodes`: as if the ranks were on these."""
    ours = as_communicator(comm)
    if nodes is not None:
        mine = nodes[ours.rank]
        local = {"local_size": nodes.count(mine), "local_rank": nodes[: ours.rank].count(mine), "node": mine}
        ours.place = dataclasses.replace(ours.place, num_nodes=len(set(nodes)), **local)
    usual = {"net": "tests.networks:plain", "batch": 8, "epochs": 1, "threads": 1}
    try:
        deepex.train(deepex.recipe("fashion", usual | keys[ours.rank]), ours, out=Path(out[ours.rank]))
    except ConfigError as error:
        return str(error)
    finally:
        ours.close()
    return "trained"


@pytest.mark.parametrize("setting", [setting for setting in DIFFERENT if not setting.startswith(("comm", "net"))])
def test_another_setting_of_one_rank_of_a_program_is_told_to_all(
    setting: str, ranks: RankPool, make_data: MakeData, tmp_path: Path
) -> None:
    keys = {"data": str(make_data(64))}
    said = ranks.run(train_embedded, [tmp_path / "run"] * 2, [keys, keys | parse_assignments([setting])])
    assert all(re.match(f"the ranks do not run the same: {DIFFERENT[setting]}", one) for one in said), said
    assert not (tmp_path / "run").exists()


def test_another_dataset_of_one_rank_is_told_to_all(ranks: RankPool, make_data: MakeData, tmp_path: Path) -> None:
    keys = [{"data": str(make_data(count))} for count in (64, 128)]
    said = ranks.run(train_embedded, [tmp_path / "run"] * 2, keys)
    assert all(one.startswith("the ranks do not run the same: the dataset is ") for one in said), said
    assert not (tmp_path / "run" / "run.json").exists()


def test_another_run_directory_on_one_rank_is_told(ranks: RankPool, make_data: MakeData, tmp_path: Path) -> None:
    keys = [{"data": str(make_data(64))}] * 2
    said = ranks.run(train_embedded, [tmp_path / "run0", tmp_path / "run1"], keys)
    assert all(one.startswith("the ranks do not run the same: the run directory is ") for one in said), said
    assert not list(tmp_path.glob("run*"))


def test_the_same_data_in_another_place_is_the_same(ranks: RankPool, make_data: MakeData, tmp_path: Path) -> None:
    """As on disks of the nodes' own."""
    (tmp_path / "copy").symlink_to(make_data(64))
    keys = [{"data": str(data)} for data in (make_data(64), tmp_path / "copy")]
    assert ranks.run(train_embedded, [tmp_path / "run"] * 2, keys) == ["trained"] * 2


def test_groups_of_nodes_of_different_sizes_are_refused_on_every_rank(ranks: RankPool, make_data: MakeData, tmp_path: Path) -> None:
    keys = [{"data": str(make_data(64)), "sync.strategy": "hierarchical"}] * 3
    said = ranks.run(train_embedded, [tmp_path / "run"] * 3, keys, [0, 0, 1], size=3)
    assert all("sync.group is 1 and 2, but there are 3 replicas" in one for one in said), said
    assert not (tmp_path / "run").exists()
