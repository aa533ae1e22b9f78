"""``overlay``: build a patched wheel in minutes, compiling only the touched units."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from m8d_build.cli import print_json
from m8d_build.cli._common import announce, choose_target, positive, python_tag, say
from m8d_build.overlay.build import OverlayRequest, build_overlay
from m8d_build.overlay.plan import Step, describe, require_recipe
from m8d_build.progress import Console, Progress
from m8d_build.series.read import load_series
from m8d_build.targets import Status

if TYPE_CHECKING:
    import argparse

    from m8d_build.overlay.build import Built
    from m8d_build.settings import Settings

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
        BuildError: as ``m8d_build.overlay.build.build_overlay``.
    """
    python = python_tag(args.python)
    target = choose_target(args, settings, python)
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
    request = OverlayRequest(
        target=target,
        python=python,
        wheel=args.wheel.absolute() if args.wheel else None,
        source=args.source,
        allow_unverified=args.allow_unverified,
    )
    # With --json standard output is for the program that asked; a person still sees the steps.
    progress = Progress(Step.expected(), Console(stderr=True, highlight=False) if args.json else console)
    built = build_overlay(request, settings, progress)
    if args.json:
        print_json(console, _as_json(built, progress.seconds))
    else:
        announce(console, built.path, built.sha256, built.topics)
    return 0


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
