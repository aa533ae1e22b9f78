from __future__ import annotations

import subprocess
import sys

import pytest
from kits import shimkit

from multiworld.shim import loader

STAND_IN = {
    "multiworld/__init__.py": "thing = object()\n__all__ = ['thing']\n",
    "multiworld/shim.py": "calls = []\n\n\ndef attach():\n    calls.append(1)\n",
    "multiworld/deep/__init__.py": "",
    "multiworld/deep/part.py": "class Part:\n    pass\n",
    "multiworld/broken.py": "import not_there_at_all\n",
}


def run(tmp_path, code: str, *, stand_in: bool = True):
    """Run code in a process that sees a small torch with the loader, and a stand-in of the package, or none."""
    root = tmp_path / "site"
    shimkit.make_site(root, more={loader.LOADER_ENTRY: loader.loader_text()})
    (root / "torch/__init__.py").write_text("")
    for name, text in STAND_IN.items() if stand_in else ():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return subprocess.run(
        [sys.executable, "-I", "-B", "-W", "error", "-c", f"import sys; sys.path.insert(0, {str(root)!r})\n{code}"],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


def test_the_text_says_its_version_and_hash_and_is_always_the_same():
    text = loader.loader_text()
    assert text == loader.loader_text()
    found = loader.read_loader(text)
    assert (found.version, found.intact, found.current) == (loader.LOADER_VERSION, True, True)
    compile(text, "loader", "exec")


def test_another_text_is_told_from_it():
    text = loader.loader_text()
    assert loader.read_loader(b"") is None
    assert loader.read_loader(b"# some other file\n") is None
    assert loader.read_loader(b"\xff\xfe") is None
    assert not loader.read_loader(text + b"#\n").intact
    assert not loader.read_loader(text[:-1]).current
    older = text.replace(b"loader 2 ", b"loader 1 ", 1)
    assert (loader.read_loader(older).intact, loader.read_loader(older).current) == (True, False)


def test_everything_below_the_name_is_the_package_itself(tmp_path):
    done = run(
        tmp_path,
        """
import torch.distributed.multiworld as mw, multiworld
from torch.distributed.multiworld import deep, thing
import torch.distributed.multiworld.deep.part as part
import multiworld.deep.part, importlib, pickle, torch.distributed
assert mw.thing is multiworld.thing is thing
assert deep is multiworld.deep and part is multiworld.deep.part is mw.deep.part
assert part.__name__ == part.__spec__.name == "multiworld.deep.part", part.__spec__
assert deep.__path__ == multiworld.deep.__path__ and deep.__spec__.name == "multiworld.deep"
assert type(pickle.loads(pickle.dumps(part.Part()))) is multiworld.deep.part.Part
assert importlib.reload(part) is part
assert multiworld.shim.calls == [1]
assert "thing" in dir(mw) and torch.distributed.multiworld is mw
names = {}
exec("from torch.distributed.multiworld import *", names)
assert names["thing"] is thing
before = len(sys.meta_path)
importlib.reload(mw)
assert len(sys.meta_path) == before
for missing in ("nope", "deep.nope", "nope.nope"):
    try:
        importlib.import_module("torch.distributed.multiworld." + missing)
    except ModuleNotFoundError as error:
        assert "nope" in error.name
    else:
        raise SystemExit("imported " + missing)
try:
    import torch.distributed.multiworld.broken
except ModuleNotFoundError as error:
    assert error.name == "not_there_at_all"
try:
    mw.nope
except AttributeError:
    print("good")
""",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "good\n", "")


def test_in_the_other_order_too(tmp_path):
    done = run(
        tmp_path,
        "import multiworld.deep.part as a\nimport torch.distributed.multiworld.deep.part as b\n"
        "assert a is b and a.__spec__.name == 'multiworld.deep.part'\nprint('good')",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "good\n", "")


def test_without_the_package_the_error_says_what_to_install(tmp_path):
    done = run(
        tmp_path,
        "import torch.distributed\n"
        "try:\n    import torch.distributed.multiworld\n"
        "except ImportError as error:\n    print(type(error).__name__, error.name, error)\n"
        "print('torch.distributed.multiworld' in sys.modules, len([f for f in sys.meta_path if 'torch' in type(f).__module__]))",
        stand_in=False,
    )
    assert done.stderr == ""
    said, state = done.stdout.splitlines()
    assert said.startswith("ImportError multiworld ")
    assert "pip install m8d" in said
    assert state == "False 0"


def test_a_package_that_fails_for_another_reason_is_not_said_to_be_missing(tmp_path):
    (tmp_path / "site").mkdir()
    done = run(tmp_path, "import torch.distributed.multiworld")
    assert done.returncode == 0
    (tmp_path / "site/multiworld/__init__.py").write_text("import numpy_is_not_here\n")
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\nimport torch.distributed.multiworld"],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert "numpy_is_not_here" in done.stderr
    assert "pip install m8d" not in done.stderr


@pytest.mark.parametrize("word", ["import torch", "os.environ", "subprocess", "open("])
def test_the_text_needs_nothing_but_the_import_system(word):
    assert word not in loader.loader_text().decode()
