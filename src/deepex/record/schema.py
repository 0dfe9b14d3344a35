"""What the files of a run directory hold, and those of a study beside them, key by key.

    checked(RunState, read_json(path), path)["ranks"]      # an int of 1 or more, or an error that names file, key and value

A later DeepEx may add keys, and an earlier one wrote fewer: unknown keys are kept, and one that is missing is an error of ours
where it is looked up. EpochRecord, the schema of epochs.jsonl, is in run.py.
"""

from pathlib import Path
from typing import Any, Final, TypedDict, final

from deepex.errors import ConfigError, RunError
from deepex.record.files import LINE_REMEDY, read_lines
from deepex.record.rule import Amount, Count, Pair, Positive, Time
from deepex.record.table import convert

REMEDY: Final = "restore the file, or leave this run out"


class Choice(TypedDict, total=False):
    """What was chosen, and why."""

    kind: str
    reason: str


class Network(TypedDict, total=False):
    """The network and its size."""

    name: str
    parameters: Count


class Dataset(TypedDict, total=False):
    """The dataset; `digest` tells it from others of that name."""

    name: str
    digest: str


class Framework(TypedDict, total=False):
    """With what else a run was trained."""

    name: str
    version: str | None
    settings: dict[str, Any]


class Changed(TypedDict, total=False):
    """What a resume changed: the value of each key of the configuration before and from then on, "" where it was not set."""

    epoch: Count
    step: Count
    keys: dict[str, Pair]


class RunState(TypedDict, total=False):
    """`run.json`."""

    schema: Any  # RunDirectory.open judges it
    id: str  # its checkpoints have it too
    status: str
    reason: str
    started: Time
    ranks: Positive
    nodes: Positive
    replicas: Positive
    resumed: list[Positive]
    changed: list[Changed]
    comm: Choice
    device: str
    threads: Positive
    placement: Choice
    layout: Choice
    step: Choice
    statistics: Choice
    sync: dict[str, str]
    network: Network
    dataset: Dataset
    samples: dict[str, Count]
    measures: list[dict[str, Any]]
    data: dict[str, Any]
    framework: Framework
    heap: str
    setup_seconds: Amount
    setup_usage: dict[str, Count]
    arena_bytes: Count
    sync_bytes: Count
    arena_shared: bool
    input_share: dict[str, float | None]


class Optim(TypedDict, total=False):
    """The table `optim` of a configuration, as far as it is read again."""

    method: str
    rate: Amount


class Config(TypedDict, total=False):
    """`config.toml` for those who only read; to resume a run, training/config.py checks all of it."""

    net: str
    data: str
    task: str
    precision: str
    layout: str
    target: str | float
    batch: Positive
    epochs: Count
    replicas: Count
    samples: Count
    seed: Count
    threads: Count
    deterministic: bool
    optim: Optim
    sync: dict[str, Any]
    checkpoint: dict[str, Any]
    data_options: dict[str, Any]
    net_options: dict[str, Any]


class Processor(TypedDict, total=False):
    """The processors of a node."""

    model: str | None
    architecture: str | None
    num_cores_usable: Count | None


class Memory(TypedDict, total=False):
    """The memory of a node."""

    total_bytes: Count | None


class Gpu(TypedDict, total=False):
    """A GPU."""

    name: str | None


class Machine(TypedDict, total=False):
    """One node in `machine.json`; what could not be read there is null."""

    host: str | None
    system: dict[str, str | None] | None
    cpu: Processor | None
    memory: Memory | None
    gpus: list[Gpu] | None
    versions: dict[str, str | None] | None
    commit: str | None
    ranks: list[Count]


class Fit(TypedDict, total=False):
    """A line through what was measured; no bandwidth where no size was slower."""

    latency_seconds: Amount
    bandwidth_bytes_per_second: Amount | None
    worst_deviation: Amount


class Measurement(TypedDict, total=False):
    """One of `measurements.json`: the times of one size on a path, or the line through those of all sizes."""

    path: str
    kind: str
    ranks: Count
    comm: str
    note: str
    bytes: Count
    seconds: list[Amount]
    fit: Fit


class PageCache(TypedDict, total=False):
    """`page_cache.json`."""

    cold: bool | None


@final
class Table(dict[str, Any]):
    """A table of a file; a key that is missing is an error of ours."""

    _path: Path
    _where: str = ""

    @classmethod
    def of(cls, values: dict[str, Any], path: Path, where: str = "") -> "Table":
        """Make such a table of `values` and of all tables in it; `where` is its dotted key."""
        table = cls({key: _guarded(value, path, f"{where}{key}") for key, value in values.items()})
        table._path, table._where = path, where
        return table

    def __missing__(self, key: str) -> Any:
        raise RunError(f"{self._path} is damaged: key {self._where + key!r} is missing; {REMEDY}")


def checked(kind: Any, value: object, path: Path) -> Any:
    """Give what a file holds if it is of the `kind`, a table here or a list of such; what is not is told with its key."""
    try:
        return _guarded(convert(kind, value, ""), path, "")
    except ConfigError as error:
        raise RunError(f"{path} is damaged: {error}; {REMEDY}") from error


def read_moments(path: Path) -> list[dict[str, float]]:
    """Read `resources.jsonl`: the keys of a line are told in deepex.machine.sampling.series."""
    return [
        checked_line(dict[str, Amount], table, path, number) for number, table in enumerate(read_lines(path, finite=True), start=1)
    ]


def checked_line(kind: Any, value: object, path: Path, number: int, remedy: str = LINE_REMEDY) -> Any:
    """Give what a line of a file holds, as `checked` does."""
    try:
        return convert(kind, value, "")
    except ConfigError as error:
        raise RunError(f"{path}, line {number} is damaged: {error}; {remedy}") from error


def _guarded(value: Any, path: Path, where: str) -> Any:
    if isinstance(value, dict):
        return Table.of(value, path, f"{where}." if where else "")
    if isinstance(value, list):
        return [_guarded(one, path, f"{where}[{index}]") for index, one in enumerate(value)]
    return value
