"""The page for everyone: names and roles, contrast, small screens, reduced motion."""

from __future__ import annotations

import itertools
import time

import browserneeded  # noqa: F401  first: it skips this module where there is no browser
import pytest
from pagekit import Source, broken, event, fault, member, pending, process, view, world
from playwright.sync_api import expect

EVERY_STATE = ("joining", "active", "busy", "broken", "closed", "failed", "gone", "lost")


def everything():
    """A view in which all that the page can show is shown."""
    worlds = [
        world(state, [member(rank, kind) for rank, kind in enumerate(EVERY_STATE)], state=state)
        for state in ("joining", "active", "broken", "closed", "failed", "gone")
    ]
    w2 = broken("w2")
    w2["pending"] = [pending(), pending(119, idle=True, tag=7, text="told", since=1)]
    w2["links"] = [{"from": 0, "to": 3, "messages": 12345, "bytes": 999_999, "rate": 1.2e9}]
    w2["waited"] = {"0": 0.0, "2": 1.9}
    transfer = [member(0), member(1, "joining", received=4e8, total=1e9)]
    worlds += [w2, world("a-world-with-quite-a-long-name-" * 3, transfer, note="a note")]
    worlds.append(world("train", 64, sizes="2:128"))
    states = ("starting", "up", "failed", "restarting", "retiring", "ended", "stopped", "lost")
    processes = [process(rank, state) for rank, state in enumerate(states)]
    faults = [fault("w2", healed=False), fault("w1", at=time.time() - 99)]
    events = [event(1), event(2, "w2 broken: " + "a long line " * 20, "warning", "w2")]
    return Source(view(worlds, processes, faults, events))


# The least contrast of all text that is seen, and whose it is. Colours are read back from a canvas, as color-mix() has
# forms of its own.
CONTRAST = """() => {
  const context = Object.assign(document.createElement("canvas"), {width: 1, height: 1})
    .getContext("2d", {willReadFrequently: true});
  const rgba = (color) => {
    context.clearRect(0, 0, 1, 1);
    context.fillStyle = color;
    context.fillRect(0, 0, 1, 1);
    return [...context.getImageData(0, 0, 1, 1).data];
  };
  const ground = (element) => {
    if (element.classList.contains("filling")) return rgba(getComputedStyle(element).getPropertyValue("--blue-fill"));
    for (let e = element; e; e = e.parentElement) {
      const [r, g, b, a] = rgba(getComputedStyle(e).backgroundColor);
      if (a === 255) return [r, g, b];
      if (a !== 0) throw new Error("half transparent: " + e.className);
    }
    return [255, 255, 255];
  };
  const light = (rgb) => {
    const [r, g, b] = rgb.slice(0, 3).map((c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !element.checkVisibility({visibilityProperty: true})) continue;
    if (element.closest(".hidden, noscript, .skip")) continue;
    const [a, b] = [light(rgba(getComputedStyle(element).color)), light(ground(element))].sort((x, y) => y - x);
    const state = element.dataset.state ?? "";
    found.push([(a + 0.05) / (b + 0.05), `${element.tagName}.${element.className} ${state} ${element.textContent}`]);
  }
  const [field] = document.getElementsByTagName("input");
  const [a, b] = [light(rgba(getComputedStyle(field, "::placeholder").color)), light(ground(field))].sort((x, y) => y - x);
  found.push([(a + 0.05) / (b + 0.05), "placeholder"]);
  return [found.length, found.sort((x, y) => x[0] - y[0]).slice(0, 3)];
}"""

UNNAMED = """() => [...document.querySelectorAll("a, button, input, [role=grid], [role=region], [role=gridcell].cell, table")]
  .filter((e) => e.checkVisibility() && !e.closest("table, dialog") || e.matches("button, a"))
  .filter((e) => !(e.getAttribute("aria-label") || e.getAttribute("aria-labelledby") || e.labels?.length || e.textContent.trim()))
  .map((e) => e.outerHTML.slice(0, 120))"""

