"""`deepex report`: runs and studies as one HTML file, compared, or for other programs. Reads records; needs no torch and no MPI."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from deepex.cli.output import make_console
from deepex.errors import ConfigError, RunError
from deepex.record.files import write_text
from deepex.report import make_report
from deepex.report.words import count, size


def report(*, directories: Sequence[str], out: str, title: str | None = None, as_json: bool = False) -> None:
    """Write the report and say where it is."""
    path = _file(out, "report.html")
    made = make_report([Path(directory) for directory in directories], title=title)
    write_text(path, made.html)
    if as_json:
        told = {"report": str(path), "bytes": path.stat().st_size, "runs": made.runs, "problems": made.problems}
        sys.stdout.write(json.dumps(told) + "\n")
        return
    problems = f"; {count(made.problems, 'run')} failed, unfinished or unreadable, see its summary" if made.problems else ""
    sys.stdout.write(f"{path}: {size(path.stat().st_size)}, {count(made.runs, 'run')}{problems}\n")


def compare(*, directories: Sequence[str], as_json: bool) -> None:
    """Print what differs between two directories."""
    from deepex.report.comparison import compare as compare_directories

    if len(directories) != 2:
        raise ConfigError(f"--compare takes two directories, a first and a second, not {len(directories)}")
    comparison = compare_directories(*map(Path, directories))
    if as_json:
        sys.stdout.write(json.dumps(asdict(comparison)) + "\n")
        return
    from rich.table import Table

    console = make_console()
    table = Table(title=f"{directories[1]} against {directories[0]}", title_justify="left")
    for column in ("setting", "measure", "first", "second", "the second is"):
        table.add_column(column)
    for finding in comparison.findings:
        table.add_row(finding.setting, finding.measure, str(finding.first), str(finding.second), finding.verdict)
    console.print(table)
    for text in comparison.only:
        console.print(f"only on one side: {text}")
    if comparison.once:
        console.print("some settings ran once: their intervals cover how epochs differ, not how runs do")


def export(*, directories: Sequence[str], kind: str, out: str | None) -> None:
    """Write the records in another program's format; to standard output without a file."""
    from deepex.report.collect import collect
    from deepex.report.export import export as export_text

    text = export_text(collect([Path(directory) for directory in directories]), kind)
    if out is None:
        sys.stdout.write(text)
    else:
        write_text(_file(out, f"records.{kind}"), text)


def _file(out: str, name: str) -> Path:
    path = Path(out)
    if path.is_dir():
        raise RunError(f"--out {out} is a directory; give the file to write, for example {path / name}")
    return path
