"""What a study will cost, from a training of a few batches on one rank.

    cost = probe(subject, request)
    cost.seconds(planned)              # of one run of the plan

It is an estimate: it takes ranks and threads for as fast as the first one up to the number of cores, and knows nothing of memory
bandwidth, caches or the network. What the runs really take corrects it while they run.
"""

import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, Final

from deepex.errors import ConfigError
from deepex.record import PlannedRun, RunDirectory
from deepex.record.table import parse_assignments
from deepex.study.kinds import Subject
from deepex.study.plan import Request

_BATCHES: Final = 4
_VALIDATION: Final = 1 / 3  # of the time that training on a sample takes


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds to start a run, and of each sample that one thread trains on; how many samples there are to validate."""

    start_seconds: float
    sample_seconds: float
    samples: int
    validated: int
    cores: int

    def seconds(self, planned: PlannedRun) -> float:
        """The estimate for one run."""
        changes = _settings(planned)
        threads = int(changes.get("threads", 1)) or 1
        at_once = min(planned.ranks * threads, self.cores)
        samples = int(changes.get("samples", 0)) or self.samples
        epoch = (samples + _VALIDATION * self.validated) * self.sample_seconds / at_once
        return self.start_seconds * max(1.0, planned.ranks / self.cores) + int(changes["epochs"]) * epoch


def probe(subject: Subject, request: Request) -> Cost:
    """Train a few batches on one rank with one thread, and time them."""
    samples = min(subject.samples, _BATCHES * subject.config.batch)
    short = [f"samples={samples}", "epochs=2", "threads=1", "replicas=1", "target=loss <= -1e9", "verify=false"]
    short += [f"{key}={value}" for key, value in subject.step.items()]
    with tempfile.TemporaryDirectory(prefix="deepex-probe-") as folder:
        out = Path(folder) / "run"
        words = [word for text in (*request.settings, *short) for word in ("--set", text)]
        began = perf_counter()
        done = subprocess.run(
            [sys.executable, "-P", "-m", "deepex", "train", request.recipe, *words, "--quiet", "--out", str(out)],
            capture_output=True,
            text=True,
            check=False,
        )
        seconds = perf_counter() - began
        if done.returncode:
            said = [line.removeprefix("deepex: ") for line in done.stderr.splitlines() if line.startswith("deepex:")]
            raise ConfigError(said[-1] if said else f"a first run of a few batches failed:\n{done.stderr[-2000:]}")
        run = RunDirectory.open(out)
        epochs, state = run.epochs(), run.state
    trained = sum(epoch.seconds for epoch in epochs)
    validated = int(state["samples"].get("validation", 0)) if subject.config.validate != "none" else 0
    each = epochs[-1].seconds / epochs[-1].samples
    start = max(0.0, seconds - trained - _VALIDATION * validated * each * len(epochs))
    return Cost(start_seconds=start, sample_seconds=each, samples=subject.samples, validated=validated, cores=subject.cores)


def with_estimates(plan: list[PlannedRun], subject: Subject, request: Request) -> list[PlannedRun]:
    """The plan with what each run is thought to take; nothing is tried where all of them know that themselves."""
    if all(planned.estimate_seconds is not None for planned in plan):
        return plan
    cost = probe(subject, request)
    return [p if p.estimate_seconds is not None else replace(p, estimate_seconds=cost.seconds(p)) for p in plan]


def _settings(planned: PlannedRun) -> dict[str, Any]:
    words = planned.command
    return parse_assignments(words[k + 1] for k, word in enumerate(words[:-1]) if word == "--set")
