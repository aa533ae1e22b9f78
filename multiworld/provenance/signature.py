"""Signatures over a wheel's statement: DSSE envelopes by securesystemslib, with PEM keys."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from multiworld.errors import ProvenanceError
from multiworld.provenance.statement import PAYLOAD_TYPE

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["SIGNATURE_SUFFIX", "sign", "signature_path", "verify"]

SIGNATURE_SUFFIX = ".intoto.jsonl"
"""Appended to a wheel's file name: the envelope beside it."""

_KEYS = (
    "Make a pair: openssl genpkey -algorithm ed25519 -out key.pem; openssl pkey -in key.pem -pubout -out "
    "public.pem"
)


def signature_path(wheel: Path) -> Path:
    """Return where a wheel's signature lies: beside it."""
    return wheel.with_name(wheel.name + SIGNATURE_SUFFIX)


def sign(payload: bytes, key: Path, passphrase: bytes | None = None) -> bytes:
    """Return a payload in an envelope with one signature: a line of JSON.

    Args:
        payload: the statement.
        key: file with a private key, PEM: Ed25519, ECDSA over P-256, or RSA.
        passphrase: of the key; None if it has none.

    Raises:
        ProvenanceError: securesystemslib is not installed, or the key cannot be used.
    """
    library = _library()
    try:
        signer = library.signer(library.pem.load_pem_private_key(_read(key), passphrase))
    except (ValueError, TypeError, library.unsupported) as exc:
        raise _unusable(key, "private", exc) from exc
    envelope = library.envelope(payload, PAYLOAD_TYPE, {})
    envelope.sign(signer)
    return (json.dumps(envelope.to_dict()) + "\n").encode()


def verify(envelopes: bytes, key: Path, payload: bytes, *, where: str) -> bool:
    """Return whether a key has signed a payload, in one of the envelopes.

    Args:
        envelopes: a line of JSON for each.
        key: file with a public key, PEM.
        payload: the statement.
        where: how errors name the file with the envelopes.

    Raises:
        ProvenanceError: none of them is signed by the key; the file or the key cannot be read;
            securesystemslib is not installed.
    """
    library = _library()
    try:
        public = library.public_key(library.pem.load_pem_public_key(_read(key)))
    except (ValueError, TypeError, library.unsupported) as exc:
        raise _unusable(key, "public", exc) from exc
    others = False
    for line in envelopes.splitlines():
        try:
            envelope = library.envelope.from_dict(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, library.malformed) as exc:
            raise ProvenanceError(
                f"{where} cannot be read: {exc}",
                rule="each line is a DSSE envelope",
                next_step="Sign the wheel again: m8d sign",
            ) from exc
        try:
            envelope.verify([public], 1)
        except library.refused:
            continue
        if envelope.payload_type == PAYLOAD_TYPE:
            if envelope.payload == payload:
                return True
            others = True
    if others:
        return False
    raise ProvenanceError(
        f"{where} has no signature that {key} verifies",
        rule="the wheel must be signed with the private key of this public key",
        next_step="See whether it is the right key, or sign the wheel: m8d sign",
    )


@dataclass(frozen=True)
class _Library:
    """What is used of securesystemslib and of cryptography."""

    pem: Any
    envelope: Any
    signer: Any
    public_key: Any
    unsupported: type[Exception]
    malformed: type[Exception]
    refused: type[Exception]


def _library() -> _Library:
    try:
        # An extra, which only signatures need.
        from cryptography.exceptions import UnsupportedAlgorithm  # noqa: PLC0415  (an extra, which only signatures need)
        from cryptography.hazmat.primitives import serialization  # noqa: PLC0415  (an extra, which only signatures need)
        from securesystemslib import dsse, exceptions, signer  # noqa: PLC0415  (an extra, which only signatures need)
    except ImportError as exc:
        raise ProvenanceError(
            f"{exc.name} is not installed",
            rule="signatures are made and verified by securesystemslib",
            next_step='Install it: python -m pip install "m8d[sign]"',
        ) from exc
    return _Library(
        pem=serialization,
        envelope=dsse.Envelope,
        signer=signer.__dict__["CryptoSigner"],
        public_key=signer.__dict__["SSlibKey"].from_crypto,
        unsupported=UnsupportedAlgorithm,
        malformed=exceptions.FormatError,
        refused=exceptions.VerificationError,
    )


def _read(key: Path) -> bytes:
    try:
        return key.read_bytes()
    except OSError as exc:
        raise ProvenanceError(f"{key} cannot be read: {exc.strerror}", next_step=_KEYS) from exc


def _unusable(key: Path, kind: str, exc: Exception) -> ProvenanceError:
    return ProvenanceError(
        f"{key} is no {kind} key that can be used: {exc}",
        rule="it is a PEM file with an Ed25519, ECDSA or RSA key",
        next_step=_KEYS,
    )
