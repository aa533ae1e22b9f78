"""Texts of stores as they are shown: passwords are left out, wherever one is told."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from multiworld._join import join
from multiworld._net.stores.address import StoreAddress, without_login
from multiworld._net.stores.etcd_address import EtcdAddress
from multiworld.errors import InvalidJoinError
from multiworld.run.errors import PlanError
from multiworld.run.worldsfile.host_checks import check_stores
from multiworld.run.worldsfile.parse import parse

SECRETS = [
    "etcd://me:secret@h:1/x", "ETCD://me:secret@h:1/x", "https://me:s/?ecret@h:1", "tcp://me:secret@h:1",
    "etcd:/me:secret@h:1/x", "me:secret@h:1", "tcp://me:secret,secret@h:1,h:2", "etcd://me:@secret@h:1/x",
]  # fmt: skip


@pytest.mark.parametrize("text", SECRETS)
def test_a_login_is_left_out(text):
    shown = without_login(text)
    assert "ecret" not in shown
    assert "...@h:1" in shown


def test_what_has_no_login_is_shown_whole():
    for text in ("tcp://h:1", "tcp://h:1,g:2", "etcd://h:1/x?ca=/a", "file:///runs/3@night/store", ""):
        assert without_login(text) == text


@pytest.mark.parametrize("text", SECRETS[1:])
def test_an_error_of_a_mistyped_store_does_not_show_its_password(text):
    with pytest.raises(InvalidJoinError) as caught:
        StoreAddress.parse_all(text, world="w")
    error = caught.value
    assert "ecret" not in f"{error} {error.__cause__}"


def test_an_error_of_an_etcd_address_does_not_show_its_password():
    with pytest.raises(InvalidJoinError) as caught:
        EtcdAddress.parse("etcd://me:secret@h:x/p?ca=/a@b")
    assert "secret" not in str(caught.value)


def test_a_join_logs_its_store_without_its_password(caplog):
    caplog.set_level(logging.INFO, "multiworld")
    join._begins(SimpleNamespace(name="w", who="rank 0", rank=0, store=SECRETS[0]))
    assert "joins at etcd://...@h:1/x" in caplog.text


@pytest.mark.parametrize("store", ["etcd://me:secret@h:1", "ETCD://me:secret@h:1/x"])
def test_a_launcher_refuses_a_store_without_its_password(store):
    plan = parse(f'[roles]\nw = 2\n[worlds.one]\nmembers = ["w:*"]\nstore = "{store}"\n', "x.toml")
    with pytest.raises(PlanError) as caught:
        check_stores(plan)
    assert "@h:1" in str(caught.value)
    assert "secret" not in str(caught.value)
