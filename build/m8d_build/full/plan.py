"""The full build, planned: steps with commands and variables. Pure."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from m8d_build.full.environment import RouteKind, build_variables, create_commands, inside, render_environment
from m8d_build.full.steps import HOUR, Act, Action, Command, FullPlan, Layout, Step, python_tag
from m8d_build.sources.base import without_password
from m8d_build.wheel.label import local_label

if TYPE_CHECKING:
    from m8d_build.full.recipes import Recipe
    from m8d_build.full.steps import FullOptions, Inputs
    from m8d_build.targets import Target

__all__ = ["JOB_BYTES", "jobs_for", "plan_full"]

# One compilation's memory. nvcc needs about 5.3 GB for flash attention's kernels (pytorch/pytorch pull
# request 130443, where a pool for them was proposed; issue 124018 measured 4.5 GB); the rest needs far less.
JOB_BYTES = 6 * 2**30


def jobs_for(memory_bytes: int, cores: int) -> int:
    """Return how many compilers may run side by side: one per core, one per 6 GiB, at least one."""
    return max(1, min(cores, memory_bytes // JOB_BYTES))


def plan_full(
    target: Target, recipe: Recipe, options: FullOptions, inputs: Inputs, *, cxx11_abi: bool
) -> FullPlan:
    """Decide a full build.

    Args:
        target: what is built.
        recipe: how its version is built.
        options: what the person chose.
        inputs: contents of the files it depends on.
        cxx11_abi: how the official wheel was compiled.
    """
    local = local_label(recipe.cuda.label, target, inputs.series, verified=inputs.known_commit)
    version = f"{target.version}+{local}"
    layout = Layout.of(target.version, recipe.cuda.label, options.python, options.out)
    steps = [
        _environment(options, layout, inputs),
        _sources(target, options, layout),
        Step(
            id="patches",
            title="apply the patch series",
            parts=(Action(Act.APPLY_SERIES, (("tree", str(layout.tree)), ("series", inputs.series))),),
            next_step=f"`python -m m8d_build verify` says what is wrong with the series of {target.version}",
        ),
        _requirements(recipe, options, layout, inputs),
        *_build(recipe, options, layout, version, cxx11_abi=cxx11_abi),
        _finish(layout, f"torch-{version}-{python_tag(options.python)}"),
        Step(
            id="inspect",
            title="inspect the wheel",
            parts=(Action(Act.INSPECT, (("out", str(layout.out)), ("stem", f"torch-{version}"))),),
            always=True,
            next_step="The wheel is not what it should be; keep the log and report it",
        ),
    ]
    return FullPlan(
        torch=target.version,
        version=version,
        layout=layout,
        steps=_chained(steps),
        local=local,
        python_tag=python_tag(options.python),
        rpath=recipe.cuda.rpath,
        cxx11_abi=cxx11_abi,
        known_commit=inputs.known_commit,
    )


def _environment(options: FullOptions, layout: Layout, inputs: Inputs) -> Step:
    route, prefix = options.route, layout.environment
    parts: list[Command | Action] = []
    if route.kind is not RouteKind.VENV:
        text = render_environment(inputs.environment, options.python)
        file = layout.work / "environment.yml"
        parts.append(Action(Act.WRITE, (("path", str(file)), ("text", text))))
        argvs = create_commands(route, prefix, file)
    else:
        argvs = create_commands(route, prefix, prefix)
    parts += [
        Command("create the build environment", argv, str(layout.work), timeout=3 * HOUR) for argv in argvs
    ]
    return Step(
        id="environment",
        title=f"create the build environment with {route.kind.value}",
        parts=tuple(parts),
        minutes=1 if route.kind is RouteKind.VENV else 20,
        clears=(str(prefix),),
        makes=(str(prefix / "bin" / "python"),),
        next_step="See what the log says is missing; another --env may do, or correct build/conda",
    )


def _sources(target: Target, options: FullOptions, layout: Layout) -> Step:
    tree = str(layout.tree)
    fetch: Command | Action
    if options.source == "git":
        url = without_password(options.git_url)
        fetch = Command(
            f"clone PyTorch {target.tag} with its submodules",
            (
                "git", "clone", "--quiet", "--branch", target.tag, "--depth", "1",
                "--recurse-submodules", "--shallow-submodules", "--jobs", "8", url, tree,
            ),
            str(layout.work),
            env=(("GIT_TERMINAL_PROMPT", "0"),),
            hidden=_instead(url, options.git_url),
            timeout=6 * HOUR,
        )  # fmt: skip
        advice = (
            "Check the network and M8D_PYTORCH_GIT, or name a tree with its submodules with --source PATH"
        )
    else:
        fetch = Action(Act.COPY_TREE, (("source", options.source), ("tree", tree)))
        advice = "Name a clean checkout of the tag, with `git submodule update --init --recursive` done"
    return Step(
        id="sources",
        title=f"get PyTorch {target.tag} with its submodules",
        parts=(fetch, Action(Act.CHECK_SOURCES, (("tree", tree), ("commit", target.commit)))),
        minutes=20,
        clears=(tree,),
        makes=(str(layout.tree / "setup.py"),),
        next_step=advice,
    )


def _instead(shown: str, url: str) -> tuple[tuple[str, str], ...]:
    """Return the variables by which git uses a URL with a password where it is told the one without."""
    if url == shown:
        return ()
    return (
        ("GIT_CONFIG_COUNT", "1"),
        ("GIT_CONFIG_KEY_0", f"url.{url}.insteadOf"),
        ("GIT_CONFIG_VALUE_0", shown),
    )


def _requirements(recipe: Recipe, options: FullOptions, layout: Layout, inputs: Inputs) -> Step:
    run = (
        *inside(options.route, layout.environment),
        "-m",
        "pip",
        "install",
        "--no-input",
        "--progress-bar",
        "off",
    )
    files = tuple(
        Action(Act.WRITE, (("path", str(layout.work / Path(name).name)), ("text", text)))
        for name, text in (inputs.requirements, inputs.libraries)
    )
    requirements, libraries = (a["path"] for a in files)
    return Step(
        id="requirements",
        title="install the build's requirements",
        parts=(
            *files,
            Command(
                "install the build's requirements", (*run, "-r", requirements), str(layout.work),
                timeout=2 * HOUR,
            ),
            Command(
                "install NVIDIA's libraries", (*run, "--no-deps", "-r", libraries), str(layout.work),
                timeout=2 * HOUR,
            ),
            Action(
                Act.LINK_LIBRARIES,
                (
                    ("environment", str(layout.environment)),
                    ("links", ":".join(recipe.links)),
                    ("folder", str(layout.linked)),
                ),
            ),
        ),
        minutes=10,
        clears=(str(layout.linked),),
        makes=(str(layout.linked),),
        next_step="Check the network and pip's index; the versions are in build/conda",
    )  # fmt: skip


def _build(
    recipe: Recipe, options: FullOptions, layout: Layout, version: str, *, cxx11_abi: bool
) -> list[Step]:
    env = build_variables(
        recipe,
        options.route,
        environment=layout.environment,
        linked=layout.linked,
        scratch=layout.work / "tmp",
        version=version,
        archs=options.archs or recipe.cuda.archs,
        jobs=options.jobs,
        cxx11_abi=cxx11_abi,
    )
    python = inside(options.route, layout.environment)
    dist = layout.work / "dist"

    def command(what: str, args: tuple[str, ...], timeout: float) -> Command:
        return Command(
            what, (*python, *args), str(layout.tree), env=env, loose=("MAX_JOBS",), timeout=timeout
        )

    steps: list[Step] = []
    if recipe.configure:
        steps.append(
            Step(
                id="configure",
                title="configure (CMake)",
                parts=(command("configure PyTorch", recipe.configure, 2 * HOUR),),
                minutes=5,
                clears=(str(layout.tree / "build" / "CMakeCache.txt"),),
                makes=(str(layout.tree / "build" / "CMakeCache.txt"),),
                next_step="The log says what CMake could not find; `--env conda` brings all of it",
            )
        )
    args = tuple(arg.format(dist=dist) for arg in recipe.wheel)
    steps.append(
        Step(
            id="wheel",
            title=f"compile PyTorch with {options.jobs} jobs",
            parts=(command("compile PyTorch", args, 48 * HOUR),),
            minutes=240,
            clears=(str(dist),),
            makes=(str(dist),),
            next_step="Killed compilers mean too little memory: run it again with a smaller --jobs; "
            "it goes on with what is not compiled yet",
        )
    )
    return steps


def _finish(layout: Layout, stem: str) -> Step:
    scratch = layout.work / "scratch"
    args = {
        "dist": layout.work / "dist",
        "scratch": scratch,
        "environment": layout.environment,
        "out": layout.out,
    }
    return Step(
        id="finish",
        title="make the wheel one that installs anywhere",
        parts=(Action(Act.FINISH, tuple((name, str(path)) for name, path in args.items())),),
        minutes=10,
        clears=(str(scratch),),
        makes=(str(layout.out / f"{stem}-*.whl"),),
        next_step="See the log; what is compiled is kept",
    )


def _chained(steps: list[Step]) -> tuple[Step, ...]:
    """Give each step its key: a step is as new as what it stands on."""
    before = ""
    done: list[Step] = []
    for step in steps:
        seen = json.dumps([before, step.id, [part.identity() for part in step.parts]], sort_keys=True)
        before = hashlib.sha256(seen.encode()).hexdigest()
        done.append(replace(step, key=before))
    return tuple(done)
