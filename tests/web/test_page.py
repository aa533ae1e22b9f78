"""The page in a real Chromium, with made-up data behind the real routes."""

from __future__ import annotations

import re
import time

import browserneeded  # noqa: F401  first: it skips this module where there is no browser
import pytest
from pagekit import (
    Source,
    broken,
    event,
    fault,
    member,
    pending,
    process,
    view,
    world,
)
from playwright.sync_api import expect

HOSTILE = "<img src=x onerror=window.hit=1>"


def fleet(count=4, **more):
    worlds = [world(f"w{number}") for number in range(count)]
    return Source(view(worlds, [process(rank) for rank in range(count)], **more))


def row(page, name):
    return page.get_by_role("row").filter(has=page.get_by_role("rowheader", name=name, exact=True))


def focused(page):
    return page.evaluate(
        "document.activeElement.getAttribute('aria-label') || document.activeElement.textContent"
    )


# -- what it shows


def test_shows_run_worlds_and_processes(site):
    source = fleet(events=[event(1, "rank 0 (hub:0) w0 active")])
    page = site(source)
    expect(page.get_by_role("heading", level=1)).to_have_text("run job7 on alpha")
    expect(page.locator("#connection")).to_have_attribute("data-state", "live")
    expect(page.locator("#trouble-word")).to_have_text("Nothing is wrong: 4 worlds")
    expect(page.locator("#world-counts")).to_have_text("Worlds 44 active")
    expect(page.locator("#process-counts")).to_have_text("Processes 44 up")
    expect(page.locator("#rows .row")).to_have_count(4)
    expect(row(page, "w3").locator(".cell")).to_have_text(["0", "1", "2", "3"])
    expect(page.locator("#process-rows tr")).to_have_count(4)
    expect(page.locator("#process-rows tr").nth(1)).to_contain_text("worker:0")
    expect(page.locator("#event-list li")).to_contain_text("rank 0 (hub:0) w0 active")
    assert page.get_by_role("link", name="OpenAPI").get_attribute("href") == "openapi.json"


@pytest.mark.parametrize(
    ("seat", "nodes", "shown"),
    [(None, 0, "seatwaits for the other nodes"), (None, 2, "seatspare"), (1, 2, "seat1 of 2")],
)
def test_the_seat_of_a_node(site, seat, nodes, shown):
    source = fleet(1)
    source.now["run"] |= {"seat": seat, "nodes": nodes}
    expect(site(source).locator("#facts")).to_contain_text(shown)


def test_one_process_without_a_run(site):
    page = site(Source(view([world("w0", 2)], kind="process", title="process 4711 on alpha", run=None)))
    expect(page.get_by_role("heading", level=1)).to_have_text("process 4711 on alpha")
    expect(page.locator("#rows .row")).to_have_count(1)
    expect(page.locator("#facts")).to_be_empty()
    expect(page.locator("#processes-empty")).to_be_visible()


def test_a_world_that_breaks_shows_its_cause(site):
    source = fleet()
    page = site(source)
    expect(page.locator("#rows .row")).to_have_count(4)
    began = time.monotonic()
    source.change(worlds=[broken("w2")])
    expect(page.locator("#trouble-list li").first).to_contain_text("w2 broken: crashed, rank 2")
    expect(row(page, "w2").locator(".note")).to_have_text("crashed, rank 2")
    print(  # noqa: T201  what was measured
        f"shown after {1000 * (time.monotonic() - began):.0f} ms"
    )
    lost = row(page, "w2").get_by_role("gridcell", name="rank 2: lost, crashed")
    expect(lost).to_have_text("L2")
    expect(page.locator("#announcer")).to_have_text("w2 broken: crashed, rank 2")
    assert page.title().startswith("1 wrong: ")
    expect(page.locator("#rows .name")).to_have_text(["w2", "w0", "w1", "w3"])  # trouble first
    source.change(worlds=[world("w2", generation=2)])
    expect(page.locator("#trouble-word")).to_have_text("Nothing is wrong: 4 worlds")
    expect(row(page, "w2")).to_contain_text("gen 2")
    expect(page.locator("#rows .name")).to_have_text(["w0", "w1", "w2", "w3"])


