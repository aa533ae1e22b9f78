from __future__ import annotations

import difflib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiworld.errors import InstallError
from multiworld.shim.diff import apply_diff, parse_diff, reversed_diff

PATH = "torch/distributed/x.py"
lines = st.lists(
    st.sampled_from([b"a\n", b"b\n", b"\n", b"-c\r\n", b"+++ d\n", b"\x0c\xff\n", b"@@ e\n"]), max_size=12
)
files = st.builds(lambda body, last: b"".join(body) + last, lines, st.sampled_from([b"", b"end", b"\\ no"]))


def split(data: bytes) -> list[bytes]:
    parts = [part + b"\n" for part in data.split(b"\n")]
    parts[-1] = parts[-1][:-1]
    return [part for part in parts if part]


def diff_of(
    before: bytes, after: bytes, context: int = 3, old: str = f"a/{PATH}", new: str = f"b/{PATH}"
) -> bytes:
    """As git writes it; difflib alone says nothing of a missing last line end."""
    out = b""
    for line in difflib.diff_bytes(
        difflib.unified_diff, split(before), split(after), old.encode(), new.encode(), n=context
    ):
        out += line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n"
    return out


@given(files, files, st.integers(0, 3))
def test_a_diff_leads_from_one_file_to_the_other_and_back(before, after, context):
    if before == after:
        return
    (diff,) = parse_diff(
        b"Some words.\n\ndiff --git a/x b/x\nindex 1..2 100644\n" + diff_of(before, after, context)
    )
    assert (diff.path, diff.creates, diff.removes) == (PATH, False, False)
    assert apply_diff(diff, before) == after
    assert apply_diff(reversed_diff(diff), after) == before
    with pytest.raises(InstallError, match="not there"):
        apply_diff(diff, None)


@given(files.filter(bool))
def test_a_new_file_is_made_and_taken_away(after):
    (diff,) = parse_diff(diff_of(b"", after, old="/dev/null"))
    assert diff.creates
    assert apply_diff(diff, None) == after
    assert apply_diff(reversed_diff(diff), after) is None
    with pytest.raises(InstallError, match="there already"):
        apply_diff(diff, b"")
    with pytest.raises(InstallError):
        apply_diff(reversed_diff(diff), after + b"\nmore\n")


@given(files, files, st.data())
def test_a_line_too_many_above_is_no_fuzz_but_a_refusal(before, after, data):
    if before == after:
        return
    (diff,) = parse_diff(diff_of(before, after))
    other = b"shifted\n" + before
    try:
        made = apply_diff(diff, other)
    except InstallError:
        return
    # Only where the hunk's old lines stand at the very same numbers by chance.
    hunk = diff.hunks[0]
    start = hunk.old_start - 1 if hunk.old else hunk.old_start
    assert split(other)[start : start + len(hunk.old)] == list(hunk.old)
    assert made is not None


BLANKS = (b" ctx\n", b"ctx \n", b"\tctx\n", b"ctx\r\n", b"ctx", b"c tx\n")
"""A line like ``ctx``, but for white space."""


@pytest.mark.parametrize("there", BLANKS)
@pytest.mark.parametrize("which", [0, 1, 2], ids=["above", "removed", "below"])
def test_white_space_is_no_less_than_other_bytes(there, which):
    (diff,) = parse_diff(b"--- a/torch/x.py\n+++ b/torch/x.py\n@@ -1,3 +1,3 @@\n ctx\n-ctx\n+new\n ctx\n")
    before = [b"ctx\n"] * 3
    assert apply_diff(diff, b"".join(before)) == b"ctx\nnew\nctx\n"
    if there.endswith(b"\n") or which == 2:  # only the last line may lack its end
        before[which] = there
        with pytest.raises(InstallError, match=f"line {which + 1} is "):
            apply_diff(diff, b"".join(before))


