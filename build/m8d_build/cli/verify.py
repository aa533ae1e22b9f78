"""``verify``: check the series of some or all versions; findings go to the terminal or out as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from m8d_build.cli import print_json
from m8d_build.errors import PatchRejected, WrongTree
from m8d_build.series.apply import pristine_files, tree_version
from m8d_build.series.findings import Finding
from m8d_build.series.read import load_series
from m8d_build.series.verify import verify
from m8d_build.targets import load_targets
from m8d_build.wheel.label import build_label

if TYPE_CHECKING:
    import argparse

    from rich.console import Console

    from m8d_build.series.read import Series
    from m8d_build.settings import Settings
    from m8d_build.targets import Target, Targets

__all__ = ["HELP", "NAME", "configure_parser", "execute"]

NAME = "verify"
HELP = "Check patch series: order, headers, encoding, overlaps, blob ids; with --source, that they apply."


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("versions", nargs="*", metavar="VERSION", help="torch versions (default: all)")
    parser.add_argument("--source", type=Path, metavar="TREE", help="check against these PyTorch sources")
    parser.add_argument("--json", action="store_true", help="print JSON")


def execute(args: argparse.Namespace, settings: Settings, console: Console) -> int:
    """Print what is wrong; the exit code is PatchRejected's if anything is.

    Raises:
        UnknownVersion: a version has no target.
        WrongTree: the source tree is of none of the versions.
        PatchRejected: targets.toml itself cannot be read.
    """
    targets = load_targets(settings.patches)
    wanted = _wanted(args, targets)
    report: list[tuple[Target, Series, list[Finding]]] = []
    for target in wanted:
        series = load_series(settings.patches, target.version)
        files = None
        if args.source is not None:
            recorded = [file.path for file in target.files]
            files = pristine_files(args.source, [*dict.fromkeys([*series.paths, *recorded])])
        report.append((target, series, verify(target, series, files)))
    strays = [] if args.versions or args.source else _strays(settings.patches, targets)
    if args.json:
        _print_json(console, report, strays)
    else:
        for target, series, findings in report:
            state = f"{len(findings)} findings" if findings else "ok"
            console.print(f"{target.version}: {state}{_note(target, series)}", markup=False)
            for finding in findings:
                console.print(f"  {finding}", markup=False, soft_wrap=True)
        for finding in strays:
            console.print(str(finding), markup=False, soft_wrap=True)
    failed = bool(strays) or any(findings for *_, findings in report)
    return PatchRejected.exit_code if failed else 0


def _note(target: Target, series: Series) -> str:
    """What a wheel with these patches is called, where that is not a build number."""
    if not target.topics:
        return " (no patches)"
    if series.digest == target.series:
        return ""
    label = build_label(target, series.digest)
    return f" (wheels are labelled {label}: the patches are of no numbered build)"


def _wanted(args: argparse.Namespace, targets: Targets) -> list[Target]:
    wanted = [targets.get(version) for version in args.versions] or list(targets)
    if args.source is None:
        return wanted
    version = tree_version(args.source)
    if args.versions and [target.version for target in wanted] != [version]:
        raise WrongTree(
            f"{args.source} is PyTorch {version}",
            rule=f"{', '.join(args.versions)} was asked for",
            next_step="Name its own version, or none",
        )
    return [targets.get(version)]


def _strays(patches: Path, targets: Targets) -> list[Finding]:
    """Folders of patches that no target knows of."""
    known = {f"v{target.version}" for target in targets}
    return [
        Finding(path.name, 0, "orphan", "this folder has no entry in targets.toml")
        for path in sorted(patches.iterdir())
        if path.is_dir() and path.name not in known
    ]


def _print_json(
    console: Console, report: list[tuple[Target, Series, list[Finding]]], strays: list[Finding]
) -> None:
    data = {
        "targets": [
            {"version": target.version, "findings": [finding.as_json() for finding in findings]}
            for target, _, findings in report
        ],
        "strays": [finding.as_json() for finding in strays],
    }
    print_json(console, data)
