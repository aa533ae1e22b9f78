"""The types of a full build's plan: commands, actions, steps, layout."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from m8d_build.full.environment import Route

__all__ = ["Act", "Action", "Command", "FullOptions", "FullPlan", "Inputs", "Layout", "Step", "python_tag"]

HOUR = 3600.0


class Act(str, Enum):
    """What the runner does itself, between commands."""

    WRITE = "write a file"  # path, text
    COPY_TREE = "copy a source tree"  # source, tree
    CHECK_SOURCES = "check the sources"  # tree
    APPLY_SERIES = "apply the patch series"  # tree
    LINK_LIBRARIES = "link NVIDIA's headers and libraries"  # environment, links, folder
    FINISH = "finish the wheel"  # dist, scratch, environment, out
    INSPECT = "inspect the wheel"  # out, stem


@dataclass(frozen=True)
class Command:
    """One program to run.

    Attributes:
        what: what it does, for messages.
        argv: program and arguments.
        cwd: its working folder.
        env: variables set on top of ours, in order.
        loose: names in ``env`` whose values do not change what is built (MAX_JOBS).
    hidden: more variables: they hold a password, so they are never shown, and change nothing that is built.
        timeout: seconds.
    """

    what: str
    argv: tuple[str, ...]
    cwd: str
    env: tuple[tuple[str, str], ...] = ()
    loose: tuple[str, ...] = ()
    hidden: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    timeout: float = HOUR

    def identity(self) -> object:
        """Return what the result depends on, as plain values.

        Of the program that is its name, without a version: where conda or Python lies changes nothing.
        """
        program = self.argv[0].rpartition("/")[2].rstrip("0123456789.")
        env = [(k, v) for k, v in self.env if k not in self.loose]
        return ["command", [program, *self.argv[1:]], self.cwd, env]


@dataclass(frozen=True)
class Action:
    """One thing the runner does itself.

    Attributes:
        act: what.
        args: names and values, as the comment at the member of ``Act`` lists them.
    """

    act: Act
    args: tuple[tuple[str, str], ...] = ()

    def identity(self) -> object:
        """Return what the result depends on, as plain values."""
        return ["action", self.act.value, self.args]

    def __getitem__(self, name: str) -> str:
        return dict(self.args)[name]


@dataclass(frozen=True)
class Step:
    """One step: finished as a whole or done again as a whole.

    Attributes:
        id: short name, also of its log ("sources").
        title: for people.
        parts: commands and actions, in order.
        key: digest of all it depends on, the steps before it included.
        minutes: how long it may take on 16 cores; a guess, measured nowhere.
        clears: files and folders removed before it starts.
        makes: files and folders that are there when it is finished; while one is missing, it is not. The last
            part of a path may have ``*`` in it.
        always: it is done in every run.
        next_step: what to do when it fails.
    """

    id: str
    title: str
    parts: tuple[Command | Action, ...]
    key: str = ""
    minutes: float = 1.0
    clears: tuple[str, ...] = ()
    makes: tuple[str, ...] = ()
    always: bool = False
    next_step: str = ""


@dataclass(frozen=True)
class FullOptions:
    """What a person can choose.

    Attributes:
        route: how the build environment is made.
        python: version to build for ("3.11").
        out: where the wheel and the logs go.
        jobs: compilers side by side.
        source: "git", or the path of a PyTorch tree with its submodules.
        git_url: where PyTorch's repository is.
        archs: GPU architectures, () for those of the official wheels.
    """

    route: Route
    python: str
    out: Path
    jobs: int
    source: str = "git"
    git_url: str = "https://github.com/pytorch/pytorch.git"
    archs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Inputs:
    """Contents the plan depends on, read at the edge.

    Attributes:
        series: digest of the patches, as `Series.digest`.
        environment: text of the conda environment file.
        requirements: path and text of the pip requirements.
        libraries: path and text of the requirements for NVIDIA's packages.
        known_commit: whether the sources are a clone, which can be compared with its commit. From others a
            wheel counts as unverified.
    """

    series: str
    environment: str
    requirements: tuple[str, str]
    libraries: tuple[str, str]
    known_commit: bool = True


@dataclass(frozen=True)
class Layout:
    """Where a full build keeps things, all below one folder of its own.

    Attributes:
        work: that folder.
        out: where the finished wheel goes.
        logs: one log per step.
    """

    work: Path
    out: Path
    logs: Path

    @classmethod
    def of(cls, version: str, label: str, python: str, out: Path) -> Layout:
        """Return the layout for a torch version, CUDA label and Python version."""
        name = f"full-{version}-{label}-{python_tag(python)}"
        return cls(work=out / name, out=out, logs=out / "logs" / name)

    @property
    def tree(self) -> Path:
        """PyTorch's sources."""
        return self.work / "pytorch"

    @property
    def environment(self) -> Path:
        """The build environment."""
        return self.work / "env"

    @property
    def linked(self) -> Path:
        """NVIDIA's headers and libraries, under the names CMake looks for."""
        return self.work / "nvidia"

    @property
    def state(self) -> Path:
        """Which steps are finished."""
        return self.work / "state.json"


@dataclass(frozen=True)
class FullPlan:
    """All of a full build.

    Attributes:
        torch: "2.6.0".
        version: of the wheel ("2.6.0+cu124.m8d2").
        layout: where things are.
        steps: in order.
        local: its local label ("cu124.m8d2").
        python_tag: "cp311".
        rpath: NVIDIA's library folders in site-packages.
        cxx11_abi: the std::string ABI the result must have.
        known_commit: as in `Inputs`.
    """

    torch: str
    version: str
    layout: Layout
    steps: tuple[Step, ...]
    local: str
    python_tag: str
    rpath: tuple[str, ...]
    cxx11_abi: bool
    known_commit: bool = True

    def as_json(self) -> dict[str, object]:
        """Return it as plain values, for ``--json``."""
        return {
            "torch": self.torch,
            "version": self.version,
            "work": str(self.layout.work),
            "steps": [
                {
                    "id": step.id,
                    "title": step.title,
                    "key": step.key,
                    "minutes": step.minutes,
                    "parts": [
                        {"run": list(p.argv), "cwd": p.cwd, "env": dict(p.env)}
                        if isinstance(p, Command)
                        else {"do": p.act.value, **dict(p.args)}
                        for p in step.parts
                    ],
                }
                for step in self.steps
            ],
        }


def python_tag(python: str) -> str:
    """Return a Python version as wheels name it: "3.11" -> "cp311"."""
    return "cp" + python.replace(".", "")
