"""PNG and JPEG files as samples.

    train, validation = find_images(Path("imagenet"))
    images = ImageFiles(train, geometry=Geometry(resize=256, crop=(224, 224)), channels=3)
    out = np.empty((2, *images.shape), images.dtype)
    bad = images.read(np.array([0, 7]), out)
    images.notes                                              # Counter({'monochrome, replicated to 3 channels': 1})

Channels, dtype and size that are not given are those of most of the first files that can be read.
"""

import os
import stat
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, Literal, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from deepex.data.geometry import Geometry
from deepex.data.source.base import Bad, Images, UnreadableError
from deepex.data.source.decode import MOST_PIXELS, Header, SampleSize, decode, read_header
from deepex.data.source.folder import Listing, printable
from deepex.errors import DataError

_FIRST = 16  # files that decide
_MOST_TRIED = 100
_MOST_PIXEL_BYTES = 8  # 16-bit RGBA, not compressed
_MOST_OTHER_BYTES = 64 << 20  # profiles, thumbnails, text
_Thing = TypeVar("_Thing")


@final
class ImageFiles(Images):
    """The files of a listing; `size` is height and width after `geometry`, `depth` the bits per value that all must have.

    `notes` counts what read() replicated or converted; whoever wants it per call resets it.
    """

    block = 1
    busy = True

    def __init__(
        self,
        listing: Listing,
        *,
        geometry: Geometry,
        channels: int | None = None,
        dtype: np.dtype[Any] | None = None,
        size: tuple[int, int] | None = None,
        depth: Literal[8, 16] | None = None,
        convert: bool = False,
        max_pixels: int = MOST_PIXELS,
    ) -> None:
        _check(channels, dtype, max_pixels)
        self.notes: Counter[str] = Counter()
        self.count = len(listing.names)
        self.labels = listing.labels
        self._root = os.fspath(listing.root)
        self._names = listing.names
        self._max_bytes = _MOST_PIXEL_BYTES * max_pixels + _MOST_OTHER_BYTES
        size = size or geometry.crop or (geometry.resize if isinstance(geometry.resize, tuple) else None)
        given = {"channels": channels, "dtype": dtype, "size": size}
        decided = [key for key, value in given.items() if value is None]
        first: dict[int, Header] = {}
        if decided or (dtype == np.float32 and depth is None):
            first = self._first_readable(max_pixels, needed=bool(decided))
        if channels is None or dtype is None or size is None:
            channels = channels or _most(1 if header.channels == 1 else 3 for header in first.values())
            size = size or _most(geometry.size(header.height, header.width) for header in first.values())
            dtype = np.dtype(np.float32 if _are_deep(first) else np.uint8) if dtype is None else dtype
        self.dtype = np.dtype(dtype)
        self.shape = (*size, channels)
        self.depth = depth or (16 if self.dtype == np.float32 and _are_deep(first) else 8)
        self._target = SampleSize(
            size=size,
            channels=channels,
            dtype=self.dtype,
            geometry=geometry,
            depth=self.depth,
            convert=convert,
            max_pixels=max_pixels,
        )
        self.description = {
            "kind": "PNG and JPEG files",
            "layout": listing.layout,
            "folder": printable(listing.root.resolve().name),
            "files": self.count,
            "ignored": dict(listing.ignored.most_common(8)),
            **asdict(geometry),
            "resampling": "bilinear, antialiased" if geometry.resize is not None else None,
            "convert": convert,
            "bits": self.depth,
            "exif_orientation": "ignored",
            "decided": f"{', '.join(decided)} from {self._named(first)}" if decided else None,
        }

    def read(self, numbers: NDArray[np.int64], out: NDArray[Any]) -> list[Bad]:
        """Read one file after another into the rows of `out`."""
        bad = []
        for place, number in enumerate(numbers.tolist()):
            try:
                out[place] = decode(self._read_file(number), self._target, self.notes)
            except UnreadableError as error:
                bad.append(Bad(place, self.name(number), str(error)))
            except MemoryError:
                bad.append(Bad(place, self.name(number), "it needs more memory than there is; shrink it, or leave it out"))
        return bad

    def name(self, number: int) -> str:
        """The path of the file below the folder or the list."""
        return printable(self._names[number])

    def _read_file(self, number: int) -> bytes:
        try:
            # Without O_NONBLOCK, opening a pipe would wait for somebody to write into it.
            descriptor = os.open(os.path.join(self._root, self._names[number]), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                self._check_file(os.fstat(descriptor))
                with open(descriptor, "rb", buffering=0, closefd=False) as file:
                    return file.read()
            finally:
                os.close(descriptor)
        except OSError as error:
            raise UnreadableError(f"it cannot be read: {error.strerror}; check that it is there and its permissions") from None

    def _check_file(self, status: os.stat_result) -> None:
        if not stat.S_ISREG(status.st_mode):
            kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe, socket or device"
            raise UnreadableError(f"it is {kind}, not a file; move it away")
        if status.st_size > self._max_bytes:
            raise UnreadableError(f"it has {status.st_size} bytes, too many for an image within --max-pixels; leave it out")

    def _first_readable(self, max_pixels: int, *, needed: bool) -> dict[int, Header]:
        reasons: list[str] = []
        found: dict[int, Header] = {}
        for number in range(min(self.count, _MOST_TRIED)):
            try:
                found[number] = read_header(self._read_file(number), max_pixels)
            except UnreadableError as error:
                reasons.append(f"{self.name(number)}: {error}")
            if len(found) == _FIRST:
                break
        if needed and not found:
            raise DataError(
                f"none of the first {len(reasons)} files below {self._root} can be read to see what the images are like; the first "
                f"is {reasons[0]}, or give --channels, --dtype and --resize HEIGHTxWIDTH, so that no file has to be seen"
            )
        return found

    def _named(self, files: Iterable[int]) -> str:
        first, *more = files
        return f"most of {len(more) + 1} files, from {self.name(first)} on" if more else self.name(first)


def _are_deep(headers: dict[int, Header]) -> bool:
    return bool(headers) and _most(header.is_deep_grey for header in headers.values())


def _most(things: Iterable[_Thing]) -> _Thing:
    """What occurs most often; of equals the first."""
    return Counter(things).most_common(1)[0][0]


def _check(channels: int | None, dtype: np.dtype[Any] | None, max_pixels: int) -> None:
    if channels not in (None, 1, 3):
        raise DataError(f"channels is {channels}; PNG and JPEG files give 1 (monochrome) or 3 (RGB): choose one")
    if dtype is not None and dtype not in (np.uint8, np.float32):
        raise DataError(f"dtype is {dtype}; PNG and JPEG files give uint8 or float32: choose one")
    if max_pixels < 1:
        raise DataError(f"max_pixels is {max_pixels}; it must be at least 1: {MOST_PIXELS} is the default")
