"""The two datasets that are computed, made as others are packed: parallel, interruptible, shuffled.

    make("atomai", "packed/atomai", images=27_000)         # electron diffraction: 27 classes of crystals
    make("pf", "packed/pf", images=100_000)                # contact maps of a protein that folds and unfolds

Nine of ten images are for training, the tenth for validation, from specimens or trajectories of its own.
"""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from deepex.data.manifest import Manifest
from deepex.data.pack import pack_source
from deepex.data.packing.config import PackConfig
from deepex.data.packing.site import Site
from deepex.data.packing.workers import PackingProgress
from deepex.data.simulation.kept import claim
from deepex.data.source.base import Source
from deepex.errors import DataError, UnknownName

if TYPE_CHECKING:
    from deepex.comm import Communicator

_ONLY_FOR: Final = {"engine": ("--engine", "atomai"), "keep": ("--keep-trajectories", "pf")}
LICENCE: Final = "made by DeepEx; free to use"


@dataclass(frozen=True, kw_only=True)
class MakeConfig:
    """How many images, from which seed; `engine` of the diffraction, `keep` for the trajectories; stored how."""

    images: int
    seed: int = 1
    engine: Literal["cpu", "gpu"] = "cpu"
    keep: Path | None = None
    compress: bool = False


def make(
    kind: str,
    out: Path | str,
    *,
    overwrite: bool = False,
    workers: int = 1,
    comm: "Communicator | None" = None,
    progress: PackingProgress | None = None,
    **options: Any,
) -> Manifest:
    """Simulate the dataset `kind` into the directory `out`. `options` are the fields of MakeConfig. Collective over `comm`."""
    if kind not in MAKERS:
        raise UnknownName("dataset to make", kind, MAKERS)
    config = MakeConfig(**options)
    _check_options(kind, config)
    source = MAKERS[kind](config)
    words = ["deepex", "data", "make", kind, "OUT", "--images", str(config.images), "--seed", str(config.seed)]
    packing = PackConfig(name=kind, seed=config.seed, validation=0.0, license=LICENCE, compress=config.compress)
    site = Site(Path(out), comm, first=lambda: _claim(config, overwrite=overwrite))
    with site.at_work():
        return pack_source(
            source, site, packing, command=shlex.join(words), overwrite=overwrite, workers=workers, progress=progress
        )


def _check_options(kind: str, config: MakeConfig) -> None:
    """What was given must have an effect."""
    default = MakeConfig(images=config.images)
    for key, (flag, only) in _ONLY_FOR.items():
        value = getattr(config, key)
        if kind != only and value != getattr(default, key):
            raise DataError(f"{flag} {value} was given, but has no effect on {kind}: it is for {only} only; leave it out")


def _claim(config: MakeConfig, *, overwrite: bool) -> None:
    if config.keep is not None:
        claim(config.keep, {"images": config.images, "seed": config.seed}, overwrite=overwrite)


def _counts(images: int, groups: int) -> tuple[int, int]:
    """How many train and validation images, each a multiple of `groups`."""
    if images < 10 * groups:
        raise DataError(
            f"images is {images}; it must be at least {10 * groups}, for {groups} of validation and nine times that to train"
        )
    validation = round(images / 10 / groups) * groups
    return (images - validation) // groups * groups, validation


def _atomai(config: MakeConfig) -> Source:
    from deepex.data.simulation.diffraction import CLASSES, DiffractionPatterns

    train, validation = _counts(config.images, len(CLASSES))
    return Source(
        train=DiffractionPatterns(train, seed=config.seed, part="train", engine=config.engine),
        validation=DiffractionPatterns(validation, seed=config.seed, part="validation", engine=config.engine),
        classes=CLASSES,
    )


def _pf(config: MakeConfig) -> Source:
    from deepex.data.simulation.folding import FoldingMaps

    train, validation = _counts(config.images, 1)
    return Source(
        train=FoldingMaps(train, seed=config.seed, part="train", keep=config.keep),
        validation=FoldingMaps(validation, seed=config.seed, part="validation", keep=config.keep),
    )


MAKERS: Final = {"atomai": _atomai, "pf": _pf}
