"""The job scripts of a study run as they are written."""

import sys
from pathlib import Path
from time import monotonic, sleep

import pytest

from deepex.record import StudyDirectory
from tests.cluster.cluster import HANGS, Cluster

pytestmark = pytest.mark.cluster

KEYS = ("samples=256", "validate=none", "threads=1", "sampling=0")


def wait_for_jobs(cluster: Cluster) -> None:
    deadline = monotonic() + HANGS
    while (queue := cluster.run(["squeue", "--noheader"])).stdout.strip():
        assert monotonic() < deadline, str(queue)
        sleep(0.5)


def test_every_run_of_a_submitted_study_finishes(cluster: Cluster, tmp_path: Path) -> None:
    out = tmp_path / "study"
    settings = [part for key in KEYS for part in ("--set", key)]
    plan = ["study", "strong", "fashion", "--ranks", "1,3", "--repeats", "1", "--epochs", "2", *settings]
    script = ["--script", "slurm", "--ranks-per-node", "2", "--out", str(out)]
    written = cluster.run([sys.executable, "-m", "deepex", *plan, *script])
    assert written.code == 0, str(written)
    submitted = cluster.run(["sh", str(out / "scripts/submit.sh")])
    assert submitted.code == 0, str(submitted)
    wait_for_jobs(cluster)
    study = StudyDirectory.open(out)
    logs = "\n".join(path.read_text() for path in sorted((out / "scripts").glob("*.log")))
    assert [study.status(planned) for planned in study.plan] == ["finished"] * 2, logs
