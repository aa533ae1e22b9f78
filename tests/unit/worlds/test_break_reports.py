"""Reports of breakages: written by each member, put together and explained by ``python -m multiworld report``."""

from __future__ import annotations

import json
import re
import time

import pytest

from multiworld._core.membership.roster import Endpoint, Member, Roster
from multiworld._core.operations.report import MemberReport, Operation
from multiworld._generation import operations
from multiworld._generation.break_report import write
from multiworld._generation.busy_members import BusyMembers
from multiworld.cli.main import main
from multiworld.events import Breakage, Cause

SIZE = 3


def roster(rank, world="w", generation=2, token=b"t" * 16):
    members = tuple(
        Member(each, f"{each:032x}", Endpoint("127.0.0.1", 1), 100 + each, "host") for each in range(SIZE)
    )
    return Roster(world, generation, rank, members, token, 5.0)


def report(rank, *, pending=True, kind="all_reduce", number=7, began=0.5):
    group = tuple(range(SIZE))
    before = Operation(0, group, kind, number - 1, 4, None, None, began + 0.25, began)
    last = Operation(0, group, kind, number, 4, None, None, began, None if pending else 0.1, pending)
    message = Operation(5, (0, 2), "send", None, 8, 2, 3, 0.2, None, False)
    return MemberReport(rank, {0: number}, (before, last, message))


def wrote(
    folder,
    rank,
    reports,
    *,
    cause=Cause.CRASHED,
    ranks=(2,),
    world="w",
    generation=2,
    ago=0.0,
    token=b"t" * 16,
):
    breakage = Breakage(cause, ranks, "rank 2 (pid 102 on host): it ended", time.monotonic() - ago)
    return write(
        folder, roster(rank, world, generation, token), breakage, reports, ["all_reduce #7: rank 0 waits"]
    )


def said(capsys, *args):
    code = main(["report", *map(str, args)])
    out, err = capsys.readouterr()
    return code, out, err


def test_one_report(tmp_path, capsys):
    file = wrote(tmp_path / "made", 0, {0: report(0), 1: report(1), 2: None})
    assert file.parent == tmp_path / "made"
    assert re.fullmatch(r"w\.2\.[0-9a-f]{8}\.rank0\.json", file.name)
    assert [each.name for each in file.parent.iterdir()] == [file.name]
    code, out, _ = said(capsys, file)
    assert code == 0
    first, *rest = out.splitlines()
    assert first.startswith("World 'w', generation 2, broke at 20")
    assert first.endswith(" UTC: crashed")
    assert rest == [
        "  rank 2 (pid 102 on host): it ended",
        "  reports of rank 0; 3 members",
        "",
        "Waiting when it broke:",
        "  all_reduce #7: ranks 0 and 1 wait since 0.5 s; rank 2 is lost",
        "",
        "Last operations of each member, the last one first:",
        "  rank 0 (pid 100 on host):",
        "    send to 2 (tag 3) of 8 bytes in the group of ranks 0, 2: posted 0.200 s before, over or not waited for",
        "    all_reduce #7 of 4 bytes: waiting since 0.500 s",
        "    all_reduce #6 of 4 bytes: took 250 ms, ended 0.500 s before",
        "  rank 1 (pid 101 on host):",
        "    send to 2 (tag 3) of 8 bytes in the group of ranks 0, 2: posted 0.200 s before, over or not waited for",
        "    all_reduce #7 of 4 bytes: waiting since 0.500 s",
        "    all_reduce #6 of 4 bytes: took 250 ms, ended 0.500 s before",
        "  rank 2 (pid 102 on host): lost",
    ]  # fmt: skip


def test_the_member_that_others_waited_for(tmp_path, capsys):
    reports = {0: report(0, began=2.5), 1: report(1, began=0.5), 2: report(2, began=0.504)}
    wrote(tmp_path, 0, reports)
    out = said(capsys, tmp_path)[1]
    assert "Waited for in the last collectives:\n  rank 1: 4.000 s, 100%\n\nLast operations" in out


def test_those_of_one_breakage_are_put_together(tmp_path, capsys):
    # Each knows little of the other; what a member wrote of itself counts.
    wrote(tmp_path, 1, {0: report(0, kind="barrier"), 1: report(1, pending=False), 2: None})
    wrote(tmp_path, 0, {0: report(0), 1: None, 2: None})
    code, out, _ = said(capsys, tmp_path)
    assert code == 0
    assert "reports of ranks 0, 1; 3 members" in out
    assert "all_reduce #7: rank 0 waits since 0.5 s; rank 2 is lost" in out
    assert "barrier" not in out
    assert "do not agree" not in out


def test_a_member_that_told_nothing_and_another_cause(tmp_path, capsys):
    wrote(tmp_path, 0, {0: MemberReport(0), 1: None, 2: None})
    wrote(tmp_path, 1, {1: report(1, pending=False)}, cause=Cause.LEFT, ranks=(0,), ago=-1.0)
    _, out, _ = said(capsys, tmp_path)
    assert "The members do not agree on the cause: rank 0: crashed of [2]; rank 1: left of [0]" in out
    assert "Waiting when it broke:\n  no operation\n" in out
    assert "rank 0 (pid 100 on host):\n    none\n" in out
    assert "rank 2 (pid 102 on host): lost" in out


def test_a_member_that_is_not_lost_and_has_not_answered(tmp_path, capsys):
    wrote(tmp_path, 0, {0: report(0), 1: None, 2: None})
    assert "rank 1 (pid 101 on host): did not answer" in said(capsys, tmp_path)[1]


