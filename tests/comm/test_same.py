"""Ranks that do not run the same say so, all with one error."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deepex.comm.launch import launcher_prefix
from tests.mpi import HANGS, ROOT, own_lines, rank_environ, run_ranks

TRAIN = ("train", "fashion", "--set", "epochs=1", "--set", "samples=64", "--set", "batch=8", "--set", "validate=none", "--quiet")
# Rank 1 has one more setting than the others.
OTHERWISE = 'if [ "${PMI_RANK:-$OMPI_COMM_WORLD_RANK}" = 1 ]; then shift; exec "$@" --set "$0"; else shift; exec "$@"; fi'


def train(setting: str, out: Path) -> subprocess.CompletedProcess[str]:
    prefix, extra = launcher_prefix(2)
    command = [*prefix, "sh", "-c", OTHERWISE, setting, "-", sys.executable, "-m", "deepex", *TRAIN, "--out", str(out)]
    return subprocess.run(command, cwd=ROOT, env=rank_environ(**extra), capture_output=True, text=True, timeout=HANGS, check=False)


SLOW = pytest.mark.slow
DIFFERENT = [
    ("seed=5", "seed is 1 on rank 0 on .*, and 5 on rank 1 on "),
    pytest.param("net=lenet", 'net is "lenet-caffe" on rank 0 on .*, and "lenet" on rank 1 on ', marks=SLOW),
    pytest.param("batch=4", "batch is 8 on rank 0 .*, and 4 on rank 1 ", marks=SLOW),
    pytest.param("epochs=2", "epochs is 1 on rank 0 .*, and 2 on rank 1 ", marks=SLOW),
    pytest.param("sync.period=2", "sync.period is not set on rank 0 .*, and 2 on rank 1 ", marks=SLOW),
    ("comm=gloo", 'comm is "auto" on rank 0 .*, and "gloo" on rank 1 '),
    pytest.param("optim.rate=0.5", "optim.rate is .* on rank 0 .*, and 0.5 on rank 1 ", marks=SLOW),
]


@pytest.mark.parametrize(("setting", "said"), DIFFERENT)
def test_another_setting_on_one_rank_is_told_once(setting: str, said: str, tmp_path: Path) -> None:
    ended = train(setting, tmp_path / "run")
    assert ended.returncode == 2, ended.stderr
    (line,) = own_lines(ended.stderr)
    assert re.search(f"the ranks do not run the same: {said}", line)
    assert not (tmp_path / "run").exists()


def test_another_run_directory_on_one_rank_is_told(make_data: Callable[[int], Path], tmp_path: Path) -> None:
    script = EMBEDDED.replace("out=sys.argv[5]", "out=sys.argv[5] + str(rank)")
    done = run_ranks(2, "-c", script, str(make_data(64)), str(make_data(64)), "1", "1", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the ranks do not run the same: the run directory is ") == 2
    assert not list(tmp_path.glob("run*"))


def test_ranks_may_have_different_numbers_of_threads(tmp_path: Path) -> None:
    """As on nodes of different sizes; the record tells them."""
    done = train("threads=2", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "run.json").read_text())["threads_by_rank"] == [1, 2]


def test_the_same_data_in_another_place_is_the_same(make_data: Callable[[int], Path], tmp_path: Path) -> None:
    """As on disks of the nodes' own."""
    (tmp_path / "copy").symlink_to(make_data(64))
    done = run_ranks(2, "-c", EMBEDDED, str(make_data(64)), str(tmp_path / "copy"), "1", "1", str(tmp_path / "run"))
    assert done.stdout.count("trained") == 2, done.stderr  # the lines of two ranks may come as one


EMBEDDED = """
import sys
from mpi4py import MPI
import deepex
from deepex.errors import ConfigError
rank = MPI.COMM_WORLD.rank
keys = {"data": sys.argv[1 + rank], "net": "tests.networks:plain", "batch": 4, "epochs": 1, "seed": int(sys.argv[3 + rank])}
try:
    deepex.train(deepex.recipe("fashion", keys), MPI.COMM_WORLD, out=sys.argv[5])
    print("trained")
except ConfigError as error:
    print(error)
"""


UNEVEN = """
import dataclasses, sys
import deepex
from deepex.comm import connect
from deepex.errors import ConfigError
comm = connect("mpi")
comm.place = dataclasses.replace(comm.place, local_size=1 if comm.rank == 2 else 2, local_rank=comm.rank % 2, node=comm.rank // 2,
    num_nodes=2)
keys = {"data": sys.argv[1], "net": "tests.networks:plain", "batch": 4, "epochs": 1, "sync.strategy": "hierarchical"}
try:
    deepex.train(deepex.recipe("fashion", keys), comm, out=sys.argv[2])
except ConfigError as error:
    print(error)
"""


def test_groups_of_nodes_of_different_sizes_are_refused_on_every_rank(make_data: Callable[[int], Path], tmp_path: Path) -> None:
    done = run_ranks(3, "-c", UNEVEN, str(make_data(64)), str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sync.group is 1 and 2, but there are 3 replicas") == 3
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("other", "said"), [("data", "the dataset is "), ("seed", "seed is 1 on rank 0 ")])
def test_every_rank_of_a_program_gets_the_error(other: str, said: str, make_data: Callable[[int], Path], tmp_path: Path) -> None:
    data = [str(make_data(64)), str(make_data(128 if other == "data" else 64))]
    seeds = ["1", "2" if other == "seed" else "1"]
    done = run_ranks(2, "-c", EMBEDDED, *data, *seeds, str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"the ranks do not run the same: {said}") == 2, done.stdout
    assert not (tmp_path / "run" / "run.json").exists()
