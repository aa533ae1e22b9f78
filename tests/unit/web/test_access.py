"""Who may see the page."""

from __future__ import annotations

import pytest

from multiworld.web.access import allowed, known_host


@pytest.mark.parametrize(
    ("cookie", "header", "expected"),
    [
        ("t0ken", None, True),
        (None, "Bearer t0ken", True),
        (None, "bearer  t0ken", True),
        ("wrong", "Bearer t0ken", True),
        (None, None, False),
        ("", "", False),
        ("t0ke", "Bearer t0kenn", False),
        (None, "Basic t0ken", False),
        (None, "t0ken", False),
        ("tökén", "Bearer \u2028", False),
    ],
)
def test_the_token(cookie, header, expected):
    headers = {} if header is None else {"authorization": header}
    assert allowed("t0ken", cookie, headers) is expected


def test_a_page_without_a_token_is_open():
    assert allowed("", None, {})


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("localhost", True),
        ("LocalHost:8080", True),
        ("127.0.0.1:8080", True),
        ("10.1.2.3", True),
        ("[::1]:8080", True),
        ("[::1]", True),
        ("alpha:8080", True),
        ("Alpha", True),
        ("evil.example:8080", False),
        ("alpha.evil.example", False),
        ("", False),
        (":8080", False),
    ],
)
def test_names_of_the_host(header, expected):
    assert known_host(header, {"alpha"}) is expected
