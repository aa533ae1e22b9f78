"""The page and its pictures: from a small record, and the one in docs/ from the records that are kept."""

from __future__ import annotations

import dataclasses
import re
import xml.etree.ElementTree as ET

import pytest

pytest.importorskip("matplotlib")

from benchmarks.figures import records
from benchmarks.figures.figure import Goal, distribution, ratio, summary
from benchmarks.figures.goals import TARGETS, answers
from benchmarks.figures.records import PartRun, Record
from benchmarks.page import notes as texts
from benchmarks.page import write as page
from benchmarks.page.notes import BadNotes, Notes
from benchmarks.page.pictures import PICTURES, draw_all, units_of

MACHINE = {
    "cpu": "Some CPU", "cores": 2, "memory_gb": 25.3, "kernel": "6.1", "python": "3.11.7", "torch": "2.13.0",
    "load_before": 0.5, "load_after": 2.0,
}  # fmt: skip
KB, MB = 1 << 10, 1 << 20


def compared(part, op):
    for size, name in ((4, "4B"), (64 * KB, "64KB"), (MB, "1MB")):
        told = {"op": op, "bytes": size, "members": 2}
        stock = [60.0 + size / 2000, 61.0 + size / 2000, 59.0 + size / 2000]
        yield summary(
            part, f"{op}/{name}/2/stock", stock, "us",
            series={**told, "form": "stock", "gb_per_s": [size / each / 1e3 for each in stock]},
        )  # fmt: skip
        for form, factor in (("world", 0.88), ("aio", 2.5)):
            ours, aimed = (
                [factor * each for each in stock],
                size == 4 and (part, form) != ("collectives", "aio"),
            )
            yield ratio(
                part, f"{op}/{name}/2/{form}", ours, stock, absolute_unit="us",
                goal=Goal(at_most=0.9 if form == "world" else 1.8) if aimed else None,
                series={**told, "form": form, "gb_per_s": [size / each / 1e3 for each in ours]},
            )  # fmt: skip


def worlds():
    for kind, unit, value in (("join", "ms", 7.0), ("threads", "threads", 1.05), ("memory", "MB", 0.05)):
        for count in (1, 30, 100):
            goal = Goal(at_most=15.0) if count == 100 else None
            yield summary(
                "worlds", f"{kind}/{count}", [value, value * 1.1], unit, goal=goal, note="one by one"
            )
        yield summary("worlds", f"plain/shared_store+own_device/{kind}", [value / 2], unit)


def detection():
    for kind, offset in (("crash", 0.0), ("stop", -10.0)):
        for count in (1, 100):
            values = [offset + 0.5 + 0.01 * place * count**0.5 for place in range(60)]
            yield summary(
                "detection", f"{kind}/{count}/p50", values, "ms", quantiles=distribution(values),
                goal=Goal(at_most=3) if kind == "crash" else None, series={"ms": values},
            )  # fmt: skip


def fanin():
    for workers in (1, 16):
        for form in ("stock_irecv", "irecv", "aio"):
            rates = [2.0 + workers / 10, 2.1 + workers / 10]
            series = {"workers": workers, "bytes": MB, "form": form, "rates": rates}
            yield summary("fanin", f"{workers}/1MB/{form}", rates, "GB/s", series=series)


def record(when: str = "2026-11-22T04:00:00+00:00", form: str = "full", **figures) -> Record:
    parts = {name: PartRun(form, 1.0, remarks=(f"a remark on {name}",)) for name in figures}
    own = tuple(figure for each in figures.values() for figure in each)
    return Record(when, "1.2.3", "abcdef", dict(MACHINE), (), parts, own)


SMALL = record(
    messages=compared("messages", "send_recv"), collectives=compared("collectives", "all_reduce"), fanin=fanin(), worlds=worlds(), detection=detection()
)  # fmt: skip
NOTES = Notes(
    parts={"messages": "Text about the part."},
    figures={"messages/send_recv/4B/*/aio": "A message wakes the loop: 40 µs."},
)


def shown(*found: Record, notes: Notes = NOTES) -> str:
    drawn = [each for each in PICTURES if each.name in {"messages", "worlds"}]
    return page.text_of({f"{each.name}.json": each for each in found}, drawn, notes)


def test_the_page_says_what_was_run_on_what_and_how_to_repeat_it():
    text = shown(SMALL)
    assert (
        "2026-11-22 04:00 UTC, multiworld 1.2.3, commit abcdef, sources not recorded, on Some CPU, 2 cores, 25.3 GB"
        in text
    )
    assert "load 0.5 before and 2 after" in text
    assert f"(../../benchmarks/results/{SMALL.name}.json)" in text
    assert "nox -s bench -- --full" in text
    assert "a remark on worlds" in text


