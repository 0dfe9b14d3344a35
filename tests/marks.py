"""What whole files of tests need, and which tests run in one process one after another."""

from pathlib import Path
from typing import Final

import pytest

_TESTS: Final = Path(__file__).parent

NEEDS: Final = {
    "ranks": (
        *("comm/test_background.py", "comm/test_contract.py", "comm/test_launch.py", "comm/test_same.py", "comm/test_start.py"),
        *("machine/test_mpi_probe.py", "study/frameworks/test_program.py", "study/test_execute.py"),
    ),
    "interpreted": ("step/captured/kernels", "step/captured/test_fusion.py", "step/test_captured.py"),
    "browser": ("report/test_browser.py", "report/test_serve.py"),
    "science": ("data/test_diffraction.py", "data/test_folding.py", "data/test_round_trip.py", "data/test_trajectory.py"),
    "peers": ("study/frameworks/test_layers.py", "study/frameworks/test_program.py"),
}


def mark(item: pytest.Item) -> None:
    """Mark a test by its file. Those of the pool share its ranks; those of a file share what the file makes."""
    path = item.path.relative_to(_TESTS)
    uses_pool = "ranks" in getattr(item, "fixturenames", ())
    for name, files in NEEDS.items():
        if any(path.is_relative_to(file) for file in files) or (name == "ranks" and uses_pool):
            item.add_marker(name)
    item.add_marker(pytest.mark.xdist_group("ranks" if uses_pool else str(path)))