def test_worlds_and_processes_come_and_go(site):
    source = fleet(2)
    page = site(source)
    expect(page.locator("#rows .row")).to_have_count(2)
    source.change(
        worlds=[world("w10"), world("w9")],
        worlds_gone=["w0"],
        processes=[process(7)],
        processes_gone=["alpha/4000"],
    )
    expect(page.locator("#rows .name")).to_have_text(["w1", "w9", "w10"])  # numbers in names count
    expect(page.locator("#process-rows tr td:first-child")).to_have_text(["1", "7"])
    source.change(worlds=[world("w1", 2)])
    expect(row(page, "w1").locator(".cell")).to_have_count(2)


def test_healing_shows_in_the_timeline(site):
    source = fleet()
    page = site(source)
    expect(page.locator("#faults-empty")).to_be_visible()
    source.change(faults=[fault("w2", healed=False, at=time.time() - 3)], worlds=[broken("w2")])
    shown = page.locator("#fault-list .fault")
    expect(shown).to_contain_text("not healed")
    expect(shown.locator(".steps li")).to_have_count(2)
    source.change(faults=[fault("w2", at=time.time() - 3), fault("w1", at=time.time())])
    expect(shown.locator(".fault-world")).to_have_text(["w1", "w2"])  # newest first
    expect(shown.nth(1)).to_contain_text("healed in 812 ms")
    expect(shown.nth(1).locator(".steps li").nth(2)).to_contain_text("310 msjoiningrank 2 joins, pid 4711")
    pieces = shown.nth(1).locator(".piece")
    placed = pieces.evaluate_all("all => all.map(p => [parseFloat(p.style.left), parseFloat(p.style.width)])")
    assert [left for left, _ in placed] == pytest.approx([0, 0.1, 38.18], abs=0.02)  # of 812 ms
    assert [width for _, width in placed] == pytest.approx([0.1, 38.08, 61.82], abs=0.02)


def test_faults_that_are_told_no_more_go(site):
    old = fault("w1", healed=False, at=time.time() - 60)
    source = fleet(faults=[fault("w2"), old])
    page = site(source)
    expect(page.locator("#faults-shown")).to_have_text("2, 1 not healed")
    source.change(faults_gone=[old["id"]])
    expect(page.locator("#faults-shown")).to_have_text("1")
    expect(page.locator("#fault-list .fault-world")).to_have_text(["w2"])
    source.change(faults_gone=[fault("w2")["id"]])
    expect(page.locator("#faults-empty")).to_be_visible()


def test_a_world_whose_state_comes_shows_how_much(site):
    rows = [member(0), member(1), member(-1, "joining", process="", received=400, total=1000)]
    page = site(Source(view([world("train", rows, sizes="2:8", size=2, candidates=1)])))
    cell = page.get_by_role("gridcell", name="rank not known yet: joining, has 40 % of the state")
    expect(cell).to_have_text("J?")
    assert cell.evaluate("cell => cell.style.getPropertyValue('--done')") == "40%"
    expect(row(page, "train").locator(".note")).to_contain_text(
        "1 waiting to be let in; rank ? has 40 % of the state"
    )
    expect(row(page, "train").locator(".size")).to_have_text("2 of 2:8")


def test_operations_that_wait_long_are_trouble_and_idle_ones_are_not(site):
    stuck, idle, short = world("w0"), world("w1"), world("w2")
    stuck["pending"], idle["pending"], short["pending"] = (
        [pending()],
        [pending(idle=True)],
        [pending(since=1)],
    )
    page = site(Source(view([stuck, idle, short])))
    expect(page.locator("#trouble-list li")).to_have_count(1)
    line = page.locator("#trouble-list li").first
    expect(line).to_have_text(re.compile(r"^all_reduce #118 in w0 waits for rank 2since 1\d s$"))
    expect(line).not_to_have_text(line.text_content())  # counts on by itself
    expect(page.locator("#trouble-list li")).to_have_count(2)  # the short one has become long


def test_trouble_of_processes_nodes_and_the_server(site):
    source = fleet()
    source.now["run"]["peers"] = [{"node": "beta", "seat": 1, "state": "lost", "since": time.time()}]
    page = site(source)
    source.change(
        set={"note": "the launcher does not answer since 3 s"},
        processes=[process(2, "failed", last="killed by SIGKILL")],
    )
    lines = page.locator("#trouble-list li")
    expect(lines).to_have_count(3)
    expect(lines.nth(0)).to_have_text("the launcher does not answer since 3 s")
    expect(lines.nth(1)).to_contain_text("node beta lost")
    expect(lines.nth(2)).to_contain_text("worker:1 (pid 4002 on alpha) failed: killed by SIGKILL")
    expect(page.locator("#process-rows tr").first).to_contain_text("failed")


