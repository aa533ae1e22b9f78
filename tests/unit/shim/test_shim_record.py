from __future__ import annotations

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiworld.errors import InstallError
from multiworld.shim.record import Record, digest

names = st.text(
    st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"], exclude_characters="\x85\\"),
    min_size=1,
    max_size=12,
).map(lambda text: f"torch/{text}")


def record_bytes(paths, end):
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator=end).writerows([path, "sha256=abc", "3"] for path in paths)
    return buffer.getvalue().encode()


@given(st.lists(names, unique=True), st.sampled_from(["\n", "\r\n"]), st.booleans(), st.binary(max_size=20))
def test_a_row_that_is_added_and_taken_away_leaves_the_file_as_it_was(paths, end, ended, content):
    data = record_bytes(paths, end)
    data = data if ended else data.removesuffix(end.encode())
    record = Record(data)
    record.put("new,name.py", content)
    assert "new,name.py" in record
    assert record.says("new,name.py", content)
    assert record.data.startswith(data)
    if ended:
        assert record.data.endswith(end.encode() if paths else b"\n")
    assert record.data.count(b"\n") == len(paths) + (ended or not paths)
    record = Record(record.data)
    record.restore("new,name.py", None)
    assert record.data == data


@given(st.lists(names, unique=True, min_size=1), st.data(), st.booleans(), st.binary(max_size=20))
def test_a_row_that_is_changed_and_put_back_leaves_the_file_as_it_was(paths, data, ended, content):
    before = record_bytes(paths, "\r\n")
    before = before if ended else before[:-2]
    path = data.draw(st.sampled_from(paths))
    record = Record(before)
    line = record.line(path)
    record.put(path, content)
    assert record.says(path, content)
    assert list(csv.reader(io.StringIO(record.data.decode(), newline="")))[paths.index(path)][0] == path
    record = Record(record.data)
    older = data.draw(st.booleans())
    record.restore(path, line.rstrip("\r\n") if older else line)
    assert record.data == before
    assert len(Record(record.data).below("torch")) == len(paths)


def test_what_stands_below_a_folder_is_found_and_a_second_row_is_not_right():
    record = Record(b"torch/a/x.py,,\ntorch/ab/y.py,,\n\ntorch/a/x.py,,\n")
    assert record.below("torch/a") == ("torch/a/x.py", "torch/a/x.py")
    assert not record.says("torch/a/x.py", b"")
    record.put("torch/a/x.py", b"")
    assert record.says("torch/a/x.py", b"")
    assert record.below("torch/a") == ("torch/a/x.py",)


def test_hashes_are_written_as_wheels_do():
    assert digest(b"") == "sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU"


@pytest.mark.parametrize("data", [b"a,b\n", b"a,b,c,d\n", b"\xff,,\n", b'a,"b,\n'])
def test_what_is_no_record_is_refused(data):
    with pytest.raises(InstallError, match="Install torch again"):
        Record(data, "/x/RECORD")
