"""Records that were damaged at random: each is read, or refused in a sentence. benchmarks/damage.py tries many more."""

from pathlib import Path

import pytest

from tests.full import examples
from tests.pool import RankPool
from tests.record.damage import KINDS, Kind, make_records, try_one

TRIES = examples(100, 300)


@pytest.fixture(scope="module")
def folder(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("records")
    make_records(path, ranks)
    return path


@pytest.mark.ranks
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_damaged_record_is_read_or_refused_in_a_sentence(kind: Kind, folder: Path) -> None:
    before = kind.path(folder).read_bytes()
    found = [try_one(folder, kind, seed) for seed in range(TRIES // kind.cost)]
    odd = [told for told in found if told not in ("read", "refused")]
    assert not odd, "\n\n".join(odd[:3])
    assert {*found} == {"read", "refused"} or kind.name == "page_cache.json", "what is damaged in part is read in part"
    assert kind.path(folder).read_bytes() == before
