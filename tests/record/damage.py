"""Damages records at random, and reads what is left with everything that reads such a record.

    make_records(folder)
    for seed in range(1000):
        found = try_one(folder, KINDS[0], seed)     # "read", "refused", or the traceback of an error that is not ours

A damage is told by its seed alone. To add a kind of record, add a line to `KINDS`, as Kind("run/checkpoints/*.json", read_run(…)).
"""

import io
import json
import random
import shutil
import tomllib
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

import deepex
from deepex.cli.dataset_table import print_dataset
from deepex.cli.report import compare
from deepex.cli.show import show
from deepex.data.dataset import PackedDataset
from deepex.data.find import SAMPLES
from deepex.data.manifest import to_json
from deepex.data.overview import look
from deepex.data.pack import pack
from deepex.errors import DataError, DeepexError, RunError
from deepex.machine.sampling.series import Series
from deepex.recipes import resumed_config
from deepex.record import RunDirectory, StudyDirectory
from deepex.record.table import dump_toml, from_table, set_values
from deepex.report import make_report
from deepex.report.collect import collect
from deepex.report.export import FORMATS, export
from deepex.study.trust import check_study
from deepex.training.checkpoint import usable
from deepex.training.config import RunConfig
from tests.pool import RankPool
from tests.report.records import Made, transfer, write_study
from tests.training.on_ranks import train_on

# Texts that may stand in the place of a value, in JSON and in TOML. Half of them no parser takes.
VALUES: Final = (
    *(
        "null",
        "true",
        "0",
        "-1",
        "3",
        "1.5",
        "0.0",
        "-0.5",
        "5e-324",
        "1e18",
        "1e308",
        "-1e308",
        "1e999",
        "NaN",
        "nan",
        "inf",
        "Infinity",
    ),
    *("9" * 5000, str(10**400), str(2**64), str(2**63), str(-(2**63)), "1979-05-27", "1979-05-27T07:32:00Z"),
    *(
        '""',
        '"x"',
        '"1"',
        '"all"',
        '"train"',
        r'"\ud800"',
        r'"\u0000"',
        r'"\u001b[31m"',
        '"[/bold]"',
        f'"{"x" * 5000}"',
        '"é\u2028"',
    ),
    *("[]", "[null]", "[[]]", "[1]", '["x"]', "[1e999]", "{}", '{"x": 1}', "{x = 1}", '[{"x": [1, {}]}]', "[1, 2, 3, 4, 5, 6, 7]"),
    *("[" * 100_000, "[" * 80 + "]" * 80, '{"a":' * 200 + "1" + "}" * 200),
)
_MARK: Final = "the value that another takes the place of"


@dataclass(frozen=True)
class Kind:
    """A file of a record below the folder, and what reads it: a function that is given the folder, and chance to choose by.

    Of several files that `file` is a pattern of, it is the last.
    `cost`: how many times longer than others it takes, so that it is tried as much more rarely.
    """

    file: str
    read: Callable[[Path, random.Random], None]
    cost: int = 1

    @property
    def name(self) -> str:
        """The file's own name."""
        return Path(self.file).name

    def path(self, folder: Path) -> Path:
        """Where the file is."""
        return max(folder.glob(self.file))


