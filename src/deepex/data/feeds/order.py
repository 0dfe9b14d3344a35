"""In which order an epoch visits a shard: piece by piece, and shuffled within a window of pieces.

    windows = epoch_windows((0, 858), part.bounds, seed=1, replica=0, epoch=3, sample_bytes=784)
    windows[0].pieces        # ((0, 858),): ranges of the part, one after another
    windows[0].visited       # the positions in the part, in the order of this epoch

A piece is what a shard and a file have in common. A dataset is shuffled when it is packed, so it is enough to permute the pieces
and to shuffle windows of up to 256 MiB of them: then files can be read whole, ahead of use, in bounded memory. In the first epoch
each piece is a window of its own, so that training waits for one file, not for several. A shard of one piece is one window: a full
permutation.

Everything is a function of the dataset's files, the seed, the replica and the epoch, never of ranks or placement.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

WINDOW_BYTES: Final = 256 << 20

Piece = tuple[int, int]  # first sample, and the one after the last


class Window(NamedTuple):
    """Some pieces, and the order in which their samples are visited: numbers among them, counted piece after piece."""

    pieces: tuple[Piece, ...]
    order: NDArray[np.int64]

    @property
    def visited(self) -> NDArray[np.int64]:
        """The samples' positions in the part, in the order of the visit."""
        return np.concatenate([np.arange(*piece) for piece in self.pieces])[self.order]


def window_samples(sample_bytes: int) -> int:
    """The most samples of a window of several pieces."""
    return WINDOW_BYTES // sample_bytes


def cut(span: Piece, bounds: NDArray[np.int64]) -> list[Piece]:
    """Cut `span` where a file ends; file k holds the samples `bounds[k]` up to `bounds[k + 1]`."""
    start, stop = span
    inner = bounds[(bounds > start) & (bounds < stop)].tolist()
    edges = [start, *inner, stop]
    return [(low, high) for low, high in pairwise(edges) if low < high]


def epoch_windows(
    span: Piece, bounds: NDArray[np.int64], *, seed: int | None, replica: int, epoch: int, sample_bytes: int
) -> list[Window]:
    """The windows of an epoch over the shard `span`, in order. With no seed they are the pieces as they are packed."""
    pieces = cut(span, bounds)
    if seed is None:
        return [Window((piece,), np.arange(piece[1] - piece[0])) for piece in pieces]
    generator = _generator(seed, replica, epoch)
    groups = _groups(generator, pieces, 0 if epoch == 0 else window_samples(sample_bytes))
    return [Window(tuple(group), generator.permutation(_count(group))) for group in groups]


def epoch_groups(
    span: Piece, bounds: NDArray[np.int64], *, seed: int | None, replica: int, epoch: int, sample_bytes: int
) -> list[list[Piece]]:
    """The pieces of each window alone, without the time to shuffle their samples."""
    pieces = cut(span, bounds)
    if seed is None:
        return [[piece] for piece in pieces]
    return list(_groups(_generator(seed, replica, epoch), pieces, 0 if epoch == 0 else window_samples(sample_bytes)))


def epoch_order(
    span: Piece, bounds: NDArray[np.int64], *, seed: int, replica: int, epoch: int, sample_bytes: int
) -> NDArray[np.int64]:
    """Positions in the part in the order of this epoch."""
    windows = epoch_windows(span, bounds, seed=seed, replica=replica, epoch=epoch, sample_bytes=sample_bytes)
    return np.concatenate([window.visited for window in windows])


def dataset_order(count: int, *, seed: int) -> NDArray[np.int64]:
    """One fixed shuffle of a dataset that was packed in a given order, so that a contiguous shard is not one class."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, count]))).permutation(count)


def _generator(seed: int, replica: int, epoch: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, replica, epoch])))


def _groups(generator: np.random.Generator, pieces: Sequence[Piece], most: int) -> Iterator[list[Piece]]:
    """The pieces, permuted, in groups of at most `most` samples, or of one piece."""
    picked = generator.permutation(len(pieces)).tolist() if len(pieces) > 1 else range(len(pieces))
    group: list[Piece] = []
    for number in picked:
        piece = pieces[number]
        if group and _count([*group, piece]) > most:
            yield group
            group = []
        group.append(piece)
    if group:
        yield group


def _count(pieces: Sequence[Piece]) -> int:
    return sum(stop - start for start, stop in pieces)
