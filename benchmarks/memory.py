"""The memory of a rank: what arena and replicas take, against a bare PyTorch loop; and whether anything makes a hidden copy.

    python benchmarks/memory.py

Each case is a process of its own, which reads its resident set (VmRSS, and its peak VmHWM) from the kernel: after imports, after
building, and after three steps of batch 32 on images of 28×28. The bare loop has the same network, batch and steps: parameters,
gradients (set to None), momentum (fused SGD), activations, samples as float32. The arena holds weights and momentum; gradients are
autograd's own on both sides. DeepEx's heap keeps what is freed, as in a run; the bare loop's is left as it is.
For hidden copies the peak is set back before each event (/proc/self/clear_refs), after every page of the arena was written once:
what the peak then rises by is memory that the event itself took. A bare mpi4py Allreduce of as many bytes tells what of that is the
MPI library's. No times are taken, so as many cases run at once as there are cores.
"""

import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from deepex.comm.early import load_mpi

load_mpi()

import torch
from torch.nn import functional

import bench
import deepex
from deepex.arena.arena import Arena
from deepex.comm import Communicator
from deepex.comm.launch import launcher_prefix
from deepex.comm.mpi import MpiCommunicator
from deepex.comm.solo import SoloCommunicator
from deepex.comm.together import abort_on_failure
from deepex.recipes.network import build_network
from deepex.training import checkpoint as checkpoints
from deepex.training.build import build
from deepex.training.gather import make_job, try_order
from deepex.training.learner import Learner
from one_rank import fused_sgd, small_data

NETS = ("resnet18", "resnet50")
STEPS, BATCH, SAMPLES = 3, 32, 768  # eight replicas' three steps
MB = 1e6


def resident(name: str = "VmRSS") -> int:
    """Bytes of this process in memory, now or (VmHWM) at most."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"the kernel tells no {name}")


def growth(event: Callable[[], object]) -> int:
    """By how many bytes the resident set rises at most during `event`."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = resident()
    event()
    return max(0, resident("VmHWM") - before)


def held(owner: object, arena: Arena) -> int:
    """Bytes of the tensors that `owner` has beside the arena."""
    values = [item for value in vars(owner).values() for item in (value if isinstance(value, list) else [value])]
    home = arena.memory.untyped_storage().data_ptr()
    return sum(v.nbytes for v in values if isinstance(v, torch.Tensor) and v.untyped_storage().data_ptr() != home)


def make_config(case: dict[str, Any]) -> deepex.RunConfig:
    changes = {"batch": BATCH, "threads": 1, "layout": "contiguous", "sync.period": STEPS}
    return deepex.recipe("fashion", {**changes, **{key: value for key, value in case.items() if key != "role"}})


def make_learner(case: dict[str, Any], comm: Communicator) -> Learner:
    return Learner(build(try_order(make_job(make_config(case), comm, build_network), comm), comm))


def deepex_case(case: dict[str, Any]) -> dict[str, int]:
    """What a lone rank takes for its replicas."""
    found = {"start": resident()}
    learner = make_learner(case, SoloCommunicator())
    parts, arena = learner.parts, learner.parts.arena
    found |= {"built": resident(), "building": resident("VmHWM")}
    bench.run_epoch(learner, 0)  # three steps of every replica, and a sync
    found |= {"trained": resident(), "peak": resident("VmHWM")}
    return found | {
        "parameters": arena.num_parameters,
        "arena": arena.memory.nbytes,
        "slice": parts.meeting.agreement.nbytes,
        "agreement": held(parts.meeting.agreement, arena),
        "momentum": held(SimpleNamespace(**parts.states.stored()), arena),
        "samples": held(parts.feed, arena),
    }


