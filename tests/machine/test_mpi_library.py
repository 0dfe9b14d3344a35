import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deepex.machine import mpi
from deepex.machine.mpi import cuda_aware, find_mpiexec, identify

OPEN_MPI_5 = "Open MPI v5.0.8, package: Open MPI me@host Distribution, ident: 5.0.8, repo rev: v5.0.8, May 30, 2025"
MPICH = "MPICH Version:      4.3.1\nMPICH Release date: Fri Jun 20 2025\nMPICH Device:       ch4:ofi\n"
CRAY = "MPI VERSION    : CRAY MPICH version 8.1.28.15 (ANL base 3.4a2)\nMPI BUILD INFO : Wed Nov 15 21:59 2023\n"
INTEL = "Intel(R) MPI Library 2021.13 for Linux* OS\n"
MVAPICH = "MVAPICH2 Version      :\t2.3.6\nMVAPICH2 Release date :\tMon March 29 2021\nMVAPICH2 Device : ch3:mrail\n"
SPECTRUM = (
    "Open MPI v3.1.0, package: IBM Spectrum MPI, ident: 10.03.01.00rtm0, "
    "repo rev: IBM_SPECTRUM_MPI_10.03.01.00_2019.04.02, Apr 02, 2019\n"
)


@pytest.mark.parametrize(
    ("words", "name", "version"),
    [
        (
            "Open MPI v4.1.1, package: Open MPI conda@x Distribution, ident: 4.1.1, repo rev: v4.1.1",
            "Open MPI",
            "4.1.1",
        ),
        ("Open MPI v5.0.0rc12, package: Open MPI root@builder Distribution", "Open MPI", "5.0.0rc12"),
        (OPEN_MPI_5, "Open MPI", "5.0.8"),
        (MPICH, "MPICH", "4.3.1"),
        ("MPICH Version:\t3.4.2\nMPICH Release date:\tWed May 26\n", "MPICH", "3.4.2"),
        (CRAY, "Cray MPICH", "8.1.28.15"),
        ("MPI VERSION    : CRAY MPICH version 9.0.0 (ANL base 4.1.2)\n", "Cray MPICH", "9.0.0"),
        (INTEL, "Intel MPI", "2021.13"),
        ("Intel(R) MPI Library 2019 Update 4 for Linux* OS\n", "Intel MPI", "2019 Update 4"),
        (MVAPICH, "MVAPICH", "2.3.6"),
        ("MVAPICH Version:      4.0\nMVAPICH Release date: 2025\n", "MVAPICH", "4.0"),
        (SPECTRUM, "Spectrum MPI", "10.03.01.00rtm0"),
        ("FUJITSU MPI Library 4.0.0 (4.0.1fj4.0.0)\0", "Fujitsu MPI", "4.0.0"),
        ("HPE MPT 2.23  08/26/20 02:54:49-root", "HPE MPT", "2.23"),
        ("wrapper 1.2.0 (MPI 5.0 standard ABI)\nwrapping:\nOpen MPI v5.0.10, package: x", "Open MPI", "5.0.10"),
        ("Some Other MPI 1.0", "unknown", None),
        ("", "unknown", None),
    ],
)
def test_libraries_are_told_apart(words: str, name: str, version: str | None) -> None:
    assert identify(words) == (name, version)


@pytest.mark.parametrize(
    ("words", "environ", "able"),
    [
        (CRAY, {}, False),
        (CRAY, {"MPICH_GPU_SUPPORT_ENABLED": "0"}, False),
        (CRAY, {"MPICH_GPU_SUPPORT_ENABLED": "1"}, True),
        (SPECTRUM, {}, False),
        (SPECTRUM, {"OMPI_MCA_pml_pami_enable_cuda": "1"}, True),
        (INTEL, {"I_MPI_OFFLOAD": "1"}, False),
        (INTEL, {"I_MPI_OFFLOAD": "1", "I_MPI_OFFLOAD_MODE": "cuda"}, True),
        (MVAPICH, {}, False),
        (MPICH, {"MPIR_CVAR_ENABLE_GPU": "0"}, False),
        ("Some Other MPI 1.0", {}, None),
    ],
)
def test_awareness_that_variables_decide(words: str, environ: dict[str, str], able: bool | None) -> None:
    answer, why = cuda_aware(words, environ)
    assert answer is able
    assert why


@pytest.mark.parametrize("words", [OPEN_MPI_5, MPICH])
def test_a_library_that_does_not_run_is_not_asked(monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    asleep = SimpleNamespace(Is_initialized=lambda: False, Is_finalized=lambda: False, __file__="nowhere")
    for module in (None, asleep):
        monkeypatch.setitem(sys.modules, "mpi4py.MPI", module)
        assert cuda_aware(words, {})[0] is None


@pytest.mark.parametrize("answer", [0, 1])
def test_open_mpi_and_mvapich_are_asked(monkeypatch: pytest.MonkeyPatch, answer: int) -> None:
    monkeypatch.setattr(mpi, "_running", {"MPIX_Query_cuda_support": lambda: answer}.get)
    assert cuda_aware(OPEN_MPI_5, {})[0] is bool(answer)
    assert cuda_aware(MVAPICH, {"MV2_USE_CUDA": "1"})[0] is bool(answer)


@pytest.mark.parametrize(("answer", "code", "able"), [(0, 0, False), (1, 0, True), (0, 15, None)])
def test_mpich_is_asked(monkeypatch: pytest.MonkeyPatch, answer: int, code: int, able: bool | None) -> None:
    def query(_kind: object, pointer: Any) -> int:
        pointer._obj.value = answer
        return code

    monkeypatch.setattr(mpi, "_running", {"MPIX_GPU_query_support": query}.get)
    assert cuda_aware(MPICH, {})[0] is able


def make_programs(prefix: Path, **programs: str) -> None:
    (prefix / "bin").mkdir(parents=True)
    for name, content in programs.items():
        path = prefix / "bin" / name.replace("_hydra", ".hydra").replace("_openmpi", ".openmpi")
        path.write_text(content)
        path.chmod(0o755)


def test_mpiexec_stands_beside_the_library(tmp_path: Path) -> None:
    make_programs(tmp_path, mpiexec="o")
    assert find_mpiexec(tmp_path / "lib/libmpi.so.40", "Open MPI") == tmp_path / "bin/mpiexec"
    assert find_mpiexec(tmp_path / "lib/arch/openmpi/lib/libmpi.so.40", "Open MPI") == tmp_path / "bin/mpiexec"


def test_an_mpiexec_of_another_mpi_in_the_same_directory_is_not_taken(tmp_path: Path) -> None:
    make_programs(tmp_path, mpiexec="h", mpirun="h", mpiexec_hydra="h", prterun="o")
    library = tmp_path / "lib/libmpi.so"
    assert find_mpiexec(library, "Open MPI") == tmp_path / "bin/prterun"
    assert find_mpiexec(library, "MPICH") == tmp_path / "bin/mpiexec"


def test_no_mpiexec_is_none(tmp_path: Path) -> None:
    assert find_mpiexec(tmp_path / "a/b/c/d/e/lib/libmpi.so", "Cray MPICH") is None
