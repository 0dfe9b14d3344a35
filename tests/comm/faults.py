"""Make one rank of a job fail at a certain moment of its start.

environ = with_fault(folder, rank=1, moment="torch", how="exit 3")     # when it is about to import torch

A moment is the start of Python, or the first import of a module; how: `exit N`, `signal N`, `raise`, `sleep`.
"""

from pathlib import Path

# Python imports this by itself when it starts. It stands in a file of its own: nothing of ours is loaded then.
_SITECUSTOMIZE = """
import os, sys, time
def fail(how):
    what, _, number = how.partition(" ")
    if what == "exit": os._exit(int(number))
    if what == "signal": os.kill(os.getpid(), int(number))
    if what == "raise": raise ImportError("libmade_up.so.1: cannot open shared object file")
    if what == "sleep": time.sleep(10000)
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["FAULT_MOMENT"]: fail(os.environ["FAULT_HOW"])
if "FAULT_RANK" in os.environ:
    names = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID", "RANK")
    if next((os.environ[name] for name in names if name in os.environ), None) == os.environ["FAULT_RANK"]:
        fail(os.environ["FAULT_HOW"]) if os.environ["FAULT_MOMENT"] == "python" else sys.meta_path.insert(0, Finder())
"""


def with_fault(folder: Path, rank: int, moment: str, how: str) -> dict[str, str]:
    """The variables with which the ranks of a job are started."""
    (folder / "sitecustomize.py").write_text(_SITECUSTOMIZE, encoding="utf-8")
    return {"PYTHONPATH": str(folder), "FAULT_RANK": str(rank), "FAULT_MOMENT": moment, "FAULT_HOW": how}
