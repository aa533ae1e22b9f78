from __future__ import annotations

import ctypes

import pytest
from bed.control import Bed, library_info
from bed.errors import BedError
from bed.knobs import COUNTERS, KNOBS, environment, knob, written
from kits.toytorch_bed import make_double


def test_names_are_unique_and_plain():
    assert all(name == name.upper() and name.replace("_", "").isalpha() for name in KNOBS)
    assert len(set(COUNTERS)) == len(COUNTERS)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("ABORT_HANG_MS", 500, "500"),
        ("ABORT_HANG_MS", 0, "0"),
        ("ABORT_HANG_MS", None, ""),
        ("NO_DETECT", True, "1"),
        ("NO_DETECT", False, ""),
        ("M8D_BED_NO_DETECT", "1", "1"),
        ("ABORT_HANG_PHASE", "after", "after"),
        ("ENQUEUE_FAIL_KIND", "Send", "Send"),
        ("ENQUEUE_FAIL_KIND", "", ""),
        ("COMM", "9f0c", "9f0c"),
    ],
)
def test_values_as_the_library_takes_them(name, value, text):
    assert written(name, value) == text


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("ABORT_HANG", 1, "ABORT_HANG is no knob"),
        ("ABORT_HANG_MS", -1, "a whole number from 0 up"),
        ("ABORT_HANG_MS", 1.5, "a whole number from 0 up"),
        ("ABORT_HANG_PHASE", "during", "before or after"),
        ("ENQUEUE_FAIL_KIND", "send", "Send or Recv"),
    ],
)
def test_wrong_ones_are_refused(name, value, says):
    with pytest.raises(BedError, match=says):
        written(name, value)


def test_knobs_for_the_environment():
    assert environment(ABORT_HANG_MS=5, NO_DETECT=True) == {
        "M8D_BED_ABORT_HANG_MS": "5",
        "M8D_BED_NO_DETECT": "1",
    }
    assert knob("M8D_BED_TRACE") is KNOBS["TRACE"]


def test_no_library_no_controls():
    assert library_info() is None
    with pytest.raises(BedError, match="not in this process"):
        Bed.here()


@pytest.fixture
def bed(tmp_path) -> Bed:
    library = ctypes.CDLL(str(make_double(tmp_path)))
    return Bed(library, library_info(library))


@pytest.mark.compiler
def test_a_fault_puts_its_knobs_back(bed):
    bed.set("ABORT_RESULT", 3)
    with pytest.raises(ZeroDivisionError), bed.abort_fails(5):
        assert bed.get("ABORT_RESULT") == "5"
        raise ZeroDivisionError
    assert bed.get("ABORT_RESULT") == "3"


@pytest.mark.compiler
def test_every_fault_sets_knobs_that_exist(bed, monkeypatch):
    seen = {}
    monkeypatch.setattr(bed, "set", lambda name, value: seen.setdefault(name, written(name, value)))
    monkeypatch.setattr(bed, "get", lambda name: "")
    faults = (
        bed.abort_hangs(0.25, phase="after"), bed.abort_fails(), bed.enqueue_fails(kind="Send", after=2),
        bed.group_end_fails(), bed.init_fails(), bed.init_hangs(1.5), bed.operations_hang(after=3), bed.async_error(5),
        bed.peer_death_unseen(), bed.detection_delayed(0.1),
    )  # fmt: skip
    for fault in faults:
        with fault:
            pass
    assert seen == {
        "ABORT_HANG_PHASE": "after", "ABORT_HANG_MS": "250", "ABORT_RESULT": "3", "ENQUEUE_FAIL_KIND": "Send",
        "ENQUEUE_FAIL_FROM": "3", "ENQUEUE_RESULT": "6", "GROUPEND_RESULT": "6", "INIT_RESULT": "2",
        "INIT_HANG_MS": "1500", "HANG_FROM_OP": "4", "ASYNC_ERROR": "5", "NO_DETECT": "1", "DETECT_DELAY_MS": "100",
    }  # fmt: skip


@pytest.mark.compiler
def test_counting_gives_differences_and_freezes(bed):
    with bed.counting() as seen:
        first = seen.launches
        assert seen.launches == first + 1  # the toy counts its being asked
        assert seen.aborts == 0
    assert seen.launches == seen.launches
    with pytest.raises(AttributeError):
        _ = seen.sheep


@pytest.mark.compiler
def test_what_the_library_lacks_is_named(bed):
    with pytest.raises(BedError, match=r"no knob NO_DETECT.*it has ABORT_RESULT"):
        bed.set("NO_DETECT", 1)
    with pytest.raises(BedError, match="no knob NO_DETECT"):
        bed.get("NO_DETECT")
    with pytest.raises(BedError, match="no counter comms_bad"):
        bed.count("comms_bad")
    assert bed.stubs() == ["cuHidden"]
    assert bed.abandon_group() == 2