def test_breakages_come_in_the_order_of_time(tmp_path, capsys):
    wrote(tmp_path, 0, {0: report(0)}, generation=3)
    wrote(tmp_path, 0, {0: report(0)}, generation=2, ago=9.0)
    wrote(tmp_path, 0, {0: report(0)}, world="a", ago=5.0)
    out = said(capsys, tmp_path)[1]
    heads = [line.partition(", broke")[0] for line in out.splitlines() if line.startswith("World")]
    assert heads == ["World 'w', generation 2", "World 'a', generation 2", "World 'w', generation 3"]


def test_those_of_an_earlier_run_are_kept_apart(tmp_path, capsys):
    wrote(tmp_path, 0, {0: report(0)}, ago=9.0, token=b"a" * 16)
    wrote(tmp_path, 0, {0: report(0)}, token=b"b" * 16)
    out = said(capsys, tmp_path)[1]
    assert out.count("World 'w', generation 2, broke at") == 2
    assert out.count("reports of rank 0; 3 members") == 2


def test_all_operations_are_shown_where_that_is_asked_for(tmp_path, capsys):
    many = tuple(
        Operation(0, (0, 1), "barrier", number, 0, None, None, 2.0, 1.0, False) for number in range(1, 30)
    )
    file = wrote(tmp_path, 0, {0: MemberReport(0, {0: 29}, many)})
    assert said(capsys, file)[1].count("barrier #") == 5
    assert said(capsys, file, "--all")[1].count("barrier #") == 29


class Attached:
    """A world whose other members do not answer."""

    def describe_with(self, describe):
        self.describe = describe

    def begin_asking(self, *, deep):
        return lambda deadline: {}


@pytest.mark.parametrize("cause", Cause)
def test_a_member_that_leaves_in_good_order_is_no_reason_for_a_report(tmp_path, monkeypatch, cause):
    monkeypatch.setattr(operations.ending, "run", lambda job: job())
    busy = BusyMembers("w", 2, 0)
    made = operations.GenerationOperations(roster(0), Attached(), busy, {}, bytes)
    breakage = Breakage(cause, (2,), "it ended", time.monotonic())
    made.report_later(breakage)
    assert not list(tmp_path.iterdir()), "no folder is named"
    monkeypatch.setenv("M8D_REPORTS", str(tmp_path))
    made.report_later(breakage)
    assert len(list(tmp_path.iterdir())) == (cause is not Cause.LEFT)


def test_the_process_that_the_kernel_names_is_looked_at_from_outside(monkeypatch):
    """A member may have told any pid."""
    monkeypatch.setattr(operations, "foreign_stack", lambda pid: f"of {pid}")
    made = operations.GenerationOperations(roster(0), Attached(), BusyMembers("w", 2, 0), {2: 77}, bytes)
    assert [made.stack_from_outside(rank) for rank in (1, 2)] == ["", "of 77"]


def test_what_torch_recorded_is_beside_the_report(tmp_path, monkeypatch):
    monkeypatch.setattr(operations.ending, "run", lambda job: job())
    monkeypatch.setenv("M8D_REPORTS", str(tmp_path))
    busy = BusyMembers("w", 2, 0)
    made = operations.GenerationOperations(roster(0), Attached(), busy, {}, lambda: b"recorded")
    made.report_later(Breakage(Cause.CRASHED, (2,), "it ended", time.monotonic()))
    record, report = sorted(tmp_path.iterdir())
    assert record.read_bytes() == b"recorded"
    assert report.name == record.name.removesuffix("flight0") + "rank0.json"


def test_names_of_worlds_that_are_no_names_of_files(tmp_path):
    one, other = (wrote(tmp_path, 0, {0: report(0)}, world=name) for name in ("a/b:c", "a_b/c"))
    assert one.parent == other.parent == tmp_path
    assert one.name.startswith("a_b_c-")
    assert one != other


def test_a_folder_that_cannot_be_written_to_is_no_error(tmp_path, caplog):
    (tmp_path / "file").write_text("x")
    assert wrote(tmp_path / "file", 0, {0: report(0)}) is None
    assert "no report of the breakage of world 'w'" in caplog.text


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 2}', "\x00", "[" * 100_000])
def test_what_is_no_report(tmp_path, capsys, content):
    file = tmp_path / "x.json"
    file.write_text(content)
    code, out, err = said(capsys, file)
    assert code == 9
    assert not out
    assert f"{file} is no report of a breakage" in err


def test_a_report_of_another_format(tmp_path, capsys):
    file = wrote(tmp_path, 0, {0: report(0)})
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 2}))
    assert said(capsys, file)[0] == 9


@pytest.mark.parametrize(
    "changed",
    [
        {"members": [1]},
        {"members": [{"rank": 0, "hostname": "h"}]},
        {"members": [{"rank": "0", "pid": 1, "hostname": "h"}]},
        {"ranks": [[1]]},
        {"broke_at": 1e300},
        {"broke_at": float("nan")},
    ],
)
def test_a_report_with_rows_that_are_none(tmp_path, capsys, changed):
    file = wrote(tmp_path, 0, {0: report(0)})
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    code, out, err = said(capsys, file)
    assert code == 9
    assert not out
    assert f"{file} is no report of a breakage" in err


@pytest.mark.parametrize("name", ["", "nowhere.json"])
def test_nothing_there(tmp_path, capsys, name):
    code, _, err = said(capsys, tmp_path / name)
    assert code == 9
    assert "no report" in err