def test_a_world_that_is_being_rebuilt(site):
    joins = world("w2", [member(0), member(1, "joining")], state="joining", since=time.time())
    source = Source(view([world("w1"), joins]))
    page = site(source)
    expect(page.locator("#trouble-word")).to_have_text("Nothing is wrong: 2 worlds, 1 joining")
    source.change(faults=[fault("w2", healed=False, at=time.time() - 3)])
    expect(page.locator("#trouble-word")).to_have_text("Being rebuilt")
    expect(page.locator("#trouble-list")).to_contain_text("w2 is being rebuilt: crashed, rank 2")
    expect(page.locator("#trouble")).to_have_attribute("data-level", "rebuilding")
    expect(row(page, "w2").locator(".note")).to_have_text("crashed, rank 2")
    source.change(faults=[fault("w2", healed=False, at=time.time() - 40)])  # too long
    expect(page.locator("#trouble")).to_have_attribute("data-level", "wrong")


def test_the_process_that_broke_a_world_is_gone(site):
    rows = [member(0, "broken"), member(1, "gone", cause="crashed", evidence="its connection was closed")]
    page = site(Source(view([world("w0", rows, state="broken", cause="crashed")])), "#world=w0")
    expect(page.locator("#trouble-list")).to_contain_text("w0 broken: crashed, rank 1")
    expect(page.locator(".breakage")).to_contain_text("rank 1: its connection was closed")
    expect(page.get_by_role("gridcell", name="rank 1: gone, crashed")).to_be_visible()


def test_a_world_that_a_member_left_in_good_order_is_no_trouble(site):
    rows = [member(0, "broken"), member(1, "closed")]
    left = world("w0", rows, state="broken", cause="left", detail="rank 1 closed it", left=True)
    page = site(Source(view([left, world("w1")])))
    expect(row(page, "w0").locator(".note")).to_have_text("left")
    expect(page.locator("#trouble-word")).to_have_text("Nothing is wrong: 2 worlds")
    expect(page.locator("#announcer")).to_be_empty()
    expect(page.locator("#rows .name")).to_have_text(["w1", "w0"])


def test_totals_of_a_run(site):
    source = fleet(
        1, totals={"failures": 3, "restarts": 2, "nodes_lost": 0, "broken": {"crashed": 2, "left": 1}}
    )
    page = site(source)
    for part in ("failures3", "restarts2", "breakages3 (2 crashed, 1 left)"):
        expect(page.locator("#facts")).to_contain_text(part)
    expect(page.locator("#facts")).not_to_contain_text("nodes lost")


def test_worlds_that_nobody_is_in_any_more(site):
    gone = world("w0", [member(0, "gone"), member(1, "gone")], state="gone")
    closed = world("w1", [member(0, "closed"), member(1, "lost", cause="left")], state="closed")
    source = Source(view([gone, closed, world("w2")]))
    page = site(source)
    expect(page.locator("#trouble-list li")).to_have_count(1)
    expect(page.locator("#trouble-list li")).to_contain_text("w0 gone: none of its processes is left")
    expect(page.locator("#rows .name")).to_have_text(["w0", "w2", "w1"])
    ended = {**source.now["run"], "ended": {"exitcode": 0, "reason": "all workers ended with 0"}}
    source.change(set={"run": ended})
    expect(page.locator("#trouble-word")).to_contain_text("Nothing is wrong")
    expect(page.locator("#facts")).to_contain_text("exit code 0, all workers ended with 0")
    source.change(set={"run": {**ended, "ended": {"exitcode": 1, "reason": "worker 3 failed"}}})
    expect(page.locator("#trouble-list li")).to_have_text(["the run ended with exit code 1: worker 3 failed"])


# -- the details


