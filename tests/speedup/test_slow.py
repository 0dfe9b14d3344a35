"""Slow ranks in synthetic records: delays are injected into noisy phases, and found as what they are; noise alone is not."""

import random
from statistics import median

import pytest

from deepex.record import PHASES, EpochRecord, Score
from deepex.speedup.slow import SlowRank, _medians_of_others, slow_ranks

SHARES = {"input": 0.1, "forward": 0.3, "backward": 0.5, "update": 0.1}
OWN = tuple(SHARES)


def records(
    ranks: int, epochs: int, noise: float, chance: random.Random, delays: dict[tuple[int, int], tuple[str, float]]
) -> list[EpochRecord]:
    """Epochs of 10 s of own work; `delays[rank, epoch]` adds seconds to a phase. The others wait in `sync`."""
    made = []
    for number in range(1, epochs + 2):
        own = {name: [10 * share * (1 + chance.gauss(0, noise)) for _ in range(ranks)] for name, share in SHARES.items()}
        common = 1 + abs(chance.gauss(0, 2 * noise))  # an epoch that is slow on every rank is nobody's fault
        own = {name: [value * common for value in values] for name, values in own.items()}
        for (rank, epoch), (phase, seconds) in delays.items():
            if epoch == number:
                own[phase][rank] += seconds
        total = [sum(own[name][rank] for name in OWN) for rank in range(ranks)]
        sync = [max(total) - one + 0.05 for one in total]
        made.append(
            EpochRecord(
                epoch=number,
                samples=1000,
                steps=10,
                syncs=1,
                rate=0.1,
                train=Score(loss=1.0, samples=1000, measures={"error": 0.5}),
                seconds=max(total) + 0.05,
                phases={**own, "sync": sync},
                wall=[max(total) + 0.05] * ranks,
            )
        )
    return made


def case(seed: int) -> tuple[int, int, float, random.Random]:
    chance = random.Random(seed)
    return chance.choice([2, 3, 4, 8, 16, 64]), chance.choice([4, 6, 10, 20]), chance.choice([0.02, 0.05, 0.08]), chance


def found_in(seed: int, kind: str) -> tuple[list[SlowRank], int, str, int]:
    ranks, epochs, noise, chance = case(seed)
    rank, phase = chance.randrange(ranks), chance.choice(OWN)
    seconds = 10 * (chance.uniform(0.3, 1.0) if kind == "chronic" else chance.uniform(0.5, 1.5))
    at = chance.randrange(2, epochs + 2)
    which = {"chronic": range(2, epochs + 2), "once": [at], "none": []}[kind]
    delays = {(rank, number): (phase, seconds) for number in which}
    return slow_ranks(records(ranks, epochs, noise, chance, delays)), rank, phase, at


def test_a_chronic_delay_is_found_as_such() -> None:
    hits = 0
    for seed in range(300):
        found, rank, phase, _ = found_in(seed, "chronic")
        hits += [(one.rank, one.phase, one.chronic) for one in found] == [(rank, phase, True)]
    assert hits >= 288


def test_a_delay_in_one_epoch_is_found_as_one_off() -> None:
    hits = 0
    for seed in range(300):
        found, rank, phase, at = found_in(1000 + seed, "once")
        hits += [(one.rank, one.phase, one.chronic, one.epochs) for one in found] == [(rank, phase, False, (at,))]
    assert hits >= 264


def test_noise_alone_raises_no_alarm() -> None:
    alarms = [seed for seed in range(400) if found_in(5000 + seed, "none")[0]]
    assert len(alarms) <= 4


@pytest.mark.parametrize("ranks", [2, 4, 64])
def test_what_mending_would_save(ranks: int) -> None:
    delays = {(1, number): ("input", 5.0) for number in range(1, 12)}
    (found,) = slow_ranks(records(ranks, 10, 0.01, random.Random(7), delays))
    assert found.saved_seconds == pytest.approx(5.0, abs=0.5)
    assert found.excess == pytest.approx(0.5, abs=0.06)
    assert found.epoch_seconds == pytest.approx(15.3, abs=0.6)


def test_two_slow_ranks_are_both_named_and_mending_one_saves_little() -> None:
    delays = {(rank, number): ("forward", 5.0) for number in range(1, 12) for rank in (3, 5)}
    found = slow_ranks(records(8, 10, 0.01, random.Random(7), delays))
    assert {one.rank for one in found} == {3, 5}
    assert all(one.saved_seconds < 0.5 for one in found)


def test_nothing_is_told_of_one_rank_few_epochs_or_a_framework_without_phases() -> None:
    chance = random.Random(1)
    assert slow_ranks([]) == []
    assert slow_ranks(records(1, 10, 0.01, chance, {})) == []
    assert slow_ranks(records(4, 1, 0.01, chance, {(0, 2): ("input", 9.0)})) == []
    whole = records(4, 10, 0.01, chance, {})
    empty = [EpochRecord(**{**vars(epoch), "phases": {name: [0.0] * 4 for name in PHASES}}) for epoch in whole]
    assert slow_ranks(empty) == []


def test_the_medians_of_the_others() -> None:
    chance = random.Random(3)
    for count in (2, 3, 4, 9, 10):
        values = [chance.choice([1.0, 2.0, chance.random()]) for _ in range(count)]
        assert _medians_of_others(values) == [median(values[:i] + values[i + 1 :]) for i in range(count)]
