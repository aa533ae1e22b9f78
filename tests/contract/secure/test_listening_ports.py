"""Every socket at which any process of a run listens, in each way to start one, and what a stranger gets there.

A listener that the table does not know fails, and so does a kind that docs/security.md does not name. `MODES` has the
ways; a mode that promises more gets `Expected.strict`.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from kits import portkit
from kits.contract.portscenes import (
    Scene,
    file,
    joining,
    run_on_one_node,
    run_on_two_nodes,
    secure,
    secure_file,
    secure_joining,
    secure_list,
    secure_run_on_one_node,
    tcp,
    tcp_list,
    with_tls,
)
from kits.contract.runkit import ROOT
from kits.strangerkit import Expected, judge, reads, visit_all

pytestmark = [pytest.mark.everyday, pytest.mark.timeout(300)]

log = logging.getLogger("measured")

SLACK = 4.0 if "CI" in os.environ else 0.9
"""Seconds beyond each bound: CI's machine is shared and noisy."""

STORE = Expected("torch's TCPStore (`tcp://`)", (None, 2.0, None), readable=True)
TABLE = {
    "store": STORE,
    "store of a list": Expected("a `tcp://` list", STORE.most, readable=True),
    # Torch's own server, as torchrun starts it.
    "rendezvous": Expected("torch's rendezvous", (None, None, None), readable=True),
    "watchdog": Expected("the watchdog's connections", (1.0, 1.0, 1.0)),
    "lane": Expected("the connections for [messages]", (2.0, 2.0, 2.0)),
    "lane (unix)": Expected("the connections for [messages]", (2.0, 2.0, 2.0)),
    "helper": Expected("[helper]", (0.0, 0.0, 0.0)),
    "gloo": Expected("gloo's connections", (None, None, None)),
    "page": Expected("[the page]", (10.0, 10.0, 10.0)),
    "metrics": Expected("`/metrics` of [`serve_metrics`]", (5.0, 5.0, 10.0), readable=True),
    "control": Expected("`m8d-run`'s control socket", (10.0, 10.0, None), readable=True),
}
EVERYWHERE = {"rendezvous"}
"""Kinds that listen at every address of the host."""


@dataclass(frozen=True)
class Mode:
    """A way to start.

    Attributes:
        start: a context with the folder for its files, that gives the scene.
        expected: by kind.
        connect: how a stranger connects.
        reads: kinds of which a stranger can read names.
    """

    start: Callable[[Path], contextlib.AbstractContextManager[Scene]]
    reads: frozenset[str]
    expected: Callable[[str], Expected] = TABLE.__getitem__
    connect: portkit.Connect = portkit.plain


def strict(kind: str) -> Expected:
    """What secure mode says. Between processes of one host a lane has the handshake without TLS, and its 2 s."""
    return TABLE[kind] if kind == "lane (unix)" else TABLE[kind].strict()


MODES = {
    "a tcp:// store": Mode(tcp, frozenset({"store", "metrics"})),
    "a list of stores": Mode(tcp_list, frozenset({"store of a list"})),
    "a file store": Mode(file, frozenset()),
    "members that connect": Mode(joining, frozenset({"store"})),
    "m8d-run on one node": Mode(run_on_one_node, frozenset({"store", "control"})),
    "m8d-run on two nodes": Mode(run_on_two_nodes, frozenset({"store", "control"})),
    **{
        f"{name}, {how}": Mode(start, frozenset(), strict, connect)
        for name, start in (
            ("a secure store", secure),
            ("secure stores", secure_list),
            ("secure members that connect", secure_joining),
        )
        for how, connect in (("without TLS", portkit.plain), ("with TLS", with_tls))
    },
    # The control socket, which speaks no TLS, refuses these: "m8d-run on one node" visits it.
    **{
        f"{name}, with TLS": Mode(start, frozenset(), strict, with_tls)
        for name, start in (("a secure file", secure_file), ("m8d-run --secure", secure_run_on_one_node))
    },
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_each_listener_is_known_and_gives_a_stranger_what_the_page_says(tmp_path, mode):
    with mode.start(tmp_path) as scene:
        found = scene.standing()
        for each, kind in found.items():
            log.info("%s: %s", kind or "UNKNOWN", each)
        assert [str(each) for each, kind in found.items() if not kind] == [], "unknown listeners"
        assert set(found.values()) >= scene.kinds
        assert elsewhere(found) == []
        names = scene.names()
        visits = visit_all(found.items(), mode.expected, scene.records, mode.connect)
        for each in visits:
            when = "stays" if each.dropped is None else f"dropped after {each.dropped:.2f} s"
            log.info("%s, %s: %s, %d bytes came", each.kind, each.manner, when, len(each.heard))
        wrong = [
            line
            for each in visits
            for line in judge(each, mode.expected(each.kind), names, slack=SLACK)
        ]  # fmt: skip
        assert wrong == []
        # A stranger who asks a store in its own words reads the record: the page says so.
        assert reads(visits, names) == mode.reads


def elsewhere(found: dict[portkit.Listener, str]) -> list[str]:
    """Listeners at another address than loopback, for which the page gives no reason."""
    return [
        f"{kind}: {each}"
        for each, kind in found.items()
        if not isinstance(each.address, str)
        and not ipaddress.ip_address(each.address[0]).is_loopback
        and kind not in EVERYWHERE
    ]


@pytest.mark.parametrize("kind", TABLE)
def test_the_page_names_each_kind_of_listener(kind):
    page = (ROOT / "docs" / "security.md").read_text()
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| ")]
    assert any(TABLE[kind].page in each for each in rows), f"docs/security.md has no row for {kind}"