WIDER = "document.documentElement.scrollWidth - innerWidth"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_contrast_is_enough(site, theme):
    page = site(everything(), "#world=w2", color_scheme=theme)
    expect(page.locator("#panel .pending > li")).to_have_count(2)
    expect(page.locator("#rows .row")).to_have_count(9)
    for name in ("w2", "train"):  # the marked row has a ground of its own
        page.evaluate(f"location.hash = '#world={name}'")
        page.locator("#rows .cell").first.hover()
        texts, worst = page.evaluate(CONTRAST)
        print(  # noqa: T201  what was measured
            f"{theme}, {name}: {texts} texts, the least contrast {worst[0][0]:.2f}:1 ({worst[0][1]!r})"
        )
        assert texts > 200
        assert worst[0][0] >= 4.5, worst
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(245, 246, 248)") == (theme == "light")


@pytest.mark.parametrize("width", [390, 700, 1000, 1400])
def test_nothing_is_wider_than_the_screen(site, width):
    page = site(
        everything(),
        viewport={"width": width, "height": 844},
        color_scheme="dark" if width == 390 else "light",
    )
    expect(page.locator("#rows .row")).to_have_count(9)
    assert page.evaluate(WIDER) <= 0
    boxes = "all => all.filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.id || e.className)"
    assert page.locator("#matrix, .row, .scroll, #main > section").evaluate_all(boxes) == []
    lines = page.locator("#rows .row", has=page.get_by_role("rowheader", name="train", exact=True)).locator(
        ".cell"
    )
    tops = set(lines.evaluate_all("cells => cells.map(cell => cell.offsetTop)"))
    assert len(tops) > 1  # 64 cells wrap
    page.evaluate("location.hash = '#world=w2'")
    expect(page.locator("#panel")).to_be_visible()
    assert page.evaluate(WIDER) <= 0
    assert page.locator("#panel").evaluate("panel => panel.scrollWidth - panel.clientWidth") <= 0
    covered = width <= 900  # then what is below cannot be reached
    assert page.evaluate("document.getElementById('main').inert") is covered
    page.get_by_role("button", name="Close", exact=True).click()
    assert not page.evaluate("document.getElementById('main').inert")


def test_roles_and_names(site):
    page = site(everything(), "#world=w2")
    expect(page.locator("#panel .pending > li")).to_have_count(2)
    snapshot = page.locator("body").aria_snapshot()
    for part in (
        "- banner:",
        "- navigation",
        "- main:",
        '- complementary "World w2"',
        '- grid "Worlds"',
        '- columnheader "Members by rank"',
        '- rowheader "w2"',
        'gridcell "rank 2: lost, crashed"',
        'gridcell "rank 1: joining, has 40 % of the state"',
        '- region "Faults"',
        '- region "Processes"',
        '- region "Events"',
        '- columnheader "Restarts"',
        '- button "Log of worker:1"',
        '- log "Events"',
        '- searchbox "Filter worlds by name, state, cause or process"',
        '- img "seen at 0.0 ms, told at 0.8 ms, joining at 310 ms, active at 812 ms, healed in 812 ms"',
        '- button "Trouble first" [pressed]',
    ):
        assert part in snapshot, part
    assert page.evaluate(UNNAMED) == []
    levels = page.evaluate(
        "[...document.querySelectorAll('h1,h2,h3')].filter(e => e.checkVisibility()).map(e => +e.tagName[1])"
    )
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels))
    assert page.evaluate("document.documentElement.lang") == "en"


def test_states_differ_without_colour(site):
    page = site(everything())
    expect(page.locator("#rows .row")).to_have_count(9)
    cells = page.locator("#rows .row[data-state=active] .cell").first.locator("xpath=..").locator(".cell")
    marks = cells.evaluate_all(
        "cells => cells.map(c => [c.textContent.replace(/[0-9]/g, ''), getComputedStyle(c).borderStyle + getComputedStyle(c).borderRadius])"
    )
    assert len(marks) == len(EVERY_STATE)
    letters = [letter for letter, _ in marks]
    assert len(set(letters)) == len(EVERY_STATE)


