"""``python -m benchmarks.scale``: simulate, and put the rows into `docs/scale.json`."""

from __future__ import annotations

import argparse
import logging
import time
from fnmatch import fnmatchcase

from benchmarks.scale.curves import jobs
from benchmarks.scale.record import RECORD, put


def main() -> None:
    """Simulate what was asked for, row by row; each is kept as soon as it is there."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument(
        "--only", nargs="+", default=["*"], metavar="TABLE/ROW", help="patterns, as reforming/64 or losses/*"
    )
    options = parser.parse_args()
    logging.getLogger("multiworld").setLevel(logging.ERROR)  # thousands of members that wait
    for name, job in jobs().items():
        if any(fnmatchcase(name, pattern) for pattern in options.only):
            began = time.monotonic()
            row = job()
            put(RECORD, name.partition("/")[0], row)
            print(f"{name} ({time.monotonic() - began:.0f} s): {row}", flush=True)


if __name__ == "__main__":
    main()
