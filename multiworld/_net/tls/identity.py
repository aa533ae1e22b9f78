"""Identity in a certificate: the job and the host of the process that holds its key. Pure.

``m8d-run --secure`` puts both into one URI of the certificate's alternative names, ``m8d://JOB/HOST``, each
part percent-encoded. A certificate of another maker may have none: its authority alone vouches for it then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Identity", "uri"]

_SCHEME = "m8d"


def uri(job: str, host: str) -> str:
    """Return the name for a certificate of a process of `job` on `host`."""
    return f"{_SCHEME}://{quote(job, safe='')}/{quote(host, safe='')}"


@dataclass(frozen=True)
class Identity:
    """A process, as a certificate names it.

    Attributes:
        job: "" if the certificate names none.
        host: name of its host; "" likewise.
        subject: the certificate's common name, for messages.
    """

    job: str = ""
    host: str = ""
    subject: str = ""

    @classmethod
    def of(cls, certificate: Mapping[str, Any]) -> Identity:
        """Read what ``SSLSocket.getpeercert()`` returns."""
        parts = {name: value for each in certificate.get("subject", ()) for name, value in each}
        subject = str(parts.get("commonName", ""))
        for kind, value in certificate.get("subjectAltName", ()):
            if kind == "URI" and value.startswith(f"{_SCHEME}://"):
                job, _, host = value.removeprefix(f"{_SCHEME}://").partition("/")
                return cls(unquote(job), unquote(host), subject)
        return cls(subject=subject)

    def __str__(self) -> str:
        named = f"job {self.job!r} on {self.host!r}" if self.job else "no job"
        return f"{self.subject!r} ({named})"

    def refusal(self, other: Identity) -> str | None:
        """Return why a process with this identity does not speak with another one; None if it does."""
        if self.job != other.job:
            return f"its certificate is of {other}, this process's of {self}"
        return None

    def is_on(self, host: str) -> bool:
        """Whether this may be a process of the host of that name."""
        return not self.host or self.host == host
