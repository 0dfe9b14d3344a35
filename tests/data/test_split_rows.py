"""Dealing rows: each in one part, in whole bands of one file, and both parts alike however the files are sorted."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepex.data.split_rows import Bands, lost_class, split_rows, spread

files = st.lists(st.integers(1, 120), min_size=1, max_size=4)
shares = st.sampled_from([0.0, 0.01, 0.1, 0.3, 0.5, 0.9, 0.999])


def rows_of(bands: Bands) -> np.ndarray:
    return np.concatenate([np.empty(0, np.int64), *(np.arange(start, start + size) for start, size in zip(*bands, strict=True))])


@given(st.integers(1, 500), st.data())
def test_one_of_each_range_is_drawn(number: int, data: st.DataObject) -> None:
    chosen = data.draw(st.integers(0, number))
    drawn = spread(number, chosen, np.random.default_rng(data.draw(st.integers(0, 99))))
    edges = np.arange(chosen + 1) * number // max(1, chosen)
    assert (edges[:-1] <= drawn).all()
    assert (drawn < edges[1:]).all()


@given(files, st.integers(1, 50), st.integers(1, 9), shares, st.integers(0, 9))
def test_every_row_is_in_one_part_in_bands_of_one_file(
    counts: list[int], rows: int, per_block: int, share: float, seed: int
) -> None:
    edges = np.cumsum([0, *counts])
    train, held = split_rows(edges, rows=rows, per_block=per_block, share=share, seed=seed)
    assert sorted([*rows_of(train), *rows_of(held)]) == list(range(edges[-1]))
    for start, size in [*zip(*train, strict=True), *zip(*held, strict=True)]:
        file = np.searchsorted(edges, start, side="right") - 1
        assert (start - edges[file]) % rows == 0  # as chunks lie
        assert size == min(rows, edges[file + 1] - start)
    number = len(train.starts) + len(held.starts)
    expected = min(max(round(share * number), int(rows == 1)), number - 1) if share else 0
    assert len(held.starts) == expected
    again = split_rows(edges, rows=rows, per_block=per_block, share=share, seed=seed)
    assert all((a == b).all() for a, b in zip([*train, *held], [*again[0], *again[1]], strict=True))


@given(st.lists(st.integers(0, 300), min_size=1, max_size=12).filter(any), st.integers(1, 8), shares, st.integers(0, 9))
def test_sorted_classes_are_held_out_in_proportion(bands: list[int], rows: int, share: float, seed: int) -> None:
    labels = np.repeat(np.arange(len(bands)), np.array(bands) * rows)
    _, held = split_rows(np.array([0, len(labels)]), rows=rows, per_block=3, share=share, seed=seed)
    found = np.bincount(labels[rows_of(held)], minlength=len(bands))
    fair = np.bincount(labels, minlength=len(bands)) * held.sizes.sum() / len(labels)
    assert (abs(found - fair) <= 2 * rows).all()


def test_blocks_are_dealt_whole_and_in_no_order() -> None:
    train, held = split_rows(np.array([0, 4000]), rows=10, per_block=8, share=0.1, seed=1)
    for bands in (train, held):
        blocks = bands.starts // 80
        changes = np.flatnonzero(np.diff(blocks)) + 1
        assert len(changes) + 1 == len(set(blocks.tolist()))
        assert (np.diff(bands.starts) < 0).sum() > len(changes) / 4
        assert all((np.diff(block) > 0).all() for block in np.split(bands.starts, changes))


@pytest.mark.parametrize(
    ("counts", "held", "lost"),
    [
        ([900, 900], [90, 90], None),
        ([900, 900], [180, 0], 1),  # missing in validation
        ([900, 20], [72, 20], 1),  # missing among the others
        ([900, 100, 50], [90, 15, 0], None),  # five were due: chance
        ([900, 0, 900], [100, 0, 80], None),
    ],
)
def test_a_class_is_lost_if_any_fair_choice_has_it(counts: list[int], held: list[int], lost: int | None) -> None:
    classes = np.arange(len(counts))
    assert lost_class(np.repeat(classes, counts), np.repeat(classes, held)) == lost
