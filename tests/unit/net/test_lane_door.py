"""Where members wait for each other: bound, not listening before they have agreed, closed for copies too."""

from __future__ import annotations

import contextlib
import errno
import re
import socket

import pytest
from kits.doorkit import HOST, all_closed, call

from multiworld._core.lane.greeting import VERSION
from multiworld._net.lane import door
from multiworld._net.lane.door import Door, unix_name
from multiworld.errors import MultiworldError

PROCESS = "0123456789abcdef" * 2


@pytest.fixture(autouse=True)
def nothing_stays_open():
    with all_closed():
        yield


def dials(opened):
    """Return what becomes of a dial of each of its sockets."""
    codes = []
    for family, where in (
        (socket.AF_UNIX, unix_name(PROCESS, opened.address.port)),
        (socket.AF_INET, (HOST, opened.address.port)),
    ):
        with contextlib.closing(socket.socket(family)) as caller:
            codes.append(caller.connect_ex(where))
    return codes


def test_an_address():
    with Door(HOST, PROCESS) as opened:
        names = [each.getsockname() for each in opened.sockets]
        # Who can dial TCP must have been able to dial the Unix socket before.
        assert names == [unix_name(PROCESS, opened.address.port).encode(), (HOST, opened.address.port)]
        assert names[0] == f"\0m8d-lane-{PROCESS}-{opened.address.port}".encode()
        assert opened.address.version == VERSION
        assert re.fullmatch("[0-9a-f]{8}", opened.address.place)
        for each in opened.sockets:
            assert each.gettimeout() == 0
            assert not each.get_inheritable()


def test_it_refuses_until_it_listens_and_after_it_was_closed():
    """After that for good, also if a forked child has copies of its sockets."""
    opened = Door(HOST, PROCESS)
    copies = [each.dup() for each in opened.sockets]
    assert dials(opened) == [errno.ECONNREFUSED] * 2
    opened.listen(8)
    assert dials(opened) == [0, 0]
    opened.close()
    assert dials(opened) == [errno.ECONNREFUSED] * 2
    opened.close()
    for each in copies:
        each.close()


def test_a_child_closes_its_copies_alone(monkeypatch):
    """The parent's door stays as it is."""
    opened = Door(HOST, PROCESS)
    copies = [each.dup() for each in opened.sockets]
    opened.listen(8)
    monkeypatch.setattr(door.os, "getpid", lambda: opened.pid + 1)
    opened.close()
    assert [each.fileno() for each in opened.sockets] == [-1, -1]
    assert dials(opened) == [0, 0]
    for each in copies:
        each.close()


def test_a_connection_outlives_the_door():
    with Door(HOST, PROCESS) as opened:
        opened.listen(8)
        caller = call(opened.address, 0)
        accepted, _ = opened.sockets[1].accept()
    with contextlib.closing(caller), contextlib.closing(accepted):
        accepted.sendall(b"x")
        assert caller.recv(1) == b"x"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "localhost", "", "300.1.1.1"])  # noqa: S104  (refused)
def test_no_numeric_address_of_one_interface(host):
    with pytest.raises(MultiworldError) as caught:
        Door(host, PROCESS)
    assert str(caught.value) == (
        f"the lane's address {host!r}. It is the numeric address of one interface of this host. Give the address of "
        "the interface that leads to the other members."
    )


def test_an_address_of_another_host():
    with pytest.raises(MultiworldError) as caught:
        Door("192.0.2.1", PROCESS)
    assert str(caught.value) == (
        "the lane cannot be connected at 192.0.2.1: Cannot assign requested address. It is connected at an address of "
        "this host, at a port that the kernel chooses. Give an address that `ip address` lists here."
    )


class TestPlace:
    def place(self):
        with Door(HOST, PROCESS) as opened:
            assert len(opened.sockets) == (2 if opened.address.place else 1)
            return opened.address.place

    def test_it_is_the_same_in_all_doors(self):
        assert self.place() == self.place() != ""

    @pytest.mark.parametrize("file", ["_BOOT", "_NETWORK"])
    def test_another_host_or_network_is_another_place(self, file, monkeypatch, tmp_path):
        here = self.place()
        (tmp_path / "other").write_text("another\n")
        monkeypatch.setattr(door, file, tmp_path / "other")
        assert self.place() not in {here, ""}

    @pytest.mark.parametrize("file", ["_BOOT", "_NETWORK"])
    def test_it_cannot_be_told(self, file, monkeypatch, tmp_path):
        monkeypatch.setattr(door, file, tmp_path / "missing")
        assert self.place() == ""

    def test_the_name_is_taken(self, monkeypatch):
        """Two addresses of one process may have the same port."""
        monkeypatch.setattr(door, "unix_name", lambda process, port: f"\0m8d-lane-{process}")
        with Door(HOST, PROCESS) as first, Door(HOST, PROCESS) as second:
            assert first.address.place
            assert second.address.place == ""
            assert len(second.sockets) == 1

    def test_no_unix_sockets(self, monkeypatch):
        real = socket.socket

        def refuse(family, kind):
            if family == socket.AF_UNIX:
                raise OSError(errno.EAFNOSUPPORT, "refused")
            return real(family, kind)

        monkeypatch.setattr(door.socket, "socket", refuse)
        assert self.place() == ""