def bare_case(case: dict[str, Any]) -> dict[str, int]:
    """What the bare loop takes."""
    found = {"start": resident()}
    config = make_config(case)
    job = make_job(config, SoloCommunicator(), build_network)
    images, labels = (torch.from_numpy(array) for array in job.dataset.part("train").read(0, SAMPLES))
    inputs = images.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format).div_(255)
    network = job.network.train()
    optimiser = fused_sgd(network, config)
    found |= {"built": resident(), "building": resident("VmHWM")}
    for batch in torch.randperm(SAMPLES).split(BATCH)[:STEPS]:
        optimiser.zero_grad(set_to_none=True)
        functional.cross_entropy(network(inputs.index_select(0, batch)), labels[batch]).backward()
        optimiser.step()
    return found | {"trained": resident(), "peak": resident("VmHWM")}


def events_case(case: dict[str, Any]) -> dict[str, int] | None:
    """What single events take on each of two ranks; the larger of the two. Rank 0 has the answer."""
    comm = MpiCommunicator()
    from mpi4py import MPI

    with abort_on_failure(comm, print, print), tempfile.TemporaryDirectory() as folder:
        learner = make_learner(case, comm)
        parts, arena, agreement = learner.parts, learner.parts.arena, learner.parts.meeting.agreement
        arena.memory.mul_(1.0)
        comm.sum(torch.zeros(1 << 20))  # what MPI allocates once, for messages of any size
        found = {"initial broadcast": growth(lambda: comm.broadcast(arena.kept))}
        bench.run_epoch(learner, 0)
        found["sync"] = growth(lambda: agreement.reach(comm, request=0.0, rate=0.0))
        plain = torch.ones(agreement.nbytes // arena.memory.itemsize, dtype=arena.memory.dtype)
        found["bare Allreduce of as much"] = growth(lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, plain.numpy()))
        position = checkpoints.Position(1)
        options = {"comm": comm, "replicas": 2, "kept": learner.kept(), "rule": {}, "keep": 2}
        directory = Path(folder) / "checkpoints"
        directory.mkdir()
        found["checkpoint"] = growth(lambda: checkpoints.save(directory, position, arena, parts.network, **options))
        weights = Path(folder) / "weights.safetensors"
        found["final weights"] = growth(lambda: checkpoints.save_weights(weights, arena, parts.network))
        if comm.rank == 0:
            found["resume"] = growth(lambda: checkpoints.restore(checkpoints.newest(directory), arena, parts.network))
            found["layout trial"] = _trial_growth(case)
        found = {name: max(row.get(name, 0) for row in comm.gather(found)) for name in comm.gather(found)[0]}
    return {**found, "arena": arena.memory.nbytes} if comm.rank == 0 else None


def _trial_growth(case: dict[str, Any]) -> int:
    job = make_job(make_config({**case, "layout": "auto"}), SoloCommunicator(), build_network)
    return growth(lambda: try_order(job, SoloCommunicator()))


CASES = {"deepex": deepex_case, "bare": bare_case, "events": events_case}


