"""A run's whole configuration: the plain composition of what each component owns.

config = RunConfig(net="lenet", data="sample:fashion", epochs=5)
from_table(RunConfig, to_table(config)) == config
"""

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Final, Literal

from deepex.arena.optimiser.config import OptimConfig
from deepex.data.augment import AugmentConfig
from deepex.errors import ConfigError
from deepex.record.table import check_types
from deepex.record.target import Target
from deepex.step.runner import StepOptions
from deepex.sync.config import SyncConfig
from deepex.task import task_kind
from deepex.training.checkpoint import CheckpointConfig

_MOST_THREADS: Final = 4096  # more than any node has cores; the libraries crash where the system gives them fewer than they want


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that decides a run.

    `net`: a name of `deepex.nets` or `package.module:function`; `net_options` go to that function; `init` initialises its weights.
    `data`: the directory of a packed dataset, `sample:NAME` for one that comes with DeepEx, or HDF5 files; `data_options`: how HDF5
    is read without packing; `samples`: to train on the first so many, 0 for all. `replicas`: 0 for one per rank. `batch` is per
    replica. `validate`: by all ranks in `parallel`, on `rank0` as in the paper, or `none`. `threads`: per rank, 0 for the cores of
    the node divided among its ranks. `verify`: check the dataset's checksums as its files are read. `layout`: order of images
    in memory. `onednn`: whether a CPU may compute with oneDNN's kernels (on Arm those of the Arm Compute Library); off, one sees
    what they gain. `augment`: random crops and flips. `statistics`: batch norm's, with which weights are validated and delivered:
    the `running` ones, or `estimated` anew from some training batches, which `auto` chooses where replicas make few steps in an
    epoch. `sampling`: seconds between two looks at what the run uses (processor, memory, I/O, GPU, energy); 0 for none.
    """

    net: str
    data: str
    data_options: dict[str, Any] = field(default_factory=dict)
    samples: int = 0
    net_options: dict[str, Any] = field(default_factory=dict)
    init: str = "default"
    task: str = "classify"
    epochs: int = 10
    batch: int = 32
    replicas: int = 0
    seed: int = 1
    target: str | float | None = None
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    step: Literal["auto", "fastest", "eager", "compiled", "captured"] = "auto"
    fuse: bool = True
    placement: Literal["auto", "device", "host", "stream"] = "auto"
    layout: Literal["auto", "channels_last", "contiguous"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    comm: Literal["auto", "solo", "mpi", "gloo", "nccl"] = "auto"
    deterministic: bool = False
    onednn: bool = True
    threads: int = 0
    validate: Literal["parallel", "rank0", "none"] = "parallel"
    statistics: Literal["auto", "running", "estimated"] = "auto"
    verify: bool = True
    sampling: float = 0.2
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    renamed: ClassVar[dict[str, str]] = {"objective": "task"}

    def __post_init__(self) -> None:
        check_types(self)
        for name, least in (("epochs", 1), ("batch", 1), ("replicas", 0), ("threads", 0), ("seed", 0), ("samples", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if self.threads > _MOST_THREADS:
            raise ConfigError(f"threads is {self.threads}; it must be at most {_MOST_THREADS}: it is what each rank computes with")
        if self.sampling != 0 and not 0.01 <= self.sampling <= 3600:
            raise ConfigError(f"sampling is {self.sampling}; it must be from 0.01 to 3600 seconds, or 0 for no sampling")
        task_kind(self.task)
        if self.target is not None:
            self._check_target(Target.parse(str(self.target)))

    def _check_target(self, target: Target) -> None:
        target.check(task_kind(self.task).measures, self.task)
        if target.part == "validation" and self.validate == "none":
            raise ConfigError(f"target is {self.target!r}, but validate is none: set validate=parallel")

    @property
    def state_policies(self) -> dict[str, str]:
        """What becomes of each of the optimiser's states at a sync of weights, in the order of memory."""
        return self.optim.policies(self.sync.momentum)

    @property
    def step_options(self) -> StepOptions:
        """What of it decides how steps are run."""
        return StepOptions(**{field.name: getattr(self, field.name) for field in fields(StepOptions)})

    def replicas_on(self, ranks: int) -> int:
        """How many replicas the run has on `ranks` ranks."""
        replicas = self.replicas or ranks
        if replicas % ranks:
            near = sorted({max(1, replicas // ranks) * ranks, (replicas // ranks + 1) * ranks})
            raise ConfigError(
                f"{replicas} replicas cannot live on {ranks} ranks: the number of replicas must be a multiple of the number of "
                f"ranks; use --replicas {' or '.join(map(str, near))}, or a number of ranks that divides {replicas}"
            )
        return replicas
