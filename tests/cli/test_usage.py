"""The table of what was used."""

from io import StringIO

from rich.console import Console

from deepex.cli.usage import print_usage
from deepex.record import PHASES, EpochRecord, Score


def epoch(number: int, usage: dict[str, dict[str, list[float]]]) -> EpochRecord:
    return EpochRecord(
        epoch=number,
        samples=10,
        steps=1,
        syncs=1,
        rate=0.1,
        train=Score(loss=1.0, samples=10, measures={"error": 0.5}),
        seconds=10.0,
        phases={name: [2.0, 2.0] for name in PHASES},
        wall=[10.0, 10.0],
        usage=usage,
    )


def shown(*epochs: EpochRecord) -> list[str]:
    text = StringIO()
    print_usage(Console(file=text, width=160), epochs)
    return [" ".join(line.replace("│", " ").replace("┃", " ").split()) for line in text.getvalue().splitlines()]


def by_phase(value: float, forward: float) -> dict[str, list[float]]:
    return {**{name: [value, value] for name in (*PHASES, "other")}, "forward": [forward, forward]}


def test_by_phase() -> None:
    usage = {
        "cpu_seconds": by_phase(0.5, 3.0),
        "written_bytes": by_phase(0.0, 2e6),
        "cpu_joules": by_phase(1.0, 5.0),
        "joules": by_phase(1.0, 5.0),
        "memory_bytes": {"epoch": [3e8, 5e8]},
    }
    lines = shown(epoch(1, {"cpu_seconds": by_phase(9.0, 9.0)}), epoch(2, usage), epoch(3, usage))
    assert lines[0] == "what was used, per epoch, by 2 rank(s) together"
    assert "phase cores of a rank CPU s written MB CPU J" in lines
    assert "forward 1.50 6.00 4.00 10.00" in lines, "3 s of a core in 2 s, on each of two ranks"
    assert "other 1.00 0.00 2.00" in lines
    assert "epoch 11.00 4.00 20.00" in lines
    assert lines[-1] == "memory of a rank, at most: 500 MB"


def test_by_epoch() -> None:
    usage = {"cpu_seconds": {"epoch": [4.0, 4.0]}, "gpu_joules": {"epoch": [700.0, 0.0]}, "gpu_memory_bytes": {"epoch": [2e9, 2e9]}}
    lines = shown(epoch(1, usage))
    assert "epoch 8.00 700.00" in lines
    assert not [line for line in lines if line.startswith("forward")]
    assert lines[-1] == "memory in use on a GPU, at most: 2,000 MB"


def test_nothing_sampled_is_nothing_shown() -> None:
    assert shown(epoch(1, {})) == []
