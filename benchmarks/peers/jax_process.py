"""JAX in a process of its own, so that its memory and its libraries do not mix with torch's."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from peers.workload import RATE, Unavailable, Workload


def measure_jax(
    workload: Workload,
    repeats: int,
    *,
    rate: float = RATE,
    platform: str = "cuda",
    plain: bool = False,
    timeout_seconds: float = 900,
) -> dict[str, Any]:
    """Train random samples for two epochs of warm-up and `repeats` timed ones; `plain` does without Flax and Optax.

    Without the `platform` it raises Unavailable: JAX would otherwise take the CPU and not tell.
    """
    if workload.net != "resnet50" or workload.task != "classify":
        raise Unavailable(f"jax: not applicable to {workload.net} with task {workload.task}, only to ResNet-50")
    if importlib.util.find_spec("jax") is None:
        raise Unavailable("jax: not installed")
    task = json.dumps({"workload": asdict(workload), "repeats": repeats, "rate": rate, "plain": plain})
    paths = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    environ = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_PLATFORMS": platform, "PYTHONPATH": paths}
    command = [sys.executable, "-m", "peers.jax_resnet", task]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=timeout_seconds)
    if done.returncode:
        raise RuntimeError(f"the process of JAX ended with {done.returncode}:\n{done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if "unavailable" in result:
        raise Unavailable(f"jax: no {platform} device ({result['unavailable']})")
    return result
