"""Who may import whom, and who may touch what: read from the source, so that new modules are held to it too."""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from kits.importkit import Import, circles, full_name, imported_names, imports_of, modules_of

ROOT = Path(__file__).parents[3]
TOOLCHAIN = ROOT / "build" / "m8d_build"
LIBRARY = ROOT / "multiworld"
PROBES = TOOLCHAIN / "check" / "probes"  # programs that run in a foreign environment

# multiworld's layers, lowest first; imports run downward or stay in their layer.
LAYERS = (
    ("errors", "events", "pending", "settings"),
    ("_core",),
    ("_c10d", "_net", "logs"),
    (
        "_generation",
        "_join",
        "world",
        "advances",
        "aio",
        "steps",
        "turns",
        "uninterrupted",
        "watchdog",
        "collectives",
        "operation_table",
        "objects",
        "selecting",
        "work",
        "registry",
        "background_threads",
        "exiting",
        "loading",
        "reentry",
        "launched",
        "notices",
        "status",
    ),
    (
        "cli",
        "shim",
        "provenance",
        "manager",
        "communicator",
        "elastic",
        "joinall",
        "launch",
        "preloaded",
        "run",
        "integrations",
        "metrics",
        "tracing",
        "weights",
        "web",
        "__main__",
    ),
)
# The toolchain's rooms, lowest first, as docs/toolchain.md shows them: a room imports from those before it.
ROOMS = (
    "files", "gitrepo", "elf", "series", "sources", "wheel", "environments", "overlay", "porting", "full", "check",
    "testing", "cli",
)  # fmt: skip
# Packages without circles, and the deferred imports that may close one: (importer, imported): why.
WITHOUT_CIRCLES: dict[Path, dict[tuple[str, str], str]] = {
    TOOLCHAIN: {},
    ROOT / "benchmarks": {},
    LIBRARY: {
        (
            "multiworld.launch.config",
            "multiworld.launch.host",
        ): "`MultiprocessConfig.resolve` is a public method; what it calls makes such configurations",
    },
}
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
PURE = {"torch", "threading", "socket", "time", "asyncio", "subprocess", "multiprocessing"}
STARTS_PROGRAMS = {
    "subprocess", "pty", "multiprocessing", "os.system", "os.popen", "os.posix_spawn", "os.fork", "os.startfile",
    "asyncio.create_subprocess_exec", "asyncio.create_subprocess_shell",
    *(f"os.{verb}{kind}" for verb in ("exec", "spawn") for kind in ("l", "le", "lp", "lpe", "v", "ve", "vp", "vpe")),
}  # fmt: skip
ENVIRONMENT = {"os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv", "os.unsetenv"}
ENDS_THE_PROCESS = {"os._exit", "os.abort", "signal.raise_signal", "sys.exit", "os.kill"}
SENDS_SIGNALS = {"os.killpg", "signal.pidfd_send_signal", "signal.pthread_kill"}


@dataclass
class Facts:
    """What a file imports and touches, in full dotted names."""

    imports: set[str] = field(default_factory=set)
    touches: set[str] = field(default_factory=set)
    faults: set[str] = field(default_factory=set)


@functools.cache
def facts(path: Path, source: str | None = None) -> Facts:
    found = Facts()
    tree = ast.parse(path.read_text() if source is None else source)
    imported = imported_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.imports |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide what is imported"
            found.imports |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module or ""}
        elif isinstance(node, ast.Name | ast.Attribute) and (name := full_name(node, imported)):
            found.touches.add(name)
        elif isinstance(node, ast.ExceptHandler) and (
            node.type is None or all(isinstance(s, ast.Pass) for s in node.body)
        ):
            found.faults.add(f"line {node.lineno}: an error is swallowed")
        elif (
            isinstance(node, ast.keyword)
            and node.arg == "shell"
            and getattr(node.value, "value", None) is not False
        ):
            found.faults.add(f"line {node.lineno}: shell=")
    return found


