"""Where the time of a captured step goes: its heaviest kernels, and how far each is from what the GPU could do.

    python benchmarks/gpu_kernels.py --only vgg16-128,resnet50-128

One step is run without its graph and on one stream, each operation between two events, all of them queued before the first begins.
For each: its seconds, the bytes that it has to move (every tensor once), the FLOPs of products. "of the roofline" is the longer of
bytes at the memory's bandwidth and FLOPs at the tensor cores' rate, both as this run measured them, over the seconds. In the graph
some run side by side, so a captured step is shorter than their sum.
"""

import argparse
import gc
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import conv_flop_count, flop_registry

import bench
from deepex.step.captured.runner import CapturedRunner
from gpu import WORKLOADS, deepex_epochs, timed
from peers import Workload

HEAVIEST = 10
_FREE = ("empty", "empty_like", "empty_strided", "new_empty", "detach", "alias", "set_")  # these launch nothing
_CHANGES = ("add_", "mul_", "relu_", "_foreach_add_")  # these read what they write
aten = torch.ops.aten


@dataclass(frozen=True)
class Entry:
    """One operation. `begin` and `end` are what the ledger's clock gave."""

    name: str
    shapes: str
    bytes: int
    flops: int
    begin: Any
    end: Any


class Ledger(TorchDispatchMode):
    """Notes every operation of PyTorch and every launch of a Triton kernel within, with `mark()` before and after it."""

    def __init__(self, mark: Callable[[], Any]) -> None:
        super().__init__()
        self.entries: list[Entry] = []
        self._mark, self._launching = mark, False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and note it unless it only looks at its input in another way."""
        name = function.overloadpacket.__name__
        if self._launching or name in _FREE:
            return function(*args, **(kwargs or {}))
        begin = self._mark()
        out = function(*args, **(kwargs or {}))
        end = self._mark()
        reads, writes = _tensors((args, kwargs)), _tensors(out)
        if name.endswith("_") or not _places(reads) & _places(writes):
            moved = _moved([*_needed(name, args, reads), *writes]) + (_moved(writes) if name in _CHANGES else 0)
            self.entries.append(
                Entry(name, _shapes([*reads, *writes]), moved, _flops(function, args, kwargs or {}, out), begin, end)
            )
        return out

    @contextmanager
    def launches(self) -> Iterator[None]:
        """Note those of Triton, too."""
        from triton.runtime.jit import KernelInterface

        plain = KernelInterface.__getitem__

        def noted(kernel: Any, grid: Any) -> Callable[..., Any]:
            return lambda *args, **options: self._launch(kernel.fn.__name__, plain(kernel, grid), args, options)

        KernelInterface.__getitem__ = noted
        try:
            yield
        finally:
            KernelInterface.__getitem__ = plain

    def _launch(self, name: str, launch: Callable[..., Any], args: Sequence[Any], options: dict[str, Any]) -> None:
        tensors = _tensors(args)
        begin, self._launching = self._mark(), True  # an interpreted kernel calls PyTorch itself
        try:
            launch(*args, **options)
        finally:
            self._launching = False
        self.entries.append(Entry(name, _shapes(tensors), _launch_bytes(name, tensors), 0, begin, self._mark()))


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _places(tensors: list[torch.Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def _moved(tensors: list[torch.Tensor]) -> int:
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def _shapes(tensors: list[torch.Tensor]) -> str:
    """Of the two largest: input and output, mostly."""
    largest = sorted(tensors, key=lambda tensor: -tensor.numel())[:2]
    return ", ".join("×".join(map(str, tensor.shape)) for tensor in largest)


def _needed(name: str, args: Any, reads: list[torch.Tensor]) -> list[torch.Tensor]:
    """What an operation reads: a convolution's backward pass needs the images for one half of it, the weight for the other."""
    if name != "convolution_backward":
        return reads
    gradient, images, weight, wanted = *args[:3], args[10]
    return [gradient, *([weight] if wanted[0] else []), *([images] if wanted[1] else [])]


def _flops(function: Any, args: Any, kwargs: dict[str, Any], out: Any) -> int:
    packet = function.overloadpacket
    if packet is aten.cudnn_convolution_relu:
        return int(conv_flop_count(args[0].shape, args[1].shape, out.shape))
    if packet is aten._addmm_activation:
        return 2 * out.numel() * int(args[1].shape[1])
    return int(flop_registry[packet](*args, **kwargs, out_val=out)) if packet in flop_registry else 0


def _launch_bytes(name: str, tensors: list[torch.Tensor]) -> int:
    """Each argument once, but for kernels that do not see all of it, or see it twice."""
    if name == "take_kernel":  # some of the samples
        samples, *others = sorted(tensors, key=lambda tensor: (tensor.dtype != torch.uint8, -tensor.nbytes))
        return _moved(others) + max(other.numel() for other in others) * samples.element_size()
    if name == "update_kernel":  # changes weights and momentum, and reads gradients by their addresses
        _, weights, momenta, shadow = tensors[:4]
        twin = shadow.nbytes if shadow.data_ptr() != weights.data_ptr() else 0
        return 2 * weights.nbytes + 2 * momenta.nbytes + twin + (twin or weights.nbytes)
    return _moved(tensors)


