"""What whole files of tests need, and which files one process runs, one after another."""

from functools import cache
from pathlib import Path
from typing import Final, final

import pytest
from typing_extensions import override
from xdist.scheduler import LoadScopeScheduling

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
    """Mark a test by its file."""
    path = item.path.relative_to(_TESTS)
    for name, files in NEEDS.items():
        uses_pool = name == "ranks" and "ranks" in getattr(item, "fixturenames", ())
        if uses_pool or any(path.is_relative_to(file) for file in files):
            item.add_marker(name)


@final
class ByFile(LoadScopeScheduling):
    """Gives a whole file to one process, for what its tests share is made once; and to one alone all files that use the ranks.

    xdist's own `loadgroup` does nothing, and says nothing, with pytest 9.2.
    """

    def __init__(self, config: pytest.Config, log: object = None) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False  # files of few tests are among the longest

    @override
    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "ranks" if _uses_pool(file) else file


@cache
def _uses_pool(file: str) -> bool:
    return "ranks: RankPool" in (_TESTS.parent / file).read_text(encoding="utf-8")
