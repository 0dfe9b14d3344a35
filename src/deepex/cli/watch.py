"""`deepex watch`: the live report of running jobs, over HTTP on this machine alone."""

import sys
from pathlib import Path

from deepex.errors import RunError
from deepex.report.serve import Watch


def watch(*, directories: list[str], port: int) -> None:
    """Serve until somebody interrupts."""
    paths = [Path(directory) for directory in directories]
    for path in paths:
        if not path.is_dir():
            raise RunError(f"{path} does not exist; give run or study directories, or a folder in which they will be written")
    with Watch(paths, port=port) as watching:
        sys.stdout.write(f"{watching.address}\nopen it in a browser on this machine; Ctrl-C ends it\n")
        sys.stdout.flush()
        try:
            watching.serve()
        except KeyboardInterrupt:
            sys.stdout.write("ended\n")
