"""Two sides against each other: what differs is shown, and what does not is not."""

from pathlib import Path

import pytest

from deepex.errors import RunError
from deepex.report.comparison import Comparison, compare
from tests.report.records import Made, write_run, write_study


def side(path: Path, *, repeats: int = 4, **changes: object) -> Path:
    for seed in range(repeats):
        write_run(path / f"run{seed}", Made(seed=seed + 10 * len(path.name), **changes))  # type: ignore[arg-type]
    return path


def verdicts(comparison: Comparison) -> dict[str, str]:
    return {finding.measure: finding.verdict for finding in comparison.findings}


def test_a_faster_side_is_told_by_how_much(tmp_path: Path) -> None:
    found = compare(side(tmp_path / "before", work=10.0), side(tmp_path / "after", work=8.0))
    told = verdicts(found)
    assert told["seconds of an epoch"].startswith("faster by 2"), told
    assert told["seconds of backward"].startswith("faster by 2")
    assert not found.once
    back = compare(tmp_path / "after", tmp_path / "before")
    assert verdicts(back)["seconds of an epoch"].startswith("slower by 2")


def test_no_difference_is_not_one(tmp_path: Path) -> None:
    told = verdicts(compare(side(tmp_path / "a"), side(tmp_path / "bb")))
    assert told["seconds of an epoch"].startswith("no difference shown"), told
    assert told["validation error after 8 epoch(s)"].startswith("no difference shown")


def test_who_learns_better_is_told(tmp_path: Path) -> None:
    told = verdicts(compare(side(tmp_path / "a", learns=0.3), side(tmp_path / "bb", learns=0.6)))
    assert told["validation error after 8 epoch(s)"].startswith("lower by "), told


def test_one_run_each_is_no_evidence_for_learning(tmp_path: Path) -> None:
    found = compare(side(tmp_path / "a", repeats=1), side(tmp_path / "bb", repeats=1, learns=0.1))
    assert found.once
    assert verdicts(found)["validation error after 8 epoch(s)"] == "no evidence: one value each"


def test_settings_are_compared_each_with_its_like(tmp_path: Path) -> None:
    first = write_study(tmp_path / "first", "strong", [({"ranks": ranks}, Made(ranks=ranks)) for ranks in (1, 2)])
    second = write_study(tmp_path / "second", "strong", [({"ranks": ranks}, Made(ranks=ranks, work=4.0)) for ranks in (2, 4)])
    found = compare(first, second)
    assert {finding.setting for finding in found.findings} == {"2 ranks"}
    assert verdicts(found)["seconds of an epoch"].startswith("faster by ")
    assert sorted(text.split(" (")[0] for text in found.only) == ["1 rank", "4 ranks"]


def test_nothing_in_common(tmp_path: Path) -> None:
    first = write_study(tmp_path / "a", "strong", [({"ranks": ranks}, Made(ranks=ranks)) for ranks in (1, 2)])
    second = write_study(tmp_path / "b", "strong", [({"ranks": ranks}, Made(ranks=ranks)) for ranks in (4, 8)])
    with pytest.raises(RunError, match=r"nothing in common: give two studies of the same kind, or two runs"):
        compare(first, second)
