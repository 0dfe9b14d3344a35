"""Which files a packing writes from which samples.

plan = Plan(chosen, form, out=out, scratch=out / ".packing", file_bytes=None)
plan.unpacking, plan.packing            # tasks; the first are for sources that are read in order, before they are shuffled
plan.digest(inputs)                     # of everything that decides the bytes of the files
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from deepex.data.packing.fingerprint import feed, stamps
from deepex.data.packing.form import Form
from deepex.data.packing.split import Chosen
from deepex.data.packing.unpacked import Unpacked
from deepex.data.packing.writer import FileReport, FileTask
from deepex.data.source.base import Images

_MOST_FILE_BYTES: Final = 64 << 20
_LEAST_FILE_BYTES: Final = 16 << 20
_UNPACKED_BYTES: Final = 4 << 20  # small, because a simulation of it may take minutes, which a kill would lose


@final
class PackingPlan:
    """The tasks of a packing of `chosen` samples into `out`, with unfinished things in `scratch`.

    `file_bytes` of images go into a file; by default a sixteenth of the part, between 16 and 64 MiB.
    """

    def __init__(
        self, chosen: Mapping[str, Chosen], form: Form, *, out: Path, scratch: Path, file_bytes: int | None, shuffled: bool
    ) -> None:
        self._chosen, self._form, self._scratch, self._file_bytes = chosen, form, scratch, file_bytes
        self.images: dict[str, Images] = {part: picked.images for part, picked in chosen.items()}
        in_order = shuffled and any(one.block > 1 for one in self.images.values())
        self._unpacking = {part: self._unpack_tasks(part) for part in chosen} if in_order else {}
        self._packing = {part: self._pack_tasks(part, out) for part in chosen}

    @property
    def unpacking(self) -> list[FileTask]:
        """Files in the order of the source, to shuffle from."""
        return [task for tasks in self._unpacking.values() for task in tasks]

    @property
    def packing(self) -> list[FileTask]:
        """The files of the dataset."""
        return [task for tasks in self._packing.values() for task in tasks]

    def unpacked(self, done: Mapping[str, FileReport]) -> dict[str, Images]:
        """The images as they were unpacked."""
        return {
            part: Unpacked(
                self.images[part],
                self._needed(part),
                self._scratch,
                [done[task.stem] for task in self._unpacking[self._owner(part)]],
                self._form.dtype,
            )
            for part in self._chosen
        }

    def by_part(self, done: Mapping[str, FileReport]) -> dict[str, list[FileReport]]:
        """The reports of the packed files, in their order."""
        return {part: [done[task.stem] for task in tasks] for part, tasks in self._packing.items()}

    def digest(self, inputs: Sequence[Path] = ()) -> str:
        """A SHA-256 of all that decides the files: an unfinished packing goes on only if nothing of it changed.

        Whether bad samples are skipped is no part of it: that decides which files count as finished.
        """
        form = {key: value for key, value in asdict(self._form).items() if key != "skip_bad"}
        digest = hashlib.sha256(json.dumps([form, self._file_bytes, _UNPACKED_BYTES, stamps(inputs)]).encode())
        for part, picked in self._chosen.items():
            images = picked.images
            plain = [part, images.shape, str(images.dtype), images.count, json.dumps(images.description, default=str)]
            digest.update(repr(plain).encode())
            digest.update(picked.order.tobytes())
            digest.update(b"" if images.labels is None else images.labels.tobytes())
            if images.portable:
                feed(digest, images)  # the names of all files, every option of the reader
        return digest.hexdigest()

    def _sample_bytes(self, part: str) -> int:
        return math.prod(self.images[part].shape) * np.dtype(self._form.dtype).itemsize

    def _pack_tasks(self, part: str, out: Path) -> list[FileTask]:
        order, sample_bytes = self._chosen[part].order, self._sample_bytes(part)
        file_bytes = self._file_bytes or min(max(len(order) * sample_bytes // 16, _LEAST_FILE_BYTES), _MOST_FILE_BYTES)
        per_file = max(1, file_bytes // sample_bytes)
        return [
            FileTask(key=part, stem=f"{part}-{number:05d}", directory=out, order=order[begin : begin + per_file])
            for number, begin in enumerate(range(0, len(order), per_file))
        ]

    def _unpack_tasks(self, part: str) -> list[FileTask]:
        """Cut the needed numbers between blocks, into files of about one size."""
        if self._owner(part) != part:
            return []
        numbers, block = self._needed(part), self.images[part].block
        per_file = max(1, _UNPACKED_BYTES // (self._sample_bytes(part) * block)) * block
        cuts = np.flatnonzero(np.diff(numbers // per_file)) + 1
        return [
            FileTask(key=part, stem=f"unpacked-{part}-{number:05d}", directory=self._scratch, order=order, in_place=True)
            for number, order in enumerate(np.split(numbers, cuts))
        ]

    def _owner(self, part: str) -> str:
        """The part under whose name the images are unpacked: a validation part taken from the train samples shares them."""
        return next(name for name, images in self.images.items() if images is self.images[part])

    def _needed(self, part: str) -> NDArray[np.int64]:
        images = self.images[part]
        return np.sort(np.concatenate([picked.order for picked in self._chosen.values() if picked.images is images]))
