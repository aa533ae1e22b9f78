"""A torch that takes milliseconds to import, and a double of a few lines: for tests of the launcher itself."""

from __future__ import annotations

import subprocess
from pathlib import Path

VERSION_PY = '__version__ = "9.8.7+toy"\ncuda: Optional[str] = {cuda!r}\n'
TORCH = 'from torch import version\n__version__ = "9.8.7+toy"\n{more}\n'
DISTRIBUTED = """
import socket

def is_available(): return True
def is_nccl_available(): return {nccl}

class TCPStore:
    def __init__(self, host, port, world, is_master, *, master_listen_fd=-1, **_):
        self.port = port
        self._listening = socket.socket(fileno=master_listen_fd) if is_master else None
"""
DOUBLE = """
#include <stdio.h>
#include <string.h>
static char value[64];
int m8d_bed_info(char* out, int size) {{
  return snprintf(out, size, "{{\\"cuda\\": {cuda}, \\"knobs\\": [\\"ABORT_RESULT\\"], \\"counters\\": [\\"launches\\"]}}");
}}
int m8d_bed_set(const char* knob, const char* given) {{
  if (strcmp(knob, "NO_DETECT") == 0) return -1;
  snprintf(value, sizeof value, "%s", given);
  return 0;
}}
int m8d_bed_get(const char* knob, char* out, int size) {{
  if (strcmp(knob, "NO_DETECT") == 0) return -1;
  return snprintf(out, size, "%s", value);
}}
long m8d_bed_count(const char* counter) {{
  static long n = 0;
  return strcmp(counter, "comms_bad") == 0 ? -1 : strcmp(counter, "launches") == 0 ? n++ : 0;
}}
int m8d_bed_stubs(char* out, int size) {{ return snprintf(out, size, "cuHidden\\n") > 0; }}
int m8d_bed_nccl_abandon_group(void) {{ return 2; }}
"""


def make_torch(folder: Path, *, cuda: str | None = None, nccl: bool = False, more: str = "") -> Path:
    """A folder for ``sys.path`` with the toy in it."""
    package = folder / "torch"
    package.mkdir(parents=True)
    (package / "version.py").write_text("from typing import Optional\n" + VERSION_PY.format(cuda=cuda))
    (package / "__init__.py").write_text(TORCH.format(more=more))
    (package / "distributed.py").write_text(DISTRIBUTED.format(nccl=nccl))
    return folder


def make_double(folder: Path, *, cuda: int = 13000) -> Path:
    """A library that says it is the test bed's."""
    source, library = folder / "double.c", folder / "libdouble.so"
    source.write_text(DOUBLE.format(cuda=cuda))
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
    return library
