"""Which samples of a source go into which part, and in which order.

>>> chosen = choose(source, share=0.1, seed=1, limit=6000)
>>> chosen["train"].order[:3]                       # numbers of samples in the source, drawn from the seed
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepex.data.source.base import Images, Source
from deepex.errors import DataError


@dataclass(frozen=True, eq=False)
class Chosen:
    """Samples, and the numbers of those to write in the order to write them."""

    images: Images
    order: NDArray[np.int64]


def choose(
    source: Source,
    *,
    share: float,
    seed: int,
    shuffle: bool = True,
    balance: bool = False,
    limit: int | None = None,
    validation_limit: int | None = None,
) -> dict[str, Chosen]:
    """Choose the train and the validation samples.

    A source without validation samples gives up a random `share` of its train samples (at least one, if it has two).
    Without `shuffle` both parts keep the given order. The limits take the first samples, with `balance` equally many of
    each class.
    """
    random = np.random.default_rng(seed)
    order = random.permutation(source.train.count)
    validation, held_out = source.validation, order[:0]
    if validation is not None:
        held_out = random.permutation(validation.count)
    elif share > 0 and len(order) > 1:
        validation = source.train
        cut = min(max(1, round(share * len(order))), len(order) - 1)
        held_out, order = order[:cut], order[cut:]
    if not shuffle:
        order, held_out = np.sort(order), np.sort(held_out)

    def kept(order: NDArray[np.int64], images: Images, limit: int | None) -> Chosen:
        return Chosen(images, _first_of_each_class(order, images, limit) if balance else order[:limit])

    chosen = {"train": kept(order, source.train, limit)}
    if validation is not None:
        chosen["validation"] = kept(held_out, validation, validation_limit)
    return chosen


def _first_of_each_class(order: NDArray[np.int64], images: Images, limit: int | None) -> NDArray[np.int64]:
    """Take the first of each class, `limit` in all; where a class has too few the others make up for it."""
    if images.labels is None:
        raise DataError(f"{images.name(0)} has no labels, so classes cannot be balanced; give labels or leave --balance out")
    # Number the samples of each class 0, 1, 2, …: the lowest numbers are equally many of each class.
    labels = images.labels[order]
    by_class = np.argsort(labels, kind="stable")
    number = np.empty(len(order), np.int64)
    number[by_class] = np.arange(len(order)) - np.searchsorted(labels[by_class], labels[by_class])
    return order[np.sort(np.argsort(number, kind="stable")[:limit])]
