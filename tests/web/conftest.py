from __future__ import annotations

import pytest

PATIENCE = 30_000
"""Milliseconds. Other work takes the machine's two cores; nothing here waits that long when all is well."""


@pytest.fixture(scope="session")
def browser():
    from browserneeded import CHROMIUM
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=PATIENCE)

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield browser
        browser.close()


@pytest.fixture
def site(browser, monkeypatch):
    """Opens the page on a source: `site(source)` returns it, with `page.server`. Errors on it fail the test."""
    from pagekit import Server

    monkeypatch.setattr("multiworld.web.feed.EVERY", 0.05)  # seconds; a test has no time
    ends, errors = [], []

    def site(source, path="", *, token="", clock=False, expected=(), **context):
        server = Server(source, token).start()
        ends.append(server.stop)
        shown = browser.new_context(**{"viewport": {"width": 1400, "height": 900}, **context})
        ends.append(shown.close)
        page = shown.new_page()
        page.set_default_timeout(PATIENCE)
        page.on("pageerror", lambda error: errors.append(f"{error}"))

        def said(message):
            if message.type == "error" and not any(part in message.text for part in expected):
                errors.append(message.text)

        page.on("console", said)
        page.streams = []
        page.on("request", lambda asked: asked.url.endswith("/events") and page.streams.append(asked.url))
        if clock:
            page.clock.install()
        page.goto(server.url + path)
        page.server = server
        return page

    yield site
    for end in reversed(ends):
        end()
    assert not errors
