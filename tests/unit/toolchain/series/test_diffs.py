"""The toolchain's diffs as values: what fits, exactly."""

from __future__ import annotations

import pytest

from m8d_build.series.diffparse import parse_diff
from m8d_build.series.diffs import FilePatch, Hunk, Line, fit

HUNK = Hunk(
    1, 3, 1, 3, "", (Line(" ", b"ctx\n"), Line("-", b"ctx\n"), Line("+", b"new\n"), Line(" ", b"ctx\n"))
)
PATCH = FilePatch("torch/x.cpp", "1" * 40, "2" * 40, "100644", (HUNK,))


def test_what_fits():
    assert fit(PATCH, b"ctx\nctx\nctx\n") == (b"ctx\nnew\nctx\n", ())


@pytest.mark.parametrize("there", [b" ctx\n", b"ctx \n", b"\tctx\n", b"ctx\r\n", b"c tx\n"])
@pytest.mark.parametrize("which", [0, 1, 2], ids=["above", "removed", "below"])
def test_white_space_is_no_less_than_other_bytes(there, which):
    before = [b"ctx\n"] * 3
    before[which] = there
    _, (misfit,) = fit(PATCH, b"".join(before))
    assert misfit.hunk is HUNK
    assert misfit.found == tuple(before)


def test_the_last_lines_end_counts():
    _, (misfit,) = fit(PATCH, b"ctx\nctx\nctx")
    assert misfit.found[-1] == b"ctx"


@pytest.mark.parametrize("context", ["", "\tctx", "ctx", "\r"])
def test_a_context_line_begins_with_a_space(context):
    head = "diff --git a/x b/x\nindex " + "1" * 40 + ".." + "2" * 40 + " 100644\n--- a/x\n+++ b/x\n"
    hunk = "@@ -1,2 +1,2 @@\n{}\n-old\n+new\n"
    assert parse_diff(head + hunk.format(" ctx"))[1] == ()
    assert parse_diff(head + hunk.format(context))[1] != ()
