"""Client of an etcd cluster (v3): its JSON gateway, over urllib3.

Every member of the cluster answers under ``/v3``. A call goes to one member and, while that fails or has no
leader, to the next, until its deadline. A call whose answer was lost may be made twice: callers have to bear
that.

The libraries on PyPI were left aside: etcd3gw has neither logins nor more than one host, the others bind to
versions of grpc and protobuf, or are not maintained.
"""

from __future__ import annotations

import base64
import functools
import json
import threading
import time
from typing import TYPE_CHECKING, Any

from multiworld._net.tls.credentials import LOOK_EVERY, versions_of
from multiworld.errors import InvalidJoinError
from multiworld.logs.source import logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from multiworld._net.stores.etcd_address import EtcdAddress

__all__ = ["EtcdClient", "b64", "text_of"]

_SHORTEST, _LONGEST = 0.3, 4.0
"""Seconds that one member has to answer, at least and at most.

What a member has passed on to a leader that is lost is never answered, and a cluster elects another one in a
second or two: the call is made again soon. After some answers that were late the time is doubled with each,
and the next calls begin with what was learned.
"""
_LATE = 4
"""Answers that are late before the time is longer."""
_OF_AN_ANSWER = 3.0
"""The same, as a multiple of the time that the last answer took."""
_AGAIN = 0.02
_UNAUTHENTICATED = 16  # google.golang.org/grpc/codes
_INVALID = 3
_OLD = "revision of auth store is old"
"""The error, an invalid argument, for a token (JWT) that was drawn before a change of any user or role."""
_PASSING = (14, 4, 10, 8, 1)
"""Codes after which another member, or a later moment, helps: Unavailable, DeadlineExceeded, Aborted,
ResourceExhausted, Canceled."""

_log = logger(__name__)


