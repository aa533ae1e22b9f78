"""Addresses to listen at."""

from __future__ import annotations

import pytest

from multiworld._net.listen_address import host_and_port, is_loopback
from multiworld.errors import MultiworldError


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        ("alpha:65535", ("alpha", 65535)),
        ("[::1]:8080", ("::1", 8080)),
        ("[fe80::1%eth0]:80", ("fe80::1%eth0", 80)),
    ],
)
def test_what_is_an_address(address, expected):
    assert host_and_port(address) == expected


@pytest.mark.parametrize(
    "address",
    ["", ":", "8080", ":80", "[]:80", "alpha", "alpha:", "alpha:x", "alpha:-1", "alpha:65536", "alpha:\u0661",
     "::1:80", "[::1", "[::1]", "[alpha]:80", "alpha:80:80"],
)  # fmt: skip
def test_what_is_none(address):
    with pytest.raises(MultiworldError, match="HOST:PORT"):
        host_and_port(address)


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.1.2.3", True), ("::1", True), ("localhost", True), ("0.0.0.0", False),  # noqa: S104
     ("::", False), ("10.0.0.1", False), ("fe80::1%eth0", False), ("alpha", False)],
)  # fmt: skip
def test_what_only_this_host_reaches(host, expected):
    assert is_loopback(host) is expected
