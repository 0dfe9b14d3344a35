"""Whether a change leaves every bit of training as it was: runs of another commit and of this tree, side by side.

    python benchmarks/same_bits.py --against d2a57df             # all cases, about ten minutes
    python benchmarks/same_bits.py --against d2a57df --only muon

Bits depend on the machine and its libraries, so both trees train here and nothing is kept. Each case is trained by the other commit
and by this tree. Their weights, losses and measures must be equal. A run that the other commit began is finished by both, and is
shown and reported by this tree.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).resolve().parents[1]
USUAL: Final = ("samples=512", "epochs=2", "batch=16", "threads=1", "deterministic=true", "step=eager", "sampling=0")

# name: recipe, ranks, replicas, keys
CASES: Final[dict[str, tuple[str, int, int, str]]] = {
    "one rank": ("fashion", 1, 1, ""),
    "mean each epoch": ("fashion", 2, 2, ""),
    "mean each step": ("fashion", 2, 2, "sync.period=1"),
    "replicas": ("fashion", 2, 4, "sync.period=4"),
    "gradients": ("fashion", 2, 2, "sync.strategy=gradients"),
    "gradients, replicas": ("fashion", 2, 4, "sync.strategy=gradients"),
    "gradients in chunks": ("fashion", 2, 2, "sync.strategy=gradients sync.chunks=4 deterministic=false"),
    "hierarchical": ("fashion", 2, 4, "sync.strategy=hierarchical sync.group=2 sync.between=2 sync.period=3"),
    "hierarchical on one rank": ("fashion", 1, 4, "sync.strategy=hierarchical sync.group=2 sync.between=2 sync.period=3"),
    "streaming": ("fashion", 2, 2, "sync.strategy=streaming sync.parts=3 sync.period=4"),
    "streaming, replicas": ("fashion", 2, 4, "sync.strategy=streaming sync.parts=3 sync.period=4 sync.momentum=local"),
    "background": ("fashion", 2, 2, "sync.strategy=background sync.period=4"),
    "background, late": ("fashion", 2, 4, "sync.strategy=background sync.period=4 sync.delay=2 sync.pull=0.7"),
    "elastic": ("fashion", 2, 4, "sync.strategy=elastic sync.period=4"),
    "auto": ("fashion", 2, 2, "sync.strategy=auto sync.cost=2 batch=2 samples=256 optim.rate=0.002"),
    "auto that hides": ("fashion", 2, 2, "sync.strategy=auto sync.cost=40 batch=2 samples=512 epochs=1 optim.rate=0.002"),
    "auto with few steps": ("fashion-resnet", 2, 2, "sync.strategy=auto samples=128 epochs=1"),
    "wire bf16": ("fashion", 2, 2, "sync.wire=bf16 sync.period=4"),
    "wire int8": ("fashion", 2, 2, "sync.wire=int8 sync.period=4"),
    "wire int8, gradients, replicas": ("fashion", 2, 4, "sync.wire=int8 sync.strategy=gradients"),
    "slowmo": ("fashion", 2, 2, "sync.outer=slowmo sync.period=4"),
    "nesterov": ("fashion", 2, 4, "sync.outer=nesterov sync.period=4 sync.momentum=reset"),
    "adam": ("fashion", 2, 2, "sync.outer=adam sync.period=4 sync.outer_rate=0.002"),
    "trust": ("fashion", 2, 2, "sync.outer=trust sync.period=4"),
    "muon": ("fashion", 2, 4, "sync.outer=muon sync.period=4"),
    "momentum reset": ("fashion", 2, 2, "sync.momentum=reset sync.period=4"),
    "momentum local": ("fashion", 2, 4, "sync.momentum=local sync.period=4"),
    "lars": ("fashion", 2, 2, "optim.method=lars optim.rate=1 optim.weight_decay=0.0005"),
    "nesterov momentum, cosine": ("fashion", 1, 2, "optim.nesterov=true optim.schedule=cosine optim.warmup_epochs=0.5"),
    "no momentum": ("fashion", 2, 2, "optim.momentum=0 sync.period=2"),
    "adacomm": ("fashion", 2, 2, "sync.period=adacomm sync.base=8"),
    "qsr": ("fashion", 2, 2, "sync.period=qsr sync.base=2 sync.alpha=0.05 optim.schedule=cosine"),
    "two rules": ("fashion", 2, 2, "sync.period=1_until_1_then_5"),
    "four per epoch": ("fashion", 2, 2, "sync.period=4_per_epoch"),
    "batch norm": ("fashion-resnet", 2, 4, "samples=64 sync.period=1 epochs=1"),
    "estimated statistics": ("fashion-resnet", 2, 2, "samples=64 epochs=1 statistics=estimated"),
    "autoencoder": ("pf-small", 2, 2, "samples=128 batch=32 epochs=1"),
    "crops and flips": ("fashion", 2, 2, "augment.pad=2 augment.flip=true sync.period=4"),
    "crops on one rank": ("fashion", 1, 1, "augment.crop=24 epochs=1"),
    "streamed": ("fashion", 2, 2, "placement=stream sync.period=4"),
    "other layout": ("fashion", 2, 2, "layout=channels_last sync.period=4"),
    "own network": ("fashion", 2, 2, "net=ownnet:build sync.period=4"),
    "checkpoint within an epoch": ("fashion", 2, 4, "sync.period=4 checkpoint.syncs=3 sync.strategy=streaming"),
}
RESUMED: Final = (  # cases whose first epoch the other commit trains, and both go on with
    *("replicas", "streaming, replicas", "background, late", "elastic", "wire int8", "muon", "adam", "momentum local"),
    *("adacomm", "hierarchical", "autoencoder", "own network"),
)
OWN_NETWORK: Final = """
from torch import nn
def build(channels, size, classes) -> nn.Module:
    return nn.Sequential(nn.Conv2d(channels, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(),
                         nn.Linear(8 * 13 * 13, classes))
"""


class Tree:
    """A checkout that trains, with this environment's libraries."""

    def __init__(self, root: Path, work: Path) -> None:
        self._work = work
        self._environment = {**os.environ, "PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"}

    def run(self, *arguments: str) -> str:
        """What a command of deepex prints; ends this program if it fails."""
        command = [sys.executable, "-m", "deepex", *arguments]
        done = subprocess.run(command, cwd=self._work, env=self._environment, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"deepex {' '.join(arguments)}: exit {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def train(self, name: str, out: Path, *changes: str) -> dict[str, Any]:
        """Train a case; what it learnt."""
        recipe, ranks, replicas, keys = CASES[name]
        settings = [*USUAL, *(key.replace("_until_", " until ").replace("_then_", " then ") for key in keys.split())]
        settings = [key.replace("_per_epoch", " per epoch") for key in settings] + list(changes)
        flags = [part for key in settings for part in ("--set", key)]
        self.run("train", recipe, "--quiet", "--ranks", str(ranks), "--replicas", str(replicas), "--out", str(out), *flags)
        return learnt(out)


def learnt(run: Path) -> dict[str, Any]:
    """The bits of a run's weights, and the losses and measures of its epochs."""
    data = (run / "weights.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")  # behind the header, which has the path of nothing but may have a version
    epochs = [json.loads(line) for line in (run / "epochs.jsonl").read_text().splitlines()]
    scores = [
        {part: {k: v for k, v in normalised(epoch[part] or {}).items() if k != "seconds"} for part in ("train", "validation")}
        | {key: epoch[key] for key in ("epoch", "samples", "steps", "syncs", "rate", "drift", "moved", "lost", "period")}
        for epoch in epochs
    ]
    return {"weights": hashlib.sha256(data[start:]).hexdigest()[:12], "epochs": scores}


def normalised(value: Any) -> Any:
    """What a record says, in today's words: the objective is a task, and measures are a table beside the loss."""
    if isinstance(value, list):
        return [normalised(one) for one in value]
    if not isinstance(value, dict):
        return value
    found = {("task" if key == "objective" else key): normalised(one) for key, one in value.items() if one is not None}
    measures = found.pop("measures", {})
    return found | measures if isinstance(measures, dict) else found


def compare(name: str, before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Print whether two trees learnt the same."""
    same = before == after
    print(f"{name:32} {before['weights']}  {after['weights']}  {'same' if same else 'DIFFERENT'}", flush=True)
    return same


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", required=True, help="the other commit")
    parser.add_argument("--only", default="", help="cases whose names contain this")
    options = parser.parse_args()
    names, alike = [name for name in CASES if options.only in name], True
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "ownnet.py").write_text(OWN_NETWORK)
        git = ["git", "-C", str(HERE), "worktree"]
        subprocess.run(
            ["git", "-C", str(HERE), "worktree", "add", "--detach", "--quiet", str(work / "tree"), options.against], check=True
        )
        try:
            other, this = Tree(work / "tree", work), Tree(HERE, work)
            for number, name in enumerate(names):
                old, new = work / f"old{number}", work / f"new{number}"
                alike &= compare(name, other.train(name, old), this.train(name, new))
            for number, name in enumerate(name for name in RESUMED if name in names):
                begun, copy = work / f"begun{number}", work / f"resumed{number}"
                other.train(name, begun, "epochs=1")
                shutil.copytree(begun, copy)
                ranks = str(CASES[name][1])
                for tree, run in ((other, begun), (this, copy)):
                    tree.run("train", "--resume", str(run), "--quiet", "--ranks", ranks, "--set", "epochs=3")
                alike &= compare(f"{name}, gone on", learnt(begun), learnt(copy))
                before, after = (normalised(json.loads(tree.run("show", str(begun), "--json"))) for tree in (other, this))
                alike &= before == after
                print(f"{'':32} shown {'the same' if before == after else 'DIFFERENTLY'}")
            this.run("report", *(str(path) for path in sorted(work.glob("old*"))[:6]), "-o", str(work / "report.html"))
        finally:
            subprocess.run([*git, "remove", "--force", str(work / "tree")], check=True)
    sys.exit(0 if alike else "bits have changed")


if __name__ == "__main__":
    main()
