"""A run: what is shown, kept and told by the exit status, with parts that measure, are left out, or fail."""

from __future__ import annotations

import argparse
import io
import json

import pytest
from rich.console import Console

from benchmarks import cli
from benchmarks.figures import records
from benchmarks.figures.figure import Goal, distribution, ratio, summary
from benchmarks.figures.table import measure, number, spread
from benchmarks.measuring.part import Part, Unavailable
from benchmarks.runner import Runner

OURS, STOCK = [9.1, 9.2, 9.0, 9.5], [10.0, 10.1, 10.2, 10.0]


def good(run):
    run.progress("rounds")
    yield ratio("good", "send/4B", OURS, STOCK, goal=Goal(at_most=0.95), absolute_unit="us")
    run.remark("gloo refuses all_to_all")
    yield summary(
        "good",
        "kill/100",
        [1.0, 2.0, 9.0],
        "ms",
        goal=Goal(at_most=run.pick(3, 1)),
        quantiles=distribution([9.0]),
    )


def half(run):
    yield summary("half", "first", [1.0], "s")
    raise OSError("no route")


def absent(run):
    raise Unavailable("needs what is not here")
    yield


def twice(run):
    yield summary("twice", "same", [1.0], "s")
    yield summary("twice", "same", [1.0], "s")


def stranger(run):
    yield summary("good", "in another's name", [1.0], "s")


def interrupted(run):
    yield summary("interrupted", "before", [1.0], "s")
    raise KeyboardInterrupt


def optional(run):
    yield summary("optional", "given", [float(run.options.number)], "s")