def test_details_of_a_world(site):
    busy = broken("w0")
    busy["pending"] = [pending(missing=2)]
    busy["links"] = [
        {"from": 0, "to": 3, "messages": 12345, "bytes": 999_999_999, "rate": 1.2e9},
        {"from": 3, "to": 0, "messages": 1, "bytes": 10, "rate": 0.0},
    ]
    busy["waited"] = {"0": 0.0, "1": 0.5, "2": 1.0, "3": 0.0}
    source = Source(view([busy, world("w1")], [process(rank) for rank in range(4)]))
    page = site(source)
    row(page, "w0").get_by_role("gridcell", name="rank 2: lost, crashed").click()
    panel = page.get_by_role("complementary", name="World w0")
    expect(panel.locator(".breakage")).to_have_text(
        "crashed, rank 2rank 2: its connection was closed by its kernel"
    )
    one = panel.locator(".pending > li")
    expect(one.locator(".pending-name")).to_have_text("all_reduce #118")
    expect(one).to_contain_text("rank 2 is at #117, in send to 3 since 11.9 s")
    expect(one.locator(".pending-age")).to_contain_text("since 1")
    expect(one.locator(".chips:not(.absent) .chip")).to_have_text(["0", "1", "3"])
    expect(one.locator(".absent .chip")).to_have_text(["2"])
    expect(panel.locator("tr.pointed")).to_contain_text("4002 on alpha")
    expect(panel.get_by_label("Throughput").locator("tbody tr").first).to_have_text(
        "0 → 312,3451.0 GB1.2 GB/s"
    )
    widths = (
        panel.get_by_label("Waited for")
        .locator(".bar > span")
        .evaluate_all("all => all.map(b => b.style.width)")
    )
    assert widths == ["0%", "50%", "100%", "0%"]
    expect(row(page, "w0")).to_have_attribute("aria-selected", "true")
    source.change(worlds=[world("w0", generation=2)])
    expect(panel.locator(".breakage")).to_be_hidden()
    expect(panel).to_contain_text("No operation waits.")


def test_members_are_asked_for_what_is_pending(site):
    source = fleet()
    source.waiting["w0"] = [pending(since=40)]
    page = site(source, "#world=w0")
    expect(page.locator("#panel")).to_contain_text("No operation waits.")
    page.get_by_role("button", name="Ask the members now").click()
    expect(page.locator(".pending-age")).to_have_text(re.compile(r"^since 4\d s$"))
    assert source.asked == ["w0"]


def test_the_address_keeps_the_selected_world(site):
    page = site(fleet(), "#world=w2")
    expect(page.get_by_role("complementary", name="World w2")).to_be_visible()
    row(page, "w1").click()
    expect(page.get_by_role("complementary", name="World w1")).to_be_visible()
    assert page.url.endswith("#world=w1")
    page.reload()
    expect(page.get_by_role("complementary", name="World w1")).to_be_visible()
    expect(row(page, "w1")).to_have_attribute("aria-selected", "true")
    page.evaluate("location.hash = '#world=nowhere'")
    expect(page.locator("#panel")).to_contain_text("There is no world of this name.")
    page.evaluate("location.hash = '#world=%E0%A4%A'")  # cut off
    expect(page.locator("#panel")).to_be_hidden()


def test_log_of_a_process(site):
    source = fleet()
    source.logs["alpha/4001", "stdout"] = "step 1\n"
    source.logs["alpha/4001", "stderr"] = f"\x1b[31mred\x1b[0m {HOSTILE}\n"
    page = site(source, expected=["404"])
    page.get_by_role("button", name="Log of worker:0", exact=True).click()
    panel = page.get_by_role("complementary", name="Log of worker:0")
    expect(panel.locator("pre")).to_have_text("step 1\n")
    source.logs["alpha/4001", "stdout"] = "step 1\nstep 2\n"
    panel.get_by_role("button", name="Refresh").click()
    expect(panel.locator("pre")).to_have_text("step 1\nstep 2\n")
    panel.get_by_role("button", name="stderr").click()
    expect(panel.locator("pre")).to_have_text(f"red {HOSTILE}\n")
    assert source.asked[-1] == ("alpha/4001", "stderr", 65536)
    source.logs.clear()
    panel.get_by_role("button", name="Refresh").click()
    expect(panel.get_by_role("status")).to_have_text(
        "no answer: alpha/4001 has no log 'stderr'. Workers have log files under m8d-run --log-dir DIR --redirects 3, or --tee 3."
    )
    page.keyboard.press("Escape")
    expect(panel).to_be_hidden()
    assert focused(page) == "Log of worker:0"


