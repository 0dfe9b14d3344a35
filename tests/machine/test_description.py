import json
import sys
from pathlib import Path
from typing import Any

import pytest

from deepex.machine import describe, description, reading

KEYS = {"host", "system", "cpu", "memory", "gpus", "versions", "commit", "threads", "job", "file_system"}


def test_the_description_is_json_with_stable_keys(tmp_path: Path) -> None:
    machine = describe(tmp_path, environ={"SLURM_JOB_ID": "7", "OMP_NUM_THREADS": "2"})
    assert json.loads(json.dumps(machine)) == machine
    assert machine.keys() == KEYS
    assert machine["cpu"]["num_cores_usable"] >= 1
    assert machine["memory"]["total_bytes"] >= machine["memory"]["available_bytes"] > 0
    assert machine["versions"]["torch"]
    assert machine["job"] == {"scheduler": "slurm", "id": "7"}
    assert machine["file_system"]["free_bytes"] > 0


def test_mpi_is_not_started(tmp_path: Path) -> None:
    before = "mpi4py.MPI" in sys.modules
    describe(tmp_path)
    assert ("mpi4py.MPI" in sys.modules) is before


def test_no_directory_is_no_file_system() -> None:
    assert describe()["file_system"] is None


def _fail(*_: Any, **__: Any) -> Any:
    raise RuntimeError("injected")


def test_every_part_may_fail_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in vars(description) if name.startswith("describe_")]:
        with monkeypatch.context() as patch:
            patch.setattr(description, name, _fail)
            machine = describe(tmp_path)
        assert machine.keys() == KEYS
        assert machine["host"]


def test_it_survives_a_system_that_tells_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError("injected")

    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pynvml", None)  # makes its import fail
        patch.setattr(Path, "read_text", refuse)
        patch.setattr(Path, "open", refuse)
        machine = describe(tmp_path)
    assert machine["gpus"] == []
    assert machine["commit"] is None
    assert machine["cpu"]["model"] is None
    assert machine["memory"]["total_bytes"] is None
    assert machine["file_system"]["kind"] is None
    assert machine["file_system"]["total_bytes"] > 0
    json.dumps(machine)


def test_a_missing_torch_is_null(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch", None)
        machine = describe()
    assert machine["versions"]["torch"] is None
    assert machine["threads"] is None
    assert machine["versions"]["python"]


def test_a_reading_that_fails_is_none() -> None:
    assert reading.attempt(_fail) is None
    assert reading.attempt(lambda: 3) == 3
