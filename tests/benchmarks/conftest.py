"""The benchmarks are scripts, not a package; their modules are found beside them, after everything else of the same name."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
