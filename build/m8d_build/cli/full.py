"""``full``: build a patched PyTorch from source, in conda or a plain venv."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from m8d_build.cli._common import announce, choose_target, positive, python_tag
from m8d_build.files.blobs import file_sha256
from m8d_build.full.actions import StandardActions
from m8d_build.full.build import loses_compiled, run_full, unfinished
from m8d_build.full.machine import read_machine, taken_by
from m8d_build.full.plan import jobs_for, plan_full
from m8d_build.full.preflight import Need, Problem, choose_route, preflight, require
from m8d_build.full.recipes import load_recipes
from m8d_build.full.steps import Command, FullOptions, Inputs
from m8d_build.gitrepo.tree import is_git_tree
from m8d_build.progress import Progress
from m8d_build.series.read import load_series
from m8d_build.series.verify import reject, verify
from multiworld import __version__ as builder

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from rich.console import Console

    from m8d_build.full.recipes import Recipes
    from m8d_build.full.steps import FullPlan
    from m8d_build.series.read import Series
    from m8d_build.settings import Settings
    from m8d_build.targets import Target

__all__ = ["HELP", "NAME", "configure_parser", "execute"]

NAME = "full"
HELP = "build a patched PyTorch from source (hours, about 100 GB)"

DISTRO = "distro"


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--torch", metavar="VERSION", help="default: the newest verified one for this Python")
    parser.add_argument(
        "--env",
        choices=("auto", "conda", "mamba", "micromamba", "venv"),
        default="auto",
        help="what makes the build environment (default: micromamba, mamba or conda if there is one, else a "
        "venv)",
    )
    parser.add_argument(
        "--source",
        default="auto",
        metavar="WHERE",
        help="git (auto is the same), or a clone with its submodules",
    )
    parser.add_argument("--python", metavar="X.Y", help="Python to build for (default: the one running this)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the wheel, the logs and the build go")
    parser.add_argument(
        "--jobs", type=positive, metavar="N", help="compilers side by side (default: one per core and 6 GiB)"
    )
    parser.add_argument(
        "--archs",
        metavar="LIST",
        help="GPU architectures, as in 8.0;9.0+PTX (default: those of the official wheel)",
    )
    parser.add_argument(
        "--plan", action="store_true", help="print the steps and their commands, and run nothing"
    )
    parser.add_argument("--json", action="store_true", help="with --plan: print one JSON object")
    again = parser.add_mutually_exclusive_group()
    again.add_argument(
        "--resume", action="store_true", help="go on from the last finished step (the default)"
    )
    again.add_argument("--fresh", action="store_true", help="remove what an earlier run left, and begin anew")


def execute(args: argparse.Namespace, settings: Settings, console: Console) -> int:
    """Plan the build; print it, or check the machine and run it.

    Raises:
        PreflightFailed: this machine cannot do it; every reason is listed.
        UnknownVersion: the version has no target or no recipe.
        PatchRejected: its series breaks a rule.
        BuildError: as ``full.run_full``.
    """
    target, series, recipes = _subject(args, settings)
    recipe = recipes.get(target.version)
    out = args.out.absolute() if args.out else settings.out
    machine = read_machine(out, settings.compiler)
    route = choose_route(args.env, recipe, machine)
    options = FullOptions(
        route=route,
        python=args.python or machine.python,
        out=out,
        jobs=args.jobs if args.jobs is not None else jobs_for(machine.memory, settings.jobs),
        source="git" if args.source in {"auto", "git"} else str(Path(args.source).absolute()),
        git_url=settings.git_url,
        archs=tuple(args.archs.split(";")) if args.archs else (),
    )
    plan = plan_full(
        target,
        recipe,
        options,
        replace(
            _inputs(series, recipes, target.version),
            known_commit=options.source == "git" or is_git_tree(Path(options.source)),
        ),
        cxx11_abi=bool(target.abi and target.abi.cxx11_abi),
    )
    need = Need(
        torch=target.version,
        recipe=recipe,
        kind=route.kind,
        python=options.python,
        jobs=options.jobs,
        abi=target.abi,
        patches=len(series.patches),
        from_git=options.source == "git",
        held=taken_by(plan.layout.work),
    )
    problems = [*preflight(need, machine), *_source_problem(args.source, plan.layout.work)]
    if not args.fresh and loses_compiled(plan):
        problems.append(
            Problem(
                "earlier",
                f"{plan.layout.tree}, and what is compiled there",
                "an earlier run made it with other options or from other files, or a part of that is gone, "
                "and this one would remove it",
                f"Run it as before ({plan.layout.logs} has that run's commands), or remove it with --fresh",
            )
        )
    if args.plan:
        _show(plan, problems, console, as_json=args.json)
        return 0
    require(problems, target.version)
    actions = StandardActions(
        target=target,
        series=series,
        compiler=route.compiler,
        patches=settings.patches,
        builder=builder,
    )
    progress = Progress([(step.title, step.minutes * 60) for step in unfinished(plan)], console)
    result = run_full(plan, actions, progress, fresh=args.fresh)
    if result.wheel is not None:
        announce(console, result.wheel, file_sha256(result.wheel), series.topics)
    return 0


def _subject(args: argparse.Namespace, settings: Settings) -> tuple[Target, Series, Recipes]:
    target = choose_target(args, settings, python_tag(args.python))
    series = load_series(settings.patches, target.version)
    reject(target.version, verify(target, series))
    return target, series, load_recipes()


def _inputs(series: Series, recipes: Recipes, version: str) -> Inputs:
    recipe = recipes.get(version)
    return Inputs(
        series=series.digest,
        environment=recipes.text(recipe.environment),
        requirements=(recipe.requirements, recipes.text(recipe.requirements)),
        libraries=(recipe.libraries, recipes.text(recipe.libraries)),
    )


def _source_problem(source: str, work: Path) -> list[Problem]:
    if source == DISTRO:
        return [
            Problem(
                "source",
                "the distribution's source package",
                "it lacks PyTorch's submodules, which a full build takes",
                "Use --source git, or a recursive clone",
            )
        ]
    tree, folder = Path(source).resolve(), work.resolve()
    if source in {"auto", "git"} or not (folder.is_relative_to(tree) or tree.is_relative_to(folder)):
        return []
    return [
        Problem(
            "source",
            f"{folder}, where it is built, and --source {tree}",
            "neither lies in the other, as the tree is copied, and stays as it is",
            "Name a folder outside of the tree with --out",
        )
    ]


def _show(plan: FullPlan, problems: Sequence[Problem], console: Console, *, as_json: bool) -> None:
    if as_json:
        said = {**plan.as_json(), "problems": [asdict(problem) for problem in problems]}
        console.print_json(json.dumps(said))
        return

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    say(f"torch {plan.version}, built in {plan.layout.work}")
    shown: tuple[tuple[str, str], ...] = ()
    for number, step in enumerate(plan.steps, 1):
        say(f"\n{number}. {step.title}  [{step.id}, roughly {step.minutes:.0f} min]")
        for part in step.parts:
            if not isinstance(part, Command):
                where = ", ".join(f"{name} {value}" for name, value in part.args if name != "text")
                say(f"   - {part.act.value}: {where}")
                continue
            if part.env and part.env != shown:
                for name, value in part.env:
                    say(f"     {name}={shlex.quote(value)}")
                shown = part.env
            say(f"   $ {shlex.join(part.argv)}")
    if problems:
        say("\nThis machine cannot do it:")
        for problem in problems:
            say(f"  - {problem}")
