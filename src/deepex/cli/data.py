"""`deepex data`: make, describe and check packed datasets.

deepex data pack fashion-mnist/ packed/fashion
deepex data info packed/fashion
deepex data verify packed/fashion
"""

import json
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:  # at run time they are imported where they are used, so that `deepex --help` stays instant
    from rich.progress import Progress

    from deepex.data.manifest import Manifest

app = typer.Typer(
    name="data",
    no_args_is_help=True,
    help="Pack images into the files that training reads, and look after them.",
)

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, for programs.")]
Dataset = Annotated[Path, typer.Argument(metavar="DIR", help="A packed dataset: a directory with a manifest.json.")]


class ArrayLayout(StrEnum):
    """Which dimension of an image array is which."""

    NHW = "NHW"
    NHWC = "NHWC"
    NCHW = "NCHW"


@app.command()
def pack(  # noqa: PLR0917 - typer reads the options from the signature
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="A directory with IDX files named like those of MNIST, or one IDX, .npy or .npz file. An .npz has "
            "x_train, y_train, x_test, y_test, or images, labels.",
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The directory to make; it becomes a dataset in the last instant.")],
    labels: Annotated[Path | None, typer.Option(help="The labels of one IDX or .npy file of images.", show_default=False)] = None,
    validation: Annotated[
        str,
        typer.Option(help="A share of the train samples to set aside if the source has no validation part, or a file of images."),
    ] = "0.1",
    validation_labels: Annotated[
        Path | None, typer.Option(help="The labels of the file given by --validation.", show_default=False)
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Keep this many train samples, drawn at random.", show_default=False)] = None,
    validation_limit: Annotated[
        int | None, typer.Option(help="Keep this many validation samples, drawn at random.", show_default=False)
    ] = None,
    balance: Annotated[bool, typer.Option("--balance", help="Let the limits keep equally many of each class.")] = False,
    seed: Annotated[int, typer.Option(help="Where the order is drawn from; the same seed packs the same files.")] = 1,
    given_order: Annotated[
        bool,
        typer.Option("--given-order", help="Do not shuffle. Shards are then unfair if the source is sorted, by class or by time."),
    ] = False,
    classes: Annotated[
        str | None,
        typer.Option(help="Names of the classes, from class 0: 'cat,dog', or @FILE with one on each line.", show_default=False),
    ] = None,
    name: Annotated[str | None, typer.Option(help="The dataset's name; by default that of SOURCE.", show_default=False)] = None,
    scale: Annotated[
        tuple[float, float] | None,
        typer.Option(
            metavar="LOW HIGH",
            help="The values that map to 0 and 1. By default 0 255 for bytes, 0 1 for maps of 0 and 1, the least "
            "and greatest train value for real numbers.",
            show_default=False,
        ),
    ] = None,
    layout: Annotated[
        ArrayLayout | None,
        typer.Option(help="The order of the dimensions, where it cannot be guessed from 1, 3 or 4 channels.", show_default=False),
    ] = None,
    license_: Annotated[
        str | None,
        typer.Option("--license", help="A note on licence and origin to keep with the data.", show_default=False),
    ] = None,
    file_mib: Annotated[int, typer.Option(min=1, help="Size of each file of images in MiB.")] = 64,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Replace the dataset in OUT. Files that are not of a dataset are left alone."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Turn images and labels into a packed dataset.

    The samples are shuffled once, here, so that every rank can later read one contiguous piece of large files and still
    has a fair shard. An interrupted packing is started again with the same command.

    Example: deepex data pack /usr/share/datasets/fashion-mnist packed/fashion --limit 6000 --balance

    Example: deepex data pack frames.npy packed/frames --validation 0.2 --layout NCHW
    """
    from deepex.data.pack import pack as pack_dataset

    with _progress("packing") as bar:
        task = bar.add_task("packing", total=None)
        manifest = pack_dataset(
            source,
            out,
            labels=labels,
            validation=_share_or_file(validation),
            validation_labels=validation_labels,
            seed=seed,
            shuffle=not given_order,
            limit=limit,
            validation_limit=validation_limit,
            balance=balance,
            name=name,
            classes=_class_names(classes),
            scale=scale,
            layout=None if layout is None else layout.value,
            license=license_,
            overwrite=overwrite,
            file_bytes=file_mib << 20,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    _show(out, manifest, as_json=as_json)


@app.command()
def info(directory: Dataset, as_json: Json = False) -> None:
    """Say what is in a packed dataset, from its manifest alone.

    Example: deepex data info packed/fashion
    """
    from deepex.data.manifest import load

    _show(directory, load(directory), as_json=as_json)


@app.command()
def verify(directory: Dataset, as_json: Json = False) -> None:
    """Read every file and compare it with the SHA-256 that was taken when it was packed.

    Every bad file is named, and the exit code is 2 if there is one. Worth its time after a copy to another machine.

    Example: deepex data verify packed/fashion
    """
    from deepex.data.dataset import PackedDataset

    dataset = PackedDataset.open(directory)
    with _progress("verifying", of_bytes=True) as bar:
        task = bar.add_task("verifying", total=_num_bytes(dataset.manifest))
        bad = dataset.verify(progress=lambda num_bytes: bar.advance(task, num_bytes))
    if as_json:
        typer.echo(json.dumps({"dataset": str(directory), "files": _num_files(dataset.manifest), "bad": bad}, indent=1))
    else:
        for message in bad:
            typer.echo(message)
        typer.echo(f"{directory}: {_num_files(dataset.manifest) - len(bad)} of {_num_files(dataset.manifest)} files are whole")
    if bad:
        raise typer.Exit(2)


def _progress(what: str, *, of_bytes: bool = False) -> "Progress":
    """Make a bar with the rate and the time left, on stderr: stdout is for the result alone."""
    from rich import progress
    from rich.console import Console
    from rich.text import Text

    class ImagesPerSecond(progress.ProgressColumn):
        def render(self, task: progress.Task) -> Text:
            return Text(f"{task.speed:,.0f} images/s" if task.speed else "")

    amount: list[progress.ProgressColumn] = [progress.MofNCompleteColumn(), ImagesPerSecond()]
    if of_bytes:
        amount = [progress.DownloadColumn(), progress.TransferSpeedColumn()]
    columns = [progress.TextColumn(what), progress.BarColumn(), *amount, progress.TimeRemainingColumn()]
    return progress.Progress(*columns, console=Console(stderr=True), transient=True)


def _show(directory: Path, manifest: "Manifest", *, as_json: bool) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from deepex.data.manifest import to_json

    if as_json:
        typer.echo(json.dumps(to_json(manifest), indent=1))
        return
    channels, height, width = manifest.shape
    rows = {
        "dataset": f"{manifest.name} in {directory}",
        "images": f"{height} × {width}, {channels} channel{'s' * (channels > 1)}, {manifest.dtype}",
        **{f"part {name}": f"{part.count:,} images in {len(part.files)} files" for name, part in manifest.parts.items()},
        "size": f"{_num_bytes(manifest) / 1e6:,.1f} MB",
        "classes": f"{len(manifest.classes)}: {_listed(manifest.classes)}" if manifest.classes else "none (no labels)",
        "order": f"{manifest.order}, seed {manifest.seed}",
        "values": f"{manifest.scale[0]:g} to {manifest.scale[1]:g} map to 0 to 1",
        "mean, deviation": " · ".join(f"{m:.4f}, {d:.4f}" for m, d in zip(manifest.mean, manifest.deviation, strict=True)),
        **{f"source {key}": _listed(value) if isinstance(value, list) else str(value) for key, value in manifest.source.items()},
    }
    table = Table(show_header=False, box=None, pad_edge=False)
    for key, value in rows.items():
        table.add_row(Text(key), Text(value))  # as text: a name may contain what rich takes for markup
    Console().print(table)


def _num_files(manifest: "Manifest") -> int:
    return sum(len(part.files) for part in manifest.parts.values()) * (2 if manifest.classes else 1)


def _num_bytes(manifest: "Manifest") -> int:
    """Count the bytes of all files, without their headers."""
    per_sample = manifest.sample_bytes + (8 if manifest.classes else 0)
    return sum(part.count for part in manifest.parts.values()) * per_sample


def _listed(names: Sequence[object], most: int = 10) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


def _share_or_file(text: str) -> float | Path:
    try:
        return float(text)
    except ValueError:
        return Path(text)


def _class_names(text: str | None) -> list[str] | None:
    """Read the names from `cat,dog`, or from the lines of FILE if `text` is `@FILE`."""
    from deepex.errors import DataError

    if text is None:
        return None
    if not text.startswith("@"):
        return [name.strip() for name in text.split(",")]
    try:
        lines = Path(text[1:]).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"--classes got {text!r}, but that file cannot be read ({error}); give a text file, one name a line"
        ) from error
    return [line.strip() for line in lines if line.strip()]
