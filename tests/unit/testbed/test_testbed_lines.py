"""What goes over the wire, and what the double's messages mean."""

from __future__ import annotations

import json
import socket
import threading

import pytest
from bed.errors import BedError
from bed.lines import Lines, Wire
from bed.rank import load_program, plain
from bed.refused import outlived, refused
from hypothesis import given
from hypothesis import strategies as st

OBJECTS = st.lists(st.dictionaries(st.text(), st.integers() | st.text()), max_size=5)


@given(OBJECTS, st.lists(st.integers(0, 200), max_size=5))
def test_lines_arrive_whole_however_they_are_cut(objects, cuts):
    data = b"".join(json.dumps(each).encode() + b"\n" for each in objects)
    marks = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    lines, seen = Lines(), []
    for begin, end in zip(marks, [*marks[1:], len(data)], strict=True):
        seen += lines.feed(data[begin:end])
    assert seen == objects


def test_a_wire_that_is_silent_and_one_that_ends():
    a, b = socket.socketpair()
    near, far = Wire(a), Wire(b)
    assert near.receive(0.01) == []
    assert not near.ended
    far.send({"n": 1})
    far.close()
    assert near.receive(5) == [{"n": 1}]
    assert near.receive(5) == []
    assert near.ended
    near.close()


def test_threads_do_not_mix_their_lines():
    a, b = socket.socketpair()
    near, far = Wire(a), Wire(b)
    words = ["x" * 3000, "y" * 3000]
    threads = [threading.Thread(target=lambda w=w: [far.send({"w": w}) for _ in range(50)]) for w in words]
    for thread in threads:
        thread.start()
    seen = []
    while len(seen) < 100:
        got = near.receive(20)
        assert got
        seen += [each["w"] for each in got]
    for thread in threads:
        thread.join()
    assert sorted(seen) == sorted(words * 50)
    near.close()
    far.close()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (1.5, 1.5),
        ((1, {2}), [1, [2]]),
        ({1: None}, {"1": None}),
        (1j, "1j"),
        (True, True),
    ],
)
def test_values_in_events(value, expected):
    assert plain(value) == expected
    assert json.loads(json.dumps(plain(value))) == expected


@pytest.mark.parametrize("name", ["nothing:here", "basics:nothing", "no.such.module:f", "basics"])
def test_no_such_program(name):
    with pytest.raises(BedError, match="is no program"):
        load_program(name)


def test_programs_by_short_and_long_name():
    assert load_program("basics:waits") is load_program("programs.basics:waits")


def test_what_the_double_refused_is_told_once_by_rank():
    outputs = {
        0: "m8d-bed: STUB cuHidden\nm8d-bed[12]: STUB cuHidden\nm8d-bed[12]: KERNEL at::add<float, 4>(x)\n",
        1: "m8d-bed[13]: peer 0 died\n",
        2: "m8d-bed: STUB cuHidden\n",
    }
    assert refused(outputs) == [
        "rank 0: a function it has only as a stub: cuHidden",
        "rank 0: a kernel it refuses: at::add<float, 4>(x)",
        "rank 2: a function it has only as a stub: cuHidden",
    ]
    assert refused({}) == outlived(outputs) == []


def test_what_nccl_does_not_survive_is_told_once_by_rank():
    outputs = {0: "m8d-bed[12]: LIFETIME ncclCommAbort while …\n" * 2, 1: "m8d-bed[13]: LIFETIME is over\n"}
    assert outlived(outputs) == ["rank 0: ncclCommAbort while …", "rank 1: is over"]
    assert refused(outputs) == []
    outputs[1] = "m8d-bed[13]: LUCK refused\n"
    assert outlived(outputs) == ["rank 0: ncclCommAbort while …", "rank 1: refused"]
    assert outlived(outputs, luck=True) == ["rank 0: ncclCommAbort while …"]
