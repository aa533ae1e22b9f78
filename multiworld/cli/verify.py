"""``m8d verify``: show that a patched wheel is as it was built, and who signed it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from multiworld.cli.console import say
from multiworld.cli.reading import reading
from multiworld.errors import ProvenanceError
from multiworld.provenance.signature import SIGNATURE_SUFFIX, signature_path, verify
from multiworld.provenance.wheel import verify_wheel

if TYPE_CHECKING:
    import argparse

    from multiworld.provenance.wheel import VerifiedWheel

__all__ = ["SUMMARY", "configure_parser", "execute"]

SUMMARY = "verify a patched wheel: its files, what it was made from, its signature"


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = (
        f"{SUMMARY[0].upper()}{SUMMARY[1:]}. Every file is compared with RECORD and with the provenance statement in "
        f"the wheel; with --key, the signature beside it (WHEEL{SIGNATURE_SUFFIX}) is verified as well."
    )
    parser.add_argument("wheel", type=Path, metavar="WHEEL", help="the patched wheel")
    parser.add_argument("--key", type=Path, metavar="PEM", help="public key of the one who signed it")
    parser.add_argument("--json", action="store_true", help="print JSON")


def execute(args: argparse.Namespace) -> int:
    """Run the command; return its exit code.

    Raises:
        ProvenanceError: the wheel is not as it was built, or the key has not signed it.
    """
    with reading(args.wheel) as progress:
        found = verify_wheel(args.wheel, progress)
    if args.key is not None:
        _verify_signature(found, args.key)
    if args.json:
        say(json.dumps(_as_dict(found, args.key), indent=1))
    else:
        say("\n".join(_lines(found, args.key)))
    return 0


def _verify_signature(found: VerifiedWheel, key: Path) -> None:
    beside = signature_path(found.path)
    try:
        envelopes = beside.read_bytes()
    except OSError as exc:
        raise ProvenanceError(
            f"{beside} cannot be read: {exc.strerror}",
            rule="the signature lies beside the wheel",
            next_step="Take it from where the wheel came from, or sign the wheel: m8d sign",
        ) from exc
    if not verify(envelopes, key, found.payload, where=str(beside)):
        raise ProvenanceError(
            f"{beside} signs another wheel than {found.path.name} with SHA-256 {found.sha256}",
            rule="name, SHA-256 and statement must be the signed ones",
            next_step="Take both from the same place, and do not rename the wheel",
        )


def _lines(found: VerifiedWheel, key: Path | None) -> list[str]:
    statement = found.statement
    lines = [
        f"{found.path.name}: {found.files} files are as built",
        f"  sha256     {found.sha256}",
        f"  made from  torch {statement.torch}, by m8d {statement.builder} ({statement.mode} build)",
        *(f"  {name:<10} {text}" for name, text in statement.tools.items()),
    ]
    lines += [
        f"  input      {each.name}, {each.algorithm} {each.digest}"
        for each in statement.inputs
        if each.algorithm != "gitBlob"
    ]
    blobs = sum(each.algorithm == "gitBlob" for each in statement.inputs)
    if blobs:
        lines.append(f"  input      {blobs} files of PyTorch's source, by blob id (--json lists them)")
    signed = f"verified with {key}" if key is not None else "not looked at; --key PEM verifies it"
    return [*lines, f"  signature  {signed}"]


def _as_dict(found: VerifiedWheel, key: Path | None) -> dict[str, object]:
    statement = found.statement
    return {
        "wheel": str(found.path),
        "sha256": found.sha256,
        "files": found.files,
        "torch": statement.torch,
        "local": statement.local,
        "mode": statement.mode,
        "builder": statement.builder,
        "tools": dict(statement.tools),
        "inputs": [
            {"name": each.name, "uri": each.uri, each.algorithm: each.digest} for each in statement.inputs
        ],
        "subjects": dict(statement.subjects),
        "signed_by": None if key is None else str(key),
    }
