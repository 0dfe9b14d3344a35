"""What is timed on a GPU: copies from and to the host, pinned and pageable, within the GPU's memory, and to another GPU.

>>> [probe.path for probe in gpu_probes(torch.device("cuda", 0))]
['host-device pinned', 'device-host pinned', 'host-device pageable', 'device-host pageable', 'device-device, within 0', …]

Copies are queued one after another, and the device is waited for at the end of a repeat (timing.py): of small ones the latency is
what queueing one takes, as in a training, which does not wait for each either. tests/gpu/test_transfer_gpu.py runs this on a GPU.
"""

from collections.abc import Callable, Iterator

import torch

from deepex.comm import Communicator
from deepex.study.transfer.probe import Probe


def gpu_probes(device: torch.device, ranks: int = 1) -> Iterator[Probe]:
    """Every way in and out of `device`, used by all of `ranks` at once, and to each GPU that this process sees besides."""
    together = "" if ranks == 1 else f", {ranks} ranks at once"
    for memory in ("pinned", "pageable"):
        yield _to_device(f"host-device {memory}{together}", device, pinned=memory == "pinned")
        yield _to_host(f"device-host {memory}{together}", device, pinned=memory == "pinned")
    yield _between(device, device, f"device-device, within {device.index}{together}", "a byte is read and written")
    for index in range(torch.cuda.device_count()) if ranks == 1 else ():
        if index != device.index:
            reach = "by peer access" if torch.cuda.can_device_access_peer(device, index) else "through the host: no peer access"
            yield _between(device, torch.device("cuda", index), f"device-device, {device.index} to {index}", reach)


def _to_device(path: str, device: torch.device, *, pinned: bool) -> Probe:
    return _copies(path, "host-device", device, lambda size: (_on_host(size, pinned=pinned), _on(device, size)))


def _to_host(path: str, device: torch.device, *, pinned: bool) -> Probe:
    return _copies(path, "host-device", device, lambda size: (_on(device, size), _on_host(size, pinned=pinned)))


def _between(device: torch.device, other: torch.device, path: str, note: str) -> Probe:
    return _copies(path, "device-device", device, lambda size: (_on(device, size), _on(other, size)), note)


def _copies(
    path: str, kind: str, device: torch.device, buffers: Callable[[int], tuple[torch.Tensor, ...]], note: str = ""
) -> Probe:
    def make(_comm: Communicator, size: int) -> Callable[[], object]:
        source, target = buffers(size)
        source.fill_(1)
        return lambda: target.copy_(source, non_blocking=True)

    return Probe(path=path, kind=kind, make=make, device=device, note=note)


def _on_host(size: int, *, pinned: bool) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8).pin_memory() if pinned else torch.zeros(size, dtype=torch.uint8)


def _on(device: torch.device, size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=device)
