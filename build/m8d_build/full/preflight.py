"""Preflight checks of a full build: every reason why a machine cannot do it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from m8d_build.errors import PreflightFailed
from m8d_build.full.environment import Route, RouteKind
from m8d_build.full.plan import JOB_BYTES, jobs_for

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from m8d_build.full.machine import Compiler, MachineFacts
    from m8d_build.full.recipes import Recipe
    from m8d_build.targets import Abi

__all__ = ["DISK_BYTES", "Need", "Problem", "choose_route", "preflight", "require"]

GIB = 2**30
# A planning figure, never measured: sources with submodules, the environment with its CUDA toolkit, objects
# for seven GPU architectures, and the wheel three times (built, unpacked libraries, finished).
# docs/full-build.md gives the parts.
DISK_BYTES = 100 * GIB
CONDAS = (RouteKind.MICROMAMBA, RouteKind.MAMBA, RouteKind.CONDA)


@dataclass(frozen=True)
class Problem:
    """One reason why this machine cannot do it.

    Attributes:
        code: short stable name ("disk", "nvcc").
        found: what is there.
        rule: what must be.
        next_step: what to do.
    """

    code: str
    found: str
    rule: str
    next_step: str

    def __str__(self) -> str:
        return f"{self.found}: {self.rule}. {self.next_step}"


@dataclass(frozen=True)
class Need:
    """What is wanted of the machine.

    Attributes:
        torch: "2.6.0".
        recipe: how it is built.
        kind: how the environment is made.
        python: version to build for.
        jobs: compilers side by side.
        from_git: whether the sources are cloned.
        disk: bytes that it takes in all.
        held: bytes that the build's folder takes already: they are there for it, kept or removed.
        abi: how the official wheel was compiled, None if the target does not say.
        patches: how many there are to apply.
    """

    torch: str
    recipe: Recipe
    kind: RouteKind
    python: str
    jobs: int
    abi: Abi | None
    patches: int
    from_git: bool = True
    disk: int = DISK_BYTES
    held: int = 0


def choose_route(asked: str, recipe: Recipe, machine: MachineFacts) -> Route:
    """Settle how the environment is made; ``preflight`` says whether that can work.

    Args:
        asked: "conda", "mamba", "micromamba", "venv", or "auto": the quickest conda there is, else a venv.
        recipe: names the CUDA version.
        machine: what is there.
    """
    if asked == "auto":
        kind = next((kind for kind in CONDAS if machine.program(kind.value)), RouteKind.VENV)
    else:
        kind = RouteKind(asked)
    if kind is not RouteKind.VENV:
        return Route(kind, machine.program(kind.value) or kind.value)
    toolkit = machine.toolkit(recipe.cuda.version)
    return Route(
        kind,
        machine.python_program,
        compiler=machine.compiler.path if machine.compiler else "",
        cuda_home=toolkit.home if toolkit else f"/usr/local/cuda-{recipe.cuda.version}",
    )


def preflight(need: Need, machine: MachineFacts) -> list[Problem]:
    """Return every reason why a machine cannot do the build, most basic first; empty if none was found.

    The network is not asked: whether conda's channels, PyPI and git can be reached shows when they are used.
    """
    problems = [*_system(need, machine), *_room(need, machine), *_programs(need, machine)]
    if need.kind is RouteKind.VENV:
        problems += _plain(need, machine)
    return problems


def require(problems: Sequence[Problem], torch: str) -> None:
    """Refuse if there is a problem.

    Raises:
        PreflightFailed: there is; the message lists all of them.
    """
    if problems:
        listed = "".join(f"\n  - {problem}" for problem in problems)
        count = "one reason" if len(problems) == 1 else f"{len(problems)} reasons"
        raise PreflightFailed(
            f"this machine cannot do the full build of torch {torch}, for {count}:{listed}",
            next_step="Correct these, or use `overlay`, which needs none of it: the official wheel with "
            "only the "
            "patched files compiled",
        )


def _system(need: Need, machine: MachineFacts) -> Iterator[Problem]:
    if (machine.system, machine.architecture) != ("Linux", "x86_64"):
        yield Problem(
            "system",
            f"{machine.system} on {machine.architecture}",
            "a full build is for Linux on x86_64",
            "Use such a machine",
        )
    if need.python not in need.recipe.pythons:
        yield Problem(
            "python",
            f"Python {need.python}",
            f"torch {need.torch} is built for {', '.join(need.recipe.pythons)}",
            "Name one of these with --python",
        )
    todo = "Take a target whose status is verified or applies (`python -m m8d_build targets`)"
    if need.abi is None:
        yield Problem(
            "abi",
            f"the target of torch {need.torch} does not say how the official wheel was compiled",
            "a full build is compiled alike",
            todo,
        )
    elif need.abi.cuda != need.recipe.cuda.version:
        yield Problem(
            "cuda",
            f"the target of torch {need.torch} names CUDA {need.abi.cuda}",
            f"its recipe builds with {need.recipe.cuda.version}",
            "Make build/conda/recipes.toml and patches/targets.toml agree",
        )
    if need.patches < 1:
        yield Problem(
            "patches", f"torch {need.torch} has no patches", "without them this is the official build", todo
        )


def _room(need: Need, machine: MachineFacts) -> Iterator[Problem]:
    if not machine.writable:
        yield Problem("out", "the output folder", "it must be one we may write", "Name another with --out")
    if machine.free + need.held < need.disk:
        earlier = f", {_gib(need.held)} GiB in the build's folder" if need.held else ""
        yield Problem(
            "disk",
            f"{_gib(machine.free)} GiB free{earlier}",
            f"about {_gib(need.disk)} GiB are needed",
            "Free some room, or name a folder on a larger disk with --out",
        )
    if need.jobs < 1:
        yield Problem("jobs", f"{need.jobs} jobs", "there must be at least one", "Name a number with --jobs")
    elif machine.memory and need.jobs * JOB_BYTES > machine.memory:
        fits = jobs_for(machine.memory, machine.cores)
        enough = machine.memory >= JOB_BYTES
        yield Problem(
            "memory",
            f"{_gib(machine.memory)} GiB of memory for {need.jobs} jobs",
            f"a job may need {_gib(JOB_BYTES)} GiB",
            f"Use --jobs {fits}" if enough else "Use a machine with more memory",
        )


def _programs(need: Need, machine: MachineFacts) -> Iterator[Problem]:
    if need.from_git and not machine.program("git"):
        yield Problem(
            "git",
            "no git",
            "PyTorch and its submodules are cloned",
            "Install git, or name a tree with --source PATH",
        )
    if need.kind is not RouteKind.VENV and not machine.program(need.kind.value):
        there = [kind.value for kind in CONDAS if machine.program(kind.value)]
        yield Problem(
            "environment",
            f"no {need.kind.value} on PATH",
            "it makes the build environment",
            f"Use --env {there[0]}"
            if there
            else "Install it (https://github.com/conda-forge/miniforge), or use --env venv",
        )


def _plain(need: Need, machine: MachineFacts) -> Iterator[Problem]:
    """What a venv does not bring and the machine must have."""
    recipe = need.recipe
    conda = "or use --env conda, which brings its own"
    if need.python != machine.python:
        yield Problem(
            "python",
            f"this is Python {machine.python}",
            f"a venv for Python {need.python} is made by that Python",
            f"Run this with Python {need.python}, {conda}",
        )
    if not machine.venv:
        yield Problem(
            "venv",
            f"{machine.python_program} cannot make virtual environments",
            "venv and ensurepip must be there",
            "Install them (Debian: python3-venv)",
        )
    if not machine.headers:
        yield Problem(
            "headers",
            f"{machine.python_program} has no C headers",
            "PyTorch is compiled against them",
            f"Install them (Debian: python3-dev), {conda}",
        )
    if machine.toolkit(recipe.cuda.version) is None:
        found = ", ".join(sorted(t.version or "unknown" for t in machine.toolkits))
        yield Problem(
            "nvcc",
            f"no CUDA toolkit {recipe.cuda.version}" + (f" (found: {found})" if found else ""),
            f"torch {need.torch} is built with it",
            f"Install it in /usr/local/cuda-{recipe.cuda.version} or put its nvcc on PATH, {conda}",
        )
    yield from _compiler(need, machine.compiler, conda)


def _compiler(need: Need, compiler: Compiler | None, conda: str) -> Iterator[Problem]:
    recipe = need.recipe
    oldest = tuple(int(part) for part in recipe.gcc_min.split("."))
    compilers = f"GCC {recipe.gcc_min} to {recipe.cuda.gcc_max}"
    rule = f"{compilers} compiles torch {need.torch} with CUDA {recipe.cuda.version}"
    todo = f"Install one of these and name it with M8D_CXX, {conda}"
    if compiler is None:
        yield Problem("compiler", "no C++ compiler", rule, todo)
    elif compiler.kind != "gcc":
        yield Problem("compiler", f"{compiler.path} is {compiler.kind or 'no compiler we know'}", rule, todo)
    elif not compiler.version:
        yield Problem("compiler", f"{compiler.path} does not say its version", rule, todo)
    elif compiler.version < oldest or compiler.version[0] > recipe.cuda.gcc_max:
        version = ".".join(str(part) for part in compiler.version)
        yield Problem("compiler", f"{compiler.path} is GCC {version}", rule, todo)


def _gib(size: int) -> str:
    return f"{size / GIB:.0f}"
