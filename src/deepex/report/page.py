"""One HTML file with everything in it: text, tables, data, styles, program, and plotly.js compressed.

    html = render(chapters(collect(paths)), title="Strong scaling on …")

Texts are escaped by the template; data is JSON in which no character can end its script element; nothing is loaded from anywhere,
and the page's own policy forbids it.
"""

import base64
import gzip
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from deepex.errors import RunError
from deepex.record.run import now
from deepex.report.figure import Figure, Section

_ASSETS: Final = Path(__file__).parent / "assets"
_ESCAPES: Final = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def render(sections: Sequence[Section], *, title: str) -> str:
    """The page as text."""
    numbered = _numbered(sections)
    figures = {entry["id"]: _data(figure) for chapter in numbered for entry in chapter["figures"] for figure in [entry["figure"]]}
    template = _environment().get_template("page.html")
    return template.render(
        title=title,
        made=now(),
        chapters=numbered,
        style=_asset("style.css"),
        program=_asset("report.js"),
        data=safe_json(figures),
        library=_library() if figures else "",
    )


def safe_json(value: object) -> Markup:
    """JSON that may stand in a script element. What is no number becomes null, as JSON has it."""
    text = json.dumps(_finite(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return Markup(re.sub("[<>&\u2028\u2029]", lambda match: _ESCAPES[match[0]], text))  # noqa: S704 - escaped here


def slug(title: str, taken: Iterable[str]) -> str:
    """An anchor made of a title, different from those taken."""
    base = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:60] or "section"
    name, number = base, 2
    while name in taken:
        name, number = f"{base}-{number}", number + 1
    return name


def _numbered(sections: Sequence[Section]) -> list[dict[str, Any]]:
    chapters: list[dict[str, Any]] = []
    anchors: set[str] = set()
    number = 0
    for section in sections:
        anchor = slug(section.title, anchors)
        anchors.add(anchor)
        entries = []
        for figure in section.figures:
            number += 1
            entries.append({"id": f"figure-{number}", "number": number, "figure": figure})
        chapters.append({"anchor": anchor, "section": section, "figures": entries})
    return chapters


def _data(figure: Figure) -> dict[str, Any]:
    return {
        "name": slug(figure.title, ()),
        "columns": figure.columns,
        "rows": figure.rows,
        "views": [asdict(view) for view in figure.views],
    }


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return (float(f"{value:.6g}") if math.isfinite(value) else None) if not value.is_integer() else value
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value


@cache
def _environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(_ASSETS), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )


@cache
def _asset(name: str) -> Markup:
    return Markup((_ASSETS / name).read_text(encoding="utf-8"))  # noqa: S704 - our own file


@cache
def _library() -> str:
    """plotly.js, gzipped, in base64: a third of its size."""
    spec = find_spec("plotly")
    path = Path(spec.origin).parent / "package_data" / "plotly.min.js" if spec and spec.origin else None
    if path is None or not path.is_file():
        raise RunError(f"plotly.js is not installed ({path or 'no package plotly'}): `pip install plotly` brings it")
    return base64.b64encode(gzip.compress(path.read_bytes(), compresslevel=9, mtime=0)).decode("ascii")
