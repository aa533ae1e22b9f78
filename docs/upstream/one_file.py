"""Print a reproducer as one file, with `ranks.py` and `fault.c` in it: that is what is attached to an issue.

python docs/upstream/one_file.py repro_open_group.py > repro.py
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
FUTURE = "from __future__ import annotations\n"


def one_file(name: str) -> str:
    """Return the text of a reproducer that needs torch and nothing else."""
    text = (HERE / name).read_text(encoding="utf-8")
    shared = (HERE / "ranks.py").read_text(encoding="utf-8")
    shared = shared[shared.index(FUTURE) + len(FUTURE) :]
    if "with_faults" in text:
        fault = (HERE / "fault.c").read_text(encoding="utf-8")
        shared = shared.replace(
            'FAULT_C = ""  # one_file.py puts the text of fault.c here', f"FAULT_C = r'''\n{fault}'''"
        )
    found = re.search(r"^from ranks import .*\n", text, re.MULTILINE)
    if found is None:
        raise ValueError(f"{name} does not import from ranks")
    return text[: found.start()] + shared + text[found.end() :]


if __name__ == "__main__":
    sys.stdout.write(one_file(sys.argv[1]))
