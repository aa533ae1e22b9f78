"""``overlay``: build a patched wheel in minutes, compiling only the touched units."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from m8d_build.cli import print_json
from m8d_build.cli._common import announce, choose_target, positive, python_tag, say
from m8d_build.errors import UnknownVersion
from m8d_build.overlay.build import OverlayRequest, build_overlay
from m8d_build.overlay.plan import Step, describe, require_recipe
from m8d_build.porting.build import EXPECTED, build_ported
from m8d_build.porting.decide import nearest_series, needs_port, unlisted
from m8d_build.progress import Console, Progress
from m8d_build.series.read import load_series
from m8d_build.targets import Status, load_targets
from multiworld.provenance.statement import ported_words

if TYPE_CHECKING:
    import argparse

    from m8d_build.overlay.build import Built
    from m8d_build.settings import Settings
    from m8d_build.targets import Target

__all__ = ["HELP", "NAME", "configure_parser", "execute"]

NAME = "overlay"
HELP = "build a patched wheel from the official one (minutes)"


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--torch", metavar="VERSION", help="default: the newest verified one for this Python")
    parser.add_argument("--python", metavar="X.Y", help="Python to build for (default: the one running this)")
    parser.add_argument(
        "--source",
        default="auto",
        metavar="WHERE",
        help="auto, cache, git, distro, or a folder (default: auto)",
    )
    parser.add_argument(
        "--wheel", type=Path, metavar="FILE", help="the official wheel (default: downloaded with pip)"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where the wheel and the logs go (default: out)"
    )
    parser.add_argument(
        "--jobs", type=positive, metavar="N", help="compilers side by side (default: one per core)"
    )
    parser.add_argument(
        "--allow-unverified",
        action="store_true",
        help="accept sources and wheels whose digests are not on record",
    )
    parser.add_argument("--plan", action="store_true", help="print what would be done, and do nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def execute(args: argparse.Namespace, settings: Settings, console: Console) -> int:
    """Build, or print the plan.

    Raises:
        BuildError: as ``m8d_build.overlay.build.build_overlay`` and ``m8d_build.porting.build.build_ported``.
    """
    python = python_tag(args.python)
    target = _target(args, settings, python)
    if needs_port(target):
        return _ported(args, settings, console, target, python)
    require_recipe(target)
    if target.status is not Status.VERIFIED and not args.json:
        say(console, f"torch {target.version} is not verified ({target.status.value}): {target.note}.", "")
    if args.plan:
        series = load_series(settings.patches, target.version)
        steps = describe(target, python, args.source, series, settings.jobs)
        if args.json:
            print_json(
                console, {"torch": target.version, "python": python, "mode": "overlay", "steps": steps}
            )
        else:
            say(console, f"torch {target.version} for {python}, overlay build, into {settings.out}")
            say(
                console,
                *(f"{number:2}. {name}: {what}" for number, (name, what) in enumerate(steps.items(), 1)),
            )
        return 0
    # With --json standard output is for the program that asked; a person still sees the steps.
    progress = Progress(Step.expected(), Console(stderr=True, highlight=False) if args.json else console)
    built = build_overlay(_request(args, target, python), settings, progress)
    if args.json:
        print_json(console, _as_json(built, progress.seconds))
    else:
        announce(console, built.path, built.sha256, built.topics)
    return 0


def _target(args: argparse.Namespace, settings: Settings, python: str) -> Target:
    """Return the target; a version that is not listed has one where what is not on record is accepted."""
    try:
        return choose_target(args, settings, python)
    except UnknownVersion as exc:
        if not args.torch:
            raise
        if args.allow_unverified:
            return unlisted(args.torch)
        raise UnknownVersion(
            exc.value,
            rule=exc.rule,
            next_step="Pick one of these with --torch; or --allow-unverified: the nearest series is ported",
        ) from exc


def _request(args: argparse.Namespace, target: Target, python: str) -> OverlayRequest:
    return OverlayRequest(
        target=target,
        python=python,
        wheel=args.wheel.absolute() if args.wheel else None,
        source=args.source,
        allow_unverified=args.allow_unverified,
    )


def _ported(
    args: argparse.Namespace, settings: Settings, console: Console, target: Target, python: str
) -> int:
    """Port the nearest series to a version that has none and build it, or print that this would be done."""
    source = nearest_series(load_targets(settings.patches), target.version)
    if not args.json:
        say(
            console,
            f"torch {target.version} HAS NO SERIES: that of {source.version} is PORTED to it, by its text.",
            "The wheel is labelled so: its patches are not proven by hand.",
            "",
        )
    if args.plan:
        steps = _plan(args, settings, target, source)
        if args.json:
            said = {
                "torch": target.version,
                "python": python,
                "mode": "overlay",
                "ported_from": source.version,
            }
            print_json(console, {**said, "steps": steps})
        else:
            say(
                console,
                *(f"{number:2}. {name}: {what}" for number, (name, what) in enumerate(steps.items(), 1)),
            )
        return 0
    progress = Progress(EXPECTED, Console(stderr=True, highlight=False) if args.json else console)
    made = build_ported(_request(args, target, python), settings, progress)
    if args.json:
        more = {"ported_from": made.ported_from, "report": str(made.report)}
        print_json(console, {**_as_json(made.built, progress.seconds), **more})
        return 0
    announce(console, made.built.path, made.built.sha256, made.built.topics)
    say(
        console,
        f"ported:   {ported_words(made.ported_from)}; `nox -s check-wheel` shows how it behaves",
        f"report:   {made.report} (please send it to the project)",
    )
    return 0


def _plan(args: argparse.Namespace, settings: Settings, target: Target, source: Target) -> dict[str, str]:
    python = python_tag(args.python)
    stand_in = replace(
        target, units=source.units, pinned_packages=source.pinned_packages, ported_from=source.version
    )
    steps = describe(
        stand_in, python, args.source, load_series(settings.patches, source.version), settings.jobs
    )
    return {
        **steps,
        Step.OFFICIAL_WHEEL.title: f"torch {target.version} for {python}; its commit, CUDA and ABI are read",
        Step.SOURCES.title: f"{steps[Step.SOURCES.title].partition(';')[0]}; at the official wheel's commit",
        Step.PATCHES.title: f"{steps[Step.PATCHES.title]}: each hunk of {source.version}'s series where its "
        "lines stand exactly once, or a conflict",
        Step.HEADERS.title: "packages of a version with the wheel's CUDA",
        Step.REPACK.title: f"torch-{target.version}, labelled as ported, and a report beside it",
    }


def _as_json(built: Built, seconds: dict[str, float]) -> dict[str, object]:
    return {
        "wheel": str(built.path),
        "size": built.size,
        "official_size": built.official_size,
        "sha256": built.sha256,
        "version": built.version,
        "topics": list(built.topics),
        "objects": built.objects,
        "cached_objects": built.cached_objects,
        "grafted_bytes": built.grafted_bytes,
        "seconds": seconds,
    }