HEAD = b"diff --git a/torch/x.py b/torch/x.py\n"
CHANGED = b"--- a/torch/x.py\n+++ b/torch/x.py\n@@ -1 +1 @@\n-a\n+b\n"
ADDED = b"--- /dev/null\n+++ b/torch/x.py\n@@ -0,0 +1 @@\n+b\n"


@pytest.mark.parametrize(
    "end", [b"", b"-- \n2.39.5\n", HEAD.replace(b"x.py", b"z.py") + CHANGED.replace(b"x.py", b"z.py")]
)
@pytest.mark.parametrize("index", [b"", b"index 0000000..e69de29\n"])
@pytest.mark.parametrize("mode", [b"100644", b"100755"])
def test_a_new_file_that_is_empty_is_made_and_taken_away(mode, index, end):
    """git gives it neither names with --- and +++ nor a hunk."""
    diff, *others = parse_diff(HEAD + b"new file mode " + mode + b"\n" + index + end)
    assert (diff.path, diff.creates, diff.hunks) == ("torch/x.py", True, ())
    assert [other.path for other in others] == (["torch/z.py"] if b"@@" in end else [])
    assert apply_diff(diff, None) == b""
    assert apply_diff(reversed_diff(diff), b"") is None
    with pytest.raises(InstallError, match="there already"):
        apply_diff(diff, b"")
    with pytest.raises(InstallError, match="more lines"):
        apply_diff(reversed_diff(diff), b"a\n")


def test_what_git_says_of_a_file_with_hunks_is_read():
    for head, rest in (
        (b"index 1111111..2222222 100644\n", CHANGED),
        (b"new file mode 100644\n", ADDED),
        (b"", CHANGED),
    ):
        (diff,) = parse_diff(HEAD + head + rest)
        assert (diff.path, len(diff.hunks), diff.creates) == ("torch/x.py", 1, rest is ADDED)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "no unified diff"),
        (b"hello\n", "no unified diff"),
        (b"@@ -1 +1 @@\n-a\n+b\n", "names of its file"),
        (b"--- a/torch/x.py\n+++ b/torch/x.py\n", "no hunk"),
        (b"--- a/torch/x.py\n+++ b/torch/x.py\n@@ what @@\n", "begins with"),
        (b"--- a/torch/x.py\n+++ b/torch/x.py\n@@ -1,2 +1 @@\n-a\n+b\n", "as many lines"),
        (b"--- a/torch/x.py\n+++ b/torch/x.py\n@@ -1 +1 @@\n a\n+b\n", "counts agree"),
        (b"--- a/torch/x.py\n+++ b/torch/x.py\n@@ -1 +1 @@\n-a\n*b\n", "as many lines"),
        (b"--- a/torch/x.py\n+++ b/torch/x.py\n@@ -1,2 +1,2 @@\n\ta\n-a\n+b\n", "as many lines"),
        (b"--- a/torch/x.py\n+++ b/torch/x.py\n@@ -1,2 +1,2 @@\n\n-a\n+b\n", "as many lines"),
        (b"--- a/torch/x.py\n+++ b/torch/x.py\n@@ -1,2 +1,2 @@\n\r\n-a\n+b\n", "as many lines"),
        (b"--- a/torch/x.py\n+++ b/torch/y.py\n@@ -1 +1 @@\n-a\n+b\n", "rename"),
        (b"--- a/torch/x.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-a\n", "removed"),
        (b"--- /dev/null\n+++ b/torch/x.py\n@@ -1 +1 @@\n-a\n+b\n", "new file"),
        (b"--- a/torch/x.cpp\n+++ b/torch/x.cpp\n@@ -1 +1 @@\n-a\n+b\n", "build-torch"),
        (b"--- a/setup.py\n+++ b/setup.py\n@@ -1 +1 @@\n-a\n+b\n", "below torch/"),
        (b"--- a/torch/../x.py\n+++ b/torch/../x.py\n@@ -1 +1 @@\n-a\n+b\n", "below torch/"),
        (b"--- /etc/torch/x.py\n+++ /etc/torch/x.py\n@@ -1 +1 @@\n-a\n+b\n", "below torch/"),
        (b"--- a/torch/\xff.py\n+++ b/torch/\xff.py\n@@ -1 +1 @@\n-a\n+b\n", "ASCII"),
        (b"diff --git a/torch/x.py b/torch/y.py\nrename from torch/x.py\n", "nothing else"),
        (b"GIT binary patch\n", "nothing else"),
        (HEAD + b"new file mode 120000\nindex 0000000..1111111\n" + ADDED, "plain ones"),
        (HEAD + b"new file mode 160000\n", "plain ones"),
        (HEAD + b"index 1111111..2222222 120000\n" + CHANGED, "plain ones"),
        (HEAD + b"old mode 100644\nnew mode 100755\n", "nothing else"),
        (HEAD + b"deleted file mode 100644\nindex e69de29..0000000\n", "nothing else"),
        (HEAD + b"similarity index 100%\nrename from torch/x.py\nrename to torch/y.py\n", "nothing else"),
        (HEAD + b"index 1111111..2222222 100644\n" + HEAD + CHANGED, "is changed"),
        (HEAD, "is changed"),
        (HEAD + b"new file mode 100644\n" + CHANGED, "one name"),
        (HEAD.replace(b"b/torch/x", b"b/torch/z") + b"new file mode 100644\n", "one name"),
        (HEAD + b"new file mode 100644\n" + ADDED.replace(b"x.py", b"y.py"), "one name"),
        (HEAD.replace(b"x.py", b"x.txt") + b"new file mode 100644\n", "Python files"),
        (b"diff --cc torch/x.py\nmode 100644,100644..100755\n", "nothing else"),
        (b"--- a/torch/x.py\n+++ b/torch/x.py\n@@ -1 +1 @@\n-a\n+b\n" * 2, "once"),
    ],
)  # fmt: skip
def test_what_is_no_plain_change_of_python_files_is_refused(text, says):
    with pytest.raises(InstallError, match=says):
        parse_diff(text)


