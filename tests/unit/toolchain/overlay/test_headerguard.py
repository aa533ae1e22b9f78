"""The guard around a wheel's headers: off, on again, and left alone where there is none."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from m8d_build.overlay.headerguard import guarded_like, unguarded

GUARDED = b"""\
#if !defined(TORCH_STABLE_ONLY) && !defined(TORCH_TARGET_VERSION)
#pragma once
struct Work;

#else
#error "This file should not be included when either TORCH_STABLE_ONLY or TORCH_TARGET_VERSION is defined."
#endif  // !defined(TORCH_STABLE_ONLY) && !defined(TORCH_TARGET_VERSION)
"""
BARE = b"#pragma once\nstruct Work;\n"


def test_the_guard_comes_off() -> None:
    assert unguarded(GUARDED) == BARE


def test_a_header_without_the_guard_stays_as_it_is() -> None:
    assert unguarded(BARE) == BARE


@pytest.mark.parametrize("half", [GUARDED[1:], GUARDED[:-1], GUARDED.replace(b"#else", b"#elif 1"), b""])
def test_half_a_guard_is_part_of_the_header(half: bytes) -> None:
    assert unguarded(half) == half


def test_a_header_takes_the_guard_of_the_one_it_replaces() -> None:
    assert guarded_like(GUARDED, BARE) == GUARDED
    assert guarded_like(BARE, b"new") == b"new"


@given(st.binary())
@example(GUARDED)
def test_on_and_off_is_nothing(header: bytes) -> None:
    assert unguarded(guarded_like(GUARDED, header)) == header
