"""The pool of ranks itself: what one job does wrong is told, and does not reach the next."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import pool_jobs as jobs
from tests.pool import RankPool, RanksError

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """One of its own, since it is broken on purpose."""
    with RankPool(3) as made:
        yield made


def _is_running(process: int) -> bool:
    """Whether it still is after a while: what was ended may wait for somebody to hear of it."""
    for _ in range(50):
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return False
        if state == "Z":
            return False
        time.sleep(0.1)
    return True


def test_ranks_work_together_and_stay(pool: RankPool) -> None:
    assert pool.run(jobs.add, 5, size=3) == [18] * 3
    assert pool.run(jobs.add, 5) == [11] * 2
    assert pool.run(jobs.add, 5, size=1) == [5]
    assert pool.run(jobs.identify, size=3)[:2] == pool.run(jobs.identify), "the same processes, of which the third slept"


def test_a_rank_that_raises_is_told_with_all_that_was_written(pool: RankPool) -> None:
    """The others wait for it in MPI; the next job has new ranks."""
    before = pool.run(jobs.identify)
    with pytest.raises(RanksError) as caught:
        pool.run(jobs.raise_on, 1, size=3)
    assert all(text in str(caught.value) for text in ("ValueError: made up", "rank 0 was here", "rank 2 was here", "in raise_on"))
    assert not set(before) & set(pool.run(jobs.identify))
    assert not any(map(_is_running, before))


def test_a_rank_that_hangs_is_told_with_where_it_stands(pool: RankPool) -> None:
    with pytest.raises(RanksError) as caught:
        pool.run(jobs.hang, limit_seconds=1)
    assert "rank 1: no answer" in str(caught.value)
    assert "in hang" in str(caught.value)
    assert pool.run(jobs.add, 1) == [3, 3]


def test_a_rank_that_dies_is_told(pool: RankPool) -> None:
    with pytest.raises(RanksError, match="the process has ended"):
        pool.run(jobs.die)
    assert pool.run(jobs.add, 1) == [3, 3]


def test_what_cannot_be_put_back_is_told(pool: RankPool) -> None:
    with pytest.raises(RanksError, match=r"left behind the thread forgotten, another tests\.mpi\.own_lines"):
        pool.run(jobs.leave_a_thread_and_another_function)


def test_what_a_job_changes_is_put_back(ranks: RankPool, tmp_path: Path) -> None:
    """These have torch already, and keep it."""
    before = ranks.run(jobs.look)
    assert ranks.run(jobs.disturb, tmp_path, environ={"GIVEN": "so"}) == ["so", "so"]
    assert ranks.run(jobs.look) == before