def test_only_new_trouble_is_announced(site):
    source = Source(view([world("w0"), world("w1")]))
    page = site(source)
    expect(page.locator("#rows .row")).to_have_count(2)
    page.evaluate(
        "window.told = []; new MutationObserver(() => told.push(document.getElementById('announcer').textContent))"
        ".observe(document.getElementById('announcer'), {childList: true, characterData: true, subtree: true})"
    )
    source.change(worlds=[broken("w1")], events=[event(1, "w1 broken", "warning")])
    expect(page.locator("#announcer")).to_have_text("w1 broken: crashed, rank 2")
    for number in range(2, 8):  # events, and the same world again
        source.change(worlds=[broken("w1")], events=[event(number)])
    page.wait_for_timeout(1300)  # its age counts on
    assert page.evaluate("told") == ["w1 broken: crashed, rank 2"]
    source.change(worlds=[broken("w0")])
    expect(page.locator("#announcer")).to_have_text("w0 broken: crashed, rank 2")
    source.change(worlds=[world("w0"), world("w1")])
    expect(page.locator("#announcer")).to_have_text("")
    assert page.evaluate("told") == ["w1 broken: crashed, rank 2", "w0 broken: crashed, rank 2", ""]
    assert page.locator("#event-list").get_attribute("aria-live") == "off"


def test_a_launcher_that_is_silent_is_announced_once(site):
    source = Source(view([world("w0")]))
    page = site(source)
    page.evaluate(
        "window.told = []; new MutationObserver(() => told.push(document.getElementById('announcer').textContent))"
        ".observe(document.getElementById('announcer'), {childList: true, characterData: true, subtree: true})"
    )
    said = [f"nothing new since {seconds} s: no answer within 2 s" for seconds in (3, 4, 5)]
    for note in said:
        source.change(set={"note": note})
        expect(page.locator("#trouble-list li")).to_have_text(note)
    assert page.evaluate("told") == said[:1]


def test_a_token_that_is_refused_is_announced_once(site):
    page = site(Source(view([world("w0")])), "?token=secret", token="secret", expected=["ERR_", "401"])  # noqa: S106
    expect(page.locator("#connection")).to_have_attribute("data-state", "live")
    page.context.clear_cookies()
    page.server.stop()
    page.server.start()
    expect(page.locator("#connection")).to_have_attribute("data-state", "refused")
    page.evaluate(
        "window.told = []; new MutationObserver(() => told.push(document.getElementById('connection-text').textContent))"
        ".observe(document.getElementById('connection-text'), {childList: true, characterData: true, subtree: true})"
    )
    for _ in range(2):
        with page.expect_response("**/api/v1/view"):
            pass
    assert page.evaluate("told") == []
    page.server.stop()
    expect(page.locator("#connection")).to_have_attribute("data-state", "reconnecting")


def test_tab_order(site):
    page = site(everything())
    expect(page.locator("#rows .row")).to_have_count(9)
    stops = []
    for _ in range(30):
        page.keyboard.press("Tab")
        stop = page.evaluate(
            "(() => { const e = document.activeElement; return e.id || e.closest('[id]')?.id || '' })()"
        )
        if not stops or stops[-1] != stop:
            stops.append(stop)
    wanted = [
        "head",
        "keys-button",
        "trouble-list",
        "world-counts",
        "filter",
        "by-trouble",
        "by-name",
        "rows",
    ]
    at = [stops.index(stop) for stop in wanted]
    assert at == sorted(at), stops
    assert stops.count("rows") == 1  # one stop for the matrix
    ring = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert ring != "none"


def test_reduced_motion(site):
    page = site(everything(), reduced_motion="reduce", expected=["ERR_"])
    expect(page.locator("#rows .row")).to_have_count(9)
    page.server.stop()
    expect(page.locator("#connection")).to_have_attribute("data-state", "reconnecting")
    assert (
        page.locator("#connection .mark").evaluate("mark => getComputedStyle(mark).animationName") == "none"
    )
    page.emulate_media(reduced_motion="no-preference")
    assert (
        page.locator("#connection .mark").evaluate("mark => getComputedStyle(mark).animationName") == "blink"
    )
