"""`deepex doctor`: what this machine has, what DeepEx would choose here and why, what is wrong and what helps.

$ deepex doctor
$ deepex doctor --json | jq .mpi.cuda_aware
"""

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deepex.cli.output import make_console

if TYPE_CHECKING:
    from rich.table import Table

    from deepex.comm.place import Place

Facts = dict[str, Any]


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Say what this machine has, what DeepEx would choose here and why, and what is wrong."""
    from deepex.comm.place import find_place
    from deepex.errors import CommError

    try:
        place, stale = find_place(os.environ), None
    except CommError as error:
        from deepex.comm.place import Place

        place, stale = Place(), str(error)
    world = _world(place)
    if place.rank != 0:
        return  # one report per job
    facts = _gather(place, stale, world)
    if json:
        from json import dumps

        typer.echo(dumps(facts, indent=1))
    else:
        _show(facts)
    raise typer.Exit(0 if facts["can_train"] else 1)


def _world(place: "Place") -> Facts | None:
    """What MPI sees of a job of several ranks, who all ask; None where the ranks do not meet through MPI."""
    from deepex.comm.start import WITHOUT_MPI
    from deepex.machine import probe_world

    if place.size == 1 or place.launcher in WITHOUT_MPI:
        return None
    return probe_world(os.environ)


def _gather(place: "Place", stale: str | None, world: Facts | None) -> Facts:
    """Collect what `--json` prints. The MPI is started in a process of its own."""
    import tempfile
    from pathlib import Path

    from deepex.machine import describe, probe_mpi
    from deepex.machine.diagnosis import Problem, find_problems, make_plan
    from deepex.machine.storage import describe_file_system

    facts: Facts = {"machine": describe(environ=os.environ), "mpi": probe_mpi(), "backends": _backends()}
    shared = Path("/dev/shm")  # noqa: S108 - it is described, nothing is written there
    directories = {"current": Path(), "temporary": Path(tempfile.gettempdir()), "shared_memory": shared}
    facts["file_systems"] = {name: describe_file_system(path) for name, path in directories.items() if path.is_dir()}
    plan = make_plan(facts["machine"], cuda_usable=facts["backends"]["cuda_usable"])
    facts |= {"plan": asdict(plan), "place": asdict(place), "choice": _choices(facts, asdict(plan), place), "world": world}
    problems = find_problems(facts)
    if stale:
        problems.insert(0, Problem(severity="warning", sentence=stale))
    facts["problems"] = [asdict(problem) for problem in problems]
    facts["can_train"] = all(problem.severity != "fatal" for problem in problems)
    return facts


def _backends() -> Facts:
    """Ask torch what it can do here."""
    try:
        import torch
        from torch import distributed
    except (ImportError, OSError) as error:
        return {"error": str(error), "cuda_usable": False, "nccl": False, "gloo": False, "architectures": []}
    together = distributed.is_available()
    usable = torch.cuda.is_available()
    return {
        "cuda_usable": usable,
        "nccl": together and distributed.is_nccl_available(),
        "gloo": together and distributed.is_gloo_available(),
        "architectures": torch.cuda.get_arch_list() if usable else [],
    }


def _choices(facts: Facts, plan: Facts, place: "Place") -> Facts:
    """Ask `comm` what it would take: for this process as it was started, and for a job of the planned size."""
    from deepex.comm import choose
    from deepex.comm.place import Place
    from deepex.errors import DeepexError

    ranks = plan["ranks"]
    places = {"here": place, "planned": Place(size=ranks, local_size=ranks, host=place.host, launcher="mpich")}
    num_devices = max(1, sum(gpu["visible"] for gpu in facts["machine"]["gpus"]))
    choices: Facts = {}
    for name, where in places.items():
        try:
            choice = choose(
                "auto",
                place=where,
                device=plan["device"],
                mpi_cuda_aware=facts["mpi"]["cuda_aware"],
                own_device=where.local_size <= num_devices,
                num_devices=num_devices,
            )
            choices[name] = {"kind": choice.kind, "reason": choice.reason}
        except (DeepexError, ImportError) as error:
            choices[name] = {"kind": None, "reason": str(error)}
    return choices


def _show(facts: Facts) -> None:
    from rich.padding import Padding
    from rich.text import Text

    console = make_console()
    for title, rows in (("This machine", _machine_rows(facts)), ("What DeepEx would choose", _choice_rows(facts))):
        console.print(Text(title, style="bold"))
        console.print(_table(rows))
    if not facts["problems"]:
        console.print(Text("No problems found.", style="green"))
        return
    console.print(Text("Problems", style="bold"))
    styles = {"fatal": "bold red", "warning": "yellow", "note": "cyan"}
    for problem in facts["problems"]:
        text = Text.assemble((f"{problem['severity']}: ", styles[problem["severity"]]), problem["sentence"])
        console.print(Padding(text, (0, 0, 0, 2)))


def _table(rows: list[tuple[str, str]]) -> "Table":
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(min_width=14, no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(f"  {name}", value)
    return table


def _machine_rows(facts: Facts) -> list[tuple[str, str]]:
    machine = facts["machine"]
    system, versions = machine["system"] or {}, machine["versions"] or {}
    job = machine["job"]
    rows = [
        (
            "host",
            f"{machine['host']}, {system.get('distribution') or system.get('name')}, {system.get('architecture')}",
        ),
        ("processor", _cpu_words(machine["cpu"] or {})),
        ("threads", _thread_words(machine["threads"] or {})),
        ("memory", _memory_words(machine["memory"] or {})),
        *[("GPU", _gpu_words(gpu)) for gpu in machine["gpus"]],
        *([] if machine["gpus"] else [("GPU", "none")]),
        *_mpi_rows(facts["mpi"]),
        ("NCCL", versions.get("nccl") or "in torch" if facts["backends"]["nccl"] else "not in this torch"),
        ("gloo", "in torch" if facts["backends"]["gloo"] else "not in this torch"),
        (
            "software",
            ", ".join(f"{name} {versions[name]}" for name in ("deepex", "torch", "cuda", "python") if versions.get(name)),
        ),
        *([("job", f"{job['scheduler']} {job['id']}")] if job else []),
    ]
    return rows + [(name.replace("_", " "), _file_system_words(found)) for name, found in facts["file_systems"].items()]


def _choice_rows(facts: Facts) -> list[tuple[str, str]]:
    plan, choice = facts["plan"], facts["choice"]
    return [
        ("device", plan["device"]),
        ("ranks", f"up to --ranks {plan['ranks']}: {plan['reason']}"),
        ("threads", f"{plan['threads_per_rank']} per rank; DeepEx sets them, OMP_NUM_THREADS need not be set"),
        ("communicator", f"{choice['planned']['kind']} with --ranks {plan['ranks']}: {choice['planned']['reason']}"),
        ("", f"{choice['here']['kind']} as started now: {choice['here']['reason']}"),
        ("placement", plan["placement"]),
    ]


def _mpi_rows(mpi: Facts) -> list[tuple[str, str]]:
    if mpi["vendor"] is None:
        return [("MPI", "none that could be loaded")]
    aware = {True: "yes", False: "no", None: "unknown"}[mpi["cuda_aware"]]
    return [
        ("MPI", f"{mpi['vendor']} {mpi['version'] or ''} (MPI {mpi['standard']}), {mpi['library']}"),
        ("", f"thread level {mpi['thread_level']}" if mpi["started"] else "could not start"),
        ("", f"CUDA-aware: {aware} ({mpi['cuda_aware_reason']})"),
        ("mpiexec", mpi["mpiexec"] or "none beside the library"),
    ]


def _cpu_words(cpu: Facts) -> str:
    return (
        f"{cpu.get('model') or 'unknown'}, {cpu.get('num_sockets') or '?'} socket(s), {cpu.get('num_cores_physical')} "
        f"physical and {cpu.get('num_cores_logical')} logical cores, {cpu.get('num_cores_usable')} usable"
    )


def _thread_words(threads: Facts) -> str:
    variables = ", ".join(f"{name}={value}" for name, value in threads.get("variables", {}).items())
    return f"torch would use {threads.get('num_torch_threads', '?')}; {variables or 'no thread variables set'}"


def _memory_words(memory: Facts) -> str:
    limit = f" (limited from {_size(memory['node_bytes'])})" if memory.get("limit_bytes") else ""
    return f"{_size(memory.get('total_bytes'))}{limit}, {_size(memory.get('available_bytes'))} available"


def _gpu_words(gpu: Facts) -> str:
    watts = f", {gpu['power_limit_watts']:.0f} W" if gpu["power_limit_watts"] else ""
    hidden = "" if gpu["visible"] else ", hidden by CUDA_VISIBLE_DEVICES"
    return f"{gpu['index']}: {gpu['name']}, {_size(gpu['memory_bytes'])}{watts}, driver {gpu['driver']}{hidden}"


def _file_system_words(found: Facts) -> str:
    shared = "shared between nodes" if found["shared"] else "of this node"
    space = f"{_size(found['free_bytes'])} free of {_size(found['total_bytes'])}"
    return f"{found['directory']}: {found['kind']}, {shared}, {space}"


def _size(count: int | None) -> str:
    """Write a number of bytes for people, in decimal units as disks and networks are sold."""
    if count is None:
        return "?"
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 1e3:.0f} kB"
