"""The connection to the store that NCCL gets of its own, while a group is made."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from multiworld._c10d import groups  # noqa: E402  (torch may be missing)
from multiworld._c10d.group_spec import GroupSpec  # noqa: E402
from multiworld._c10d.nccl.inflight import Traffic  # noqa: E402

SOON = 30.0


def test_a_join_that_is_given_up_waits_for_no_connection(monkeypatch):
    """The store's server may stand still, and torch waits for it without a limit."""
    traffic = Traffic(timeout=SOON, device=torch.device("cpu"))
    monkeypatch.setattr(groups, "_traffic", lambda *_: traffic)
    asked, answered, made = threading.Event(), threading.Event(), []
    monkeypatch.setattr(groups.nccl, "wake", lambda: made.append("a group"))
    joins = threading.current_thread()

    def fresh_store():
        assert threading.current_thread() is not joins
        asked.set()
        assert answered.wait(SOON)
        return torch.distributed.HashStore()

    def alive():
        if asked.is_set():
            raise KeyError("given up")

    spec = GroupSpec(
        world="w", generation=1, rank=0, size=2, backend="nccl", device=None, timeout=SOON,
        store=torch.distributed.HashStore(), local_host="127.0.0.1", check_cancelled=alive, fresh_store=fresh_store,
    )  # fmt: skip
    try:
        with pytest.raises(KeyError, match="given up"):
            groups._default_group(spec, None, SimpleNamespace(kept=[]), alive)
    finally:
        answered.set()
        for each in threading.enumerate():
            if each.name == "m8d-nccl-connect-0":
                each.join(SOON)
    assert not made, "too late"
