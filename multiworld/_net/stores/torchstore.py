"""torch Stores implemented in Python: over `TcpClient`, and with waits that can be cancelled."""

from __future__ import annotations

import datetime as dt
import time
import weakref
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch.distributed as _dist

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from multiworld._net.stores.tcp_client import TcpClient

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
else:  # torch exports it without saying so to type checkers
    Store = _dist.Store

__all__ = ["AskingStore", "PollingStore", "TcpStore", "octets"]

_Value: TypeAlias = "str | bytes"

_FIRST, _LAST = 0.0002, 0.005
"""Seconds between two polls: at first, and at most."""


class AskingStore(Store):
    """A torch Store whose waits poll, so that they hold neither a lock nor a connection.

    torch's C++ calls overridden methods by the C++ names in some cases; both names are there.
    """

    def __init__(self, timeout: float) -> None:
        super().__init__()
        self._patience = timeout

    def _turn(self) -> None:
        """Called at every poll of a wait; raises to end it."""

    def _check(self, keys: list[str]) -> bool:
        raise NotImplementedError

    def deleteKey(self, key: str) -> bool:  # noqa: N802  (the name that C++ looks up)
        return bool(self.delete_key(key))

    def getNumKeys(self) -> int:  # noqa: N802  (the name that C++ looks up)
        return int(self.num_keys())

    def check(self, keys: Sequence[str]) -> bool:
        return self._check(list(keys))

    def wait(self, keys: Sequence[str], timeout: dt.timedelta | None = None) -> None:
        seconds = self._patience if timeout is None else timeout.total_seconds()
        deadline = time.monotonic() + seconds
        pause, wanted = _FIRST, list(keys)
        while True:
            self._turn()
            if self._check(wanted):
                return
            left = deadline - time.monotonic()
            if left <= 0:
                missing = ", ".join(wanted)
                raise _dist.DistStoreError(f"wait timeout after {seconds * 1000:.0f}ms, keys: {missing}")
            time.sleep(min(pause, left))
            pause = min(_LAST, pause * 1.3)

    def set_timeout(self, timeout: dt.timedelta) -> None:
        self._patience = timeout.total_seconds()

    @property
    def timeout(self) -> dt.timedelta:
        """Timeout of waits without one of their own."""
        return dt.timedelta(seconds=self._patience)

    def has_extended_api(self) -> bool:
        """False: torch then does without append, multi_get and multi_set."""
        return False

    def clone(self) -> Any:
        """Return itself, which is thread-safe."""
        return self


class TcpStore(AskingStore):
    """A torch Store over a shared `TcpClient`.

    Args:
        client: shared with the other worlds of this process that meet at the same server.
        deadline: ``time.monotonic()`` seconds until which a call waits for the server's answer; when it is
            over, or near, a call still has `answer` seconds.
        answer: seconds.
    """

    appends = True  # to `WorldRecord`; torch itself is to do without (`has_extended_api`)

    def __init__(self, client: TcpClient, *, deadline: float, answer: float) -> None:
        super().__init__(max(answer, deadline - time.monotonic()))
        self._client = client
        self._deadline = deadline
        self._answer = answer

    def set(self, key: str, value: _Value) -> None:
        self._ask(self._client.set, key, octets(value))

    def get(self, key: str) -> bytes:
        """Return the value, waiting until it exists."""
        value = self._ask(self._client.get, key)
        while value is None:  # again if it was deleted in between
            self.wait([key])
            value = self._ask(self._client.get, key)
        return bytes(value)

    def add(self, key: str, value: int) -> int:
        return int(self._ask(self._client.add, key, value))

    def compare_set(self, key: str, expected_value: _Value, desired_value: _Value) -> bytes:
        return bytes(self._ask(self._client.compare_set, key, octets(expected_value), octets(desired_value)))

    def delete_key(self, key: str) -> bool:
        return bool(self._ask(self._client.delete, key))

    def append(self, key: str, value: _Value) -> None:
        self._ask(self._client.append, key, octets(value))

    def num_keys(self) -> int:
        return int(self._ask(self._client.count))

    def _check(self, keys: list[str]) -> bool:
        return bool(self._ask(self._client.check, keys))

    def _ask(self, call: Callable[..., Any], *args: Any) -> Any:
        deadline = max(self._deadline, time.monotonic() + self._answer)
        try:
            return call(*args, deadline=deadline)
        except TimeoutError as error:
            raise _dist.DistStoreError(str(error)) from error
        except OSError as error:
            raise _dist.DistNetworkError(str(error)) from error


