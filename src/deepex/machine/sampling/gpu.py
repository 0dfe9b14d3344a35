"""One GPU, as its driver counts (NVML).

    source = open_gpu("GPU-5d2b3f6c-…")
    source.read()       # {"gpu_busy_seconds": 3.2, "gpu_joules": 1804.5, "gpu_memory_bytes": 2.1e10}

All of it is the device's, whichever process used it. Busy is the share of time in which some kernel ran, however few of the
multiprocessors it kept busy, as an average over the driver's last period (1/6 s to 1 s).
"""

from time import perf_counter
from typing import Any, final

from typing_extensions import override

from deepex.machine.reading import attempt
from deepex.machine.sampling.source import Reading, UsageSource


def open_gpu(uuid: str) -> "GpuSource | None":
    """The GPU with this identifier; None where its driver does not tell."""
    import pynvml

    return attempt(lambda: GpuSource(pynvml, uuid))


@final
class GpuSource(UsageSource):
    """Busy seconds, energy and memory of a GPU; `nvml` is the module pynvml.

    Energy is the driver's counter, which GPUs have since Volta; else power, times the time since the last reading.
    """

    def __init__(self, nvml: Any, uuid: str) -> None:
        self._nvml = nvml
        nvml.nvmlInit()
        try:
            self._handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        except nvml.NVMLError:
            nvml.nvmlShutdown()
            raise
        self._has_counter = attempt(self._counted) is not None
        self._last, self._watts = perf_counter(), attempt(self._power)
        self._busy_seconds, self._joules = 0.0, 0.0

    def _counted(self) -> float:
        return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) * 1e-3

    def _power(self) -> float:
        return float(self._nvml.nvmlDeviceGetPowerUsage(self._handle)) * 1e-3

    def _share(self) -> float:
        return float(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu) * 1e-2

    def _memory(self) -> float:
        return float(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)

    @override
    def read(self) -> Reading:
        now = perf_counter()
        passed, self._last = now - self._last, now
        found = {"gpu_memory_bytes": attempt(self._memory), "gpu_joules": self._energy(passed)}
        share = attempt(self._share)
        if share is not None:
            self._busy_seconds += share * passed
            found["gpu_busy_seconds"] = self._busy_seconds
        return {name: value for name, value in found.items() if value is not None}

    def _energy(self, passed: float) -> float | None:
        if self._has_counter:
            return attempt(self._counted)
        watts = attempt(self._power)
        if watts is None:
            return None
        self._joules += passed * (watts + (watts if self._watts is None else self._watts)) / 2
        self._watts = watts
        return self._joules

    @override
    def close(self) -> None:
        attempt(self._nvml.nvmlShutdown)
