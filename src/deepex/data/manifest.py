"""What is in a packed dataset: `manifest.json`, checked key by key.

A packed dataset is a directory of `.npy` files that numpy alone can read, and this one file, written last: a directory
without it is not a dataset. Values `scale[0]`..`scale[1]` map to 0..1; `mean` and `deviation` are those of the train
part after that mapping.

>>> manifest = load(Path("samples/fashion"))
>>> manifest.shape, manifest.parts["train"].count, manifest.classes[0]
((1, 28, 28), 6000, 'T-shirt/top')
"""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from deepex.errors import ConfigError, DataError
from deepex.record.files import write_json
from deepex.record.strict import parse_json
from deepex.record.table import from_table

FILE_NAME = "manifest.json"
MARKER_NAME = ".packing"  # there from the start of a packing until the manifest is written
FORMAT = "deepex-packed"
VERSION = 1

_REMEDY = "restore the file or pack the dataset again"
_ITEM_BYTES = {"uint8": 1, "float16": 2, "float32": 4}
_LABEL_BYTES = 8
_LEAST_DEVIATION = 1e-37  # of values: its inverse is a float32
_LEAST_WIDTH = 1e-12  # of a scale, as a share of its larger end: float64 has 16 digits
_MOST_VALUES, _MOST_SAMPLES = 10**12, 10**15  # above is no number of a dataset, and too much for numpy's
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class PackedFile:
    """One file of images and the file of their labels (None where the dataset has no labels)."""

    images: str
    labels: str | None = None
    count: int
    images_sha256: str
    labels_sha256: str | None = None


@dataclass(frozen=True, kw_only=True)
class Part:
    """The samples for one purpose, `train` or `validation`: `count` of them, in the order of `files`."""

    count: int
    files: tuple[PackedFile, ...]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything about a packed dataset but the samples; building one checks it and raises DataError.

    `shape` is that of one image as (channels, height, width), although the files hold (n, height, width, channels).
    `classes` is empty exactly when there are no labels. A channel that is constant has deviation 1, so that dividing
    by it is safe. `source` says what the dataset was made from; it holds plain JSON values. `order` is "dealt" for a dataset that
    is read without packing (direct.py): its parts list no files, and it is never written.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Literal["uint8", "float16", "float32"]
    layout: Literal["NHWC"]
    classes: tuple[str, ...]
    order: Literal["shuffled", "given", "dealt"]
    seed: int
    scale: tuple[float, ...]
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    parts: dict[str, Part]
    source: dict[str, Any]

    def __post_init__(self) -> None:
        for problem in _problems(self):
            raise DataError(problem)

    @property
    def sample_shape(self) -> tuple[int, int, int]:
        """The shape of one image in the files: (height, width, channels)."""
        channels, height, width = self.shape
        return height, width, channels

    @property
    def sample_bytes(self) -> int:
        """The bytes of one image."""
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]

    @property
    def digest(self) -> str:
        """A SHA-256 of all that decides what a run learns from: the files and how their values are read, not their history."""
        history = {"name"} if self.order == "dealt" else {"name", "source"}
        table = {key: value for key, value in asdict(self).items() if key not in history}
        return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()

    @property
    def num_bytes(self) -> int:
        """The bytes of all images and labels, without the headers of their files."""
        return sum(part.count for part in self.parts.values()) * (self.sample_bytes + (_LABEL_BYTES if self.classes else 0))

    @property
    def num_files(self) -> int:
        """How many files of images and labels there are."""
        return sum(len(part.files) for part in self.parts.values()) * (2 if self.classes else 1)


def load(directory: Path | str) -> Manifest:
    """Read and check the manifest of the dataset in `directory`."""
    path = Path(directory) / FILE_NAME
    table = _read(path)
    try:
        return from_json(table)
    except (ConfigError, DataError) as error:
        raise DataError(f"{path}: {error}; {_REMEDY}") from error


def save(directory: Path | str, manifest: Manifest) -> None:
    """Write the manifest into `directory`, atomically: from then on it is a dataset."""
    write_json(Path(directory) / FILE_NAME, to_json(manifest))


def to_json(manifest: Manifest) -> dict[str, Any]:
    """Turn the manifest into a JSON object; `from_json` gives an equal one back."""
    table = asdict(manifest)
    for part in table["parts"].values():
        part["files"] = list(part["files"])
    plain = {key: list(value) if isinstance(value, tuple) else value for key, value in table.items()}
    return {"format": FORMAT, "version": VERSION, **plain}


def from_json(value: object) -> Manifest:
    """Build the manifest from a JSON object; what breaks a rule is named by its dotted key."""
    table = dict(_table(value, "the file"))
    if table.pop("format", None) != FORMAT:
        raise DataError(f"key 'format' must be {FORMAT!r}, so this is not the manifest of a packed dataset")
    version = table.pop("version", None)
    if isinstance(version, bool) or version != VERSION:
        raise DataError(f"key 'version' is {version!r}; this DeepEx reads version {VERSION}: use the DeepEx that packed it")
    if "parts" in table:
        parts = _table(table["parts"], "key 'parts'")
        table["parts"] = {name: _part(part, f"parts.{name}") for name, part in parts.items()}
    if table.get("order") == "dealt":
        raise DataError("key 'order' is 'dealt'; that of a packed dataset is 'shuffled' or 'given'")
    return from_table(Manifest, table)