def test_every_goal_has_its_line_measured_or_not():
    lines = shown(SMALL).splitlines()
    for target in TARGETS:
        assert any(line.startswith(f"| {target.what} | {target.limit} |") for line in lines), target
    assert (
        "6 of the 8 figures that have a goal reach it, 2 of them within error: 4 reach it for certain."
        in lines
    )
    met = next(line for line in lines if "messages/send_recv/4B/2/world" in line)
    assert met.endswith("| 0.88 | 0.88 to 0.88 | met, within error |"), "of one sample"
    missed = next(line for line in lines if "messages/send_recv/4B/2/aio" in line)
    assert missed.endswith("| 2.5 | 2.5 to 2.5 | **missed** |")
    assert sum("| not measured |" in line for line in lines) == len(TARGETS) - len(
        [target for target, found in answers(SMALL.figures) if found]
    )


def test_a_limit_within_the_error_is_said():
    values = {"met": [0.7, 0.85, 1.1], "missed": [0.7, 0.95, 1.1], "sure": [0.8, 0.82, 0.82, 0.84]}
    values["few"] = values["sure"][1:]
    rounds = {
        name: ratio("messages", "send_recv/4B/2/world", value, [1.0] * len(value), goal=Goal(at_most=0.9))
        for name, value in values.items()
    }
    for name, verdict in (
        ("met", "met, within error"),
        ("missed", "**missed**, within error"),
        ("sure", "met"),
        ("few", "met, within error"),
    ):
        line = next(
            each
            for each in shown(record(messages=[rounds[name]]), notes=Notes()).splitlines()
            if "/world |" in each
        )
        assert line.endswith(f"| {verdict} |"), line


def test_parts_have_their_tables_pictures_and_texts():
    text = shown(SMALL)
    assert "| send_recv/4B/2 | 60 µs | 52.8 µs (0.88) | **150 µs (2.5)** |" in text
    assert "| | 1 | 30 | 100 |\n|---|---|---|---|\n| join | 7.35 ms | 7.35 ms | 7.35 ms |" in text
    assert text.index("## Messages") < text.index("Text about the part.")
    assert "(throughput.svg)" not in text, "a picture that was not drawn"
    assert "**`send_recv/4B/*/aio`.** A message wakes the loop: 40 µs." in text
    assert "| crash/1/p50 | 0.795 ms | 0.647 to 0.942; max 1.09 | 60 |" in text, (
        "of too few for a 99th percentile"
    )


def test_the_page_opens_with_pictures_then_goals_then_the_method():
    text = page.text_of({"a.json": SMALL}, PICTURES, NOTES)
    order = [
        "# Speed",
        *(f"({each.name}.svg)" for each in PICTURES if each.opens and each.part in SMALL.parts),
    ]
    order += [
        "## Goals",
        "## Method",
        "## Repeat it",
        "## Messages",
        "(throughput.svg)",
        "Text about the part.",
    ]
    assert [text.index(each) for each in order] == sorted(text.index(each) for each in order)
    assert "(peers.svg)" not in text, "of a part that was not measured"


def test_pictures_are_legible_on_a_phone(drawn):
    folder, names = drawn
    for name in names:
        text = (folder / f"{name}.svg").read_text()
        width = re.search(r'<svg [^>]*width="([\d.]+)pt"', text)
        assert width
        assert float(width[1]) * 4 / 3 <= 350, "shown smaller than it was drawn"
        assert min(float(size) for size in re.findall(r"font-size: ([\d.]+)px", text)) >= 7.5


def test_a_part_comes_from_its_newest_full_run():
    older = record("2026-11-20T00:00:00+00:00", worlds=[summary("worlds", "join/100", [3.0], "ms")])
    quick = record(
        "2026-11-25T00:00:00+00:00", "quick", worlds=worlds(), rebuild=[summary("rebuild", "r", [1.0], "ms")]
    )
    chosen = page.chosen_of([quick, SMALL, older])
    assert {part: each.when[8:10] for part, each in chosen.items()} == {
        "messages": "22", "collectives": "22", "fanin": "22", "worlds": "22", "detection": "22", "rebuild": "25",
    }  # fmt: skip


def test_a_part_comes_from_a_run_that_ended():
    later, latest = "2026-11-23T00:00:00+00:00", "2026-11-24T00:00:00+00:00"
    broken = record(later, worlds=worlds())
    broken.parts["worlds"] = PartRun("full", missing="interrupted")
    assert page.chosen_of([SMALL, broken])["worlds"] is SMALL
    quick = record("2026-11-22T00:00:00+00:00", "quick", worlds=worlds())
    assert page.chosen_of([quick, broken])["worlds"] is quick
    assert page.chosen_of([broken])["worlds"] is broken
    again = record(latest, worlds=worlds())
    assert page.chosen_of([SMALL, broken, again])["worlds"] is again


def test_the_records_are_listed_with_their_options():
    given = dataclasses.replace(SMALL, options=("--full", "--rounds", "3"))
    assert "load 0.5 before and 2 after, with `--full --rounds 3`; record" in shown(given)


def test_a_part_that_there_is_no_more_stays_in_its_record():
    gone = record(latency=[summary("latency", "a", [1.0], "us")], worlds=worlds())
    assert {*page.chosen_of([gone])} == {"worlds"}


def test_a_goal_that_was_given_up_is_left_out():
    given_up, kept = page.aimed(
        [
            summary("fanin", "16/1MB/best", [1.0], "ratio", goal=Goal(at_least=0.97)),
            summary("fanin", "16/1MB/aio", [1.0], "ratio", goal=Goal(at_least=2)),
        ]
    )
    assert (given_up.goal, kept.goal) == (None, Goal(at_least=2))


