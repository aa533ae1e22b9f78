import pytest
from hypothesis import given
from hypothesis import strategies as st
from kits.fakewheel import write_wheel

from m8d_build.wheel.changes import Edit, Put, content, edit_blocks
from m8d_build.wheel.wheelfile import open_wheel


@st.composite
def cases(draw):
    data = draw(st.binary(max_size=200))
    size = draw(st.integers(1, 50))
    edits, at = [], 0
    while at < len(data) and len(edits) < 6:
        start = draw(st.integers(at, len(data)))
        new = draw(st.binary(max_size=len(data) - start))
        edits.append((start, new))
        at = start + len(new) + 1
    return data, size, draw(st.permutations(edits))


@given(cases())
def test_edits_are_written_over_wherever_the_blocks_are_cut(case):
    data, size, edits = case
    expected = bytearray(data)
    for offset, new in edits:
        expected[offset : offset + len(new)] = new
    edits = [edit for edit in edits if edit[1]]
    blocks = [data[i : i + size] for i in range(0, len(data), size)]
    assert b"".join(edit_blocks(blocks, edits)) == bytes(expected)


@pytest.mark.parametrize(
    "edits",
    [[(2, b"abc"), (4, b"d")], [(9, b"ab")], [(11, b"a")], [(-1, b"a")]],
    ids=["overlap", "end", "past", "before"],
)
def test_edits_that_overlap_or_lie_outside_are_refused(edits):
    with pytest.raises(ValueError, match="edit"):
        list(edit_blocks([bytes(5), bytes(5)], edits))


def test_a_change_knows_its_size_and_its_bytes(tmp_path):
    wheel = open_wheel(write_wheel(tmp_path))
    (tmp_path / "file").write_bytes(b"from a file")
    for change, expected in [
        (Put("x", b"bytes"), b"bytes"),
        (Put("x", tmp_path / "file"), b"from a file"),
        (Edit("torch/__init__.py", ((0, b"FROM"),)), b"FROM torch.version import __version__\n"),
    ]:
        size, blocks = content(wheel, change)
        assert b"".join(blocks) == expected
        assert size == len(expected)
