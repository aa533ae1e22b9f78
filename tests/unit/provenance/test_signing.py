"""``m8d sign`` and ``m8d verify``: with keys of each kind, and each way that a signature does not hold."""

from __future__ import annotations

import base64
import builtins
import errno
import json
import subprocess
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from kits.provenancekit import OVERLAY, patched_wheel, rewritten

from multiworld.cli.main import main
from multiworld.errors import ProvenanceError
from multiworld.provenance.signature import SIGNATURE_SUFFIX, sign, verify

# Deeper than a parser goes.
NESTED = b"[" * 200_000 + b"]" * 200_000
KINDS = {
    "ed25519": ed25519.Ed25519PrivateKey.generate,
    "p256": lambda: ec.generate_private_key(ec.SECP256R1()),
    "rsa": lambda: rsa.generate_private_key(65537, 2048),
}


def pair(folder, kind="ed25519", passphrase=None, name=""):
    """A private key and its public one, in two PEM files."""
    key = KINDS[kind]()
    encryption = (
        serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
    )
    private, public = folder / f"{kind}{name}.pem", folder / f"{kind}{name}.pub"
    pem = serialization.Encoding.PEM
    private.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, encryption))
    public.write_bytes(key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo))
    return private, public


def run(capsys, *arguments):
    code = main([str(each) for each in arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_signed_is_verified_with_the_public_key(tmp_path, capsys, kind):
    wheel = patched_wheel(tmp_path).path
    private, public = pair(tmp_path, kind)
    code, out, _ = run(capsys, "sign", wheel, "--key", private)
    assert (code, str(wheel) + SIGNATURE_SUFFIX in out) == (0, True)
    code, out, _ = run(capsys, "verify", wheel, "--key", public)
    assert code == 0
    assert f"signature  verified with {public}" in out
    envelope = json.loads((wheel.parent / (wheel.name + SIGNATURE_SUFFIX)).read_bytes())
    assert envelope["payloadType"] == "application/vnd.in-toto+json"
    beside = wheel.with_name(wheel.name + ".provenance.json")
    assert base64.b64decode(envelope["payload"]) == beside.read_bytes()


def test_keys_of_openssl_are_taken(tmp_path, capsys):
    private, public = tmp_path / "key.pem", tmp_path / "public.pem"
    for command in (
        ["openssl", "genpkey", "-algorithm", "ed25519", "-out", private],
        ["openssl", "pkey", "-in", private, "-pubout", "-out", public],
    ):
        subprocess.run(command, check=True)
    wheel = patched_wheel(tmp_path).path
    assert run(capsys, "sign", wheel, "--key", private)[0] == 0
    assert run(capsys, "verify", wheel, "--key", public)[0] == 0


def test_a_wheel_on_a_read_only_file_system_is_told(tmp_path, capsys, monkeypatch):
    wheel = patched_wheel(tmp_path).path
    private, _ = pair(tmp_path)

    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    for name in ("write_bytes", "unlink"):
        monkeypatch.setattr(Path, name, refuse)
    code, _, said = run(capsys, "sign", wheel, "--key", private)
    assert (code, "cannot be written: Read-only file system" in said) == (7, True)


def test_an_encrypted_key_takes_its_passphrase(tmp_path, capsys):
    wheel = patched_wheel(tmp_path).path
    private, public = pair(tmp_path, passphrase=b"secret")
    (tmp_path / "pass").write_text("secret\n")
    code, _, said = run(capsys, "sign", wheel, "--key", private)
    assert (code, "no private key that can be used" in said) == (7, True)
    assert run(capsys, "sign", wheel, "--key", private, "--passphrase-file", tmp_path / "pass")[0] == 0
    assert run(capsys, "verify", wheel, "--key", public)[0] == 0


def test_verify_without_a_key_says_that_the_signature_was_not_looked_at(tmp_path, capsys):
    wheel = patched_wheel(tmp_path).path
    code, out, _ = run(capsys, "verify", wheel)
    assert code == 0
    assert "signature  not looked at" in out
    assert "g++ 12.2.0" in out
    assert "0001-group-guard.patch, sha256 " in out
    code, out, _ = run(capsys, "verify", wheel, "--json")
    assert json.loads(out)["signed_by"] is None
    assert json.loads(out)["subjects"].keys() >= {OVERLAY}


def test_another_key_an_unsigned_wheel_and_another_wheel_are_refused(tmp_path, capsys):
    wheel = patched_wheel(tmp_path).path
    private, public = pair(tmp_path)
    _, other = pair(tmp_path, name="-other")
    code, _, said = run(capsys, "verify", wheel, "--key", public)
    assert (code, "the signature lies beside the wheel" in said) == (7, True)
    run(capsys, "sign", wheel, "--key", private)
    code, _, said = run(capsys, "verify", wheel, "--key", other)
    assert (code, "has no signature that" in said) == (7, True)
    beside = wheel.with_name(wheel.name + SIGNATURE_SUFFIX)
    renamed = wheel.with_name(wheel.name.replace("cp311", "cp312"))
    renamed.write_bytes(wheel.read_bytes())
    renamed.with_name(renamed.name + SIGNATURE_SUFFIX).write_bytes(beside.read_bytes())
    code, _, said = run(capsys, "verify", renamed, "--key", public)
    assert (code, "signs another wheel" in said) == (7, True)


def test_a_changed_wheel_is_neither_signed_nor_verified(tmp_path, capsys):
    private, public = pair(tmp_path)
    good = patched_wheel(tmp_path).path
    run(capsys, "sign", good, "--key", private)
    bad = rewritten(good, lambda files: files.update({OVERLAY: b"x"}))
    bad.with_name(bad.name + SIGNATURE_SUFFIX).write_bytes(
        good.with_name(good.name + SIGNATURE_SUFFIX).read_bytes()
    )
    assert run(capsys, "verify", bad, "--key", public)[0] == 7
    code, _, said = run(capsys, "sign", bad, "--key", private)
    assert (code, "contradicts itself" in said) == (7, True)


def test_a_payload_that_was_changed_has_no_signature(tmp_path):
    private, public = pair(tmp_path)
    envelope = json.loads(sign(b"payload", private))
    envelope["payload"] = base64.b64encode(b"another").decode()
    with pytest.raises(ProvenanceError, match="no signature"):
        verify(json.dumps(envelope).encode(), public, b"another", where="here")
    envelope = json.loads(sign(b"payload", private))
    envelope["payloadType"] = "text/plain"
    with pytest.raises(ProvenanceError, match="no signature"):
        verify(json.dumps(envelope).encode(), public, b"payload", where="here")


def test_one_of_several_signatures_is_enough(tmp_path):
    first, second = pair(tmp_path), pair(tmp_path, "p256")
    lines = sign(b"payload", first[0]) + sign(b"payload", second[0])
    for _, public in (first, second):
        assert verify(lines, public, b"payload", where="here")


def test_a_key_may_have_signed_other_wheels_in_the_lines_before(tmp_path, capsys):
    wheel = patched_wheel(tmp_path).path
    private, public = pair(tmp_path)
    run(capsys, "sign", wheel, "--key", private)
    beside = wheel.with_name(wheel.name + SIGNATURE_SUFFIX)
    beside.write_bytes(sign(b"of another wheel", private) + beside.read_bytes())
    assert run(capsys, "verify", wheel, "--key", public)[0] == 0


@pytest.mark.parametrize("data", [b"{}\n", b"x\n", b"[]\n", b'{"payload": 1}\n', b"\xff\n", NESTED])
def test_what_is_no_envelope_is_refused(tmp_path, data):
    _, public = pair(tmp_path)
    with pytest.raises(ProvenanceError, match="here cannot be read"):
        verify(data, public, b"payload", where="here")


def test_what_is_no_key_is_refused(tmp_path):
    _, public = pair(tmp_path)
    for key, said in ((tmp_path / "none", "cannot be read"), (public, "no private key")):
        with pytest.raises(ProvenanceError, match=said) as caught:
            sign(b"payload", key)
        assert "openssl genpkey" in str(caught.value)


def test_without_the_library_the_extra_is_named(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *rest, **more):
        if name.partition(".")[0] == "securesystemslib":
            raise ImportError(name, name="securesystemslib")
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ProvenanceError, match="securesystemslib is not installed") as caught:
        sign(b"payload", tmp_path / "key")
    assert 'pip install "m8d[sign]"' in str(caught.value)
