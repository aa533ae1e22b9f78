"""``m8d sign``: sign a patched wheel with a key of one's own."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from multiworld.cli.console import say
from multiworld.cli.reading import reading
from multiworld.errors import ProvenanceError
from multiworld.provenance.signature import SIGNATURE_SUFFIX, sign, signature_path
from multiworld.provenance.wheel import verify_wheel

if TYPE_CHECKING:
    import argparse

__all__ = ["SUMMARY", "configure_parser", "execute"]

SUMMARY = "sign a patched wheel with a key of one's own"


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = (
        f"{SUMMARY[0].upper()}{SUMMARY[1:]}. The wheel is verified first. The signature, a DSSE envelope over its "
        f"provenance statement, is written beside it: WHEEL{SIGNATURE_SUFFIX}."
    )
    parser.add_argument("wheel", type=Path, metavar="WHEEL", help="the patched wheel")
    parser.add_argument("--key", type=Path, required=True, metavar="PEM", help="private key")
    parser.add_argument(
        "--passphrase-file", type=Path, metavar="FILE", help="file with the passphrase of an encrypted key"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def execute(args: argparse.Namespace) -> int:
    """Run the command; return its exit code.

    Raises:
        ProvenanceError: the wheel does not agree with itself, or the key cannot be used.
    """
    passphrase = None if args.passphrase_file is None else _passphrase(args.passphrase_file)
    with reading(args.wheel) as progress:
        found = verify_wheel(args.wheel, progress)
    envelope = sign(found.payload, args.key, passphrase)
    out = signature_path(args.wheel)
    aside = out.with_name(f".{out.name}.part")
    try:
        aside.write_bytes(envelope)
        aside.replace(out)
    except OSError as exc:
        with suppress(OSError):  # a read-only file system has none, and refuses all the same
            aside.unlink(missing_ok=True)
        raise ProvenanceError(
            f"{out} cannot be written: {exc.strerror}", rule="the signature lies beside the wheel"
        ) from exc
    if args.json:
        say(json.dumps({"signature": str(out), "sha256": found.sha256}, indent=1))
    else:
        say(f"{out}\n  signs {args.wheel.name}, sha256 {found.sha256}")
    return 0


def _passphrase(path: Path) -> bytes:
    try:
        return path.read_bytes().rstrip(b"\r\n")
    except OSError as exc:
        raise ProvenanceError(f"{path} cannot be read: {exc.strerror}") from exc