def test_texts_of_figures_that_are_not_there_are_refused():
    for wrong in (
        Notes(figures={"messages/no/such": "text"}),
        Notes(figures={"messagees/send_recv": "text"}),
        Notes(parts={"messagees": "text"}),
    ):
        with pytest.raises(ValueError, match=r"messag(es/no/such|ees)"):
            shown(SMALL, notes=wrong)
    waiting = shown(SMALL, notes=Notes({"peers": "not yet"}, {"peers/latency/4B/*": "not yet"}))
    assert "not yet" not in waiting, "of a part that was not measured"


def test_a_goal_that_no_target_takes_is_refused():
    stray = summary("worlds", "colour/7", [1.0], "ms", goal=Goal(at_most=2))
    with pytest.raises(ValueError, match="worlds/colour/7"):
        answers([stray])


@pytest.mark.parametrize(
    "bad", ["[colours]\nred = 'x'", "[figures]\nlatency.send = 'x'", "[parts]\nlatency = 3"]
)
def test_notes_are_texts_of_parts_and_figures(tmp_path, bad):
    path = tmp_path / "notes.toml"
    path.write_text(bad)
    with pytest.raises(BadNotes):
        texts.load(path)
    path.write_text('[parts]\nlatency = "x"\n[figures]\n"latency/a" = "y"\n')
    assert texts.load(path) == Notes({"latency": "x"}, {"latency/a": "y"})


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    return folder, [each.name for each in draw_all(SMALL.figures, folder)]


def test_pictures_are_drawn_of_what_is_there(drawn):
    folder, names = drawn
    assert names == ["messages", "all-reduce", "detection", "worlds", "fanin", "throughput"]
    assert sorted(path.stem for path in folder.iterdir()) == sorted(names)


def test_pictures_are_labelled(drawn):
    folder, _ = drawn
    # S314: they were written a moment ago, by the code under test.
    trees = {path.stem: ET.parse(path) for path in folder.glob("*.svg")}  # noqa: S314
    words = {name: " ".join(tree.getroot().itertext()) for name, tree in trees.items()}
    for name, expected in {
        "messages": (
            "4 B",
            "64 KB",
            "1 MB",
            "World.aio",
            "time / torch's",
            "size of a message",
        ),
        "throughput": ("send_recv, 2 members", "MB/s", "torch.distributed"),
        "fanin": ("messages of 1 MB", "GB/s", "worlds, asyncio", "one stock group, irecv"),
        "worlds": (
            "time to join, for each world",
            "ms",
            "goal",
            "worlds in the process",
            "a plain gloo group, shared store, own device",
        ),
        "detection": ("killed", "stopped", "100 worlds (60 faults)", "share of the faults"),
    }.items():
        for text in expected:
            assert text in words[name], (name, text)


def test_panels_stand_in_one_order_whatever_the_hashes():
    units = ["us", "threads", "ms", "ratio", "GB/s", "MB"]
    for given in (units, units[::-1]):
        found = units_of(summary("peers", unit, [1.0], unit) for unit in given)
        assert found == ["ratio", "GB/s", "MB", "ms", "threads", "us"]


def test_pictures_are_the_same_for_the_same_figures(drawn, tmp_path):
    folder, _ = drawn
    draw_all(SMALL.figures, tmp_path)
    for path in folder.glob("*.svg"):
        again = (tmp_path / path.name).read_text()
        assert again == path.read_text()
        assert not re.search(r"<dc:date>|20\d\d-\d\d-\d\d|matplotlib v", again.lower())


def test_a_page_written_again_is_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "NOTES", tmp_path / "notes.toml")
    monkeypatch.setattr(texts, "load", lambda: NOTES)
    path = records.save(SMALL, tmp_path)
    written = page.write([path], tmp_path / "docs")
    first = {each.name: each.read_bytes() for each in written.parent.iterdir()}
    (written.parent / "of-an-earlier-page.svg").write_text("<svg/>")
    page.write([path], tmp_path / "docs")
    assert {each.name: each.read_bytes() for each in written.parent.iterdir()} == first
    assert set(re.findall(r"\(([\w-]+\.svg)\)", written.read_text())) == set(first) - {"index.md"}


def test_the_page_in_docs_is_that_of_the_kept_records():
    found = {path.name: records.load(path) for path in sorted(records.KEPT.glob("*.json"))}
    drawn = [each for each in PICTURES if (page.FOLDER / f"{each.name}.svg").is_file()]
    text = (page.FOLDER / "index.md").read_text(encoding="utf-8")
    used = page.chosen_of(found.values()).values()
    for name in [name for name, each in found.items() if each in used]:
        assert f"(../../benchmarks/results/{name})" in text
    assert text == page.text_of(found, drawn, texts.load()), "write it anew: python -m benchmarks.page"
    assert {path.stem for path in page.FOLDER.glob("*.svg")} == set(re.findall(r"\(([\w-]+)\.svg\)", text))
