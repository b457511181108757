"""`make docs`: the documentation as a site, without a warning and without a network."""

from __future__ import annotations

import html.parser
import re
from pathlib import Path

import pytest

from tests.support.docs_site import build_site
from tests.support.shared_folder import made_once


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    return made_once(tmp_path_factory, "site", build_site)


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


def test_nothing_is_loaded_from_a_network_and_all_that_is_loaded_is_there(site):
    pages = [page for page in site.rglob("*.html") if page.name != "404.html"]
    assert len(pages) > 35
    for page in pages:
        for address in Loads(page).loaded:
            assert not re.match(r"(\w+:)?//", address), f"{page.name} loads {address}"
            assert (page.parent / address.partition("?")[0]).is_file(), f"{page.name} loads {address}"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(https?:)?//", sheet.read_text()), sheet


def test_every_link_inside_leads_to_a_place_of_a_page(site):
    read = {page: Loads(page) for page in site.rglob("*.html") if page.name != "404.html"}
    for page, loads in read.items():
        for link in loads.links:
            if re.match(r"\w+:", link) or link in (".", ".."):
                continue
            target, _, anchor = link.partition("#")
            other = (page.parent / target).resolve() if target else page
            assert other.exists(), f"{page.name}: {link}"
            if anchor and other in read:
                assert anchor in read[other].ids or anchor.startswith("__"), f"{page.name}: {link}"


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
