from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kits.patchkit import HEADER, Text, file_diff, patch_bytes

from m8d_build.files.blobs import blob_id
from m8d_build.series.diffparse import parse_diff
from m8d_build.series.diffs import ABSENT, fit, render, split_lines
from m8d_build.series.read import load_series, parse_patch, parse_series

PRE = Text.of("one", "two", "three", "four")
POST = PRE.changed("two", "zwei")
NAME = "0001-some-topic.patch"


def patch(header: str = "", body: bytes | None = None) -> bytes:
    head = header or HEADER.format(topic="some-topic", ends="D5 D6")
    return head.encode() + (file_diff("a.cpp", PRE, POST) if body is None else body)


def codes(faults) -> set[str]:
    return {fault.code for fault in faults}


def test_header_fields_are_parsed_and_folded():
    parsed, faults = parse_patch(NAME, patch())
    assert faults == ()
    assert parsed.topic == parsed.header.topic == "some-topic"
    assert parsed.number == 1
    assert parsed.header.reason == "a reason that goes over two lines."
    assert parsed.header.ends == ("D5", "D6")
    assert parsed.header.drop_when == "upstream does it."
    assert parsed.header.licence.endswith("BSD-3-Clause")


def test_ends_dash_means_no_defect():
    parsed, faults = parse_patch(NAME, patch(HEADER.format(topic="some-topic", ends="-")))
    assert (parsed.header.ends, faults) == ((), ())


def test_sha256_is_of_the_whole_file():
    data = patch()
    assert parse_patch(NAME, data)[0].sha256 == hashlib.sha256(data).hexdigest()


def test_diff_is_parsed_exactly():
    file = parse_patch(NAME, patch())[0].files[0]
    assert file.path == "a.cpp"
    assert (file.pre_blob, file.post_blob) == (blob_id(PRE.data), blob_id(POST.data))
    assert (file.added, file.removed) == (1, 1)
    hunk = file.hunks[0]
    assert (hunk.old_start, hunk.old_count, hunk.new_start, hunk.new_count) == (1, 3, 1, 3)
    assert (hunk.leading, hunk.trailing) == (1, 1)
    assert hunk.old == (b"one\n", b"two\n", b"three\n")
    assert patch().decode().split("\n")[hunk.at - 1].startswith("@@ ")


def test_new_and_deleted_files():
    for pre, post in ((None, POST), (PRE, None), (None, Text(())), (Text(()), None)):
        (file,), faults = parse_diff(file_diff("d/new.cpp", pre, post).decode())
        assert faults == ()
        assert (file.created, file.deleted) == (pre is None, post is None)
        before = pre.data if pre else (None if pre is None else b"")
        after, misfits = fit(file, before)
        assert misfits == ()
        assert after == (None if post is None else post.data)


def test_last_line_without_newline_survives():
    pre = Text(((1, b"a\n"), (2, b"b")))
    post = Text(((1, b"a\n"), (3, b"c")))
    diff = file_diff("x", pre, post)
    assert diff.count(b"\\ No newline at end of file\n") == 2
    (file,), faults = parse_diff(diff.decode())
    assert faults == ()
    assert fit(file, b"a\nb") == (b"a\nc", ())
    assert render(file) == diff


@pytest.mark.parametrize("shift", [-1, 1])
def test_no_offset_is_tolerated(shift):
    file = parse_patch(NAME, patch())[0].files[0]
    moved = b"zero\n" + PRE.data if shift == 1 else PRE.data.split(b"\n", 1)[1]
    assert fit(file, moved)[1]


def test_no_fuzz_is_tolerated():
    file = parse_patch(NAME, patch())[0].files[0]
    _, misfits = fit(file, PRE.data.replace(b"three", b"THREE"))
    assert [misfit.found for misfit in misfits] == [(b"one\n", b"two\n", b"THREE\n")]


