"""A store in an etcd cluster: a torch Store over `EtcdClient`.

Records of worlds are replaced in transactions, and stay. What members set for their process groups, and their
signs of life, belong to a lease of the process: they go with it.
"""

from __future__ import annotations

import datetime as dt
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as _dist

from multiworld._net import host_address
from multiworld._net.stores.etcd_address import EtcdAddress
from multiworld._net.stores.etcd_client import EtcdClient, b64, text_of
from multiworld._net.stores.secure import check_etcd
from multiworld._net.stores.shared import FRESH, Shared, StoreHandle, registry
from multiworld._net.stores.torchstore import AskingStore, octets
from multiworld.errors import StoreUnreachableError
from multiworld.logs.source import logger

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["EtcdStore", "open_etcd"]

_LEASE = 60
"""Seconds for which keys of a process outlive it."""

_ANSWER = 3.0
"""Seconds for a call when the deadline of the join is over, or near: a cluster elects a leader in less."""

_TURN = 0.1
"""Seconds after which a wait for another thread's lease asks whether it was given up."""

_KEYS = 100
"""Keys of one transaction; etcd takes 128."""

T = TypeVar("T")

_log = logger(__name__)


def open_etcd(
    text: str,
    *,
    world: str,
    secure: bool = False,
    deadline: float,
    cancelled: Callable[[], bool] = lambda: False,
) -> StoreHandle:
    """Open a store in etcd; see `multiworld._net.stores.store.open_store`.

    Raises:
        InvalidJoinError: the address breaks a rule, one of secure mode's included, or urllib3 is missing.
        StoreUnreachableError: the cluster does not answer before the deadline, or refuses.
    """
    address = EtcdAddress.parse(text, world=world)
    if secure:
        address = check_etcd(address, world)
    here = host_address.chosen(world)
    with registry.slot(text):
        shared = registry.hold(text)
        if shared is None:
            shared = registry.put(text, _SharedEtcd(text, EtcdClient(address, secure=secure)))
    assert isinstance(shared, _SharedEtcd)  # noqa: S101  (the key is an etcd's)
    try:
        view = EtcdStore(shared.etcd, lease=shared.lease, deadline=deadline, cancelled=cancelled)
        view.check(["m8d-none"])
    except _dist.DistError as error:
        registry.release(shared)
        raise StoreUnreachableError(
            world,
            f"{address}: {error}",
            rule="A majority of the cluster runs, and lets this user read and write below the prefix",
            next_step="See that this host reaches it; give it the user and certificates that it wants",
        ) from error
    except BaseException:
        registry.release(shared)
        raise
    return StoreHandle(shared, view, str(address), here or _towards(address))


def _towards(address: EtcdAddress) -> str:
    """Return the address of this host on the way to the cluster."""
    for endpoint in address.endpoints:
        for each in host_address.resolved(endpoint.rpartition(":")[0].strip("[]")):
            if found := host_address.source_towards(each):
                return found
    return host_address.outward()


class _SharedEtcd(Shared):
    """This process's client of a cluster, and its lease."""

    def __init__(self, key: str, etcd: EtcdClient) -> None:
        super().__init__(key)
        self.etcd = etcd
        self.lease = Lease(etcd)
        # C++ finds a store's Python methods only as long as the Python object lives.
        self._for_torch = EtcdStore(etcd, lease=self.lease, deadline=time.monotonic())
        self._for_torch.set_timeout(dt.timedelta(seconds=FRESH))

    def _connected(self) -> Any:
        return self._for_torch

    def close(self) -> None:
        self.lease.end()
        self.etcd.close()


class Lease:
    """A lease of this process, granted when it is first needed, and kept alive by a thread.

    Args:
        etcd: where.
    """

    def __init__(self, etcd: EtcdClient) -> None:
        self._etcd = etcd
        self._lock = threading.Lock()
        self._id = ""
        self._ended = threading.Event()

    def id(self, deadline: float, cancelled: Callable[[], bool] = lambda: False) -> str:
        """Return its id.

        Raises:
            OSError: the cluster does not answer, or it was given up.
        """
        while not self._lock.acquire(timeout=max(0.0, min(_TURN, deadline - time.monotonic()))):
            if cancelled() or time.monotonic() >= deadline:
                raise TimeoutError("the etcd cluster does not grant a lease")
        try:
            if not self._id:
                said = self._etcd.call(
                    "/lease/grant", {"TTL": _LEASE}, deadline=deadline, cancelled=cancelled
                )
                self._id = str(said["ID"])
                threading.Thread(
                    target=self._keep, args=(self._id,), daemon=True, name="m8d-etcd-lease"
                ).start()
            return self._id
        finally:
            self._lock.release()

    def lost(self, lease: str) -> None:
        """Forget a lease that has run out: the process stood still for longer than that."""
        with self._lock:
            if self._id == lease:
                self._id = ""

    def end(self) -> None:
        """Let it run out."""
        self._ended.set()

    def _keep(self, lease: str) -> None:
        while not self._ended.wait(_LEASE / 6) and self._id == lease:
            try:
                said = self._etcd.call(
                    "/lease/keepalive", {"ID": lease}, deadline=time.monotonic() + _LEASE / 6
                )
            except OSError as error:
                _log.info("the lease in etcd is not renewed: %s", error)
                continue
            if int(said.get("result", {}).get("TTL", 0)) <= 0:
                self.lost(lease)


