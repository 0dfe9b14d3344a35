"""What the machine's paths carry: within memory, between host and device, from rank to rank, and in an all-reduce.

    mpiexec -n 4 python -P -m deepex.study.transfer --out measurements.json --comm mpi --sizes 8,1024,1048576

    tables = measure(comm, sizes=[8, 1 << 20])      # collective; every rank gets them all

Tables are of two kinds. One for each size of each path, which has `bytes`:

    {"path": "all-reduce mpi, 4 ranks", "kind": "all-reduce", "comm": "mpi", "ranks": 4, "bytes": 1024, "runs": 5000,
     "seconds": [of one transfer, in each repeat], "bandwidth_bytes_per_second": bytes / median of seconds,
     "bus_bandwidth_bytes_per_second": that times 2(P - 1)/P (of an all-reduce), "note": "as a sync does it"}

and behind these one for each path of several sizes, which has `fit` instead: latency and bandwidth of the line through the medians
(fit.py; a bandwidth is null if time does not grow with size), and how far the farthest point is from it.

A rank that does not take part sleeps meanwhile, and then waits: it must not take a core from those that do.
"""

import argparse
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from statistics import median
from time import sleep
from typing import Any, Final

import torch

from deepex.comm import Communicator, connect
from deepex.comm.deadline import fail
from deepex.comm.together import abort_on_failure, together
from deepex.errors import ConfigError, DeepexError, UnknownName
from deepex.machine.hardware import describe_cpu, describe_memory
from deepex.record.files import write_json
from deepex.study.transfer.fit import fit, worst_deviation
from deepex.study.transfer.probe import HOST, Probe, all_reduce, memory, ping_pong
from deepex.study.transfer.probe_gpu import gpu_probes
from deepex.study.transfer.timing import Timing

Table = dict[str, Any]

_MOST_BYTES: Final = 64 << 20
_MEMORY_SHARE: Final = 0.25  # of what is free on a node: a path has two buffers of a size
_WORD_BYTES: Final = torch.float32.itemsize  # what is summed


def measure(
    comm: Communicator,
    *,
    sizes: Sequence[int] = (),
    groups: Sequence[int] = (),
    timing: Timing | None = None,
    device: torch.device = HOST,
    watch: Callable[[Table], None] = lambda _: None,
) -> list[Table]:
    """Time every path that the ranks of `comm` have, and give every rank all tables. Collective.

    `sizes` in bytes are by default 8 to 64 MiB, as far as memory allows; `groups` the numbers of ranks that all-reduce, by default
    2, 4, 8 … and all. `device` is this rank's. `watch` is told each table on its rank. Call it within `abort_on_failure`
    (comm/together.py), as errors are of one rank or of all.
    """
    timing = timing or Timing()
    room = min(comm.gather(_room(comm)))
    sizes = together(comm, lambda: _check_sizes(sizes, room))
    groups = together(comm, lambda: _check_groups(groups, comm.size))
    tables: list[Table] = []
    for members, probes in _plan(comm, groups, device):
        part = comm.split(int(comm.rank not in members))
        if comm.rank in members:
            for probe in probes:
                for table in _along(part, probe, sizes, timing):
                    tables.append({**table, "comm": comm.kind})
                    watch(tables[-1])
        else:
            sleep(timing.seconds * len(sizes) * len(probes))
        part.close()
        comm.barrier()
    found: list[Table] = comm.gather(tables if comm.rank == 0 else None)[0]  # rank 0 is a member of all
    return found