def test_tooltip_of_a_cell(site):
    source = Source(view([broken("w0")], [process(rank) for rank in range(4)]))
    page = site(source)
    page.get_by_role("gridcell", name="rank 2: lost, crashed").hover()
    tip = page.get_by_role("tooltip")
    for part in (
        "its connection was closed by its kernel",
        "pid 4002 on alpha, up",
        "rank 2 of the run, worker:1",
    ):
        expect(tip).to_contain_text(part)
    page.mouse.move(5, 5)
    expect(tip).to_be_hidden()


def test_events_follow_unless_the_reader_scrolled_up(site):
    source = fleet(events=[event(number, f"event {number}") for number in range(450)])
    page = site(source)
    box = page.locator("#event-list")
    expect(box.locator("li")).to_have_count(450)
    end = "box => box.scrollHeight - box.scrollTop - box.clientHeight"
    assert box.evaluate(end) < 5
    source.change(events=[event(number, f"event {number}") for number in range(450, 510)])
    expect(box).to_contain_text("event 509")
    expect(box.locator("li")).to_have_count(500)
    assert box.evaluate(end) < 5
    box.evaluate("box => { box.scrollTop = 300 }")
    page.wait_for_timeout(100)
    source.change(events=[event(600, "event 600")])
    expect(box).to_contain_text("event 600")
    assert box.evaluate(end) > 100
    page.get_by_role("button", name="To the newest").click()
    assert box.evaluate(end) < 5


# -- keys


def test_keyboard_walk(site):
    source = fleet()
    page = site(source)
    expect(page.locator("#rows .row")).to_have_count(4)
    assert page.locator("#matrix [tabindex='0']").count() == 1
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "filter"
    page.keyboard.press("ArrowDown")
    assert focused(page) == "w0"
    for key, at in [
        ("ArrowDown", "w1"),
        ("ArrowRight", "rank 0: active"),
        ("ArrowRight", "rank 1: active"),
        ("ArrowUp", "rank 1: active"),
        ("End", "rank 3: active"),
        ("ArrowRight", "rank 3: active"),
        ("Home", "w0"),
        ("ArrowUp", "w0"),
        ("PageDown", "w3"),
        ("Control+Home", "w0"),
        ("Control+End", "w3"),
    ]:
        page.keyboard.press(key)
        assert focused(page) == at, key
    assert page.locator("#matrix [tabindex='0']").count() == 1
    page.keyboard.press("Enter")
    expect(page.get_by_role("complementary", name="World w3")).to_be_visible()
    assert focused(page) == "World w3"
    page.keyboard.press("Escape")
    expect(page.locator("#panel")).to_be_hidden()
    assert focused(page) == "w3"
    assert "#" not in page.url
    source.change(worlds=[broken("w3")])  # its row goes to the top, and keeps the focus
    expect(page.locator("#rows .name").first).to_have_text("w3")
    assert focused(page) == "w3"
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keys")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()


def test_filter_and_order(site):
    source = Source(
        view([world("w1"), broken("w2"), world("w10"), world("other", note="the node beta was lost")])
    )
    page = site(source)
    expect(page.locator("#rows .name")).to_have_text(["w2", "other", "w1", "w10"])
    page.get_by_role("button", name="By name").click()
    expect(page.locator("#rows .name")).to_have_text(["other", "w1", "w2", "w10"])
    page.keyboard.press("/")
    page.keyboard.type("W1")
    expect(page.locator("#rows .name")).to_have_text(["w1", "w10"])
    expect(page.locator("#worlds-shown")).to_have_text("2 of 4")
    page.keyboard.press("Escape")
    expect(page.locator("#rows .row")).to_have_count(4)
    page.get_by_role("button", name="1 broken").click()
    expect(page.locator("#rows .name")).to_have_text(["w2"])
    page.locator("#filter").fill("nothing like this")
    expect(page.locator("#worlds-empty")).to_have_text('No world matches "nothing like this".')


# -- what may go wrong