class EtcdStore(AskingStore):
    """One world's view of a store in etcd.

    Args:
        etcd: the client.
        lease: of this process.
        deadline: ``time.monotonic()`` seconds until which a call waits for the cluster; when it is over, or
            near, a call still has three seconds.
        cancelled: asked while a value, or the cluster, is waited for. What is called after that, as what a
            join reports at its end, has three seconds.
    """

    def __init__(
        self,
        etcd: EtcdClient,
        *,
        lease: Lease,
        deadline: float,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(max(_ANSWER, deadline - time.monotonic()))
        self._etcd, self._lease = etcd, lease
        self._deadline, self._cancelled = deadline, cancelled

    def set(self, key: str, value: str | bytes) -> None:
        self._leased("/kv/put", lambda lease: {"key": self._key(key), "value": b64(value), "lease": lease})

    def get(self, key: str) -> bytes:
        """Return the value, waiting until it exists."""
        while (found := self._read(key)) is None:
            self.wait([key])
        return text_of(found.get("value", ""))

    def add(self, key: str, value: int) -> int:
        while True:
            found = self._read(key)
            number = int(text_of(found["value"])) + value if found else value
            revision = found["mod_revision"] if found else "0"
            same = {"key": self._key(key), "target": "MOD", "mod_revision": revision}

            def put(lease: str, same: dict[str, Any] = same, number: int = number) -> dict[str, Any]:
                put = {"key": self._key(key), "value": b64(str(number)), "lease": lease}
                return {"compare": [same], "success": [{"request_put": put}]}

            if self._leased("/kv/txn", put).get("succeeded"):
                return number

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        name, expected, desired = self._key(key), octets(expected_value), octets(desired_value)
        if expected:
            same = {"key": name, "target": "VALUE", "value": b64(expected)}
        else:
            same = {"key": name, "target": "CREATE", "create_revision": "0"}
        put, read = {"key": name, "value": b64(desired)}, {"key": name}
        said = self._ask(
            "/kv/txn",
            {
                "compare": [same],
                "success": [] if expected == desired else [{"request_put": put}],
                "failure": [{"request_range": read}],
            },
        )
        if said.get("succeeded"):
            return desired
        found = said["responses"][0]["response_range"].get("kvs", [])
        return text_of(found[0].get("value", "")) if found else expected

    def delete_key(self, key: str) -> bool:
        return int(self._ask("/kv/deleterange", {"key": self._key(key)}).get("deleted", 0)) > 0

    def num_keys(self) -> int:
        prefix = self._etcd.address.prefix
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        asked = {"key": b64(prefix), "range_end": b64(end), "count_only": True}
        return int(self._ask("/kv/range", asked).get("count", 0))

    def _turn(self) -> None:
        if self._cancelled():
            raise _dist.DistStoreError("the wait was given up")

    def _check(self, keys: list[str]) -> bool:
        for at in range(0, len(keys), _KEYS):
            reads = [
                {"request_range": {"key": self._key(key), "count_only": True}}
                for key in keys[at : at + _KEYS]
            ]
            said = self._ask("/kv/txn", {"success": reads})
            if not all(int(each["response_range"].get("count", 0)) for each in said["responses"]):
                return False
        return True

    def _key(self, key: str) -> str:
        return b64(self._etcd.address.prefix + key)

    def _read(self, key: str) -> dict[str, Any] | None:
        found = self._ask("/kv/range", {"key": self._key(key)}).get("kvs", [])
        return found[0] if found else None

    def _leased(self, path: str, body: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
        """Make a call with the process's lease; once more with a new one where that has run out."""
        deadline, cancelled = self._terms()
        for again in (True, False):
            lease = self._on_time(lambda: self._lease.id(deadline, cancelled))
            try:
                return self._etcd.call(path, body(lease), deadline=deadline, cancelled=cancelled)
            except OSError as error:
                if not again or "lease not found" not in str(error):
                    raise _error(error) from error
                self._lease.lost(lease)
        raise AssertionError("unreachable")

    def _ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        deadline, cancelled = self._terms()
        return self._on_time(lambda: self._etcd.call(path, body, deadline=deadline, cancelled=cancelled))

    def _terms(self) -> tuple[float, Callable[[], bool]]:
        """Return until when a call that begins now waits for the cluster, and what gives it up."""
        least = time.monotonic() + _ANSWER
        if self._cancelled():
            return least, _never
        return max(self._deadline, least), self._cancelled

    @staticmethod
    def _on_time(call: Callable[[], T]) -> T:
        try:
            return call()
        except OSError as error:
            raise _error(error) from error


def _never() -> bool:
    return False


def _error(error: OSError) -> Exception:
    kind = _dist.DistStoreError if isinstance(error, TimeoutError) else _dist.DistNetworkError
    made: Exception = kind(str(error))
    return made