def make_records(folder: Path, ranks: RankPool | None = None) -> None:
    """Train a tiny run twice on two ranks, pack a tiny dataset, and write studies; what is there is left."""
    with ExitStack() as stack:
        pool = ranks or stack.enter_context(RankPool(2))
        for name in ("run", "base"):
            if not (folder / name).is_dir():
                keys = {"epochs": 2, "samples": 512, "threads": 1, "target": "validation error <= 0.01", "sync.period": 2}
                train_on(pool, deepex.recipe("fashion", keys | {"sampling": 0.1}), folder / name)
                changed = set_values(RunDirectory.open(folder / name).config, {"epochs": 3, "optim.rate": 0.01})
                train_on(pool, from_table(RunConfig, changed), folder / name, resume=True)
    shutil.copy(max((folder / "run" / "checkpoints").glob("*.json")), folder / WRITTEN)
    if not (folder / "data").is_dir():
        sample = PackedDataset.open(SAMPLES / "fashion")
        images, labels = sample.part("train").read(0, 64)
        np.savez(folder / "some.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
        pack(folder / "some.npz", folder / "data", classes=sample.manifest.classes, file_bytes=20_000)
    if not (folder / "transfer").is_dir():
        transfer(folder / "transfer")
    if not (folder / "storage").is_dir():
        write_study(folder / "storage", "storage", [({"placement": name}, Made(epochs=2)) for name in ("host", "device")])
        cache = {"bytes": 100, "resident_bytes": 0, "cold": True, "note": "no page was left in memory"}
        (folder / "storage" / "runs" / "host-r1" / "page_cache.json").write_text(json.dumps(cache), encoding="utf-8")


def read_run(part: Callable[[RunDirectory], object]) -> Callable[[Path, random.Random], None]:
    """Give what reads the file that `part` of a run comes from, and then the whole run by one of the commands.

    All of them read the file in this way, so what is refused once is rarely tried again.
    """

    def read(folder: Path, chance: random.Random) -> None:
        run = RunDirectory(folder / "run")
        try:
            part(run)
        except DeepexError:
            if chance.random() < 0.95:
                raise
        (command,) = chance.choices([*COMMANDS], [*COMMANDS.values()])
        command(str(run.path), str(folder / "base"))

    return read


COMMANDS: Final[dict[Callable[[str, str], object], int]] = {  # of a run and of another, and how often each is taken
    lambda run, _: show(run=run, base=None, targets=(), as_json=True): 40,
    lambda run, _: show(run=run, base=None, targets=(), as_json=False): 10,
    lambda run, other: show(run=run, base=other, targets=("error <= 0.5",), as_json=True): 20,
    lambda run, other: show(run=other, base=run, targets=(), as_json=True): 20,
    lambda run, _: [export(collect([Path(run)]), kind).encode() for kind in FORMATS]: 20,
    lambda run, _: resumed_config(Path(run), {}): 40,
    lambda run, _: make_report([Path(run)]).html.encode(): 6,
    lambda run, other: make_report([Path(run), Path(other)]).html.encode(): 2,
    lambda run, other: compare(directories=[run, other], as_json=False): 1,
}


def read_series(folder: Path, _: random.Random) -> None:
    """The samples of a run: who resumes it goes on with them, whatever they are."""
    Series(folder / "run" / "resources.jsonl", 0.2).open()
    RunDirectory(folder / "run").resources()


def read_dataset(folder: Path, chance: random.Random) -> None:
    """Everything that reads a manifest."""
    dataset = PackedDataset.open(folder / "data")
    json.dumps(to_json(dataset.manifest)).encode()
    assert dataset.manifest.digest
    for bad in dataset.missing():  # who trains looks for this first, too
        raise DataError(bad)
    for name in dataset.manifest.parts:
        dataset.part(name).read(0, 2)
    print_dataset(dataset.directory, dataset.manifest, look(dataset) if chance.random() < 0.3 else None)


def read_study(name: str) -> Callable[[Path, random.Random], None]:
    """Give what reads the study `name` of the folder."""

    def read(folder: Path, chance: random.Random) -> None:
        if chance.random() < 0.5:
            show(run=str(folder / name), base=None, targets=(), as_json=chance.random() < 0.5)
        else:
            assert make_report([folder / name]).html.encode()

    return read


def read_plan(folder: Path, chance: random.Random) -> None:
    """What a study may start or delete by its plan, and what shows it."""
    check_study(StudyDirectory.open(folder / "transfer"))
    read_study("transfer")(folder, chance)


def read_checkpoint(folder: Path, _: random.Random) -> None:
    """The header of a checkpoint, which is left out or says what was written, to the last number."""
    header = max((folder / "run" / "checkpoints").glob("*.json"))
    for checkpoint in usable(header.parent):
        if checkpoint.path.stem == header.stem:
            assert checkpoint.header == json.loads((folder / WRITTEN).read_bytes()), "it says something else"
            assert checkpoint.position
            return
    raise RunError(f"{header} is left out")


WRITTEN: Final = "written.json"  # the header of the newest checkpoint, as it was
KINDS: Final = (
    Kind("run/run.json", read_run(lambda run: (run.state, run.outcome))),
    Kind("run/machine.json", read_run(lambda run: run.machine)),
    Kind("run/epochs.jsonl", read_run(RunDirectory.epochs)),
    Kind("run/resources.jsonl", read_series),
    Kind("run/config.toml", read_run(lambda run: run.config)),
    Kind("data/manifest.json", read_dataset),
    Kind("transfer/runs/all/measurements.json", read_study("transfer")),
    Kind("transfer/study.json", read_plan),
    Kind("run/checkpoints/*.json", read_checkpoint),
    Kind("storage/runs/host-r1/page_cache.json", read_study("storage"), cost=10),
)


def try_one(folder: Path, kind: Kind, seed: int) -> str:
    """Damage a file, read it, put it back, and tell what became of it."""
    path = kind.path(folder)
    before = path.read_bytes()
    chance = random.Random(f"{kind.file} {seed}")
    path.write_bytes(damaged(before, path.suffix, chance))
    try:
        with redirect_stdout(io.TextIOWrapper(io.BytesIO(), encoding="utf-8")):
            kind.read(folder, chance)
    except DeepexError as error:
        str(error).encode()  # it is printed
        return "refused"
    except Exception:  # noqa: BLE001 - that it is none of ours is what is looked for
        return f"{kind.file}, seed {seed}\n{traceback.format_exc()}"
    finally:
        path.write_bytes(before)
    return "read"


def damaged(content: bytes, suffix: str, chance: random.Random) -> bytes:
    """The content with one damage, or with a few."""
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        content = _changed_value(content, suffix, chance) if chance.random() < 0.6 else _changed_bytes(content, chance)
    return content


def _changed_bytes(content: bytes, chance: random.Random) -> bytes:
    """Flip a bit, cut the end off, take a span out, put one in twice or elsewhere, or put a value or zeros in its place."""
    if not content:
        return b"0"
    begin = chance.randrange(len(content))
    end = min(len(content), begin + chance.choice((1, 2, 5, 20, 200)))
    at = chance.randrange(len(content))
    head, span, tail = content[:begin], content[begin:end], content[end:]
    return chance.choice(
        (
            head + bytes([content[begin] ^ 1 << chance.randrange(8)]) + content[begin + 1 :],
            head,
            head + tail,
            content[:at] + span + content[at:],
            head + span + span + tail,
            head + bytes(len(span)) + tail,
            head + chance.choice(VALUES).encode() + tail,
            head + chance.randbytes(len(span)) + tail,
        )
    )


def _changed_value(content: bytes, suffix: str, chance: random.Random) -> bytes:
    """Change one value of a file that can still be parsed, wherever it stands in it."""
    try:
        text = content.decode()
        if suffix == ".jsonl":
            lines = text.split("\n")
            at = chance.randrange(max(1, len(lines) - 1))
            lines[at] = _changed(json.loads(lines[at]), json.dumps, chance)
            return "\n".join(lines).encode()
        read, write = (tomllib.loads, dump_toml) if suffix == ".toml" else (json.loads, json.dumps)
        return _changed(read(text), write, chance).encode()
    except (ValueError, RecursionError):  # there was a damage before
        return _changed_bytes(content, chance)


def _changed(value: Any, write: Callable[[Any], str], chance: random.Random) -> str:
    """Another value, another name, no value, or two: in the place of one value within."""
    where = chance.choice([*_places(value, ())] or [()])
    other = chance.choice(VALUES)
    if not where:
        return other
    inner = value
    for key in where[:-1]:
        inner = inner[key]
    key, how = where[-1], chance.randrange(8)
    if how == 0:
        del inner[key]
    elif how == 1 and isinstance(inner, dict):
        inner[chance.choice(("x", "", "a.b", "all", "epoch", "\N{SNOWMAN}"))] = inner.pop(key)
    elif how == 2 and isinstance(inner, dict):  # in TOML the second stands on a line of its own
        again = f", {json.dumps(key)}: {other}" if write is json.dumps else f"\n{key} = {other}"
        twice = json.dumps(inner[key], default=str) + again  # a TOML may have a date
        inner[key] = _MARK
        return write(value).replace(f'"{_MARK}"', twice)
    else:
        inner[key] = _MARK
        return write(value).replace(f'"{_MARK}"', other)
    return write(value)


def _places(value: Any, where: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    yield where
    for key, one in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from _places(one, (*where, key))
