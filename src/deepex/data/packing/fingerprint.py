"""A digest of an object's whole state, so that an unfinished packing goes on only with the very same source."""

from array import array
from typing import Any

import numpy as np

from deepex.data.source.base import Images


def feed(digest: Any, value: object) -> None:
    """Add `value` and all that it holds to a hash of hashlib."""
    if isinstance(value, dict):
        for key, inner in value.items():
            digest.update(repr(key).encode())
            feed(digest, inner)
    elif isinstance(value, list | tuple):
        digest.update(f"{len(value)} of".encode())
        for inner in value:
            feed(digest, inner)
    elif isinstance(value, bytes | bytearray | array | np.ndarray):
        digest.update(f"{type(value).__name__} {len(value)}:".encode())
        digest.update(np.ascontiguousarray(np.frombuffer(value, np.uint8) if isinstance(value, bytes | bytearray) else value).data)
    elif isinstance(value, Images) or type(value).__module__.startswith("deepex."):
        digest.update(type(value).__qualname__.encode())
        feed(digest, value.__getstate__())
    else:
        digest.update(repr(value).encode("utf-8", "surrogateescape"))
