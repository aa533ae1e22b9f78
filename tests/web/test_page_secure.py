"""The page in secure mode, in a real Chromium: it comes by the link, and sees the page live over HTTPS."""

from __future__ import annotations

import browserneeded  # noqa: F401  first: it skips this module where there is no browser
import pytest
from kits.tlskit import Files, authority
from pagekit import Source, broken, view, world
from playwright.sync_api import expect

from multiworld.web.server import serve


@pytest.fixture
def source():
    return Source(view([world("w0"), world("w1")]))


@pytest.fixture
def served(tmp_path, monkeypatch, source):
    for name, path in Files(tmp_path, authority("job"), addresses=("127.0.0.1",)).environment.items():
        monkeypatch.setenv(name, path)
    with serve(source) as found:
        yield found


def test_by_the_link(browser, served, source):
    with browser.new_context(ignore_https_errors=True) as context:
        page = context.new_page()
        page.set_default_timeout(30_000)
        assert page.goto(served.url).status == 401
        assert "w0" not in page.content()
        errors = []
        page.on("pageerror", lambda error: errors.append(f"{error}"))
        page.goto(served.link)
        assert page.url == served.url, "the token is not in the address any more"
        expect(page.locator("#connection")).to_have_attribute("data-state", "live")
        expect(page.locator("#rows .row")).to_have_count(2)
        source.change(worlds=[broken("w1")])
        expect(page.locator("#trouble-list li").first).to_contain_text("w1 broken: crashed, rank 2")
        (cookie,) = context.cookies()
        assert (cookie["secure"], cookie["httpOnly"], cookie["sameSite"]) == (True, True, "Lax")
        assert page.evaluate("document.cookie") == ""
        assert errors == []


def test_a_browser_that_does_not_know_the_authority_warns(browser, served):
    with browser.new_context() as context, pytest.raises(Exception, match="ERR_CERT_AUTHORITY_INVALID"):
        context.new_page().goto(served.url)
