"""The documentation's site in a real Chromium: light and dark, narrow and wide, without a network."""

from __future__ import annotations

import pytest

from tests.support.browser import Browser
from tests.support.docs_site import build_site
from tests.support.shared_folder import made_once

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return made_once(tmp_path_factory, "site", build_site)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as one:
        yield one


@pytest.mark.parametrize(("width", "dark"), [(400, False), (1600, True)], ids=["narrow", "wide and dark"])
def test_pages_fit_and_ask_for_nothing(site, browser, width, dark):
    for page in ("index.html", "migrate.html", "api/nn.html"):
        browser.open(site / page, width=width, dark=dark, ready="return document.readyState === 'complete'")
        assert browser.script("return document.documentElement.scrollWidth") <= width, page
        scheme = browser.script("return document.body.dataset.mdColorScheme")
        assert scheme == ("slate" if dark else "default"), page
        broken = (
            "return [...document.querySelectorAll('td code')].map(e => [e.textContent, e.getClientRects().length])"
            ".filter(([text, lines]) => /^[\\w.]+$/.test(text) && lines > 1)"
        )
        assert browser.script(broken) == [], f"names in tables of {page} that go on in the next line"
        assert not browser.errors()
        assert not [a for a in browser.requests() if not a.startswith("file:")], page


def test_the_search_finds(site, browser):
    browser.open(site / "index.html", ready="return document.readyState === 'complete'")
    browser.point("input.md-search__input", 0.5, 0.5, click=True)
    browser.keys("fp8_autocast")
    browser.until("return document.querySelectorAll('.md-search-result__item').length > 0")
    assert "fp8_autocast" in browser.text(".md-search-result__list")