def sources(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*.py")) if PROBES not in path.parents]


def name_of(path: Path) -> str:
    return path.relative_to(TOOLCHAIN if TOOLCHAIN in path.parents else LIBRARY).as_posix()


def inside(name: str, *doors: str) -> bool:
    return any(name == door or (door.endswith("/") and name.startswith(door)) for door in doors)


def roots(names: set[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


TOOLCHAIN_FILES = [pytest.param(path, id=name_of(path)) for path in sources(TOOLCHAIN)]
LIBRARY_FILES = [pytest.param(path, id=name_of(path)) for path in sources(LIBRARY)]


def test_the_reader_sees_what_it_must():
    seen = facts(
        Path("x.py"),
        "from os import environ as e\nimport os as o\ndef f():\n  import git.cmd\n  e['a']; o._exit(1)\n",
    )
    assert "git.cmd" in seen.imports
    assert {"os.environ", "os._exit"} <= seen.touches
    assert facts(Path("x.py"), "try:\n  x\nexcept E:\n  pass\nrun(shell=True)\n").faults


@pytest.mark.parametrize("path", TOOLCHAIN_FILES)
def test_the_toolchain_keeps_its_doors(path):
    name, seen = name_of(path), facts(path)
    if not inside(name, "proc.py"):
        assert not STARTS_PROGRAMS & (seen.imports | seen.touches), "only proc starts programs"
    if not inside(name, "gitrepo/"):
        assert "git" not in roots(seen.imports), "only gitrepo imports git"
    if not inside(name, "elf/"):
        assert "elftools" not in roots(seen.imports), "only elf imports elftools"
    if not inside(name, "settings.py", "proc.py"):  # proc hands the environment on and reads nothing of it
        assert not ENVIRONMENT & seen.touches, "only settings reads the environment"
    if not inside(name, "cli/"):
        assert not {"print", "sys.stdout", "sys.stderr", "sys.argv", "input"} & seen.touches, (
            "only cli prints"
        )
        assert "argparse" not in roots(seen.imports), "only cli reads arguments"
    if not inside(name, "cli/", "progress.py", "__main__.py"):
        runtime = {name for name in seen.imports if name.startswith("m8d_build.cli")}
        assert not runtime, "nothing below the command line imports it"


@pytest.mark.parametrize("path", TOOLCHAIN_FILES)
def test_the_rooms_of_the_toolchain_import_downward_only(path):
    own, _, rest = name_of(path).partition("/")
    above = ROOMS[ROOMS.index(own) + 1 :] if rest else ROOMS
    taken = {name.split(".")[1] for name in facts(path).imports if name.startswith("m8d_build.")}
    assert name_of(path) == "__main__.py" or not taken & set(above)


def test_the_page_shows_the_rooms_in_this_order():
    page = (ROOT / "docs" / "toolchain.md").read_text()
    assert tuple(re.findall(r"^\| `(\w+)/` \|", page, re.MULTILINE)) == ROOMS


def test_circles_are_found():
    package = {"p.a": "from p import b", "p.b": "import p.c as c\nif TYPE_CHECKING:\n  from p.d import D"}
    package |= {"p.c": "def f():\n  from p import a", "p.d": "import p.a", "p": ""}
    found = imports_of(package)
    assert {Import("p.b", "p.d"), Import("p.c", "p.a", deferred=True)} <= found
    assert circles(found) == [["p.a", "p.b", "p.c", "p.d"]]
    assert circles(found, {("p.c", "p.a"): "why"}) == [["p.a", "p.b", "p.d"]]
    assert circles(found - {Import("p.b", "p.d")}, {("p.c", "p.a"): "why"}) == []


@pytest.mark.parametrize("package", WITHOUT_CIRCLES, ids=lambda path: path.name)
def test_no_modules_import_in_circles(package):
    allowed = WITHOUT_CIRCLES[package]
    modules = modules_of(package, without=[PROBES])
    imports = imports_of({module: path.read_text() for module, path in modules.items()})
    assert circles(imports, allowed) == []
    assert set(allowed) <= {(i.importer, i.imported) for i in imports if i.deferred}, "an exception left over"


@pytest.mark.parametrize("path", TOOLCHAIN_FILES)
def test_the_toolchain_takes_little_of_multiworld(path):
    allowed = (
        "multiworld.errors",
        "multiworld.provenance.statement",
        "multiworld.provenance.wheel",
        "multiworld.shim.loader",
        "multiworld.shim.marker",
        "multiworld.__version__",
    )
    of_ours = {name for name in facts(path).imports if name.startswith("multiworld.")}
    assert {name for name in of_ours if not name.startswith(allowed)} == set()
    assert "torch" not in roots(facts(path).imports)


@pytest.mark.parametrize("path", [*TOOLCHAIN_FILES, *LIBRARY_FILES])
def test_nothing_ends_the_process_or_swallows_errors(path):
    seen = facts(path)
    allowed = {"sys.exit"} if path.name == "__main__.py" else set()
    if name_of(path) in {"proc.py", "gitrepo/fetch.py"}:
        allowed |= {"os.kill"}  # of the programs they started themselves
    if name_of(path) == "run/workers/fork_server.py":
        allowed |= {"os._exit"}  # of the process between it and a worker, which it has just forked
    assert ENDS_THE_PROCESS & seen.touches <= allowed
    if not inside(
        name_of(path), "proc.py", "gitrepo/fetch.py", "run/workers/process.py", "run/workers/orphan_reaper.py"
    ):
        assert not SENDS_SIGNALS & seen.touches, "only launchers send signals, to what they started"
    assert not seen.faults


@pytest.mark.parametrize("path", LIBRARY_FILES)
def test_the_library_imports_downward_only(path):
    own = path.relative_to(LIBRARY).with_suffix("").parts[0]
    seen = facts(path)
    assert "m8d_build" not in roots(seen.imports), "nothing imports the toolchain"
    if own == "__init__":
        return
    assert own in RANK, f"{own} has no layer yet: say in docs and here where it stands"
    for name in seen.imports:
        parts = name.split(".")
        if parts[0] == "multiworld" and len(parts) > 1 and parts[1] in RANK:
            assert RANK[parts[1]] <= RANK[own], f"{name} is above {own}"
    if RANK[own] <= RANK["_core"]:
        assert not PURE & roots(seen.imports), f"{own} decides; it does not act"
    if own != "_c10d":
        assert not {name for name in seen.imports if name.startswith("torch.distributed") and "._" in name}
    if own != "settings" and name_of(path) != "run/workers/fork_server.py":  # it sets a worker's whole one
        assert not ENVIRONMENT & seen.touches, "only settings reads and writes the environment"
    programs = {
        "run/main.py", "logs/handler.py", "run/workers/orphan_reaper.py", "run/workers/fork_server.py",
    }  # fmt: skip
    if own not in {"cli", "__main__"} and name_of(path) not in programs:
        assert not {"print", "sys.stdout", "sys.stderr", "sys.argv"} & seen.touches, (
            "only programs and the log print, and have arguments"
        )
    assert not {"pickle", "marshal", "shelve"} & roots(seen.imports) or own == "objects", (
        "objects unpickles, safely"
    )


def test_the_marker_reader_is_torch_free():
    path = LIBRARY / "shim" / "marker.py"
    assert not {"torch", "ctypes", "numpy"} & roots(facts(path).imports)


def test_nothing_else_imports_the_toolchain():
    for folder in ("scripts", "benchmarks", "examples"):
        for path in sources(ROOT / folder) if (ROOT / folder).is_dir() else []:
            if folder != "benchmarks":  # they measure it
                assert "m8d_build" not in roots(facts(path).imports), path


SNAPSHOT = """
import json, logging, os, signal, sys, threading, warnings

QUIET = {"multiworld", "asyncio", "concurrent"}

def state():
    return {
        "environ": dict(os.environ),
        "signals": [str(signal.getsignal(s)) for s in signal.valid_signals()],
        "handlers": [str(h) for h in logging.getLogger().handlers],
        # asking for a logger by name configures nothing; asyncio asks for its own, too
        "loggers": sorted(n for n in logging.root.manager.loggerDict if n.split(".")[0] not in QUIET),
        "filters": [str(f) for f in warnings.filters],
        "threads": threading.active_count(),
        "hooks": [str(h) for h in (sys.excepthook, threading.excepthook, sys.meta_path)],
        "path": sys.path,
    }

before, loaded = state(), set(sys.modules)
import multiworld
light = sorted(set(sys.modules) - loaded)
import multiworld.errors, multiworld.shim, multiworld.shim.marker
dir(multiworld), [getattr(multiworld, name) for name in multiworld.__all__]
print(json.dumps({"light": light, "all": sorted(sys.modules), "same": before == state()}))
"""


def test_importing_multiworld_changes_nothing():
    """Measured in a process of its own."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", SNAPSHOT],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env=environ,
        cwd="/",
    )
    seen = json.loads(done.stdout)
    assert done.stderr == ""
    assert seen["same"], "environment, signals, logging, warnings, threads or hooks changed"
    assert not {"torch", "numpy", "m8d_build"} & {name.split(".")[0] for name in seen["all"]}
    assert [name for name in seen["light"] if name.startswith("multiworld")] == ["multiworld"], (
        "loaded too early"
    )
