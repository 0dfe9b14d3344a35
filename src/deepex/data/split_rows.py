"""Which rows of files go into which part, and in which order: short bands are held out, blocks of bands are dealt.

    train, held = deal(np.array([0, 600, 1000]), rows=10, per_block=4, share=0.1, seed=1)
    train.starts, train.sizes         # of the bands, in the order in which they are dealt

Files are often sorted, by class or by time. So what is held out is one band of each of as many equal ranges: whatever the order,
both parts have of everything, in proportion, but for two bands. The rest is dealt in blocks of neighbouring bands, for large reads.
"""

from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]

_SURE: Final = 16  # a class of which a part should have as many is there by any fair choice


class Bands(NamedTuple):
    """Ranges of rows."""

    starts: Integers
    sizes: Integers


def spread(number: int, chosen: int, random: np.random.Generator) -> Integers:
    """Draw one of each of `chosen` near-equal ranges of `number` things; ascending."""
    edges = np.arange(chosen + 1) * number // max(1, chosen)
    return random.integers(edges[:-1], edges[1:])


def split_rows(edges: Integers, *, rows: int, per_block: int, share: float, seed: int) -> tuple[Bands, Bands]:
    """Cut files, which begin and end at `edges`, into bands of up to `rows`; give those to train on and a `share` held out.

    Of two samples that can be read singly at least one is held out. Where the share is less than half a band, none is.
    """
    starts = np.concatenate([np.arange(low, high, rows) for low, high in pairwise(edges.tolist())])
    bands, number = Bands(starts, np.diff(starts, append=edges[-1])), len(starts)
    random = np.random.default_rng(seed)
    blocks = random.permutation(-(-number // per_block))
    order = np.argsort(blocks[np.arange(number) // per_block], kind="stable")
    chosen = min(max(round(share * number), 1 if rows == 1 else 0), number - 1) if share else 0
    held = np.zeros(number, bool)
    held[spread(number, chosen, random)] = True
    train, validation = (Bands(bands.starts[some], bands.sizes[some]) for some in (order[~held[order]], order[held[order]]))
    return train, validation


def lost_class(labels: Integers, held: Integers) -> int | None:
    """A class that is not among the labels `held` out, or not among the others, though any fair choice of as many has it."""
    number = 1 + int(labels.max())
    total, out = (np.bincount(some, minlength=number) for some in (labels, held))
    due = total * (len(held) / len(labels))
    lost = np.flatnonzero(((out == 0) & (due >= _SURE)) | ((out == total) & (total - due >= _SURE)))
    return int(lost[0]) if len(lost) else None
