"""Each step of each replica draws numbers of its own, whoever runs it and in whatever way."""

from itertools import product

import numpy as np

from deepex.step.eager import mixed, mixed_many


def test_no_two_steps_share_a_seed() -> None:
    where = list(product((1, 2), range(3), range(3), range(4)))
    assert len({mixed(*one) for one in where}) == len(where)


def test_many_at_once_are_the_same() -> None:
    """As a captured step has them."""
    replicas, steps = np.arange(5, dtype=np.uint64), np.arange(7, 12, dtype=np.uint64)
    expected = [mixed(3, replica, 2, step) for replica, step in zip(range(5), range(7, 12), strict=True)]
    assert mixed_many(3, replicas, 2, steps).tolist() == expected
