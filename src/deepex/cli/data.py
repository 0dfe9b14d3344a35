"""`deepex data`: make, describe and check packed datasets.

deepex data make atomai packed/atomai --images 27000
deepex data pack fashion-mnist/ packed/fashion
deepex data info packed/fashion --sheet fashion.png
deepex data verify packed/fashion
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from deepex.cli.output import HELP_NAMES, checked

if TYPE_CHECKING:  # at run time they are imported where they are used, so that `deepex --help` stays instant
    from deepex.cli.stages import Stages
    from deepex.comm import Communicator
    from deepex.data.manifest import Manifest
    from deepex.data.overview import Overview

_SAFE_PATH: Final = "PYTHONSAFEPATH"

app = typer.Typer(
    name="data",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # it would take [science] for markup
    context_settings={"help_option_names": HELP_NAMES},
    help="Make datasets by simulation, pack images of any format into the files that training reads, and look after them.",
)

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, for programs.")]
Dataset = Annotated[Path, typer.Argument(metavar="DIR", help="A packed dataset: a directory with a manifest.json.")]


class StoredType(StrEnum):
    """In which type samples are stored."""

    uint8 = "uint8"
    float16 = "float16"
    float32 = "float32"


class Simulated(StrEnum):
    """The datasets that are computed."""

    atomai = "atomai"
    pf = "pf"


class Engine(StrEnum):
    """Where diffraction is simulated."""

    cpu = "cpu"
    gpu = "gpu"


class ArrayLayout(StrEnum):
    """Which dimension of an image array is which."""

    NHW = "NHW"
    NHWC = "NHWC"
    NCHW = "NCHW"


Workers = Annotated[
    int | None,
    typer.Option(min=1, help="Processes that work at once; by default one for each core of this rank.", show_default=False),
]
Overwrite = Annotated[
    bool,
    typer.Option(
        "--overwrite",
        help="Replace the dataset in OUT: the old one is removed when the new one is begun. Files that are not of a dataset are "
        "left alone.",
    ),
]
Compress = Annotated[
    bool, typer.Option("--compress", help="Compress the files of images, for a dataset that is shipped; it is then read whole.")
]
Out = Annotated[
    Path, typer.Argument(metavar="OUT", callback=checked, help="The directory to make; it becomes a dataset in the last instant.")
]


@app.command()
def pack(  # noqa: PLR0917 - typer reads the options from the signature
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="A folder of PNG or JPEG files (one folder per class; train/ and val/ above them, if you like), a list file with "
            "lines 'path label', HDF5 (a file or a folder of them), .npy, .npz, IDX files named like those of MNIST (.gz too), the "
            "binary version of CIFAR, a folder or file of matrices as text, or a trajectory (with --topology).",
        ),
    ],
    out: Out,
    images: Annotated[
        str | None, typer.Option(help="Where the images are in an HDF5 or .npz file: entry/data, x_train.", show_default=False)
    ] = None,
    labels: Annotated[
        str | None,
        typer.Option(
            help="Where the labels are in an HDF5 or .npz file, or the file of labels of an IDX or .npy file.", show_default=False
        ),
    ] = None,
    validation: Annotated[
        str,
        typer.Option(
            help="A share of the train samples to set aside if the source has no validation part; or another source, which "
            "replaces that part."
        ),
    ] = "0.1",
    validation_labels: Annotated[
        str | None,
        typer.Option(
            help="The labels of the source given by --validation, or of the validation images in SOURCE.", show_default=False
        ),
    ] = None,
    resize: Annotated[
        str | None, typer.Option(help="Pixels of the shorter side (256), or HEIGHTxWIDTH exactly.", show_default=False)
    ] = None,
    crop: Annotated[
        str | None, typer.Option(help="Keep the middle, HEIGHTxWIDTH, or a number for a square (224).", show_default=False)
    ] = None,
    channels: Annotated[
        int | None, typer.Option(min=1, max=3, help="1 or 3; monochrome images are replicated to 3.", show_default=False)
    ] = None,
    convert: Annotated[
        bool,
        typer.Option("--convert", help="Accept CMYK, transparent, 16-bit and animated pictures, and count what was converted."),
    ] = False,
    max_pixels: Annotated[
        int | None,
        typer.Option(
            min=1, help="Refuse pictures of more pixels before they are decoded; by default 89 million.", show_default=False
        ),
    ] = None,
    dtype: Annotated[
        StoredType | None,
        typer.Option(help="Store as this, rounded; by default bytes for 0 to 255, else float32.", show_default=False),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Keep this many train samples, drawn at random.", show_default=False)] = None,
    validation_limit: Annotated[
        int | None, typer.Option(help="Keep this many validation samples, drawn at random.", show_default=False)
    ] = None,
    balance: Annotated[bool, typer.Option("--balance", help="Let the limits keep equally many of each class.")] = False,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave out what cannot be read, and list it in OUT/skipped.txt.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Where the order is drawn from; the same seed packs the same files.")] = 1,
    given_order: Annotated[
        bool,
        typer.Option("--given-order", help="Do not shuffle. Shards are then unfair if the source is sorted, by class or by time."),
    ] = False,
    classes: Annotated[
        str | None,
        typer.Option(
            help="Names of the classes, from class 0: 'cat,dog', or @FILE with one on each line. The source's own names in another "
            "order number its classes anew.",
            show_default=False,
        ),
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
    topology: Annotated[
        Path | None, typer.Option(help="Of a trajectory: the file that names its atoms (PDB, PSF, GRO, …).", show_default=False)
    ] = None,
    select: Annotated[str, typer.Option(help="Of a trajectory: which atoms, in MDAnalysis' language.")] = "name CA",
    cutoff: Annotated[float, typer.Option(help="Of a trajectory: below how many Å two atoms are in contact.")] = 8.0,
    stride: Annotated[int, typer.Option(min=1, help="Of a trajectory: take every so many frames.")] = 1,
    periodic: Annotated[bool, typer.Option("--periodic", help="Of a trajectory: measure distances in its periodic box.")] = False,
    matrix: Annotated[
        str | None, typer.Option(help="ROWSxCOLUMNS of text matrices that stand on one line each.", show_default=False)
    ] = None,
    license_: Annotated[
        str | None,
        typer.Option("--license", help="A note on licence and origin to keep with the data.", show_default=False),
    ] = None,
    file_mib: Annotated[
        int | None, typer.Option(min=1, help="Size of each file of images in MiB; by default 16 to 64.", show_default=False)
    ] = None,
    compress: Compress = False,
    workers: Workers = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Turn images and labels into a packed dataset.

    The samples are shuffled once, here, so that every rank can later read one contiguous piece of large files and still
    has a fair shard. All cores work, and all ranks if it is started with mpiexec or srun. An interrupted packing goes on with
    the same command.

    Example: deepex data pack imagenet/ packed/imagenet --resize 256 --crop 224 --skip-bad

    Example: deepex data pack frames.h5 packed/frames --images entry/data --labels entry/class --validation 0.2

    Example: deepex data pack run.xtc packed/folding --topology protein.pdb --select "name CA" --cutoff 8

    Example: srun -n 64 deepex data pack images/ packed/images --channels 3
    """
    from deepex.data.geometry import parse_size
    from deepex.data.pack import pack as pack_dataset

    options: dict[str, Any] = {
        "resize": None if resize is None else parse_size(resize),
        "crop": None if crop is None else _square(parse_size(crop)),
        "matrix": None if matrix is None else _square(parse_size(matrix)),
        "dtype": None if dtype is None else dtype.value,
        "layout": None if layout is None else layout.value,
        "classes": _class_names(classes),
        "license": license_,
        "file_bytes": None if file_mib is None else file_mib << 20,
    }
    with _helpers(), _ranks() as comm, _stages(comm) as stages:
        manifest = pack_dataset(
            source,
            out,
            validation=_share_or_file(validation),
            validation_labels=validation_labels,
            overwrite=overwrite,
            workers=workers or _num_cores(comm),
            comm=comm,
            progress=stages.tell,
            images=images,
            labels=labels,
            channels=channels,
            convert=convert,
            max_pixels=max_pixels,
            limit=limit,
            validation_limit=validation_limit,
            balance=balance,
            skip_bad=skip_bad,
            seed=seed,
            given_order=given_order,
            name=name,
            scale=scale,
            topology=topology,
            select=select,
            cutoff=cutoff,
            stride=stride,
            periodic=periodic,
            compress=compress,
            **options,
        )
    if comm is None or comm.rank == 0:
        _show(out, manifest, as_json=as_json)


