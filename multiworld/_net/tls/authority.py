"""An authority of one job, which signs certificates for the job's processes; it needs `cryptography`."""

from __future__ import annotations

import datetime as dt
import ipaddress
import secrets
from typing import TYPE_CHECKING, NamedTuple

from multiworld._net.tls.identity import uri
from multiworld.errors import MultiworldError

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError as _error:  # what needs it says so
    _missing: ImportError | None = _error
else:
    _missing = None

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.x509 import Certificate

__all__ = ["Authority", "Issued"]

_EARLY = dt.timedelta(minutes=5)
"""Certificates are valid from then on before they are made: hosts' clocks differ."""

_LONGEST = 64
"""Bytes of a common name (RFC 5280, ub-common-name)."""


class Issued(NamedTuple):
    """A certificate and its key, both PEM; the key has no password."""

    certificate: bytes
    key: bytes


class Authority:
    """An authority of its own, or one that was made before.

    Args:
        job: whose processes it signs for.
        certificate: of the authority.
        key: of the certificate.
    """

    def __init__(self, job: str, certificate: Certificate, key: EllipticCurvePrivateKey) -> None:
        self.job = job
        self._certificate = certificate
        self._key = key

    @staticmethod
    def create(job: str, *, days: float = 30) -> Authority:
        """Make one; its certificate is valid for so many days.

        Raises:
            MultiworldError: `cryptography` is missing.
        """
        _need()
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"m8d authority {secrets.token_hex(4)}")])
        built = (
            _begun(name, name, key, days)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .sign(key, hashes.SHA256())
        )
        return Authority(job, built, key)

    @staticmethod
    def load(job: str, issued: Issued) -> Authority:
        """Read what `pem` returned.

        Raises:
            MultiworldError: `cryptography` is missing.
            ValueError: it is no certificate with its key.
        """
        _need()
        key = serialization.load_pem_private_key(issued.key, None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError("the authority's key is not of an elliptic curve")  # noqa: TRY004  (of a file, not an argument)
        certificate = x509.load_pem_x509_certificate(issued.certificate)
        if certificate.public_key() != key.public_key():
            raise ValueError("the authority's certificate and key do not belong together")
        return Authority(job, certificate, key)

    @property
    def certificate(self) -> bytes:
        """What others need to know to trust it: PEM."""
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def until(self) -> float:
        """``time.time()`` seconds until which it is valid."""
        return self._certificate.not_valid_after_utc.timestamp()

    @property
    def pem(self) -> Issued:
        """Certificate and key, for `load`."""
        return Issued(self.certificate, _pem(self._key))

    def issue(self, host: str, name: str, *, days: float = 30, addresses: tuple[str, ...] = ()) -> Issued:
        """Sign a certificate for a process.

        Args:
            host: name of its host, as ``socket.gethostname()`` gives it there.
            name: of the process, for messages.
            days: for which it is valid.
            addresses: further names by which browsers and others may reach it.

        Raises:
            ValueError: a name that no certificate can have, or `days` that are over.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _cut(name))])
        names = [
            x509.UniformResourceIdentifier(uri(self.job, host)),
            *(_alternative(each) for each in dict.fromkeys((host, *addresses)) if each),
        ]
        uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        built = (
            _begun(subject, self._certificate.subject, key, days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
            )
            .sign(self._key, hashes.SHA256())
        )
        return Issued(built.public_bytes(serialization.Encoding.PEM), _pem(key))


def _need() -> None:
    if _missing is not None:
        raise MultiworldError(
            "the package cryptography is missing",
            rule="It makes the certificates of a secure run",
            next_step="pip install 'm8d[secure]'",
        ) from _missing


def _begun(
    subject: x509.Name, issuer: x509.Name, key: EllipticCurvePrivateKey, days: float
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.timezone.utc)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLY)
        .not_valid_after(now + dt.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _cut(name: str) -> str:
    """Return as much of a name as a common name holds."""
    return name.encode(errors="replace")[:_LONGEST].decode(errors="ignore")


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(key: EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
