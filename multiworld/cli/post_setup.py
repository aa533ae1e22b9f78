"""``m8d-post-setup``: put ``torch.distributed.multiworld`` into a torch, or apply a patch file to it."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from multiworld.cli.console import UnreadError, complain, say
from multiworld.cli.exits import INTERRUPTED, exit_code
from multiworld.errors import InstallError, MultiworldError
from multiworld.shim.install import inspect, install, remove_left, uninstall
from multiworld.shim.patchfile import apply_patch, left_by, read_patch, revert_patch
from multiworld.shim.receipt import Standing, receipt_of, standing_of
from multiworld.shim.torchsite import find_folder, find_site, is_there, keep_to_own

if TYPE_CHECKING:
    from collections.abc import Sequence

    from multiworld.shim.patchfile import Outcome
    from multiworld.shim.torchsite import TorchSite

__all__ = ["NOT_INSTALLED", "SUMMARY", "configure_parser", "execute", "main"]

SUMMARY = "put torch.distributed.multiworld into an installed torch, or apply a patch file to it"

NOT_INSTALLED = 1
"""Exit code of --check where there is something to do."""

_NEXT_STEPS = {
    Standing.HALF_DONE: "Run m8d-post-setup again: it takes the patch file back",
    Standing.STALE: "Run m8d-post-setup again: it discards the backup",
}

_DESCRIPTION = """\
Without arguments: adds one file, torch/distributed/multiworld/__init__.py, to the installed torch, and a line to its
RECORD, so that `pip uninstall torch` removes it. No file of torch is changed. An upgrade of torch takes it away: run
it again then. A torch made by build-torch has it already.

With PATCHFILE: applies a unified diff of Python files below torch/, exactly or not at all; --revert takes it back."""


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = _DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "patchfile",
        nargs="?",
        type=Path,
        metavar="PATCHFILE",
        help="apply this patch file to the installed torch",
    )
    parser.add_argument(
        "--torch",
        type=Path,
        metavar="DIR",
        help="folder of the torch package, or the site-packages that holds it (default: this interpreter's; in a virtual environment only its own)",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--check", action="store_true", help="print what is there; exit code 1 if there is something to do"
    )
    what.add_argument("--uninstall", action="store_true", help="take torch.distributed.multiworld away")
    what.add_argument("--revert", action="store_true", help="take the applied patch file back, byte for byte")
    parser.add_argument("--json", action="store_true", help="with --check: print JSON")
    parser.add_argument(
        "--force",
        action="store_true",
        help="replace or remove a loader that was edited; with --revert: discard a backup that cannot be put back",
    )
    parser.add_argument("--for-torch", metavar="X.Y.Z", help="the version that PATCHFILE is for")
    parser.add_argument("--dry-run", action="store_true", help="with PATCHFILE or --revert: change nothing")


def execute(args: argparse.Namespace) -> int:
    """Run the command; return its exit code.

    Raises:
        InstallError: it could not be done.
    """
    if args.patchfile is not None and (args.check or args.uninstall or args.revert):
        raise InstallError(
            "a PATCHFILE and --check, --uninstall or --revert", rule="one at a time", next_step="See --help"
        )
    if args.dry_run and args.patchfile is None and not args.revert:
        raise InstallError(
            "--dry-run alone", rule="it goes with PATCHFILE or --revert", next_step="Use --check"
        )
    for option, given, goes_with in (
        ("--json", args.json and not args.check, "--check"),
        ("--for-torch", args.for_torch is not None and args.patchfile is None, "PATCHFILE"),
        (
            "--force",
            args.force and (args.check or args.patchfile is not None),
            "--uninstall or --revert, or alone",
        ),
    ):
        if given:
            raise InstallError(option, rule=f"it goes with {goes_with}", next_step="See --help")
    if args.uninstall and _uninstall_left(args.torch):
        return 0
    site = find_site(args.torch)
    if args.check:
        return _check(site, as_json=args.json)
    if args.torch is None and not args.dry_run:
        keep_to_own(site.torch, site.dist_info)
    if args.patchfile is not None:
        _tell(apply_patch(site, read_patch(args.patchfile, for_torch=args.for_torch), dry_run=args.dry_run))
        if site.by_conda and not args.dry_run:
            say(
                "Run m8d-post-setup --revert before conda removes or replaces torch: it leaves the backup there."
            )
    elif args.revert:
        _tell(revert_patch(site, dry_run=args.dry_run, force=args.force))
    elif args.uninstall:
        left = left_by(site)
        done = uninstall(site, force=args.force)
        _tell_of_left(left)
        say(f"{site.torch}: torch.distributed.multiworld is {'removed' if done else 'not there'}.")
    else:
        left = left_by(site)
        done = install(site, force=args.force)
        _tell_of_left(left)
        say(f"{site.torch}: torch.distributed.multiworld is {'installed' if done else 'there already'}.")
        if site.by_conda:
            say(
                "Run m8d-post-setup --uninstall before conda removes or replaces torch: it leaves this file there."
            )
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``m8d-post-setup``; return its exit code."""
    parser = argparse.ArgumentParser(prog="m8d-post-setup")
    configure_parser(parser)
    try:
        return execute(parser.parse_args(argv))
    except MultiworldError as error:
        complain(f"m8d-post-setup: {error}")
        return exit_code(error)
    except KeyboardInterrupt:
        complain("m8d-post-setup: stopped by Ctrl-C; run the same again.")
        return INTERRUPTED
    except UnreadError:
        return 0


def _uninstall_left(torch_dir: Path | None) -> bool:
    """Remove the loader where torch itself is gone; return False where there is nothing of that kind."""
    torch = find_folder(torch_dir)
    if is_there(torch / "__init__.py"):
        return False
    if torch_dir is None:
        keep_to_own(torch)
    removed = remove_left(torch)
    if removed:
        say(f"{torch}: torch.distributed.multiworld is removed; torch itself was gone.")
    return removed


def _check(site: TorchSite, *, as_json: bool) -> int:
    found, receipt = inspect(site), receipt_of(site)
    state = None if receipt is None else standing_of(site, receipt)
    applied = None if receipt is None else {"name": receipt["patch"]["name"], "state": str(state)}
    next_step = "" if state is None else _NEXT_STEPS.get(state, "")
    if next_step and not found.next_step:
        found = replace(found, next_step=next_step)
    if as_json:
        say(json.dumps({**found.as_dict(), "patch_file": applied}, indent=1, sort_keys=True))
    else:
        say(f"torch {found.torch_version} in {found.torch}")
        says = found.says if found.says.startswith("torch") else found.says[0].upper() + found.says[1:]
        say(f"{says}.")
        if receipt is not None and state is Standing.STALE:
            say(
                f"Patch file {receipt['patch']['name']}: its backup is of torch {receipt['torch']}, which was replaced."
            )
        elif applied is not None:
            say(f"Patch file {applied['name']}: {applied['state']}; `m8d-post-setup --revert` takes it back.")
        if found.next_step:
            say(f"{found.next_step}.")
    return 0 if found.fine and not next_step else NOT_INSTALLED


def _tell_of_left(left: str) -> None:
    if left:
        say(f"{left}.")


def _tell(outcome: Outcome) -> None:
    _tell_of_left(outcome.left)
    for path in outcome.files:
        say(f"  {path}")
    say(f"{outcome.says}.")