def run_case(case: dict[str, Any], *, ranks: int = 0) -> dict[str, int]:
    """Run a case in a process of its own, or in `ranks` of them."""
    prefix, extra = launcher_prefix(ranks) if ranks else ([], {})
    command = [*prefix, sys.executable, __file__, "--case", json.dumps(case)]
    done = subprocess.run(command, env={**os.environ, **extra}, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"the case {case} failed:\n{done.stdout}{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def list_cases(data: str, repeats: int) -> dict[tuple[str, object, str], list[dict[str, Any]]]:
    """The cases of one rank by network, replicas and momentum policy; the bare loop and the lone replica are repeated."""
    cases: dict[tuple[str, object, str], list[dict[str, Any]]] = {}
    for net in NETS:
        ours = {"role": "deepex", "net": net, "data": data}
        cases[net, "bare loop", ""] = [{"role": "bare", "net": net, "data": data}] * repeats
        cases[net, 1, "any"] = [{**ours, "replicas": 1}] * repeats
        cases[net, 1, "any, layout by trial"] = [{**ours, "replicas": 1, "layout": "auto"}] * repeats
        for replicas in (2, 8):
            for momentum in ("average", "reset", "local"):
                cases[net, replicas, momentum] = [{**ours, "replicas": replicas, "sync.momentum": momentum}]
    return cases


def compare_with_bare(data: str, repeats: int) -> tuple[list[list[object]], dict[str, Any]]:
    """Rows for every case, and their record."""
    cases = list_cases(data, repeats)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        pending = {names: [pool.submit(run_case, case) for case in same] for names, same in cases.items()}
        found = {names: [future.result() for future in same] for names, same in pending.items()}
    rows, result = [], {}
    for names, same in found.items():
        bare = found[names[0], "bare loop", ""]
        record: dict[str, Any] = {"bytes": same}
        if same is bare:
            rows.append([*names, *[""] * 5, *(f"{bare[0][key] / MB:.0f}" for key in ("start", "built", "peak")), "", ""])
        else:
            record["peak_over_bare"] = against = _over(same, bare)
            rows.append(_row(names, same[0], bench.show_ratio(against), _over_start(same, bare)))
        result[", ".join(map(str, names))] = record
    return rows, result


def _row(names: tuple[object, ...], found: dict[str, int], against: str, over_start: str) -> list[object]:
    slices = found["agreement"] / found["slice"] if found["slice"] else 0
    return [
        *names,
        f"{found['arena'] / MB:.0f}",
        f"{found['arena'] / (8 * found['parameters']):.3f}",
        f"{slices:.1f} slices = {found['agreement'] / found['arena']:.2f} arenas",
        f"{found['momentum'] / found['arena']:.2f}",
        f"{found['samples'] / MB:.1f}",
        *(f"{found[key] / MB:.0f}" for key in ("start", "built", "peak")),
        against,
        over_start,
    ]


def _over(found: list[dict[str, int]], bare: list[dict[str, int]]) -> dict[str, float]:
    """The ratio of the peaks; a case that ran once is compared with each bare loop."""
    ours = [case["peak"] for case in (found if len(found) == len(bare) else found * len(bare))]
    return bench.ratio(ours, [case["peak"] for case in bare])


def _over_start(found: list[dict[str, int]], bare: list[dict[str, int]]) -> str:
    """The same ratio without what the imports take."""
    ours, theirs = (min(case["peak"] - case["start"] for case in cases) for cases in (found, bare))
    return f"{ours / theirs:.2f}"


def find_copies(data: str) -> tuple[list[list[object]], dict[str, Any]]:
    """Rows for every event, as a part of the arena."""
    rows, result = [], {}
    for layout in ("contiguous", "channels_last"):
        found = run_case({"role": "events", "net": "resnet50", "data": data, "layout": layout}, ranks=2)
        result[layout] = found
        for name, size in found.items():
            if name != "arena":
                rows.append([layout, name, f"{size / MB:.1f}", f"{size / found['arena']:.1%}"])
    return rows, result


def main() -> None:
    options = bench.arguments(__doc__, repeats=3)
    data = small_data(SAMPLES)
    try:
        measure(data, options.repeats, keep=options.keep)
    finally:
        shutil.rmtree(Path(data).parent)


def measure(data: str, repeats: int, *, keep: bool) -> None:
    """Run all cases, print the two tables, write the record."""
    rows, result = compare_with_bare(data, repeats)
    columns = [
        "network",
        "replicas on the rank",
        "momentum",
        "arena MB",
        "arena / (2 × 4 B × parameters)",
        "agreement's own buffers (bar 0 for one replica, 2 slices for more)",
        "waiting momenta, arenas",
        "samples MB",
        "RSS MB at start",
        "built",
        "peak",
        "peak / bare loop's (bar 1.05 for one replica)",
        "less imports",
    ]
    bench.print_table(f"resident memory of a rank after {STEPS} steps of batch {BATCH}, 28×28", columns, rows)
    copies, events = find_copies(data)
    bench.print_table(
        "hidden copies: ResNet-50 on 2 ranks, the larger of the two",
        ["layout", "event", "peak rises by MB", "of the arena (bar 10 % for broadcast, sync, checkpoint)"],
        copies,
    )
    bench.write_record("memory", {"results": result, "events": events}, keep=keep)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        given = json.loads(sys.argv[2])
        torch.set_num_threads(1) if given["role"] == "bare" else bench.settle(1)
        answer = CASES[given["role"]](given)
        if answer is not None:
            print(json.dumps(answer))
    else:
        main()
