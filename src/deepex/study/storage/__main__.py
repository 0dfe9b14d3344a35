"""Before a run of the study of storage: see that its copy is there, and that its first epoch will read the disk.

    python -P -m deepex.study.storage sample:fashion /scratch/me hdf5 --out studies/storage/runs/NAME

What became of the page cache goes to `page_cache.json` in the run's directory.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from deepex.comm.deadline import fail
from deepex.errors import DeepexError
from deepex.record.files import write_json
from deepex.study.storage.copies import FORMATS, prepare
from deepex.study.storage.page_cache import drop_cache


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the copy, or find it, and drop it from memory."""
    parser = argparse.ArgumentParser(prog="python -P -m deepex.study.storage", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", metavar="DATA", help="a packed dataset, or sample:NAME")
    parser.add_argument("directory", metavar="DIRECTORY")
    parser.add_argument("format", metavar="FORMAT", help=", ".join(FORMATS))
    parser.add_argument("--out", metavar="DIR", help="where page_cache.json goes")
    options = parser.parse_args(arguments)
    try:
        ((path),) = prepare(options.data, [options.directory], [options.format]).values()
        found = drop_cache(path)
        if options.out:
            write_json(Path(options.out) / "page_cache.json", found)
    except DeepexError as error:
        fail(str(error), error.exit_code)


if __name__ == "__main__":
    main()
