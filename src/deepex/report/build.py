"""From directories to a page.

>>> make_report([Path("studies/strong")]).html
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deepex.report.chapter import chapters
from deepex.report.collect import collect
from deepex.report.page import render
from deepex.report.words import listed


@dataclass(frozen=True, kw_only=True)
class Report:
    """A page, and how many runs and problems are in it."""

    html: str
    runs: int
    problems: int


def make_report(directories: Sequence[Path], *, title: str | None = None) -> Report:
    """Read all that is in `directories` and make one page of it; by default its title is their names."""
    collection = collect(directories)
    names = listed([path.resolve().name for path in directories], 3)
    html = render(chapters(collection), title=title or names)
    return Report(html=html, runs=len(collection.all_runs()), problems=len(collection.problems))
