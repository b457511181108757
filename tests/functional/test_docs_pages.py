"""`make docs`: the documentation as a site, without a warning and without a network; in a real Chromium too."""

from __future__ import annotations

import html.parser
import re
from pathlib import Path

import pytest

from tests.support.browser import Browser
from tests.support.docs_site import build_site


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build_site(folder)
    return folder


class Loads(html.parser.HTMLParser):
    """What a page loads by itself, and what it links to."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        if found.get("id"):
            self.ids.add(str(found["id"]))
        if tag == "a" and found.get("href"):
            self.links.append(str(found["href"]))
        elif tag == "link" and found.get("rel") in (
            "stylesheet",
            "icon",
            "preload",
            "preconnect",
            "modulepreload",
        ):
            self.loaded.append(str(found["href"]))
        elif found.get("src"):
            self.loaded.append(str(found["src"]))


@pytest.fixture(scope="module")
def pages(site) -> dict[Path, Loads]:
    return {page: Loads(page) for page in site.rglob("*.html") if page.name != "404.html"}


def test_nothing_is_loaded_from_a_network_and_all_that_is_loaded_is_there(site, pages):
    assert len(pages) > 35
    for page, loads in pages.items():
        for address in loads.loaded:
            assert not re.match(r"(\w+:)?//", address), f"{page.name} loads {address}"
            assert (page.parent / address.partition("?")[0]).is_file(), f"{page.name} loads {address}"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(https?:)?//", sheet.read_text()), sheet


def test_every_link_inside_leads_to_a_place_of_a_page(pages):
    for page, loads in pages.items():
        for link in loads.links:
            if re.match(r"\w+:", link) or link in (".", ".."):
                continue
            target, _, anchor = link.partition("#")
            other = (page.parent / target).resolve() if target else page
            assert other.exists(), f"{page.name}: {link}"
            if anchor and other in pages:
                assert anchor in pages[other].ids or anchor.startswith("__"), f"{page.name}: {link}"


def test_what_users_call_is_in_the_reference_and_found_by_the_search(site):
    text = (site / "api" / "nn.html").read_text() + (site / "api" / "recipes.html").read_text()
    for name in ("convert_to_fp8", "fp8_step", "MXFP8BlockScaling", "DelayedScaling", "Float8Tensor"):
        assert re.search(rf'id="megatron_fp8[\w.]*\.{name}"', text), name
    index = (site / "search" / "search_index.js").read_text()
    assert "convert_to_fp8" in index and "Transformer Engine" in index


def test_the_home_page_is_the_readme(site):
    text = (site / "index.html").read_text()
    assert "Two commands" in text and 'href="start.html"' in text and (site / "report.png").is_file()
    assert (site / "examples" / "megatron_gpt.py").is_file(), "what a page links to comes along"


# ----------------------------------------------------------------------------------------------------- in a browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as one:
        yield one


@pytest.mark.browser
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


@pytest.mark.browser
def test_the_search_finds(site, browser):
    browser.open(site / "index.html", ready="return document.readyState === 'complete'")
    browser.point("input.md-search__input", 0.5, 0.5, click=True)
    browser.keys("fp8_autocast")
    browser.until("return document.querySelectorAll('.md-search-result__item').length > 0")
    assert "fp8_autocast" in browser.text(".md-search-result__list")