@app.command()
def make(  # noqa: PLR0917 - as above
    kind: Annotated[
        Simulated,
        typer.Argument(
            metavar="KIND",
            help="atomai: electron diffraction, 27 classes of crystals. pf: contact maps of a protein that folds and unfolds.",
        ),
    ],
    out: Out,
    images: Annotated[
        int, typer.Option(min=1, help="Images in all; a tenth of them is for validation. The paper's: 729000 and 1100000.")
    ],
    seed: Annotated[int, typer.Option(min=0, help="The same seed makes the same dataset on the same machine.")] = 1,
    keep_trajectories: Annotated[
        Path | None,
        typer.Option(
            callback=checked,
            help="pf: also keep the trajectories in this directory, as DCD. Those of other images or another seed are refused, "
            "or removed with --overwrite.",
            show_default=False,
        ),
    ] = None,
    engine: Annotated[Engine, typer.Option(help="atomai: where to simulate; gpu needs CuPy (16 cores are faster).")] = Engine.cpu,
    compress: Compress = False,
    workers: Workers = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Make one of the paper's two scientific datasets by simulation.

    Needs the extra `science`: pip install 'deepex[science]'. All cores work, and all ranks if it is started with mpiexec
    or srun; an interrupted simulation goes on with the same command.

    Example: deepex data make atomai packed/atomai --images 27000

    Example: deepex data make pf packed/pf --images 100000 --keep-trajectories trajectories/
    """
    from deepex.data.make import make as make_dataset

    with _helpers(), _ranks() as comm, _stages(comm) as stages:
        manifest = make_dataset(
            kind.value,
            out,
            overwrite=overwrite,
            workers=workers or _num_cores(comm),
            comm=comm,
            progress=stages.tell,
            images=images,
            seed=seed,
            engine=engine.value,
            keep=keep_trajectories,
            compress=compress,
        )
    if comm is None or comm.rank == 0:
        _show(out, manifest, as_json=as_json)


@app.command()
def info(
    directory: Dataset,
    sheet: Annotated[
        Path | None,
        typer.Option(
            callback=checked, help="Write a contact sheet, a PNG with samples of each class, to this file.", show_default=False
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what is in a packed dataset: its manifest, images per class, how the values are spread; and show samples.

    Example: deepex data info packed/fashion --sheet fashion.png
    """
    from deepex.data.dataset import PackedDataset
    from deepex.data.overview import contact_sheet, look

    dataset = PackedDataset.open(directory)
    overview = look(dataset)
    _show(directory, dataset.manifest, as_json=as_json, overview=overview)
    if sheet is not None:
        rows, columns = contact_sheet(dataset, sheet)
        typer.echo(f"contact sheet: {sheet}, {rows} rows of {columns}", err=True)


@app.command()
def verify(directory: Dataset, as_json: Json = False) -> None:
    """Read every file and compare it with the SHA-256 that was taken when it was packed.

    Every bad file is named, and the exit code is 2 if there is one. Worth its time after a copy to another machine.

    Example: deepex data verify packed/fashion
    """
    from deepex.cli.stages import Stages
    from deepex.data.dataset import PackedDataset

    dataset = PackedDataset.open(directory)
    total, done = dataset.manifest.num_bytes, 0

    def advance(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        stages.tell("verifying", done, total)

    with Stages(unit="bytes") as stages:
        bad = dataset.verify(progress=advance)
    files = dataset.manifest.num_files
    if as_json:
        typer.echo(json.dumps({"dataset": str(directory), "files": files, "bad": bad}, indent=1))
    else:
        for message in bad:
            typer.echo(message)
        typer.echo(f"{directory}: {files - len(bad)} of {files} files are whole")
    if bad:
        raise typer.Exit(2)


@contextmanager
def _helpers() -> "Iterator[None]":
    """Worker processes begin as `python -c …`, for which a random.py in the current directory would be Python's own."""
    before = os.environ.get(_SAFE_PATH)
    os.environ[_SAFE_PATH] = "1"
    try:
        yield
    finally:
        os.environ.pop(_SAFE_PATH)
        if before is not None:
            os.environ[_SAFE_PATH] = before


@contextmanager
def _ranks() -> "Iterator[Communicator | None]":
    """All ranks of the launcher, or None for one alone: then neither torch nor MPI is loaded."""
    from deepex.comm.place import find_place

    if find_place(os.environ).size == 1:
        yield None
        return
    from deepex.comm import connect

    comm = connect("auto", device="cpu")
    try:
        yield comm
    finally:
        comm.close()


def _num_cores(comm: "Communicator | None") -> int:
    from deepex.machine.hardware import describe_cpu

    return max(1, (describe_cpu()["num_cores_usable"] or 1) // (1 if comm is None else comm.place.local_size))


def _stages(comm: "Communicator | None") -> "Stages":
    from deepex.cli.stages import Stages

    return Stages(shown=comm is None or comm.rank == 0, kept="what is finished is kept: the same command goes on from there")


def _show(directory: Path, manifest: "Manifest", *, as_json: bool, overview: "Overview | None" = None) -> None:
    from deepex.cli.dataset_table import print_dataset
    from deepex.data.manifest import to_json

    if as_json:
        extra = {} if overview is None else {"counts": overview.counts, "histogram": overview.histogram}
        typer.echo(json.dumps(to_json(manifest) | extra, indent=1))
    else:
        print_dataset(directory, manifest, overview)


def _square(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


def _share_or_file(text: str) -> float | Path:
    if not text:
        raise typer.BadParameter("is empty; give a share such as 0.1, or a file or folder", param_hint="--validation")
    try:
        return float(text)
    except ValueError:
        return Path(text)


def _class_names(text: str | None) -> tuple[str, ...] | None:
    """Read the names from `cat,dog`, or from the lines of FILE if `text` is `@FILE`."""
    from deepex.errors import DataError

    if text is None:
        return None
    if not text.startswith("@"):
        return tuple(name.strip() for name in text.split(","))
    try:
        lines = Path(text[1:]).read_text(encoding="utf-8-sig").splitlines()  # Windows begins files with a mark
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"--classes got {text!r}, but that file cannot be read ({error}); give a text file, one name a line"
        ) from error
    return tuple(line.strip() for line in lines if line.strip())