def _part(value: object, where: str) -> Part:
    table = dict(_table(value, f"key {where!r}"))
    files = table.get("files")
    if isinstance(files, list):
        places = [f"{where}.files[{index}]" for index in range(len(files))]
        table["files"] = [
            from_table(PackedFile, _table(file, f"key {place!r}"), f"{place}.") for file, place in zip(files, places, strict=True)
        ]
        # The annotation's own conversion would not know which file of the list a wrong key belongs to.
        count = from_table(_Count, {key: value for key, value in table.items() if key != "files"}, f"{where}.").count
        return Part(count=count, files=tuple(table["files"]))
    raise DataError(f"key {where + '.files'!r} is {files!r}; it must be a list of files")


@dataclass(frozen=True, kw_only=True)
class _Count:
    count: int


def _table(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{what} is {type(value).__name__}; it must be a JSON object")
    return value


def _read(path: Path) -> object:
    try:
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(_missing(path.parent)) from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; {_REMEDY}") from error
    return parse_json(text, str(path), error=DataError, remedy=_REMEDY)


def _missing(directory: Path) -> str:
    if directory.is_file():
        return f"{directory} is a file, and a packed dataset is a directory; make one with: deepex data pack {directory} OUT"
    if not directory.is_dir():
        return f"there is no directory {directory}; make a dataset there with: deepex data pack SOURCE {directory}"
    if (directory / MARKER_NAME).exists():
        return f"the packing into {directory} did not finish (no {FILE_NAME}); run the same command again"
    return f"{directory} has no {FILE_NAME}, so it is not a packed dataset; make one with: deepex data pack SOURCE OUT"


def _problems(manifest: Manifest) -> Iterator[str]:
    """Every broken rule, as a sentence with key, value and rule."""
    yield from _problems_of_values(manifest)
    if "train" not in manifest.parts:
        yield f"key 'parts' has {', '.join(map(repr, manifest.parts)) or 'nothing'}; it must have 'train'"
    for name, part in manifest.parts.items() if manifest.order != "dealt" else ():
        yield from _problems_of_part(part, f"parts.{name}", has_labels=bool(manifest.classes))
    packed = [file for part in manifest.parts.values() for file in part.files]
    names = Counter(name for file in packed for name in (file.images, file.labels) if name is not None)
    for name, times in names.items():
        if times > 1:
            yield f"file {name!r} is listed {times} times; it must be listed once"


def _problems_of_values(manifest: Manifest) -> Iterator[str]:
    shape = manifest.shape
    if not manifest.name:
        yield "key 'name' is empty; give the dataset a name"
    if len(shape) != 3 or min(shape) < 1:
        yield f"key 'shape' is {list(shape)}; it must be [channels, height, width], each 1 or more"
    elif math.prod(shape) > _MOST_VALUES:
        yield f"key 'shape' is {list(shape)}; an image has at most {_MOST_VALUES:,} values"
    if manifest.seed < 0:
        yield f"key 'seed' is {manifest.seed}; it must be 0 or more"
    yield from _problems_of_scale(manifest.scale, manifest.deviation)
    for key, values in (("mean", manifest.mean), ("deviation", manifest.deviation)):
        if len(values) != shape[0] or not all(map(math.isfinite, values)):
            yield f"key {key!r} is {list(values)}; it must have one number for each of the {shape[0]} channels"
    if any(value <= 0 for value in manifest.deviation):
        yield f"key 'deviation' is {list(manifest.deviation)}; each must be above 0 (1 where a channel is constant)"


def _problems_of_scale(scale: tuple[float, ...], deviation: tuple[float, ...]) -> Iterator[str]:
    if len(scale) != 2 or not all(map(math.isfinite, scale)) or scale[0] >= scale[1]:
        yield f"key 'scale' is {list(scale)}; it must be [low, high], two numbers with low below high"
    elif not _LEAST_WIDTH * max(*map(abs, scale), 1e-280) < scale[1] - scale[0] < math.inf:
        yield f"key 'scale' is {list(scale)}; low and high must be so far apart that numbers between them can be told"
    elif any((scale[1] - scale[0]) * value < _LEAST_DEVIATION for value in deviation if value > 0):
        yield f"key 'scale' is {list(scale)}; what is trained on is float32, which cannot tell such values: multiply them by 1e30"


def _problems_of_part(part: Part, where: str, *, has_labels: bool) -> Iterator[str]:
    total = sum(file.count for file in part.files)
    if total > _MOST_SAMPLES:
        yield f"the files of {where} have {total} samples; a part has at most {_MOST_SAMPLES:,}"
    for index, file in enumerate(part.files):
        yield from _problems_of_file(file, f"{where}.files[{index}]", has_labels=has_labels)
    if part.count < 1:
        yield f"key {where + '.count'!r} is {part.count}; a part has 1 sample or more, or is left out"
    if total != part.count:
        yield f"key {where + '.count'!r} is {part.count}, but the counts of its files add up to {total}"


def _problems_of_file(file: PackedFile, where: str, *, has_labels: bool) -> Iterator[str]:
    if file.count < 1:
        yield f"key {where + '.count'!r} is {file.count}; a file has 1 sample or more"
    for key, value in (("labels", file.labels), ("labels_sha256", file.labels_sha256)):
        if (value is not None) != has_labels:
            rule = "must be given because there are class names" if has_labels else "must be null because 'classes' is empty"
            yield f"key {where + '.' + key!r} is {value!r}; it {rule}"
    for key, name in (("images", file.images), ("labels", file.labels)):
        if name is not None and not _PLAIN_NAME.fullmatch(name):
            yield f"key {where + '.' + key!r} is {name!r}; it must be the plain name of a file of the dataset"
    for key, digest in (("images_sha256", file.images_sha256), ("labels_sha256", file.labels_sha256)):
        if digest is not None and not _SHA256.fullmatch(digest):
            yield f"key {where + '.' + key!r} is {digest!r}; it must be 64 hexadecimal digits"
