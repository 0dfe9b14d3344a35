"""What to run here, and what is wrong here: sentences with remedies, from facts alone.

    plan = make_plan(machine, cuda_usable=False)          # 16 ranks of 4 threads, one per physical core …
    for problem in find_problems(facts):
        print(problem.severity, problem.sentence)

`facts` has the keys machine (`describe`), mpi (`probe_mpi`), backends, file_systems and plan (`deepex doctor --json`); within a job
of several ranks also place and world (`probe_world`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

from deepex.machine.mpi import srun_mpi

MachineFacts = dict[str, Any]

_SHARED_MEMORY_BYTES: Final = 64_000_000  # what containers give by default; a few ranks of any MPI fill it
_FREE_BYTES: Final = 1_000_000_000
_FREE_FRACTION: Final = 0.02


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A fact that hurts, and its remedy. Fatal: nothing can be trained; warning: slower or less; note: good to know."""

    severity: Literal["fatal", "warning", "note"]
    sentence: str


@dataclass(frozen=True, kw_only=True)
class RankAdvice:
    """What `--ranks` could sensibly be on this machine, and what goes with it."""

    device: str
    ranks: int
    threads_per_rank: int
    placement: str
    reason: str


def make_plan(machine: MachineFacts, *, cuda_usable: bool) -> RankAdvice:
    """One rank per GPU that torch can use, else one per physical core that this process may use."""
    cpu = machine.get("cpu") or {}
    cores = cpu.get("num_cores_usable_physical") or cpu.get("num_cores_usable") or 1
    gpus = [gpu for gpu in machine.get("gpus") or [] if gpu["visible"]]
    if cuda_usable:
        ranks = max(1, len(gpus))
        placement = "device while a rank's shard fits on its GPU, then host, then stream"
        return RankAdvice(
            device="cuda",
            ranks=ranks,
            threads_per_rank=max(1, cores // ranks),
            placement=placement,
            reason="one rank per GPU",
        )
    placement = "device, which is host memory here, while a rank's shard fits in it, then stream"
    return RankAdvice(
        device="cpu", ranks=cores, threads_per_rank=1, placement=placement, reason="one rank per usable physical core"
    )


def find_problems(facts: MachineFacts) -> list[Problem]:
    """List all problems, the worst first."""
    found = [
        *_torch_problems(facts),
        *_mpi_problems(facts),
        *_world_problems(facts),
        *_thread_problems(facts),
        *_storage_problems(facts["file_systems"]),
    ]
    return sorted(found, key=lambda problem: ("fatal", "warning", "note").index(problem.severity))


def _torch_problems(facts: MachineFacts) -> Iterator[Problem]:
    versions = facts["machine"].get("versions") or {}
    gpus = facts["machine"].get("gpus") or []
    if not versions.get("torch"):
        why = facts["backends"].get("error") or "it is not installed"
        yield _fatal(f"torch could not be imported ({why}): install it with `pip install torch`.")
        return
    if versions.get("cuda") and not gpus:
        yield _note(
            f"torch was built for CUDA {versions['cuda']}, but no NVIDIA GPU is here, so training uses the CPU: "
            "normal on a login node; on a GPU node ask the job for GPUs, and in a container pass the driver in "
            "(--nv, --gpus all)."
        )
    if gpus and not versions.get("cuda"):
        yield _warning(
            f"{len(gpus)} GPU(s) are here, but torch {versions['torch']} was built without CUDA and cannot use them: "
            "install a CUDA build of torch."
        )
    elif gpus and not any(gpu["visible"] for gpu in gpus):
        yield _warning("CUDA_VISIBLE_DEVICES hides every GPU, so training uses the CPU: unset it or name GPUs in it.")
    elif gpus and not facts["backends"].get("cuda_usable"):
        yield _warning(
            f"torch cannot use the GPUs: the driver {gpus[0]['driver']} may be too old for CUDA {versions['cuda']}: "
            "update the driver, or install a torch built for an older CUDA."
        )
    yield from _architecture_problems(gpus, facts["backends"].get("architectures") or [])


def _architecture_problems(gpus: list[MachineFacts], architectures: list[str]) -> Iterator[Problem]:
    """Find GPUs that this build of torch leaves out, old or very new ones: the first kernel would fail on them."""
    for name, capability in sorted({(gpu["name"], gpu["compute_capability"] or "") for gpu in gpus if gpu["visible"]}):
        if capability and architectures and not _runs_on(capability, architectures):
            yield _warning(
                f"this torch has no code for {name} (compute capability {capability}; it has {', '.join(architectures)}"
                "): install a build of torch for it, or use the CPU with CUDA_VISIBLE_DEVICES=''."
            )


def _runs_on(capability: str, architectures: list[str]) -> bool:
    """Binary code (sm_) runs on its major version from its minor one on, intermediate code (compute_) on all later."""
    major, minor = map(int, capability.split("."))
    for architecture in architectures:
        kind, _, digits = architecture.partition("_")
        number = int("".join(filter(str.isdigit, digits)) or 0)
        if kind == "compute" and number <= major * 10 + minor:
            return True
        if number // 10 == major and number % 10 <= minor:
            return True
    return False


def _mpi_problems(facts: MachineFacts) -> Iterator[Problem]:
    mpi, plan = facts["mpi"], facts["plan"]
    if not mpi["started"]:
        yield _warning(
            f"MPI could not start, so only one rank can train ({mpi['error']}): on a login node try again inside a "
            "job; else load the site's MPI module and name its library in MPI4PY_LIBMPI, or `pip install mpich`."
        )
        return
    if mpi["thread_level"] not in ("MULTIPLE", "SERIALIZED"):
        yield _warning(
            f"this MPI gives the thread level {mpi['thread_level']}, so it cannot synchronise in the background: "
            "use an MPI built with MPI_THREAD_MULTIPLE."
        )
    if not mpi["mpiexec"]:
        yield _note("no mpiexec was found beside the MPI library: start ranks with the site's launcher (srun, jsrun, mpiexec).")
    if plan["device"] == "cuda" and not mpi["cuda_aware"]:
        how = "NCCL is used with one GPU per rank, and" if facts["backends"].get("nccl") else "NCCL is not in this torch, so"
        yield _note(f"this MPI does not take GPU memory ({mpi['cuda_aware_reason']}): {how} MPI copies through host memory.")


def _world_problems(facts: MachineFacts) -> Iterator[Problem]:
    """Find a launcher and an MPI library that do not know each other: each rank would train alone, or none would start."""
    world, place, mpi = facts.get("world"), facts.get("place") or {}, facts["mpi"]
    if not world or world["size"] == place["size"]:
        return
    found = f"MPI sees {world['size']}" if world["size"] else f"MPI could not start there ({world['error']})"
    how = srun_mpi(mpi.get("vendor")) if place["launcher"] == "slurm" else None
    other = f"srun --mpi={how}" if how else mpi.get("mpiexec") or "the launcher of that library"
    yield _fatal(
        f"the launcher ({place['launcher']}) started {place['size']} ranks, but {found}: the library that mpi4py loads, "
        f"{mpi.get('vendor') or 'none'} {mpi.get('library') or ''}, does not know this launcher: start with {other}, or name the "
        "launcher's own library in MPI4PY_LIBMPI."
    )


def _thread_problems(facts: MachineFacts) -> Iterator[Problem]:
    threads = facts["machine"].get("threads") or {}
    cpu, plan = facts["machine"].get("cpu") or {}, facts["plan"]
    asked = str((threads.get("variables") or {}).get("OMP_NUM_THREADS", "")).partition(",")[0]
    cores = cpu.get("num_cores_usable") or 1
    if asked.isdecimal() and plan["ranks"] > 1 and int(asked) * plan["ranks"] > cores:
        yield _warning(
            f"OMP_NUM_THREADS is {asked}: {plan['ranks']} ranks want {int(asked) * plan['ranks']} of {cores} cores: "
            f"unset it (DeepEx then gives each rank its share), or set it to {max(1, cores // plan['ranks'])}."
        )
    if cores < (cpu.get("num_cores_logical") or cores):
        yield _note(
            f"this process may use {cores} of {cpu['num_cores_logical']} logical cores (affinity or a control group): "
            "ask the batch system or the launcher for more if you want them all (--cpus-per-task, --bind-to none)."
        )


def _storage_problems(file_systems: dict[str, MachineFacts]) -> Iterator[Problem]:
    memory = file_systems.get("shared_memory") or {}
    if memory.get("total_bytes") is not None and memory["total_bytes"] < _SHARED_MEMORY_BYTES:
        yield _warning(
            f"the shared memory {memory['directory']} has {memory['total_bytes'] / 1e6:.0f} MB; the ranks of a node "
            f"exchange data through it and want at least {_SHARED_MEMORY_BYTES / 1e6:.0f} MB: start the container with "
            "--shm-size=1g or --ipc=host."
        )
    for name in ("current", "temporary", "shared_memory"):
        yield from _space_problems(name, file_systems.get(name) or {})


def _space_problems(name: str, found: MachineFacts) -> Iterator[Problem]:
    where = f"the {name.replace('_', ' ')} directory {found.get('directory')}"
    total, free = found.get("total_bytes"), found.get("free_bytes")
    low = min(_FREE_BYTES, total / 2) if total else 0  # a small file system is not full because it is small
    if total and free is not None and (free < low or free < _FREE_FRACTION * total):
        yield _warning(f"{where} has {free / 1e9:.2f} of {total / 1e9:.1f} GB free: make room, or write elsewhere (--out, TMPDIR).")
    if found.get("writable") is False:
        yield _warning(f"{where} is not writable: write elsewhere (--out, TMPDIR).")


def _fatal(sentence: str) -> Problem:
    return Problem(severity="fatal", sentence=sentence)


def _warning(sentence: str) -> Problem:
    return Problem(severity="warning", sentence=sentence)


def _note(sentence: str) -> Problem:
    return Problem(severity="note", sentence=sentence)
