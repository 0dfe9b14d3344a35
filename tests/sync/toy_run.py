"""Train with the toy strategy and the toy rule on each rank: `python -m tests.sync.toy_run OUT key=value…`."""

import sys
from pathlib import Path

from deepex.sync.how import STRATEGIES
from deepex.sync.when import RULES

STRATEGIES.append("tests.sync.toy_strategy")  # the one line that a new file costs, in the table of names
RULES.append("tests.sync.toy_rule")

if __name__ == "__main__":
    import deepex
    from deepex.record.table import parse_assignments

    keys = {"samples": 256, "epochs": 1, "batch": 16, "threads": 1, "deterministic": True, "sampling": 0, "device": "cpu"}
    deepex.train(deepex.recipe("fashion", keys | parse_assignments(sys.argv[2:])), out=Path(sys.argv[1]))
