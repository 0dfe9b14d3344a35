"""A packed dataset as a table for people.

print_dataset(Path("packed/fashion"), dataset.manifest, look(dataset))
"""

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from deepex.cli.output import make_console
from deepex.data.manifest import Manifest
from deepex.data.overview import Overview


def print_dataset(directory: Path, manifest: Manifest, overview: Overview | None = None) -> None:
    """Print what the manifest says and, if given, what was seen in the files."""
    channels, height, width = manifest.shape
    rows = {
        "dataset": f"{manifest.name} in {directory}",
        "images": f"{height} × {width}, {channels} channel{'s' * (channels > 1)}, {manifest.dtype}",
        **{f"part {name}": f"{part.count:,} images in {len(part.files)} files" for name, part in manifest.parts.items()},
        "size": f"{manifest.num_bytes / 1e6:,.1f} MB",
        "classes": f"{len(manifest.classes)}: {_listed(manifest.classes)}" if manifest.classes else "none (no labels)",
        "order": f"{manifest.order}, seed {manifest.seed}",
        "values": f"{manifest.scale[0]:g} to {manifest.scale[1]:g} map to 0 to 1",
        "mean, deviation": " · ".join(f"{m:.4f}, {d:.4f}" for m, d in zip(manifest.mean, manifest.deviation, strict=True)),
        **{f"source {key}": _brief(value) for key, value in manifest.source.items()},
        **({} if overview is None else _overview_rows(overview)),
    }
    table = Table(show_header=False, box=None, pad_edge=False)
    for key, value in rows.items():
        table.add_row(key, value)
    make_console().print(table)


def _brief(value: object) -> str:
    text = _listed(value) if isinstance(value, list) else str(value)
    return text if len(text) <= 400 else f"{text[:400]} …"


def _overview_rows(overview: Overview) -> dict[str, str]:
    counts = {
        f"per class, {part}": _listed([f"{name} {count:,}" for name, count in found.items()], 100)
        for part, found in overview.counts.items()
    }
    shares = overview.histogram["shares"]
    bars = "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * (share / max(*shares, 1e-9)) ** 0.5))] if share else " " for share in shares)
    low, high, samples = (overview.histogram[key] for key in ("low", "high", "samples"))
    text = f"{low:g} |{bars}| {high:g} (height: root of the share; greatest {max(shares):.1%}; {samples:,} samples)"
    return counts | {"histogram": text}


def _listed(names: Sequence[object], most: int = 10) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more
