"""What the study of storage trains from: copies of a packed dataset, in each directory and format; and what a run got out of one.

    copies = prepare("packed/atomai", ["/scratch/me", "/dev/shm"], ["packed", "hdf5"])
    for (kind, directory), path in copies.items():
        drop_cache(path)                            # page_cache.py: so that the first epoch reads the disk
        settings("packed/atomai", directory, kind)  # {"data": "/scratch/me/deepex-storage-1f0c…/packed"}, each for a --set
    summary(run)["first_epoch"]["samples_per_second"]
    sweep("packed/atomai", ["/scratch/me", "/dev/shm"])

Copies are made on this node. They are kept in a folder of a name that tells the dataset, and found again by its digest.

HDF5 that is not packed is read before the first epoch too, for mean and deviation (`setup` in a summary): up to 256 MiB the whole
file is then in the page cache, and no first epoch is cold.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from deepex.data.dataset import PackedDataset
from deepex.data.manifest import FILE_NAME, load
from deepex.errors import ConfigError, DataError, StorageError, UnknownName
from deepex.record.files import storage_error, write_atomic
from deepex.record.run import EpochRecord, RunDirectory
from deepex.study.storage.page_cache import drop_cache
from deepex.study.storage.twin import is_twin, twin_settings, write_twin

__all__ = ["FORMATS", "drop_cache", "prepare", "settings", "summary", "sweep"]

FORMATS: Final = ("packed", "hdf5", "hdf5-gzip")
_NAMES: Final = {"packed": "packed", "hdf5": "plain.h5", "hdf5-gzip": "gzip.h5"}
_OVERHEAD_BYTES: Final = 1 << 20  # of an HDF5 file, beside its samples

Copies = dict[tuple[str, str], Path]


def prepare(data: Path | str, directories: Sequence[Path | str], formats: Sequence[str] = ("packed", "hdf5")) -> Copies:
    """Copy a dataset, or the sample `sample:NAME`, into each directory in each format; what is there already is used.

    Gives the path of each copy by format and directory, as they were given.
    """
    dataset = _open(data)
    for name in formats:
        if name not in FORMATS:
            raise UnknownName("format", name, FORMATS)
    for directory in map(Path, directories):
        if not directory.is_dir():  # made here, a name that is wrong would lie on another file system than was meant
            raise ConfigError(f"{directory} is not a directory; make it first, on the file system that is to be measured")
    wanted = {(name, str(directory)): _folder(dataset, directory) / _NAMES[name] for directory in directories for name in formats}
    missing = {key: path for key, path in wanted.items() if not _is_there(dataset, key[0], path)}
    _check_space(dataset, list(missing))
    for (name, _), path in missing.items():
        _make(dataset, name, path)
    return wanted


def settings(data: Path | str, directory: Path | str, name: str) -> dict[str, Any]:
    """The keys with which a training reads a copy, whether it has been made yet or not."""
    if name not in FORMATS:
        raise UnknownName("format", name, FORMATS)
    dataset = _open(data)
    path = _folder(dataset, directory) / _NAMES[name]
    return {"data": str(path)} | ({} if name == "packed" else twin_settings(dataset))


def sweep(data: Path | str, directories: Sequence[Path | str]) -> None:
    """Remove what `prepare` made, and nothing else."""
    dataset = _open(data)
    for folder in (_folder(dataset, directory) for directory in directories):
        for name in _NAMES.values():
            shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink(missing_ok=True)
        for rest in folder.glob(".*.part"):  # of a copy that was killed
            rest.unlink()
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def summary(run: RunDirectory) -> dict[str, Any]:
    """Rates, share of time lost to input, opened files and bytes: of the first epoch, and a mean of the later ones; null if none.

    Opens and bytes are those of all ranks, `setup` those of rank 0 before the first epoch.
    """
    epochs = [epoch for epoch in run.epochs() if not epoch.partial]
    return {"setup": run.state.get("setup_usage"), "first_epoch": _mean(epochs[:1]), "steady": _mean(epochs[1:])}


def _mean(epochs: Sequence[EpochRecord]) -> dict[str, float] | None:
    if not epochs:
        return None
    number, seconds = len(epochs), sum(epoch.seconds for epoch in epochs)
    shares = [epoch.phase_seconds("input") * epoch.ranks / sum(epoch.wall) for epoch in epochs]
    used = {key: sum(sum(epoch.usage.get(key, {}).get("input", [])) for epoch in epochs) for key in ("opens", "data_bytes")}
    return {
        "samples_per_second": sum(epoch.samples for epoch in epochs) / seconds,
        "seconds": seconds / number,
        "input_share": sum(shares) / number,
        **{key: value / number for key, value in used.items()},
    }


def _open(data: Path | str) -> PackedDataset:
    from deepex.data.find import find_data

    return PackedDataset.open(find_data(str(data)).absolute())


def _folder(dataset: PackedDataset, directory: Path | str) -> Path:
    return Path(directory).absolute() / f"deepex-storage-{dataset.manifest.digest[:12]}"


def _files(dataset: PackedDataset) -> Iterator[str]:
    for part in dataset.manifest.parts.values():
        for file in part.files:
            yield from filter(None, (file.images, file.labels))


def _is_there(dataset: PackedDataset, name: str, path: Path) -> bool:
    if name != "packed":
        return is_twin(path, dataset.manifest.digest)
    try:
        return load(path).digest == dataset.manifest.digest and not PackedDataset.open(path).missing()
    except DataError:
        return False


def _check_space(dataset: PackedDataset, missing: Sequence[tuple[str, str]]) -> None:
    """Refuse before anything is written; directories of one file system share its space."""
    needed: dict[int, int] = {}
    for name, directory in missing:
        device = os.stat(directory).st_dev
        needed[device] = needed.get(device, 0) + _size(dataset, name)
        free = shutil.disk_usage(directory).free
        if needed[device] > free:
            raise StorageError(
                f"{directory} has {free / 1e6:.1f} MB free, and the copies of {dataset.directory} there, up to {name}, need "
                f"{needed[device] / 1e6:.1f} MB: free space, leave out a format, or give another directory"
            )


def _size(dataset: PackedDataset, name: str) -> int:
    if name != "packed":
        return dataset.manifest.num_bytes + _OVERHEAD_BYTES
    return sum((dataset.directory / file).stat().st_size for file in (*_files(dataset), FILE_NAME))


def _make(dataset: PackedDataset, name: str, path: Path) -> None:
    try:
        (path if name == "packed" else path.parent).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise storage_error(path, error) from error
    if name != "packed":
        write_twin(dataset, path, compressed=name == "hdf5-gzip")
        return
    for file in (*_files(dataset), FILE_NAME):  # the manifest comes last, and makes it a dataset
        _copy(dataset.directory / file, path / file)


def _copy(source: Path, target: Path) -> None:
    def write(temporary: Path) -> None:
        shutil.copyfile(source, temporary)

    write_atomic(target, write)
