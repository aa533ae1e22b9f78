"""``targets``: the table of supported PyTorch versions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from m8d_build.cli import print_json
from m8d_build.targets import Status, load_targets

if TYPE_CHECKING:
    import argparse

    from rich.console import Console

    from m8d_build.settings import Settings
    from m8d_build.targets import Target

__all__ = ["HELP", "NAME", "configure_parser", "execute"]

NAME = "targets"
HELP = "List the PyTorch versions, how far each has come, its defects and its patches."
COLOURS = {Status.VERIFIED: "green", Status.APPLIES: "yellow", Status.PLANNED: "dim"}


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def execute(args: argparse.Namespace, settings: Settings, console: Console) -> int:
    """Print the table.

    Raises:
        PatchRejected: targets.toml breaks its schema.
    """
    targets = load_targets(settings.patches)
    if args.json:
        print_json(console, [_plain(target) for target in targets])
        return 0
    table = Table("torch", "status", "build", "CUDA", "defects", "patches", "official wheels", box=None)
    for target in targets:
        table.add_row(
            target.version,
            f"[{COLOURS[target.status]}]{target.status.value}[/]",
            str(target.build or ""),
            target.abi.cuda if target.abi else "",
            " ".join(target.defects),
            " ".join(target.topics),
            " ".join(_tags(target)),
        )
    console.print(table)
    for target in targets:
        if target.note:
            console.print(f"\n{target.version}: {target.note}.", markup=False, highlight=False)
    return 0


def _tags(target: Target) -> list[str]:
    return sorted({wheel.filename.split("-")[2] for wheel in target.wheels})


def _plain(target: Target) -> dict[str, object]:
    return {
        "version": target.version,
        "status": target.status.value,
        "note": target.note,
        "tag": target.tag,
        "commit": target.commit,
        "build": target.build or None,
        "series": target.series or None,
        "cuda": target.abi.cuda if target.abi else None,
        "defects": list(target.defects),
        "topics": list(target.topics),
        "files": {file.path: file.blob for file in target.files},
        "wheels": [wheel.filename for wheel in target.wheels],
    }
