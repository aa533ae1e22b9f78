"""Whether a member's address means another place for the other."""

from __future__ import annotations

import pytest

from multiworld._core.membership.reachability import apart
from multiworld._core.membership.roster import Endpoint, Member


def at(host, hostname):
    return Member(0, "0" * 32, Endpoint(host, 1), 1, hostname)


@pytest.mark.parametrize(
    ("one", "other", "found"),
    [
        (("10.0.0.1", "a"), ("10.0.0.2", "b"), False),
        (("10.0.0.1", "a"), ("10.0.0.1", "a"), False),
        (("127.0.0.1", "a"), ("127.0.0.1", "a"), False),
        (("127.0.0.1", "a"), ("127.0.0.1", "b"), True),
        (("172.17.0.1", "a"), ("172.17.0.1", "b"), True),
        (("10.0.0.1", "a"), ("127.0.0.1", "b"), True),
        (("::1", "a"), ("fe80::1%eth0", "a"), True),
        (("no number", "a"), ("10.0.0.2", "b"), False),
    ],
)
def test_apart(one, other, found):
    assert apart(at(*one), at(*other)) is found
    assert apart(at(*other), at(*one)) is found