def table(entries: Sequence[Entry], seconds: Callable[[Entry], float], bandwidth: float, rate: float) -> list[dict[str, Any]]:
    """Operations of the same name and shapes as one row, the heaviest first."""
    groups: dict[tuple[str, str], list[Entry]] = defaultdict(list)
    for entry in entries:
        groups[entry.name, entry.shapes].append(entry)
    rows: list[dict[str, Any]] = []
    for (name, shapes), some in groups.items():
        moved, flops = sum(entry.bytes for entry in some), sum(entry.flops for entry in some)
        least = sum(max(entry.bytes / bandwidth, entry.flops / rate) for entry in some)
        row = {"name": name, "shapes": shapes, "calls": len(some), "seconds": sum(map(seconds, some)), "bytes": moved}
        rows.append(row | {"flops": flops, "least_seconds": least})
    return sorted(rows, key=lambda row: -row["seconds"])


def measure(workload: Workload) -> dict[str, Any]:
    """The rows of a workload's step, what the GPU can do, and the seconds of a captured step."""
    torch.backends.cudnn.benchmark = True
    bandwidth, rate = _bandwidth(), _rate()
    _, _, data = bench.random_data(workload.shape, workload.classes, workload.count)
    epoch, learner = deepex_epochs(workload, data)
    epoch()
    step = statistics.median(timed(epoch)() for _ in range(3)) / (workload.count // workload.batch)
    runner = cast("CapturedRunner", learner.parts.runner)
    _separate(runner)
    learner.begin_epoch(1000, 0)
    lap = runner.laps[0]
    runner._step(lap.size, lap.tables[0], capturing=False)
    for _ in range(2):  # the first time, watching makes the host slower than the device
        ledger = Ledger(_event)
        torch.cuda.synchronize()
        with ledger, ledger.launches():
            torch.cuda._sleep(2_000_000_000)  # about a second, in which everything is queued
            runner._step(lap.size, lap.tables[0], capturing=False)
        torch.cuda.synchronize()
        # to send the gradients' addresses makes the host wait; they are the same the next time, or of memory as good to read
        lap.tables[0].send = lambda: None
    rows = table(ledger.entries, lambda entry: entry.begin.elapsed_time(entry.end) / 1000, bandwidth, rate)
    return {"rows": rows, "bytes_per_second": bandwidth, "flops_per_second": rate, "step_seconds": step}


def _separate(runner: CapturedRunner) -> None:
    """Let the next steps run on one stream, without a graph, and write nowhere they read."""
    runner._lane._stream = None
    for module in cast("torch.nn.Module", runner._fused._run).modules():
        if hasattr(module, "owned"):
            module.owned = (False,) * 3 if isinstance(module.owned, tuple) else False


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _bandwidth() -> float:
    """Bytes per second, read and written, of a copy."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / _seconds(lambda: target.copy_(source))


def _rate() -> float:
    """FLOP/s of a large bf16 product of random matrices."""
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return 2 * 8192**3 / _seconds(lambda: a @ b)


def _seconds(work: Callable[[], object]) -> float:
    found = []
    for _ in range(10):
        begin = _event()
        work()
        end = _event()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1000)
    return statistics.median(found[3:])


def show(workload: Workload, found: dict[str, Any]) -> None:
    """The heaviest rows, and what all of them make together."""
    rows, total = found["rows"], math.fsum(row["seconds"] for row in found["rows"])
    heaviest = [
        [
            *(row["name"], row["shapes"], row["calls"], f"{1000 * row['seconds']:.3f}", f"{100 * row['seconds'] / total:.1f} %"),
            *(f"{row['bytes'] / 1e9:.2f}", f"{row['flops'] / 1e12:.2f}", f"{100 * row['least_seconds'] / row['seconds']:.0f} %"),
        ]
        for row in rows[:HEAVIEST]
    ]
    columns = ["kernel", "largest tensors", "calls", "ms", "share", "GB", "TFLOP", "of the roofline"]
    bench.print_table(f"{workload.name}: the heaviest of {len(rows)} kinds of kernels", columns, heaviest)
    least = math.fsum(row["least_seconds"] for row in rows)
    print(f"memory {found['bytes_per_second'] / 1e12:.2f} TB/s, tensor cores {found['flops_per_second'] / 1e12:.0f} TFLOP/s")
    for name, seconds in (("one after the other", total), ("at the roofline", least), ("captured", found["step_seconds"])):
        print(f"a step {name}: {1000 * seconds:.2f} ms, {workload.batch / seconds:,.0f} images/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = {workload.name: workload for workload, _ in WORKLOADS}
    parser.add_argument("--only", default=",".join(known), help="workloads, with commas between")
    parser.add_argument("--keep", action="store_true", help="write the records into benchmarks/records/gpu")
    options = parser.parse_args()
    if unknown := set(options.only.split(",")) - known.keys():
        parser.error(f"there is no {', no '.join(sorted(unknown))}; workloads: {', '.join(known)}")
    bench.need_gpu()
    for name in options.only.split(","):
        found = measure(known[name])
        show(known[name], found)
        bench.write_record(f"kernels-{name}", {"workload": vars(known[name]), **found}, keep=options.keep, folder="gpu")
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
