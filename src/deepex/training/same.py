"""What every rank of a run must have the same, in two parts: what it was started with, and what that became.

As the ranks of a job may be started one by one, each with a configuration of its own, or find another installation or dataset on
their node. Left out is what may differ: the threads of a rank, and the path of the dataset, whose content counts.
"""

from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import torch

from deepex.machine.reading import attempt
from deepex.record.table import to_table
from deepex.training.config import RunConfig
from deepex.training.job import Job

_MAY_DIFFER: Final = ("threads", "data")


def started_with(config: RunConfig, device: str, *, resume: bool, out: Path | str | None) -> dict[str, Any]:
    """What a rank was started with, by key."""
    return {
        "the version of deepex": attempt(lambda: version("deepex")),  # None, where it is not installed
        "the version of torch": torch.__version__,
        "--resume": resume,
        "the run directory": None if out is None else str(Path(out).resolve()),
        "the device": device,
        **_settings(config),
    }


def settled(job: Job, checkpoint: str | None) -> dict[str, Any]:
    """What that became: the configuration as it was settled, the dataset, the network and the checkpoint to go on from."""
    tensors = {**dict(job.network.named_parameters()), **dict(job.network.named_buffers())}
    layout = {
        f"the network's {name}": [list(tensor.shape), str(tensor.dtype), tensor.requires_grad] for name, tensor in tensors.items()
    }
    return {
        **_settings(job.config),
        "the dataset": job.dataset.manifest.digest,
        "the checkpoint": checkpoint,
        "the number of replicas": job.replicas,
        **layout,
    }


def _settings(config: RunConfig) -> dict[str, Any]:
    return {key: value for key, value in _flat(to_table(config), "").items() if key not in _MAY_DIFFER}


def _flat(table: dict[str, Any], where: str) -> dict[str, Any]:
    flat = {}
    for key, value in table.items():
        flat.update(_flat(value, f"{where}{key}.") if isinstance(value, dict) else {where + key: value})
    return flat
