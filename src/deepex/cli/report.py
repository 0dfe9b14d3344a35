"""`deepex report`: runs and studies as one HTML file. Reads records; needs no torch and no MPI."""

import sys
from pathlib import Path

from deepex.errors import RunError
from deepex.record.files import write_text
from deepex.report import make_report
from deepex.report.words import count, size


def report(*, directories: list[str], out: str) -> None:
    """Write the report and say where it is."""
    path = Path(out)
    if path.is_dir():
        raise RunError(f"--out {out} is a directory; give the file to write, for example {path / 'report.html'}")
    made = make_report([Path(directory) for directory in directories])
    write_text(path, made.html)
    problems = f"; {count(made.problems, 'run')} failed, unfinished or unreadable, see its summary" if made.problems else ""
    sys.stdout.write(f"{path}: {size(path.stat().st_size)}, {count(made.runs, 'run')}{problems}\n")