def test_hostile_names_are_text(site):
    bad = broken(HOSTILE, note=HOSTILE, backend=HOSTILE)
    bad["pending"] = [pending(text=HOSTILE, kind=HOSTILE, missing={"2": HOSTILE + "!"})]
    bad["members"][2]["evidence"] = bad["detail"] = bad["members"][0]["seat"] = HOSTILE
    source = Source(
        view(
            [bad],
            [process(0, role=HOSTILE, last=HOSTILE, host=HOSTILE, state="failed")],
            [fault(HOSTILE, detail=HOSTILE, cause=HOSTILE)],
            [event(1, HOSTILE, name=HOSTILE)],
            title=HOSTILE,
            note=HOSTILE,
        )
    )
    source.waiting[HOSTILE] = [pending(text=HOSTILE)]
    page = site(source)
    expect(page.get_by_role("heading", level=1)).to_have_text(HOSTILE)
    page.get_by_role("rowheader", name=HOSTILE).click()
    expect(page.locator("#panel-title")).to_have_text(f"World {HOSTILE}")
    page.get_by_role("button", name="Ask the members now").click()
    expect(page.get_by_role("complementary").get_by_role("status")).to_have_text("answered")
    assert source.asked == [HOSTILE]
    page.reload()
    expect(page.locator("#panel-title")).to_have_text(f"World {HOSTILE}")
    page.locator("#rows .cell").nth(2).hover()
    expect(page.get_by_role("tooltip")).to_contain_text(HOSTILE)
    assert page.evaluate("[document.images.length, window.hit === undefined]") == [0, True]


def test_reconnects_when_the_server_is_back(site):
    source = fleet()
    page = site(source, expected=["ERR_"])
    expect(page.locator("#rows .row")).to_have_count(4)
    page.server.stop()
    expect(page.locator("#connection")).to_have_attribute("data-state", "reconnecting")
    expect(page.locator("#connection")).to_contain_text("reconnecting")
    expect(page.locator("#connection")).to_contain_text(re.compile(r"since [1-9] s"))
    expect(page.locator("#rows .row")).to_have_count(4)  # what was known stays
    source.change(worlds=[broken("w2")], worlds_gone=["w0"])
    page.server.start()
    expect(page.locator("#connection")).to_have_attribute("data-state", "live")
    expect(page.locator("#trouble-list")).to_contain_text("w2 broken: crashed")
    expect(page.locator("#rows .row")).to_have_count(3)


def test_a_server_that_was_started_anew_has_its_own_events(site):
    page = site(fleet(events=[event(1, "old 1"), event(2, "old 2")]), expected=["ERR_"])
    expect(page.locator("#event-list")).to_contain_text("old 2")
    page.server.stop()
    page.server.source = fleet(events=[event(1, "new 1")])
    page.server.start()
    expect(page.locator("#event-list")).to_contain_text("new 1")
    expect(page.locator("#event-list li")).to_have_count(1)


def test_a_server_that_refuses_is_told(site):
    page = site(fleet(), "?token=secret", token="secret", expected=["ERR_", "401"])  # noqa: S106
    expect(page.locator("#rows .row")).to_have_count(4)
    assert "secret" not in page.url
    page.context.clear_cookies()
    page.server.stop()
    page.server.start()
    expect(page.locator("#connection")).to_contain_text("refused: open the page with its token again")


def test_a_stream_that_is_dead_in_silence_is_opened_again(site):
    page = site(fleet(), clock=True)
    expect(page.locator("#rows .row")).to_have_count(4)
    page.clock.fast_forward(21_000)
    expect(page.locator("#connection")).to_have_attribute("data-state", "reconnecting")
    page.clock.fast_forward(1000)
    expect(page.locator("#connection")).to_have_attribute("data-state", "live")
    assert len(page.streams) == 2


def test_nothing_works_while_the_page_is_hidden(site):
    source = fleet()
    page = site(source, clock=True)
    expect(page.locator("#rows .row")).to_have_count(4)

    def hide(hidden):
        page.evaluate(
            "hidden => { Object.defineProperty(document, 'hidden', {value: hidden, configurable: true});"
            " document.dispatchEvent(new Event('visibilitychange')) }",
            hidden,
        )

    hide(True)
    before = row(page, "w0").locator(".age").text_content()
    page.clock.fast_forward(5000)
    assert row(page, "w0").locator(".age").text_content() == before
    page.clock.fast_forward(26_000)
    expect(page.locator("#connection")).to_have_attribute("data-state", "paused")
    hide(False)
    expect(page.locator("#connection")).to_have_attribute("data-state", "live")
    assert len(page.streams) == 2