def default_sizes(most: int = _MOST_BYTES) -> list[int]:
    """Eight bytes, four times as many, and so on; the last is `most`, or 64 MiB."""
    most = max(8, min(most, _MOST_BYTES) // 8 * 8)
    sizes = [8]
    while 4 * sizes[-1] < most:
        sizes.append(4 * sizes[-1])
    return sizes if sizes[-1] == most else [*sizes, most]


def _plan(comm: Communicator, groups: Sequence[int], device: torch.device) -> Iterator[tuple[Collection[int], list[Probe]]]:
    """Which ranks measure which paths, one set of ranks after another; rank 0 is in each."""
    on_gpu = device.type == "cuda"
    for ranks in sorted({1, comm.size}):
        yield range(ranks), [memory(ranks), *(gpu_probes(device, ranks) if on_gpu else ())]
    # What a communicator is for: NCCL moves device memory alone, gloo the host's, MPI both.
    places = [HOST] * (comm.kind != "nccl") + [device] * (on_gpu and comm.kind != "gloo")
    nodes = comm.gather(comm.place.node)
    for pair, note in _pairs(nodes).items():
        yield pair, [ping_pong(comm.kind, pair, device=place, note=note) for place in places]
    for ranks in groups:
        probes = [all_reduce(comm.kind, ranks, device=place) for place in places]
        # On one node a sync sums in memory that the ranks share. What the library does, as it must between nodes, comes beside it.
        if HOST in places and len(set(nodes[:ranks])) == 1:
            probes.append(all_reduce(comm.kind, ranks, device=HOST, own=True))
        yield range(ranks), probes


def _pairs(nodes: Sequence[int]) -> dict[tuple[int, int], str]:
    """Rank 0 with the next and with the last, and with one of its own node and of another, if there are; and what each pair is."""
    others = range(1, len(nodes))
    near = next((rank for rank in others if nodes[rank] == nodes[0]), None)
    far = next((rank for rank in others if nodes[rank] != nodes[0]), None)
    chosen = sorted({rank for rank in (*others[:1], near, far, *others[-1:]) if rank is not None})
    return {(0, rank): "within a node" if nodes[rank] == nodes[0] else "between nodes" for rank in chosen}


def _crowded(ranks: int, cores: int | None) -> str:
    """What to say of ranks that must share cores: each may wait for time slices of those that wait for it."""
    return f"{ranks} ranks on {cores} cores: times are those of waiting for a core" if cores and ranks > cores else ""


def _along(part: Communicator, probe: Probe, sizes: Sequence[int], timing: Timing) -> Iterator[Table]:
    """The tables of one path."""
    crowded = _crowded(part.place.local_size, describe_cpu()["num_cores_usable"])
    note = "; ".join(filter(None, (probe.note, crowded)))
    about = {"path": probe.path, "kind": probe.kind, "ranks": part.size, "note": note}
    points = []
    for size in sizes:
        found, runs = timing.time(part, probe.make(part, size), probe.settle)
        seconds = [one / probe.transfers for one in found]
        bandwidth = size / median(seconds)
        bus = {"bus_bandwidth_bytes_per_second": probe.traffic * bandwidth} if probe.traffic is not None else {}
        yield {**about, "bytes": size, "runs": runs, "seconds": seconds, "bandwidth_bytes_per_second": bandwidth, **bus}
        points.append((size, median(seconds)))
    if len(points) > 1:
        latency, bandwidth = fit(points)
        line = {
            "latency_seconds": latency,
            "bandwidth_bytes_per_second": bandwidth if bandwidth < float("inf") else None,
            "worst_deviation": worst_deviation(points, latency, bandwidth),
        }
        yield {**about, "fit": line}


def _room(comm: Communicator) -> int:
    """The bytes that a buffer may have here."""
    free = describe_memory()["available_bytes"]
    return int(_MEMORY_SHARE * free) // comm.place.local_size if free else _MOST_BYTES


def _check_sizes(sizes: Sequence[int], room: int) -> list[int]:
    for size in sizes:
        if size < _WORD_BYTES or size % _WORD_BYTES:
            raise ConfigError(f"--sizes has {size}; a size is a multiple of {_WORD_BYTES} bytes, for example 8,1024,1048576")
        if size > room:
            raise ConfigError(f"--sizes has {size}, but a rank has memory for {room} bytes: leave it out, or use fewer ranks")
    return sorted(set(sizes)) or default_sizes(room)


def _check_groups(groups: Sequence[int], size: int) -> list[int]:
    for ranks in groups:
        if not 2 <= ranks <= size:
            raise ConfigError(f"--groups has {ranks}; a group has 2 ranks at least and at most the {size} that there are")
    powers = [1 << k for k in range(1, size.bit_length())]
    return sorted(set(groups) or {*powers, *((size,) if size > 1 else ())})


def _numbers(name: str, text: str) -> list[int]:
    return [int(_number(name, part, int)) for part in text.split(",")] if text else []


def _number(name: str, text: str, kind: type[int] | type[float]) -> float:
    try:
        return kind(text)
    except ValueError:
        what = "whole numbers" if kind is int else "a number"
        raise ConfigError(f"{name} has {text!r}; it takes {what}, for example {'2' if kind is int else '0.3'}") from None


def _say(table: Table) -> None:
    if "fit" in table:
        line, speed = table["fit"], table["fit"]["bandwidth_bytes_per_second"]
        rate = "no limit seen" if speed is None else f"{speed / 1e9:9.3f} GB/s"
        text = f"latency {line['latency_seconds'] * 1e6:10.2f} us, {rate}, up to {line['worst_deviation']:.0%} off the line"
    else:
        rate = f"{table['bandwidth_bytes_per_second'] / 1e9:9.3f} GB/s"
        text = f"{table['bytes']:>10} B {median(table['seconds']) * 1e6:12.2f} us {rate}"
    sys.stdout.write(f"{table['path']:<36} {text}\n")
    sys.stdout.flush()


def _complain(text: str) -> None:
    sys.stderr.write(f"deepex: {text}\n")
    sys.stderr.flush()


def run(options: argparse.Namespace) -> None:
    """Measure as the options say, and write the tables; rank 0 prints them as they come."""
    timing = Timing(seconds=_number("--seconds", options.seconds, float), repeats=int(_number("--repeats", options.repeats, int)))
    sizes, groups = _numbers("--sizes", options.sizes), _numbers("--groups", options.groups)
    on_gpu = torch.cuda.is_available()
    comm = connect(options.comm, device="cuda" if on_gpu else "cpu")
    device = torch.device("cuda", comm.place.local_rank % torch.cuda.device_count()) if on_gpu else HOST
    torch.set_num_threads(max(1, (describe_cpu()["num_cores_usable"] or 1) // comm.place.local_size))  # as a training does
    with abort_on_failure(comm, _complain, lambda _: None):
        watch = _say if comm.rank == 0 else lambda _: None
        tables = measure(comm, sizes=sizes, groups=groups, timing=timing, device=device, watch=watch)
        together(comm, lambda: write_json(_file(options.out), tables) if comm.rank == 0 else None)
    comm.close()


def _file(out: str) -> Path:
    path = Path(out)
    return path / "measurements.json" if path.is_dir() else path


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program; every error that is ours becomes one line."""
    parser = argparse.ArgumentParser(prog="python -P -m deepex.study.transfer", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", metavar="FILE", required=True, help="the JSON file to write; in a directory, measurements.json")
    parser.add_argument("--comm", default="auto", help="auto, mpi, gloo or nccl [auto]")
    parser.add_argument("--sizes", default="", metavar="BYTES,…", help="[8 to 67108864, each 4 times the one before]")
    parser.add_argument("--groups", default="", metavar="RANKS,…", help="how many ranks all-reduce [2, 4, 8 … and all]")
    parser.add_argument("--seconds", default="0.3", help="for each size of each path [0.3]")
    parser.add_argument("--repeats", default="5", help="of each measurement [5]")
    try:
        run(parser.parse_args(arguments))
    except DeepexError as error:
        fail(
            str(error), error.exit_code, agreed=error.agreed or isinstance(error, ConfigError | UnknownName)
        )  # options are one for all
