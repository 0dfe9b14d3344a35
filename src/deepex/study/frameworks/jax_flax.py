"""JAX with Flax and Optax: one compiled step, one process per rank, gradients summed by XLA's collectives.

Ranks are joined by jax.distributed; on CPUs XLA then sums through gloo, on GPUs through NCCL. That works as it would on several
nodes, which one process over several devices of a host (xla_force_host_platform_device_count) would not. Samples and the order of
an epoch are on the device, so that a step is handed a number. Tried: gradients summed one by one, or as one vector.

A last step in which ranks have different numbers of samples is padded and masked. Running statistics of batch norm are averaged
over ranks together with the gradients, since XLA has one copy of what all ranks share.
"""

import socket
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, final

from typing_extensions import override

from deepex.study.frameworks.base import Framework, Training, UnsupportedTask

if TYPE_CHECKING:
    from deepex.comm import Communicator
    from deepex.study.frameworks.workload import Workload
    from deepex.training.config import RunConfig


@final
class JaxFlax(Framework):
    """JAX, with the libraries that most use with it."""

    name = "jax"
    packages = ("jax", "flax", "optax")
    requirement = "jax flax optax"

    @override
    def prepare(self, environ: MutableMapping[str, str], *, threads: int) -> None:
        environ["NPROC"] = str(threads)  # the size of XLA's pool of threads; there is no option for it
        several = "true" if threads > 1 else "false"
        flags = f"--xla_cpu_multi_thread_eigen={several} intra_op_parallelism_threads={threads}"
        environ["XLA_FLAGS"] = f"{environ.get('XLA_FLAGS', '')} {flags}".strip()
        environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

    @override
    def check(self, config: "RunConfig", *, ranks: int) -> None:
        super().check(config, ranks=ranks)
        refuse_other_than_classify(self.name, config)

    @override
    def build(self, task: "Workload") -> Training:
        from deepex.study.frameworks.jax_training import JaxTraining
        from deepex.study.frameworks.layers import describe

        layers = describe(task.network, task.manifest.shape)
        _join(task)
        return JaxTraining(task, layers)


def refuse_other_than_classify(name: str, config: "RunConfig") -> None:
    """Raise UnsupportedTask for what is written for PyTorch alone."""
    if config.task != "classify":
        raise UnsupportedTask(
            f"{name} does not train this here: the task {config.task} and its networks are not translated; compare with "
            "pytorch and lightning"
        )
    if config.precision != "fp32":
        raise UnsupportedTask(f"{name} does not train this here: precision is {config.precision}; set precision=fp32")


def free_port() -> int:
    """Find a port on which nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def own_address(comm: "Communicator") -> str:
    """Where the other ranks reach this one."""
    return "localhost" if comm.place.num_nodes == 1 else socket.getfqdn()


def _join(task: "Workload") -> None:
    import jax

    comm, on_gpu = task.comm, task.device.type == "cuda"
    jax.config.update("jax_platforms", "cuda" if on_gpu else "cpu")
    jax.config.update("jax_default_matmul_precision", "highest")  # else a GPU computes float32 as TF32
    if comm.size == 1:
        return
    if not on_gpu:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    coordinator = comm.gather(f"{own_address(comm)}:{free_port()}" if comm.rank == 0 else None)[0]
    own = [task.device.index] if on_gpu else None
    jax.distributed.initialize(coordinator, comm.size, comm.rank, local_device_ids=own)
