"""Loader: the file below torch/ that provides ``torch.distributed.multiworld``.

Its text is made here, for m8d-post-setup and for the wheels of build-torch alike. It needs nothing of this
package to be understood: its first line says its version and the hash of the rest.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

__all__ = ["LOADER_ENTRY", "LOADER_FOLDER", "LOADER_VERSION", "LoaderText", "loader_text", "read_loader"]

LOADER_VERSION = 2
"""Raised when the text below changes."""

LOADER_FOLDER = "torch/distributed/multiworld"
LOADER_ENTRY = f"{LOADER_FOLDER}/__init__.py"
"""The file, below the folder that holds ``torch``."""

_FIRST = re.compile(r"# multiworld loader (\d{1,9}) sha256:([0-9a-f]{64})\r?\n")

_BODY = '''\
# Put here by multiworld (m8d-post-setup, or a wheel of build-torch); `m8d-post-setup --uninstall` takes it away.
"""torch.distributed.multiworld: the objects of the package ``multiworld``, under this name.

Modules below this name are those of ``multiworld`` themselves, never second copies.
"""

import importlib
import importlib.abc
import importlib.util
import sys

_HERE = __name__ + "."

try:
    import multiworld as _multiworld
except ModuleNotFoundError as _error:
    if _error.name != "multiworld":
        raise
    raise ImportError(
        "torch.distributed.multiworld is here, but the package multiworld is not. "
        "Install the distribution m8d, which has it, into this environment: python -m pip install m8d.",
        name="multiworld",
    ) from _error


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers imports below this name with the module of the same name below ``multiworld``."""

    def find_spec(self, fullname, path=None, target=None):
        if not fullname.startswith(_HERE):
            return None
        if importlib.util.find_spec("multiworld." + fullname[len(_HERE) :]) is None:
            return None
        return importlib.util.spec_from_loader(fullname, self)

    def create_module(self, spec):
        module = importlib.import_module("multiworld." + spec.name[len(_HERE) :])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module):
        # The import system has just given the module this name's spec: it gets its own back.
        module.__spec__ = module.__spec__.loader_state


if not any(type(_finder).__module__ == __name__ for _finder in sys.meta_path):
    # First, because the packages below this name have folders, in which others would find second copies.
    sys.meta_path.insert(0, _Finder())

__path__ = []  # nothing below this name is looked for in a folder


def __getattr__(name):
    return getattr(_multiworld, name)


def __dir__():
    return dir(_multiworld)


importlib.import_module("multiworld.shim").attach()
'''


@dataclass(frozen=True)
class LoaderText:
    """What a loader's text says of itself.

    Attributes:
        version: of the loader.
        intact: whether the text is the one its first line speaks of.
    """

    version: int
    intact: bool

    @property
    def current(self) -> bool:
        """Whether it is the one this package would write."""
        return self.intact and self.version == LOADER_VERSION


def loader_text() -> bytes:
    """Return the loader: UTF-8, the same bytes every time."""
    body = _BODY.encode()
    return f"# multiworld loader {LOADER_VERSION} sha256:{hashlib.sha256(body).hexdigest()}\n".encode() + body


def read_loader(data: bytes) -> LoaderText | None:
    """Return what a file says of itself; None if it is no loader of ours."""
    first, _, body = data.partition(b"\n")
    found = _FIRST.fullmatch(first.decode("ascii", errors="replace") + "\n")
    if found is None:
        return None
    return LoaderText(int(found[1]), hashlib.sha256(body).hexdigest() == found[2])