@pytest.mark.parametrize(
    ("hunks", "says"),
    [
        (b"@@ -2 +2 @@\n-a\n+b\n", "was made against"),
        (b"@@ -3 +3 @@\n-x\n+b\n", "behind its end"),
        (b"@@ -9 +9 @@\n-x\n+b\n", "behind its end"),
        (b"@@ -2 +2 @@\n-b\n+c\n@@ -1 +1 @@\n-a\n+c\n", "out of order"),
        (b"@@ -1 +2 @@\n-a\n+c\n", "does not lead"),
    ],
)
def test_what_does_not_fit_is_told_with_its_line(hunks, says):
    (diff,) = parse_diff(b"--- a/torch/x.py\n+++ b/torch/x.py\n" + hunks)
    with pytest.raises(InstallError, match=says) as caught:
        apply_diff(diff, b"a\nb\n")
    assert "nothing was changed" in str(caught.value)


@pytest.mark.parametrize(
    ("hunks", "before"),
    [
        (b"@@ -1 +1 @@\n-a\n+a\n", b"a\nb\n"),
        (b"@@ -1,2 +1,2 @@\n a\n b\n", b"a\nb\n"),
        (b"@@ -1 +0,0 @@\n-a\n@@ -2,0 +2 @@\n+a\n", b"a\na\n"),
    ],
)
def test_a_file_that_is_the_same_afterwards_is_refused(hunks, before):
    (diff,) = parse_diff(b"--- a/torch/x.py\n+++ b/torch/x.py\n" + hunks)
    for each in (diff, reversed_diff(diff)):
        with pytest.raises(InstallError, match=r"torch/x\.py is the same afterwards"):
            apply_diff(each, before)


def test_timestamps_and_names_without_prefixes_are_read():
    text = b"--- torch/x.py\t2026-01-01 10:00:00\n+++ torch/x.py\t2026-01-02\n@@ -1 +1 @@ def f():\n-a\n+b\n"
    assert parse_diff(text)[0].path == "torch/x.py"
