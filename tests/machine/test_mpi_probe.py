import sys
from pathlib import Path

import pytest

from deepex.machine import mpi_probe, probe_mpi


def test_the_mpi_of_this_machine_starts_in_a_process_of_its_own() -> None:
    before = "mpi4py.MPI" in sys.modules
    facts = probe_mpi()
    assert facts["started"], facts["error"]
    assert facts["error"] is None
    assert facts["vendor"] in facts["library_version"]
    assert facts["thread_level"] in ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
    assert Path(facts["library"]).exists()
    assert facts["cuda_aware_reason"]
    assert ("mpi4py.MPI" in sys.modules) is before


def test_variables_of_an_outer_launcher_do_not_reach_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "99", "PMIX_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert probe_mpi()["error"] is None


def test_a_missing_library_is_an_error_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MPI4PY_LIBMPI", str(tmp_path / "libmpi.so"))
    facts = probe_mpi()
    assert not facts["started"]
    assert str(tmp_path / "libmpi.so") in facts["error"]
    assert facts["vendor"] is None


def run_instead(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    monkeypatch.setattr(mpi_probe, "_PROGRAM", program)


def test_an_mpi_that_aborts_is_told_with_what_it_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said = 'print(\'deepex-mpi-probe:{"vendor": "Cray MPICH"}\', flush=True)'
    run_instead(monkeypatch, f"import os, sys; {said}; print('hello\\nMPID_Init: init failed', file=sys.stderr); os.abort()")
    facts = probe_mpi()
    assert facts["error"] == "the process that started MPI was ended by SIGABRT: MPID_Init: init failed"
    assert facts["vendor"] == "Cray MPICH"
    assert not facts["started"]


def test_an_mpi_that_hangs_is_ended_with_its_daemons(monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"  # it holds the pipes open
    run_instead(monkeypatch, f"import subprocess, sys, time; {daemon}; time.sleep(60)")
    assert probe_mpi(timeout_seconds=0.5)["error"] == "MPI did not start within 0.5 s"


def test_chatter_of_the_library_is_not_taken_for_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    run_instead(monkeypatch, "print('hello'); print('deepex-mpi-probe:{broken'); print('deepex-mpi-probe:{\"started\": true}')")
    facts = probe_mpi()
    assert facts["started"]
    assert facts["error"] is None


def test_no_process_is_an_error_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert "could not be started" in probe_mpi()["error"]