class _Handle(Protocol):
    """Holder of a store: a StoreHandle."""

    store: Store


class PollingStore(AskingStore):
    """Store under a process group: never blocks in the store below, and can be told to give up.

    Args:
        inner: any torch Store, or a StoreHandle; only short calls are made to it.
        prefix: put before every key, with a slash.
        check_cancelled: called at every turn of a wait; what it raises ends the wait, and so gloo's
            connecting.
        timeout: seconds a wait lasts that is given no timeout.
        publishing: called with each value that is about to be set, while it records.
        call: calls a function of `inner` with its arguments, in time; None where each ends in time by itself.

    Attributes:
        written: what was set through it, by key: gloo publishes the addresses of its sockets so.
        read: what was got through it, by key.
        recording: set it to False to forget and to stop recording.
    """

    def __init__(
        self,
        inner: Store | _Handle,
        *,
        prefix: str = "",
        check_cancelled: Callable[[], None] = lambda: None,
        timeout: float = 300.0,
        publishing: Callable[[bytes], None] = lambda _: None,
        call: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(timeout)
        self._call = call or _directly
        # torch's stores take bytes as well as text, contrary to their type hints.
        self._inner: Any = inner if isinstance(inner, Store) else inner.store
        self._prefix = f"{prefix}/" if prefix else ""
        self._check_cancelled = check_cancelled
        self._publishing = publishing
        self.written: dict[str, bytes] = {}
        self.read: dict[str, bytes] = {}
        self.recording = True
        on_move = getattr(self._inner, "on_move", None)  # a store that is a list of addresses
        if on_move is not None:
            on_move(weakref.WeakMethod(self.bring))

    def bring(self, server: TcpStore, _epoch: int) -> None:
        """Set on another server, which takes this one's place, what was set on this one."""
        for key, value in list(self.written.items()):
            server.set(self._prefix + key, value)

    def set(self, key: str, value: _Value) -> None:
        self._check_cancelled()
        if self.recording:
            self.written[key] = kept = octets(value)
            self._publishing(kept)
        self._call(self._inner.set, self._prefix + key, value)

    def get(self, key: str) -> bytes:
        """Return the value, waiting until it exists."""
        self.wait([key])
        value: bytes = self._call(self._inner.get, self._prefix + key)
        if self.recording:
            self.read[key] = value
        return value

    def add(self, key: str, value: int) -> int:
        self._check_cancelled()
        return int(self._call(self._inner.add, self._prefix + key, value))

    def compare_set(self, key: str, expected_value: _Value, desired_value: _Value) -> bytes:
        self._check_cancelled()
        return bytes(self._call(self._inner.compare_set, self._prefix + key, expected_value, desired_value))

    def delete_key(self, key: str) -> bool:
        return bool(self._call(self._inner.delete_key, self._prefix + key))

    def num_keys(self) -> int:
        return int(self._call(self._inner.num_keys))

    def _turn(self) -> None:
        self._check_cancelled()

    def _check(self, keys: list[str]) -> bool:
        return bool(self._call(self._inner.check, [self._prefix + key for key in keys]))


def _directly(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def octets(value: _Value) -> bytes:
    """Return a value as torch's stores keep it."""
    return value.encode() if isinstance(value, str) else bytes(value)
