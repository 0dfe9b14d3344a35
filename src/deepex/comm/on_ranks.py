"""Start a module on ranks of this machine: `python -P -m deepex.comm.on_ranks 4 deepex.study.transfer --out DIR`."""

import os
import sys

from deepex.comm.launch import launch


def main() -> int:
    """Run the module that is named after the number of ranks, and give its exit code."""
    ranks, *command = sys.argv[1:]
    return launch(int(ranks), [sys.executable, "-P", "-m", *command], os.environ, joins=True)


if __name__ == "__main__":
    sys.exit(main())
