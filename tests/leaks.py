"""What a function leaves behind in a process that goes on: put back where that can be done, told where it cannot.

before = State()
work()
before.put_back()
assert before.leaks() == []
"""

import os
import random
import resource
import signal
import sys
import threading
import time
from types import FunctionType
from typing import Any, Final

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGXFSZ)
_LIMITS: Final = (resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE)
_OURS: Final = ("deepex", "tests")


class State:
    """The process as it is now. Where nobody has loaded torch, this does not either."""

    def __init__(self) -> None:
        self._folder = os.getcwd()
        self._environ = dict(os.environ)
        self._words, self._path = list(sys.argv), list(sys.path)
        self._handlers = {number: signal.getsignal(number) for number in _SIGNALS}
        self._limits = {number: resource.getrlimit(number) for number in _LIMITS}
        self._random = random.getstate()
        self._torch = _TorchState() if "torch" in sys.modules else None
        self._running = {*threading.enumerate()}
        self._functions = _functions()
        os.umask(mask := os.umask(0o022))
        self._mask = mask

    def put_back(self) -> None:
        """Undo what can be undone without harm."""
        os.chdir(self._folder)
        os.environ.clear()
        os.environ.update(self._environ)
        os.umask(self._mask)
        sys.argv[:], sys.path[:] = self._words, self._path
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        for number, limits in self._limits.items():
            resource.setrlimit(number, limits)
        random.setstate(self._random)
        if self._torch is not None:
            self._torch.put_back()

    def leaks(self) -> list[str]:
        """Name what would change what is done next."""
        found = [f"the thread {thread.name}" for thread in self._threads()]
        now = _functions()
        found += [f"another {name}" for name, one in self._functions.items() if now.get(name) is not one]
        if self._torch is not None and self._torch.modes != _TorchState().modes:
            found.append("another mode of torch")
        return found

    def _threads(self) -> list[threading.Thread]:
        """Those that were begun since, and stay: one that was told to end takes a moment."""
        patience = time.monotonic() + 2
        while left := [thread for thread in threading.enumerate() if thread not in self._running]:
            if time.monotonic() > patience:
                break
            time.sleep(0.005)
        return left


class _TorchState:
    """What torch and numpy keep for a whole process."""

    def __init__(self) -> None:
        import numpy as np
        import torch

        self.modes = (torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype(), torch.is_grad_enabled())
        self._random = (np.random.get_state(), torch.get_rng_state())  # noqa: NPY002 - what others may use
        self._threads = torch.get_num_threads()
        self._onednn = torch.backends.mkldnn.enabled
        self._precision = torch.get_float32_matmul_precision()

    def put_back(self) -> None:
        import numpy as np
        import torch

        np.random.set_state(self._random[0])  # noqa: NPY002
        torch.set_rng_state(self._random[1])
        torch.set_num_threads(self._threads)
        torch.backends.mkldnn.enabled = self._onednn
        torch.set_float32_matmul_precision(self._precision)


def _functions() -> dict[str, Any]:
    """The functions and classes of our modules, and the methods of these: what may have been replaced by something else."""
    found: dict[str, Any] = {}
    for name, module in [*sys.modules.items()]:
        if name.partition(".")[0] in _OURS:
            for key, value in [*vars(module).items()]:
                if isinstance(value, FunctionType | type):
                    found[f"{name}.{key}"] = value
                if isinstance(value, type) and value.__module__ == name:
                    methods = {one: what for one, what in vars(value).items() if isinstance(what, FunctionType)}
                    found |= {f"{name}.{key}.{one}": what for one, what in methods.items()}
    return found
