"""Packing: from files as they are found to a packed dataset, shuffled once, in files of a size that disks like.

The order is drawn at pack time from the seed, so that any contiguous range of samples is a fair shard of the whole.

>>> manifest = pack("fashion-mnist", "packed/fashion", limit=6000, seed=1)
>>> manifest.parts["train"].count
6000

Nothing is a dataset before the manifest is written, which comes last. Until then `OUT/.packing` holds what is finished: the same
command goes on from there. Files are written by worker processes, and by all ranks of a job that was started with several.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepex.data.manifest import Manifest
from deepex.data.packing.check import check_agreement, check_options, class_names, numbered_by, with_validation
from deepex.data.packing.command import pack_command
from deepex.data.packing.config import PackConfig
from deepex.data.packing.form import choose_form
from deepex.data.packing.plan import PackingPlan
from deepex.data.packing.site import Site
from deepex.data.packing.split import choose
from deepex.data.packing.summary import summarise
from deepex.data.packing.workers import PackingProgress, WorkerPool
from deepex.data.packing.writer import FileReport
from deepex.data.source import Source, SourceConfig, open_source
from deepex.data.source.base import Images
from deepex.errors import DataError

if TYPE_CHECKING:  # torch comes with it, and packing on one rank does not need it
    from deepex.comm import Communicator


def pack(
    path: Path | str,
    out: Path | str,
    *,
    validation: float | Path | str = 0.1,
    validation_labels: Path | str | None = None,
    overwrite: bool = False,
    workers: int = 1,
    comm: "Communicator | None" = None,
    progress: PackingProgress | None = None,
    **options: Any,
) -> Manifest:
    """Pack the files at `path` into the directory `out` and return the manifest.

    `validation` is the share of the train samples to set aside when the source has no validation part, or a source of its own.
    `options` are the other fields of SourceConfig and PackConfig. `workers` above 1 starts processes that import your main module:
    guard it. Collective over `comm`.
    """
    path, out = Path(path), Path(out)
    share, held = (0.0, Path(validation)) if isinstance(validation, Path | str) else (validation, None)
    held_labels = None if validation_labels is None else str(validation_labels)
    reading, packing = split_options(options | {"validation": share})
    if held is None:
        reading = replace(reading, validation_labels=held_labels)
    inputs = [p for p in (path, held, reading.topology, _as_file(reading.labels), _as_file(held_labels)) if p is not None]

    def find() -> Source:
        source = open_source(path, reading)
        if held is None:
            if held_labels is not None and source.validation is None:
                raise DataError(f"validation labels {held_labels} were given without validation images; name their file too")
            check_options(reading, None, [(path, source)])
            return numbered_by(source, packing.classes)
        other = open_source(held, replace(reading, labels=held_labels or _same_labels(reading)))
        check_options(reading, held_labels, [(path, source), (held, other)])
        return numbered_by(with_validation(source, other), packing.classes)

    site = Site(out, comm)
    with site.at_work():
        source = site.find(find)
        command = pack_command(
            path,
            reading,
            packing,
            held_out=held,
            held_out_labels=held_labels,
            own_validation=source.validation is not None,
            numbered=packing.classes == source.classes,
        )
        packing = replace(packing, name=packing.name or path.absolute().name.split(".")[0] or "dataset")
        work: dict[str, Any] = {"overwrite": overwrite, "workers": workers, "progress": progress}
        return pack_source(source, site, packing, command=command, inputs=inputs, **work)


def split_options(options: Mapping[str, Any]) -> tuple[SourceConfig, PackConfig]:
    """Give each configuration its fields, both `dtype` and `scale`; what is in neither is an error."""
    reading, packing = ({f.name for f in fields(config)} for config in (SourceConfig, PackConfig))
    plain = {key: _plain(key, value) for key, value in options.items()}
    return (
        SourceConfig(**{key: value for key, value in plain.items() if key in reading}),
        PackConfig(**{key: value for key, value in plain.items() if key in packing or key not in reading}),
    )


def _plain(key: str, value: Any) -> Any:
    """A list as the tuple that a configuration holds, a path to labels as the text."""
    if key == "labels" and isinstance(value, Path):
        return str(value)
    return tuple(value) if isinstance(value, list) else value


def pack_source(
    source: Source,
    site: Site,
    config: PackConfig,
    *,
    command: str,
    inputs: Sequence[Path] = (),
    overwrite: bool = False,
    workers: int = 1,
    progress: PackingProgress | None = None,
) -> Manifest:
    """Pack a source that is open already. Collective over the site's ranks."""
    check_agreement(source)
    classes = class_names(source, config.classes or source.classes)
    chosen = choose(
        source,
        share=config.validation,
        seed=config.seed,
        shuffle=not config.given_order,
        balance=config.balance,
        limit=config.limit,
        validation_limit=config.validation_limit,
    )
    form = choose_form(source, config)
    plan = PackingPlan(
        chosen, form, out=site.out, scratch=site.scratch, file_bytes=config.file_bytes, shuffled=not config.given_order
    )
    site.prepare(lambda: plan.digest(inputs), inputs, overwrite=overwrite)
    images, unpacked = plan.images, dict[str, FileReport]()
    if plan.unpacking:
        pool = WorkerPool(
            images=images, form=replace(form, compress=False), reports=site.scratch, workers=_num_workers(images, workers)
        )
        unpacked = site.run(pool, plan.unpacking, "reading", progress)
        images = plan.unpacked(unpacked)
    pool = WorkerPool(images=images, form=form, reports=site.scratch, workers=_num_workers(images, workers))
    done = site.run(pool, plan.packing, "packing", progress)
    return site.finish(
        lambda: summarise(
            source,
            config,
            form,
            parts=plan.by_part(done),
            unpacked=list(unpacked.values()),
            classes=classes,
            command=command,
            out=site.out,
        )
    )


def _num_workers(images: Mapping[str, Images], workers: int) -> int:
    return workers if any(one.busy for one in images.values()) else 1


def _as_file(text: str | None) -> Path | None:
    return Path(text) if text is not None and Path(text).is_file() else None


def _same_labels(reading: SourceConfig) -> str | None:
    """The labels of the validation source: under the same name within its file, but not the same file."""
    return reading.labels if reading.images is not None or _as_file(reading.labels) is None else None