@pytest.mark.parametrize(
    ("data", "code", "line"),
    [
        (patch().replace(b"\n", b"\r\n"), "crlf", 1),
        (patch().replace(b"+zwei\n", b"+zwei\r\n"), "crlf", 17),
        (b"\xef\xbb\xbf" + patch(), "bom", 1),
        (patch()[:-1], "final-newline", 18),
        (patch().replace(b"zwei", b"zw\xffei"), "utf8", 17),
        (patch().replace(b"\n---\n", b"\n"), "header", 0),
        (patch().replace(b"Send: as it is.\n", b""), "header", 0),
        (patch().replace(b"Send: as it is.", b"Send:"), "header", 7),
        (patch().replace(b"Send: as it is.", b"Sent: as it is."), "header", 7),
        (patch().replace(b"Send: as it is.", b"Topic: again"), "header", 7),
        (patch().replace(b"@@ -1,3 +1,3 @@", b"@@ -1,4 +1,3 @@"), "hunk", 10),
        (patch().replace(b"@@ -1,3 +1,3 @@", b"@@ -1,2 +1,2 @@"), "hunk", 18),
        (patch().replace(b"@@ -1,3 +1,3 @@", b"@@ -1,3 +2,3 @@"), "hunk", 14),
        (patch() + b"stray\n", "hunk", 19),
        (patch() + b"+one more\n", "hunk", 19),
        (patch() + b"\n", "hunk", 19),
        (patch().replace(b" one\n", b"\n"), "hunk", 15),
        (patch().replace(b"a.cpp", b"../a.cpp"), "path", 10),
        (patch().replace(b"a/a.cpp", b"a//a.cpp").replace(b"b/a.cpp", b"b//a.cpp"), "path", 10),
        (patch().replace(b"a.cpp", b".git/config"), "path", 10),
        (patch().replace(b"--- a/a.cpp", b"--- a/b.cpp"), "diff", 10),
        (patch().replace(b"--- a/a.cpp", b"old mode 100644\n--- a/a.cpp"), "diff", 10),
        (patch().replace(b" 100644\n", b" 120000\n"), "diff", 10),
        (patch().replace(b"diff --git a/a.cpp b/a.cpp", b"diff --git a/a.cpp b/b.cpp"), "hunk", 10),
        (patch().replace(blob_id(PRE.data).encode(), b"0123456"), "index", 10),
        (patch().replace(blob_id(PRE.data).encode(), ABSENT.encode()), "index", 10),
        (patch(body=b""), "diff", 10),
        (patch(body=b"--- a/a.cpp\n+++ b/a.cpp\n@@ -1 +1 @@\n-a\n+b\n"), "diff", 10),
    ],
)
def test_every_fault_of_a_patch_file_is_found_with_its_line(data, code, line):
    _, faults = parse_patch(NAME, data)
    assert (code, line) in {(fault.code, fault.line) for fault in faults}, faults


def test_carriage_returns_are_one_fault_not_many():
    assert codes(parse_patch(NAME, patch().replace(b"\n", b"\r\n"))[1]) == {"crlf"}


@pytest.mark.parametrize(
    "name", ["1-topic.patch", "0001_topic.patch", "0001-Topic.patch", "0001-topic.diff", "x"]
)
def test_patch_names_are_held_to_the_rule(name):
    assert codes(parse_patch(name, patch())[1]) == {"name"}


def test_series_keeps_the_order_of_its_file_and_ignores_comments():
    contents = {
        "series": b"# second first\n0002-b.patch\n\n0001-a.patch\n",
        "0001-a.patch": patch_bytes("a", {"a": PRE}, {"a": POST}),
        "0002-b.patch": patch_bytes("b", {"b": PRE}, {"b": POST}),
    }
    series = parse_series("2.6.0", contents)
    assert series.faults == ()
    assert series.topics == ("b", "a")
    assert series.listed == ((2, "0002-b.patch"), (4, "0001-a.patch"))
    assert series.paths == ("b", "a")
    assert series.contents() == contents


def test_missing_folder_is_an_empty_series(tmp_path):
    series = load_series(tmp_path, "9.9.9")
    assert (series.patches, series.text, series.present) == ((), None, ())


def test_real_patches_are_written_as_git_writes_them():
    patches = Path(__file__).parents[4] / "patches"
    folders = [path for path in patches.iterdir() if path.is_dir()]
    assert folders
    for folder in folders:
        for parsed in load_series(patches, folder.name.removeprefix("v")).patches:
            again = parsed.header_text.encode() + b"".join(render(file) for file in parsed.files)
            assert again == parsed.data, parsed.name


LINE = st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=6)


@given(
    st.lists(LINE, max_size=12),
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 3), st.lists(LINE, max_size=3)), max_size=4),
    st.integers(0, 3),
)
def test_any_diff_survives_parse_fit_and_render(lines, edits, context):
    pre = Text.of(*lines)
    post = pre
    for start, count, new in edits:
        post = post.replaced(min(start, len(post.lines)), min(start + count, len(post.lines)), *new)
    diff = file_diff("some/file.cpp", pre, post, context)
    if not diff:
        return
    (file,), faults = parse_diff(diff.decode())
    assert faults == ()
    assert render(file) == diff
    assert fit(file, pre.data) == (post.data, ())


@given(st.binary(max_size=60))
def test_split_lines_splits_at_newlines_only(data):
    lines = split_lines(data)
    assert b"".join(lines) == data
    assert all(line.count(b"\n") == 1 and line.endswith(b"\n") for line in lines[:-1])
