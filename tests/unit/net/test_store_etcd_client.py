"""How long the members of an etcd cluster have to answer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from multiworld._net.stores import etcd_client
from multiworld._net.stores.etcd_address import EtcdAddress

pytest.importorskip("urllib3")


class Cluster(etcd_client.EtcdClient):
    """Members that take as long as is said, in turn: None for ever. Time passes with their answers alone."""

    def __init__(self, monkeypatch, *takes):
        super().__init__(EtcdAddress.parse("etcd://h1:1,h2:1,h3:1/p", world="w"))
        self.takes, self.asked, self.now = list(takes), [], 0.0
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=lambda _: None)
        monkeypatch.setattr(etcd_client, "time", clock)

    def _post(self, at, path, body, headers, seconds):
        self.asked.append((at, seconds))
        takes = self.takes.pop(0)
        self.now += seconds if takes is None else min(takes, seconds)
        if takes is None or takes > seconds:
            raise self._late
        return 0, {}


@pytest.fixture
def cluster(monkeypatch):
    return lambda *takes: Cluster(monkeypatch, *takes)


def test_a_call_that_was_lost_with_the_leader_is_made_again_soon(cluster):
    etcd = cluster(None, None, 0.01)
    etcd.call("/kv/txn", {}, deadline=60.0)
    assert etcd.asked == [(0, 0.3), (1, 0.3), (2, 0.3)]


def test_a_cluster_that_is_slow_is_waited_for_and_by_the_next_calls_from_the_beginning(cluster):
    etcd = cluster(*[0.8] * 6, 0.8, 0.01, 0.01)
    etcd.call("/kv/range", {}, deadline=3.0)
    assert [seconds for _, seconds in etcd.asked] == pytest.approx([0.3] * 4 + [0.6, 1.2])
    for learned in (2.4, 2.4, 1.2):
        etcd.call("/kv/range", {}, deadline=60.0)
        assert etcd.asked[-1][1] == pytest.approx(learned)


def test_what_a_call_that_failed_has_learned_is_not_forgotten(cluster):
    etcd = cluster(*[1.1] * 10)
    with pytest.raises(TimeoutError):
        etcd.call("/kv/range", {}, deadline=1.8)
    etcd.call("/kv/range", {}, deadline=5.0)
    assert etcd.asked[-1][1] == pytest.approx(1.2)


def test_no_member_has_more_than_what_is_left(cluster):
    etcd = cluster(None, None, None, None)
    with pytest.raises(TimeoutError, match="does not answer"):
        etcd.call("/kv/range", {}, deadline=1.0)
    assert [seconds for _, seconds in etcd.asked] == pytest.approx([0.3, 0.3, 0.3, 0.1])
