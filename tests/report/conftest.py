"""Records and reports that several tests read; written once."""

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from deepex.report import make_report
from tests.report.records import Made, write_all, write_run

HOSTILE = "<img src=x onerror=\"document.title='broken'\"></script><b>bold</b>&amp;'\"\u2028"


@pytest.fixture(scope="session", autouse=True)
def unflushed() -> Iterator[None]:
    """Hundreds of small files: nobody waits for the disk."""
    with patch("deepex.record.files.flush_file"):
        yield


@pytest.fixture(scope="session")
def studies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a study of each kind."""
    return write_all(tmp_path_factory.mktemp("studies"))


@pytest.fixture(scope="session")
def full_page(studies: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of all studies."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(make_report([studies]).html, encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def hostile_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of runs whose configuration, machine and reason are made to break out of the page."""
    folder = tmp_path_factory.mktemp("hostile")
    for number, net in enumerate((HOSTILE, HOSTILE, HOSTILE)):
        made = Made(ranks=2, config={"net": net, "precision": f"{HOSTILE}{number}"}, hosts=(HOSTILE,), usage=True, drift=True)
        write_run(folder / f"runs/<b>{number}", made, reason=HOSTILE)
    write_run(folder / "runs/failed", Made(), status="failed", reason=HOSTILE)
    path = folder / "report.html"
    path.write_text(make_report([folder / "runs"]).html, encoding="utf-8")
    return path
