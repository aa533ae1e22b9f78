"""Compilation, with object files cached by the content of all their inputs."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import threading
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from m8d_build import proc
from m8d_build.errors import CommandFailed, CompilerMissing
from m8d_build.files.blobs import file_sha256
from m8d_build.files.cachedir import mark_used
from m8d_build.files.disk import needs_room
from m8d_build.overlay.plan import next_to_start

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from m8d_build.overlay.plan import CompileJob, Layout
    from m8d_build.progress import Reporter

__all__ = ["NO_FOREIGN_HEADERS", "OLDEST_STD", "Compiled", "compile_all", "compiler_identity"]

CACHE_SCHEMA = 1
NO_FOREIGN_HEADERS = {"CPATH": "", "C_INCLUDE_PATH": "", "CPLUS_INCLUDE_PATH": ""}
"""Environment of the compiler: folders named there would come before those of the pinned packages."""
OLDEST_STD = "gnu++17"  # of all targets; our own probes need no newer one
_BETWEEN, _ESCAPED = re.compile(r"(?<!\\)\s+"), re.compile(r"\\([ #:])|(\$)\$")
"""What is between the words of a make rule, and how the compiler writes a space, #, : and $ in them."""
COMPILE_TIMEOUT = 1200.0  # seconds; the largest unit takes 35 s and 1.8 GB


@dataclass(frozen=True)
class Compiled:
    """One object.

    Attributes:
        job: what it was made from.
        path: the object, in the folder of this build: others may replace what the cache has under its key.
        cached: whether it was there already.
        seconds: how long the compiler took (0 if cached).
        files: what it read of the stage and of the source tree ("source:torch/csrc/a.hpp"), with SHA-256.
    """

    job: CompileJob
    path: Path
    cached: bool
    seconds: float
    files: Mapping[str, str]


def compiler_identity(compiler: str, std: str = OLDEST_STD, *, work: Path | None = None) -> str:
    """Return what the compiler says of itself, for the cache's keys and for people.

    Args:
        compiler: its command.
        std: the language standard it must know, as for ``-std``.
        work: folder for its files; the system's if None.

    Raises:
        DiskFull: there is no room in that folder.
        CompilerMissing: it cannot be run, or cannot compile a small program in this standard.
    """
    hint = (
        "Install g++ (Debian: apt-get install g++; Fedora: dnf install gcc-c++), or name another in M8D_CXX"
    )
    try:
        version = proc.run(
            [compiler, "--version"], what="ask the compiler for its version", timeout=60
        ).stdout
        with (
            tempfile.TemporaryDirectory(prefix="m8d-cxx-", dir=work) as folder,
            needs_room(Path(folder), "trying the compiler"),
        ):
            source = Path(folder, "probe.cpp")
            source.write_text("#include <optional>\nint main() { return std::optional<int>(0).value(); }\n")
            proc.run(
                [compiler, f"-std={std}", "-c", source, "-o", source.with_suffix(".o")],
                what=f"compile {std.replace('gnu', 'C')}",
                env={"TMPDIR": folder},
                timeout=120,
            )
    except CommandFailed as exc:
        raise CompilerMissing(
            f"{compiler!r} does not work: {exc.value}",
            rule=f"a {std.replace('gnu', 'C')} compiler is needed",
            next_step=hint,
            tail=exc.tail,
        ) from exc
    return version.splitlines()[0] if version else compiler


def compile_all(
    jobs: Sequence[CompileJob],
    layout: Layout,
    *,
    compiler: str,
    identity: str,
    toolbox_identity: str,
    cache: Path,
    log: Path,
    workers: int,
    budget_mb: int,
    report: Reporter,
) -> tuple[Compiled, ...]:
    """Compile every job, or take it from the cache; the largest unit first.

    Args:
        jobs: what to compile.
        layout: the build's folders.
        compiler: the compiler's command.
        identity: what the compiler says of itself.
        toolbox_identity: digest of the headers' origin.
        cache: the cache folder; objects go to ``objects/`` in it.
        log: where compilers write (one file per unit beside it).
        workers: the most compilers side by side.
        budget_mb: the most memory they may take together, by what is on record of each.
        report: told of each object.

    Raises:
        CommandFailed: a compiler failed; its last lines are in the error.
    """
    store = cache / "objects"
    store.mkdir(parents=True, exist_ok=True)
    done: dict[str, Compiled] = {}
    todo: list[tuple[CompileJob, str]] = []
    staged = [path.relative_to(layout.stage).as_posix() for path in sorted(layout.stage.rglob("*"))]
    for job in jobs:
        key = _key(job, identity, toolbox_identity, staged)
        found = _lookup(store, key, job, layout)
        if found is not None:
            done[job.unit] = found
            report.note(f"{job.unit}: unchanged")
        else:
            todo.append((job, key))
    # The largest first: it takes longest.
    todo.sort(key=lambda entry: (entry[0].memory_mb, entry[0].source.stat().st_size), reverse=True)
    stop = threading.Event()
    pool = ThreadPoolExecutor(max_workers=max(1, workers), thread_name_prefix="m8d-cxx")
    running: dict[Future[Compiled], int] = {}
    try:
        while todo or running:
            while len(running) < max(1, workers) and todo:
                index = next_to_start([job.memory_mb for job, _ in todo], list(running.values()), budget_mb)
                if index is None:
                    break
                job, key = todo.pop(index)
                future = pool.submit(_compile, job, key, layout, compiler, store, log, stop)
                running[future] = job.memory_mb
            # A short wait keeps Ctrl-C responsive; each compiler has its own deadline.
            finished, _ = wait(running, timeout=1.0, return_when=FIRST_COMPLETED)
            for future in finished:
                del running[future]
                compiled = future.result()
                done[compiled.job.unit] = compiled
                report.note(f"{compiled.job.unit}: {compiled.seconds:.1f} s")
    finally:
        stop.set()  # after a failure or Ctrl-C the other compilers are ended; when all is done there are none
        pool.shutdown(wait=True, cancel_futures=True)
    return tuple(done[job.unit] for job in jobs)


