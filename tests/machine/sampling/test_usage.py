"""What ranks tell each other of their use."""

import math

from deepex.machine.sampling.ledger import Used
from deepex.machine.sampling.usage import LENGTH, NOTHING, to_row, usage_of
from deepex.record import PHASES


def phased(**amounts: float) -> Used:
    places = (*PHASES, "other")
    return Used(amounts={name: dict.fromkeys(places, value) for name, value in amounts.items()}, peaks={}, by_phase=True)


def whole(**amounts: float) -> Used:
    return Used(amounts={name: {"epoch": value} for name, value in amounts.items()}, peaks={"memory_bytes": 9.0}, by_phase=False)


def test_every_rank_has_its_number_in_every_phase() -> None:
    rows = [to_row(phased(cpu_seconds=value), first=value == 1.0, gpu=None) for value in (1.0, 2.0, 3.0)]
    assert {len(row) for row in rows} == {LENGTH}
    usage = usage_of(rows)
    assert usage == {"cpu_seconds": {place: [1.0, 2.0, 3.0] for place in (*PHASES, "other")}}


def test_levels_and_what_cannot_be_told_by_phase_are_under_epoch() -> None:
    usage = usage_of([to_row(whole(cpu_seconds=1.0), first=True, gpu=None)])
    assert usage == {"cpu_seconds": {"epoch": [1.0]}, "memory_bytes": {"epoch": [9.0]}}


def test_the_first_rank_measures_for_its_node() -> None:
    rows = [to_row(phased(network_bytes=7.0), first=True, gpu=None), to_row(phased(), first=False, gpu=None)]
    assert usage_of(rows)["network_bytes"]["sync"] == [7.0, 0.0]


def test_what_one_rank_cannot_measure_is_absent_for_all() -> None:
    rows = [
        to_row(phased(network_bytes=7.0, read_bytes=1.0), first=True, gpu=None),
        to_row(phased(read_bytes=math.nan), first=True, gpu=None),
    ]
    assert usage_of(rows) == {}


def test_no_sampling_is_no_usage() -> None:
    assert usage_of([list(NOTHING)] * 2) == {}


def test_joules_are_those_of_processors_and_gpus() -> None:
    rows = [
        to_row(whole(cpu_joules=100.0, gpu_joules=7.0), first=True, gpu="GPU-a"),
        to_row(whole(gpu_joules=8.0), first=False, gpu="GPU-b"),
    ]
    usage = usage_of(rows)
    assert usage["joules"] == {"epoch": [107.0, 8.0]}
    assert (usage["cpu_joules"], usage["gpu_joules"]) == ({"epoch": [100.0, 0.0]}, {"epoch": [7.0, 8.0]})


def test_a_gpu_that_ranks_share_counts_once() -> None:
    rows = [to_row(whole(gpu_joules=value, gpu_busy_seconds=0.5), first=False, gpu="GPU-a") for value in (7.0, 7.5)]
    usage = usage_of(rows)
    assert usage["gpu_joules"] == {"epoch": [7.0, 0.0]}
    assert usage["gpu_busy_seconds"] == {"epoch": [0.5, 0.5]}, "how busy a rank's GPU was is no sum"
