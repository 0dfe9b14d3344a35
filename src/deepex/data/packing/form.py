"""In which type samples are stored, and how they get there without losing anything unsaid.

form = choose_form(source, config)
stored, misfits = form.convert(raw)         # misfits: places of samples with a value that the type cannot hold, and why
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from deepex.data.packing.config import PackConfig
from deepex.data.source.base import Images, Source
from deepex.errors import DataError

_AS_BYTES: Final = (np.uint8, np.bool_)  # types whose values are bytes as they are


@dataclass(frozen=True, kw_only=True)
class Form:
    """How samples are stored: `dtype`; floats as bytes where `quantise` says which values become 0 and 255; compressed or not.

    `skip_bad` leaves bad samples out and lists them; otherwise the first one is an error. `exact`: integers that the type would
    round do not fit.
    """

    dtype: Literal["uint8", "float16", "float32"]
    quantise: tuple[float, float] | None = None
    skip_bad: bool = False
    compress: bool = False
    exact: bool = False

    def convert(self, raw: NDArray[Any]) -> tuple[NDArray[Any], list[tuple[int, str]]]:
        """Give samples in the stored type, and for each that does not fit its place and why."""
        if self.dtype == "uint8":
            return (raw, []) if raw.dtype == np.uint8 else self._to_bytes(raw)
        with np.errstate(over="ignore", invalid="ignore"):  # what does not fit is found here
            stored = np.ascontiguousarray(raw, self.dtype)
            rounded = self.exact and raw.dtype.kind in "iu" and stored.astype(raw.dtype) != raw
        if np.any(rounded):
            return stored, _misfits(raw, np.asarray(rounded), f"{self.dtype} would round it, which --dtype {self.dtype} allows")
        return stored, _misfits(raw, ~np.isfinite(stored), f"all values must be finite in {self.dtype}")

    def _to_bytes(self, raw: NDArray[Any]) -> tuple[NDArray[Any], list[tuple[int, str]]]:
        if self.quantise is None:
            outside = (raw < 0) | (raw > 255) if raw.dtype.kind != "b" else np.zeros(raw.shape, bool)
            return raw.astype(np.uint8), _misfits(raw, outside, "uint8 holds 0 to 255")
        low, high = self.quantise
        with np.errstate(invalid="ignore"):
            values = np.rint((raw.astype(np.float64) - low) * (255 / (high - low)))
            outside = ~((values >= 0) & (values <= 255))
            stored = np.where(outside, 0, values).astype(np.uint8)
        return stored, _misfits(raw, outside, f"--scale {low:g} {high:g} was given for bytes")


def _misfits(raw: NDArray[Any], wrong: NDArray[np.bool_], rule: str) -> list[tuple[int, str]]:
    flat = wrong.reshape(len(wrong), -1)
    return [
        (int(row), f"has the value {raw[row].reshape(-1)[np.argmax(flat[row])]}; {rule}: mend or remove that sample")
        for row in np.flatnonzero(flat.any(axis=1))
    ]


def choose_form(source: Source, config: PackConfig) -> Form:
    """Choose the type for the samples of both parts, or take the one asked for."""
    images = [one for one in (source.train, source.validation) if one is not None]
    dtype = config.dtype or stored_dtype(images)
    quantise = None
    if config.dtype == "uint8" and any(one.dtype not in _AS_BYTES for one in images):
        if config.scale is None and any(one.dtype.kind == "f" for one in images):
            raise DataError(
                f"{images[0].name(0)} has real numbers, which --dtype uint8 would round; say with --scale LOW HIGH which values "
                "become 0 and 255"
            )
        quantise = config.scale
    if quantise and any(one.dtype == np.uint8 for one in images):
        types = " and ".join(str(one.dtype) for one in images)
        raise DataError(f"the parts are of {types}, and --scale is not for values that are bytes already; convert one of them")
    return Form(dtype=dtype, quantise=quantise, skip_bad=config.skip_bad, compress=config.compress, exact=config.dtype is None)


def stored_dtype(images: Sequence[Images]) -> Literal["uint8", "float32"]:
    """uint8 for integers that fit, else float32; wider integers are looked through, to the first that does not fit."""
    if any(one.dtype.kind == "f" for one in images):
        return "float32"
    wide = [one for one in images if one.dtype not in _AS_BYTES]
    return "uint8" if all(_fits_bytes(one) for one in wide) else "float32"


def _fits_bytes(images: Images) -> bool:
    step = max(images.block, (1 << 20) // (math.prod(images.shape) * images.dtype.itemsize), 1)
    for begin in range(0, images.count, step):
        numbers = np.arange(begin, min(begin + step, images.count))
        block = np.zeros((len(numbers), *images.shape), images.dtype)
        images.read(numbers, block)
        if block.min() < 0 or block.max() > 255:
            return False
    return True