def _compile(
    job: CompileJob, key: str, layout: Layout, compiler: str, store: Path, log: Path, stop: threading.Event
) -> Compiled:
    made = layout.work / job.name
    with tempfile.TemporaryDirectory(prefix="m8d-obj-", dir=layout.work) as folder:
        deps = Path(folder, "unit.d")
        unit_log = log.with_name(f"{log.stem}-{Path(job.unit).stem}{log.suffix}")
        finished = proc.run(
            [compiler, *job.flags, "-MD", "-MF", deps, "-c", job.source, "-o", made],
            what=f"compile {job.unit}",
            log=unit_log,
            env={**NO_FOREIGN_HEADERS, "TMPDIR": folder},  # a full disk is then that of the cache
            timeout=COMPILE_TIMEOUT,
            cancel=stop,
            next_step="Look at the log; a compiler too new for this torch is named by M8D_CXX=g++-12, say",
        )
        files = _dependencies(os.fsdecode(deps.read_bytes()), layout)
        manifest = {"schema": CACHE_SCHEMA, "unit": job.unit, "files": files}
        target = store / f"{key}.o"
        with tempfile.TemporaryDirectory(prefix=".part-", dir=store) as aside:  # as another build may
            kept, said = Path(aside, target.name), Path(aside, f"{key}.json")
            shutil.copyfile(made, kept)
            said.write_text(json.dumps({**manifest, "object": file_sha256(kept)}, indent=1))
            kept.replace(target)
            said.replace(target.with_suffix(".json"))  # last: an object without its manifest is not one
    return Compiled(job, made, cached=False, seconds=finished.seconds, files=files)


def _key(job: CompileJob, identity: str, toolbox_identity: str, staged: Sequence[str]) -> str:
    # With the names in the stage: a file that comes there hides one that the manifest says nothing of.
    parts = [str(CACHE_SCHEMA), identity, toolbox_identity, job.unit, *job.identity, file_sha256(job.source)]
    return sha256("\0".join([*parts, *staged]).encode()).hexdigest()


def _lookup(store: Path, key: str, job: CompileJob, layout: Layout) -> Compiled | None:
    """Return a copy of the object if it is whole and nothing it was made from has changed."""
    made, manifest = layout.work / job.name, store / f"{key}.json"
    try:
        data = json.loads(manifest.read_text())
        shutil.copyfile(store / f"{key}.o", made)
        if data["schema"] != CACHE_SCHEMA or file_sha256(made) != data["object"]:
            return None
        own = _name(job.source, layout)
        if own is not None and own not in data["files"]:
            return None  # the compiler wrote paths in a way that was not understood
        for name, digest in data["files"].items():
            root, _, path = name.partition(":")
            if file_sha256((layout.stage if root == "stage" else layout.source) / path) != digest:
                return None
    except (OSError, ValueError, KeyError, AttributeError):
        return None
    mark_used(manifest, store / f"{key}.o")
    return Compiled(job, made, cached=True, seconds=0.0, files=data["files"])


def _dependencies(rule: str, layout: Layout) -> dict[str, str]:
    """Return the files of the stage and of the source tree that a unit read, with their digests.

    The others come from wheels and from the compiler, and are in the key by those names.
    """
    found: dict[str, str] = {}
    for word in _BETWEEN.split(rule.replace("\\\n", " ").strip())[1:]:
        path = Path(_ESCAPED.sub(r"\1\2", word))
        name = _name(path, layout)
        if name is not None:
            found[name] = file_sha256(path)
    return dict(sorted(found.items()))


def _name(path: Path, layout: Layout) -> str | None:
    """Return how a manifest names a file; None for one that is in neither folder."""
    for name, root in (("stage", layout.stage), ("source", layout.source)):
        if root in path.parents:
            return f"{name}:{path.relative_to(root).as_posix()}"
    return None