def _number(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--number", type=int, default=7)


PARTS = {
    each.__name__: Part(each.__name__, f"Title of {each.__name__}", "what it does", each)
    for each in (good, half, absent, twice, stranger, interrupted)
} | {"optional": Part("optional", "Options", "what it does", optional, _number)}


@pytest.fixture
def shell(monkeypatch, tmp_path, capsys):
    """The command line with these parts, in folders of the test's own."""
    monkeypatch.setattr(cli, "PARTS", tuple(PARTS))
    monkeypatch.setattr(cli, "load", PARTS.__getitem__)
    monkeypatch.setattr(records, "KEPT", tmp_path / "kept")
    monkeypatch.setattr(records, "OUT", tmp_path / "nothing")

    def call(*argv: str) -> tuple[int, str, list[records.Record]]:
        out = tmp_path / "out"
        status = cli.main([*argv, "--out", str(out)])
        return status, capsys.readouterr().out, records.stored(out)[0]

    return call


def run(*names: str, full: bool = False) -> tuple[Runner, records.Record, str]:
    text = io.StringIO()
    runner = Runner(Console(file=text, width=140), Console(file=io.StringIO()), full=full, options=None)
    record = runner.run({name: lambda name=name: PARTS[name] for name in names}, ("--only", *names))
    return runner, record, text.getvalue()


def test_figures_are_shown_as_they_come_and_kept():
    runner, record, text = run("good")
    assert not runner.failed
    assert [figure.name for figure in record.figures] == ["send/4B", "kill/100"]
    line = next(line for line in text.splitlines() if line.startswith("send/4B"))
    assert line.split() == [
        "send/4B",
        "9.15",
        "µs",
        "10.1",
        "µs",
        "0.91",
        "0.903",
        "to",
        "0.921",
        "≤",
        "0.95",
        "met",
    ]
    assert (
        text.index("Title of good")
        < text.index("send/4B")
        < text.index("gloo refuses")
        < text.index("kill/100")
    )
    assert record.parts["good"].remarks == ("gloo refuses all_to_all",)
    assert record.parts["good"].form == "quick"
    assert record.options == ("--only", "good")
    assert {"cores", "cpu", "kernel", "python", "torch", "load_before", "load_after"} <= set(record.machine)


def test_the_long_form_is_another():
    _, record, _ = run("good", full=True)
    assert record.figures[1].goal == Goal(at_most=1)
    assert record.parts["good"].form == "full"


def test_a_part_that_fails_leaves_the_others_alone_and_keeps_what_it_had():
    runner, record, text = run("half", "absent", "good")
    assert runner.failed
    assert [figure.key for figure in record.figures] == ["half/first", "good/send/4B", "good/kill/100"]
    assert record.parts["half"].missing == "OSError: no route"
    assert record.parts["absent"].missing == "needs what is not here"
    assert "no route" in text
    assert "Traceback" in text
    assert "left out: needs what is not here" in text


def test_what_cannot_run_here_is_no_failure():
    runner, record, _ = run("absent")
    assert not runner.failed
    assert record.figures == ()


@pytest.mark.parametrize(
    ("part", "rule"), [("twice", "unique in its part"), ("stranger", "name it as its part")]
)
def test_figures_have_their_parts_names_once(part, rule):
    runner, record, _ = run(part)
    assert runner.failed
    assert rule in record.parts[part].missing


def test_an_interrupted_run_is_kept_and_ends():
    runner, record, _ = run("interrupted", "good")
    assert runner.failed
    assert list(record.parts) == ["interrupted"]
    assert [figure.key for figure in record.figures] == ["interrupted/before"]


@pytest.mark.parametrize(
    ("argv", "status"),
    [
        (["--only", "good"], 0),
        (["--only", "good", "--check"], 0),
        (["--only", "good", "--full"], 0),
        (["--only", "good", "--full", "--check"], 1),  # 2 ms are not at most 1
        (["--only", "absent"], 0),
        (["--only", "half", "good"], 2),
        (["--only", "half", "good", "--full", "--check"], 2),
    ],
)
def test_exit_status(shell, argv, status):
    assert shell(*argv)[0] == status


def test_a_run_that_failed_does_not_write_the_page(shell, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks.page import write as page

    written = []
    monkeypatch.setattr(page, "write", lambda paths: written.append([*paths]) or tmp_path / "index.md")
    status, text, (record,) = shell("--only", "half", "good", "--page")
    assert (status, written, [*records.KEPT.glob("*")]) == (2, [], [])
    assert [*record.parts] == ["good", "half"]
    assert "the page is as it was, as a part failed" in text
    assert shell("--only", "good", "--page")[0] == 0
    assert len(written) == 1


def test_goals_are_counted_and_missed_ones_listed(shell):
    _, text, (record,) = shell("--only", "good", "--full")
    assert "1 of 2 goals met" in text
    assert "missed  good/kill/100  2 ms" in text
    assert record.options == ("--only", "good", "--full"), "not where it was written to"


def test_a_run_is_compared_with_the_last_of_its_form(shell, monkeypatch):
    shell("--only", "good")
    slower = Part("good", "t", "d", lambda run: [ratio("good", "send/4B", [2 * v for v in OURS], STOCK)])
    monkeypatch.setitem(PARTS, "good", slower)
    records_time = iter(["2100-01-01T00:00:00+00:00", "2100-01-02T00:00:00+00:00"])
    monkeypatch.setattr(
        "benchmarks.runner.datetime", type("", (), {"now": lambda _: Clock(next(records_time))})
    )
    _, text, _ = shell("--only", "good")
    assert "1 figures changed by more than their spreads" in text
    row = next(line for line in text.splitlines() if "good/send/4B" in line and "worse" in line)
    assert "2.00" in row
    assert "only then: good/kill/100" in text
    _, text, _ = shell("--only", "good", "--full")
    assert "changed by more" not in text, "a full run is not compared with quick ones"


class Clock:
    def __init__(self, when: str) -> None:
        self._when = when

    def isoformat(self, timespec: str) -> str:
        return self._when


def test_two_records_are_compared_by_name(shell, tmp_path, capsys):
    shell("--only", "good", "--keep")
    (kept,) = (tmp_path / "kept").glob("*.json")
    changed = json.loads(kept.read_text())
    changed["figures"][0] |= {"value": 0.5, "low": 0.49, "high": 0.51}
    other = tmp_path / "other.json"
    other.write_text(json.dumps(changed))
    assert cli.main(["--compare", str(kept), str(other)]) == 0
    assert "better" in capsys.readouterr().out
    (tmp_path / "bad.json").write_text("{}")
    assert cli.main(["--compare", str(kept), str(tmp_path / "bad.json")]) == 2
    assert "bad.json: not a record" in capsys.readouterr().out


def test_a_part_alone_has_its_own_options(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(records, "KEPT", tmp_path / "kept")
    assert cli.run_alone(PARTS["optional"], ["--number", "3", "--out", str(tmp_path)]) == 0
    (record,), _ = records.stored(tmp_path)
    assert (record.figures[0].value, record.options) == (3.0, ("--number", "3"))
    _, record, _ = run("optional")
    assert record.figures[0].value == 7.0
    with pytest.raises(SystemExit, match="0"):
        cli.run_alone(PARTS["optional"], ["--help"])
    assert "what it does" in capsys.readouterr().out


@pytest.mark.parametrize("name", cli.PARTS)
def test_every_part_has_its_name_and_its_words(name):
    part = cli.load(name)
    assert part.name == name
    assert part.title
    assert part.description.endswith(".")
    assert part.defaults() is not None


def test_parts_that_download_are_left_out_of_the_quick_form(shell, monkeypatch):
    monkeypatch.setattr(cli, "NOT_QUICK", frozenset(PARTS) - {"good"})
    _, _, (record,) = shell()
    assert list(record.parts) == ["good"]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.0, "0"),
        (0.90049, "0.9"),
        (1.2345, "1.23"),
        (123.4, "123"),
        (1234.5, "1234"),
        (0.00012345, "0.000123"),
    ],
)
def test_numbers_have_three_digits(value, words):
    assert number(value) == words


def test_values_have_units_and_spreads_have_tails():
    assert measure(12.345, "us") == "12.3 µs"
    assert measure(0.9, "ratio") == "0.9"
    assert measure(None, "us") == ""
    assert spread(summary("p", "n", [1.0, 2.0, 3.0], "ms", quantiles={"p99": 2.98, "max": 3.0})) == (
        "1.5 to 2.5; p99 2.98; max 3"
    )
    assert spread(summary("p", "n", [1.0], "ms")) == ""


def test_a_part_that_runs_by_name_runs_by_name_only(monkeypatch, shell):
    monkeypatch.setattr(cli, "BY_NAME", frozenset({"half"}))
    monkeypatch.setattr(cli, "NOT_QUICK", frozenset(PARTS) - {"half", "good"})
    chosen = []
    monkeypatch.setattr(cli, "_run", lambda *args, **_kwargs: chosen.append([*args[3]]) or 0)
    for given in ([], ["--full"], ["--only", "half"]):
        cli.main(given)
    assert chosen == [["good"], [name for name in PARTS if name != "half"], ["half"]]
