"""Names of hosts that no name server is asked for: an empty label, or one that is too long."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("torch")

from multiworld._net import host_address
from multiworld._net.stores.store import open_store
from multiworld.errors import StoreUnreachableError

MALFORMED = pytest.mark.parametrize("host", ["node..example", "n" * 64 + ".example"])


@MALFORMED
def test_a_store_at_a_malformed_name_is_refused_at_once(host):
    with pytest.raises(StoreUnreachableError, match="no host can have that name") as caught:
        open_store(f"tcp://{host}:29511", world="w", serve=False, deadline=time.monotonic() + 10.0)
    assert caught.value.next_step.startswith("Check the name")


@MALFORMED
def test_a_malformed_name_has_no_address(host):
    assert host_address.resolved(host) == []