class EtcdClient:
    """Calls of one process to one cluster; thread-safe.

    Files of the address that have changed are read again for the calls that are made after it.

    Args:
        address: of the cluster.
        secure: whether this process is in secure mode, which speaks nothing older than TLS 1.3.

    Raises:
        InvalidJoinError: urllib3 is missing, or a file of the address cannot be read.
    """

    def __init__(self, address: EtcdAddress, *, secure: bool = False) -> None:
        try:
            import urllib3  # noqa: PLC0415  (an extra, which only these stores need)
        except ImportError as error:
            raise InvalidJoinError(
                "",
                f"store={str(address)!r}: urllib3 is not installed",
                rule="A store in etcd needs it",
                next_step="pip install 'm8d[etcd]'",
            ) from error
        self.address = address
        self._secure = secure
        self._errors: Any = urllib3.exceptions.HTTPError
        self._late: Any = urllib3.exceptions.TimeoutError
        self._timeout: Any = urllib3.Timeout
        self._new_pool = functools.partial(urllib3.PoolManager, maxsize=8, retries=False)
        self._files = tuple(each for each in (address.ca, address.cert, address.key) if each)
        self._look_at = time.monotonic() + LOOK_EVERY
        try:
            self._versions, self._pool = self._load()
        except (OSError, ValueError) as error:
            raise InvalidJoinError(
                "",
                f"store={str(address)!r}: {error}",
                rule="ca, cert and key are files in PEM format that this process can read",
                next_step="Give their absolute paths",
            ) from error
        self._scheme = "https" if address.secure else "http"
        self._lock = threading.Lock()
        self._token = ""
        self._member = 0
        self._patience = _SHORTEST

    def call(
        self,
        path: str,
        body: dict[str, Any],
        *,
        deadline: float,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> dict[str, Any]:
        """Make one call; returns the answer.

        Args:
            path: of the gateway, without ``/v3``.
            body: the request.
            deadline: ``time.monotonic()`` seconds.
            cancelled: asked between two members; True gives up.

        Raises:
            TimeoutError: no member answered in time, or it was given up.
            PermissionError: the cluster refuses the user.
            ConnectionError: it refuses the call.
        """
        last, patience, late = "", self._patience, 0
        while True:
            left = deadline - time.monotonic()
            if last and cancelled():
                raise TimeoutError(f"the call of the etcd cluster {self.address} was given up: {last}")
            if left <= 0:
                self._patience = max(self._patience, patience)
                why = last or "no member was asked"
                raise TimeoutError(f"the etcd cluster {self.address} does not answer: {why}")
            at, began = self._member, time.monotonic()
            try:
                code, said, token = self._once(at, path, body, min(left, patience))
            except (self._errors, ValueError) as error:
                if isinstance(error, self._late):
                    if last and left < patience:
                        continue  # the deadline cut this one off: what an earlier one said tells more
                    late += 1
                    if late >= _LATE:
                        patience = min(2 * patience, _LONGEST)
                code, said, token = -1, {"error": f"{type(error).__name__}: {error}"}, ""
            if code == 0:
                enough = max(_OF_AN_ANSWER * (time.monotonic() - began), self._patience / 2)
                self._patience = min(max(_SHORTEST, enough), _LONGEST)
                return said
            last = f"{self.address.endpoints[at]}: {str(said.get('error', said))[:200]}"
            old = code == _INVALID and _OLD in last
            if (old or code == _UNAUTHENTICATED) and token:  # which has expired
                with self._lock:
                    if self._token == token:  # else another thread has drawn a new one
                        self._token = ""
                continue
            if code not in (-1, *_PASSING):
                kind = PermissionError if code in (_UNAUTHENTICATED, 7, _INVALID) else ConnectionError
                raise kind(f"the etcd cluster {self.address} refuses: {last}")
            with self._lock:
                if self._member == at:
                    self._member = (at + 1) % len(self.address.endpoints)
            time.sleep(max(0.0, min(_AGAIN, deadline - time.monotonic())))

    def close(self) -> None:
        """End the connections."""
        self._pool.clear()

    def _load(self) -> tuple[tuple[tuple[int, int, int], ...], Any]:
        """Return the versions of the address's files, and a pool for connections with them."""
        versions = versions_of(self._files)  # first: one that changes meanwhile is seen at the next look
        return versions, self._new_pool(**_tls(self.address, self._secure))

    def _read_again(self) -> None:
        """Make a new pool where the address's files have changed; one that fails leaves the old one."""
        with self._lock:
            if not self._files or time.monotonic() < self._look_at:
                return
            self._look_at = time.monotonic() + LOOK_EVERY
        try:
            if versions_of(self._files) == self._versions:
                return
            versions, pool = self._load()
        except (OSError, ValueError) as error:
            # They are being replaced, one after the other, or wrongly: what was good is used on.
            _log.warning("new TLS files for the etcd cluster %s are not used: %s", self.address, error)
            return
        self._versions, self._pool, old = versions, pool, self._pool
        old.clear()  # what is idle there ends, and calls under way go on
        _log.info("new TLS files are used for the etcd cluster %s", self.address)

    def _once(
        self, at: int, path: str, body: dict[str, Any], seconds: float
    ) -> tuple[int, dict[str, Any], str]:
        """Ask one member.

        Returns:
            A code of grpc, 0 where it did what was asked; the answer; the token of the login that was used.
        """
        headers, token = {"Content-Type": "application/json"}, self._token
        if self.address.user:
            if not token:
                login = {"name": self.address.user, "password": self.address.password}
                code, said = self._post(at, "/auth/authenticate", login, headers, seconds)
                if code:
                    return code, said, ""
                token = self._token = str(said["token"])
            headers["Authorization"] = token
        return *self._post(at, path, body, headers, seconds), token

    def _post(
        self, at: int, path: str, body: dict[str, Any], headers: dict[str, str], seconds: float
    ) -> tuple[int, dict[str, Any]]:
        self._read_again()
        answer = self._pool.request(
            "POST", f"{self._scheme}://{self.address.endpoints[at]}/v3{path}",
            body=json.dumps(body).encode(), headers=headers, timeout=self._timeout(total=seconds),
        )  # fmt: skip
        said = json.loads(answer.data or b"{}")
        if not isinstance(said, dict):
            return -1, {"error": f"{answer.status}: no answer of etcd's"}
        code = said.get("code", 0 if answer.status == 200 else -1)
        return (code if type(code) is int else -1), said


def _tls(address: EtcdAddress, secure: bool) -> dict[str, Any]:
    if not address.secure:
        return {}
    import ssl  # noqa: PLC0415  (only with TLS)

    context = ssl.create_default_context(cafile=address.ca or None)
    if secure:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
    if address.cert:
        context.load_cert_chain(address.cert, address.key)
    return {"ssl_context": context}


def b64(value: str | bytes) -> str:
    """Return a key or value as the gateway takes it."""
    return base64.b64encode(value.encode() if isinstance(value, str) else value).decode()


def text_of(value: str) -> bytes:
    """Return a key or value that the gateway gave."""
    return base64.b64decode(value)
