"""Train with the toy strategy and the toy rule on each rank: `python -m tests.sync.toy_run OUT key=value… [-- OUT key=value… …]`.

Rank 0 prints, in a line for each training, `trained` or what was wrong. They share a launch: starting ranks takes most of the time.
"""

import sys
from itertools import groupby
from pathlib import Path

from deepex.sync.how import STRATEGIES
from deepex.sync.when import RULES

STRATEGIES.append("tests.sync.toy_strategy")  # the one line that a new file costs, in the table of names
RULES.append("tests.sync.toy_rule")

if __name__ == "__main__":
    import deepex
    from deepex.comm import connect
    from deepex.errors import UserError
    from deepex.record.table import parse_assignments

    comm = connect()
    jobs = [list(words) for ends, words in groupby(sys.argv[1:], "--".__eq__) if not ends]
    for out, *assignments in jobs:
        keys = {"samples": 256, "epochs": 1, "batch": 16, "threads": 1, "deterministic": True, "sampling": 0, "device": "cpu"}
        try:
            deepex.train(deepex.recipe("fashion", keys | parse_assignments(assignments)), comm, out=Path(out))
            said = "trained"
        except UserError as error:
            said = str(error)
        if comm.rank == 0:
            print(said, flush=True)
    comm.close()
