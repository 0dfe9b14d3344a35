"""Trials: short runs with exact replicas, a process each, of which the epochs are kept.

    for trial in run(trials, jobs=2, limit=600.0):
        print(trial.told())

R replicas on one device compute what R devices would, so what a trial learns is what they would; only its seconds are its own.
A trial that fails says why in `note`: a run that diverged is a result.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

from deepex.errors import DeepexError

_NO_TIME: Final = "ended for want of time"


class Epoch(NamedTuple):
    """What an epoch showed: the trial's measure in training and validation, and how replicas met."""

    train: float
    validation: float
    steps: int
    syncs: int
    drift: float
    seconds: float

    @classmethod
    def parse(cls, text: str) -> "Epoch":
        """Read what `str` gave."""
        words = text.split()
        return cls(float(words[0]), float(words[1]), int(words[2]), int(words[3]), float(words[4]), float(words[5]))

    def __str__(self) -> str:
        return f"{self.train:.5g} {self.validation:.5g} {self.steps} {self.syncs} {self.drift:.3g} {self.seconds:.3f}"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run: a recipe with changes, and what came of it. `workload` and `name` are for whoever reads.

    `strategy` and `outer`: those that were asked for, or that `auto` chose.
    """

    workload: str
    name: str
    seed: int
    recipe: str
    measure: str  # loss, error or rmse
    changes: dict[str, Any]
    strategy: str = ""
    outer: str = ""
    samples: int = 0
    epochs: list[Epoch] = field(default_factory=list)
    note: str = ""
    commit: str = ""
    when: str = ""

    @property
    def key(self) -> tuple[str, str, int, int]:
        """What tells it from others."""
        return self.workload, self.name, self.replicas, self.seed

    @property
    def replicas(self) -> int:
        """How many learn together."""
        return int(self.changes.get("replicas", 1))

    @property
    def cut(self) -> bool:
        """Whether it was ended for want of time."""
        return self.note == _NO_TIME

    def answers(self, asked: "Trial") -> bool:
        """Whether it ran to its end with what is asked for, wherever the data lies."""
        return not self.cut and {**self.changes, "data": ""} == {**asked.changes, "data": ""}

    def asked(self) -> "Trial":
        """The same before it has run."""
        return replace(self, strategy="", outer="", samples=0, epochs=[], note="", commit="", when="")

    def told(self) -> str:
        """What came of it, in a line."""
        name, shown = " ".join(map(str, self.key)), " ".join(f"{epoch.train:.3f}" for epoch in self.epochs)
        return f"{name}: {shown} {self.note}".rstrip()

    def to_json(self) -> dict[str, Any]:
        """For a record: an epoch is a line."""
        return {**asdict(self), "epochs": [str(epoch) for epoch in self.epochs]}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> "Trial":
        """Read what `to_json` gave."""
        return cls(**{**found, "epochs": [Epoch.parse(text) for text in found["epochs"]]})


def run(trials: Sequence[Trial], *, jobs: int, limit: float = math.inf) -> Iterator[Trial]:
    """Run the trials, `jobs` at a time, and give each when it has ended; `limit` seconds from now they end with their epoch.

    Trials that could not begin in time, or of which nothing is known, are left out; of the latter it is said why.
    """
    deadline = time.time() + limit
    with ThreadPoolExecutor(jobs) as pool:
        for done in as_completed([pool.submit(_run_apart, trial, deadline) for trial in trials]):
            if (trial := done.result()) is not None:
                yield trial


def _run_apart(trial: Trial, deadline: float) -> Trial | None:
    """Run a trial in a process of its own."""
    if time.time() > deadline:
        return None
    with tempfile.TemporaryDirectory() as folder:
        asked, told = Path(folder) / "asked.json", Path(folder) / "told.json"
        asked.write_text(json.dumps(trial.to_json()), encoding="utf-8")
        words = [sys.executable, __file__, str(asked), str(told), str(deadline)]
        done = subprocess.run(words, check=False, capture_output=True, text=True)
        if done.returncode == 0:
            return Trial.from_json(json.loads(told.read_text(encoding="utf-8")))
        print(f"{trial.key} ended with code {done.returncode}:\n{done.stderr[-2000:]}", flush=True)
        return None


def _run_here(trial: Trial, out: Path, deadline: float) -> None:
    """Train; `out` has the trial with all epochs that have ended, at any time."""
    import deepex
    from deepex.machine import describe
    from deepex.record import EpochRecord
    from deepex.training.watch import Watcher

    done = replace(trial, commit=str(describe(environ=os.environ).get("commit", "")))

    def write(**changes: Any) -> None:
        nonlocal done
        done = replace(done, **changes, when=datetime.now(UTC).isoformat(timespec="seconds"))
        out.with_suffix(".new").write_text(json.dumps(done.to_json()), encoding="utf-8")
        out.with_suffix(".new").rename(out)

    class Listener(Watcher):
        def began(self, state: dict[str, Any]) -> None:
            nonlocal done
            done = replace(done, strategy=state["sync"]["strategy"], outer=state["sync"]["outer"])

        def epoch_ended(self, epoch: EpochRecord) -> None:
            scores = [epoch.score(part, trial.measure) for part in ("train", "validation")]
            train, validation = (math.nan if score is None else score for score in scores)
            drift = epoch.drift.get("all", 0.0)
            seen = Epoch(train, validation, epoch.steps, epoch.syncs, drift, epoch.seconds)
            write(epochs=[*done.epochs, seen], samples=epoch.samples)
            if time.time() > deadline:
                write(note=_NO_TIME)
                os._exit(0)  # what was learnt is written; nothing else is wanted of the run

    settings = {"checkpoint.epochs": 10**6, "seed": trial.seed, **trial.changes}
    try:
        with tempfile.TemporaryDirectory() as folder:
            deepex.train(deepex.recipe(trial.recipe, settings), out=Path(folder) / "run", watcher=Listener())
    except DeepexError as error:
        write(note=f"{type(error).__name__}: {error}")
    else:
        write()


if __name__ == "__main__":
    path, result, until = sys.argv[1:]
    _run_here(Trial.from_json(json.loads(Path(path).read_text(encoding="utf-8"))), Path(result), float(until))
