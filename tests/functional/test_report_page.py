"""The report of runs in a real Chromium: pointed at, driven by keyboard alone, narrow and wide, light and dark."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_fp8.commands.main import main
from tests.support.browser import Browser
from tests.support.run_folders import sites, write_run

pytestmark = pytest.mark.browser

LAYERS, EVERY, ITERATIONS = 3, 10, 40
HOSTILE = "<img src=x onerror=\"document.title='ruined'\"></script><script>document.title='ruined'</script>"
SPECIAL = {10: math.nan, 20: math.inf, 30: None, 40: 5.0}
"""What the first site's output gradients had as cur_amax."""


def planted(line: dict[str, Any]) -> dict[str, Any]:
    if line["site"] == sites(LAYERS)[0] and line["tensor"] == "grad_output":
        line["cur_amax"] = SPECIAL[line["iteration"]]
    return line


def lossless(line: dict[str, Any]) -> dict[str, Any]:
    """Two steps skipped, of which nothing finite is known."""
    if line["iteration"] in (17, 18):
        line |= {"lm_loss": None, "grad_norm": math.nan, "skipped": 1}
    return line


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("chromium")) as found:
        yield found


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    size = {"layers": LAYERS, "iterations": ITERATIONS, "every": EVERY, "tensors": ("input", "grad_output")}
    ill = write_run(folder / "ill", **size, fields=planted, metrics=lossless)  # type: ignore[arg-type]
    advice = [{"cause": HOSTILE, "site": HOSTILE, "line": HOSTILE}]
    (ill / "advice.json").write_text(json.dumps(advice))
    hostile = write_run(folder / HOSTILE.replace("/", "|"), **{**size, "every": 0}, seed=1)  # type: ignore[arg-type]
    (hostile / "events.jsonl").write_text(
        json.dumps({"iteration": 5, "event": HOSTILE, "text": HOSTILE}) + "\n"
    )
    return [ill, hostile]


@pytest.fixture(scope="module")
def page(runs, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    assert main(["report", *map(str, runs), "--html", str(path)]) == 0
    return path


def recorded(run: Path, site: str, tensor: str, statistic: str) -> dict[int, float]:
    lines = map(json.loads, (run / "telemetry.jsonl").read_text().splitlines())
    return {e["iteration"]: e[statistic] for e in lines if (e["site"], e["tensor"]) == (site, tensor)}


def number(text: str) -> float:
    """Of 'site, iteration 20: 31.2' or '... sqnr_db = 31.2 (plan)'."""
    return float(text.split(" = ")[-1].split(" (")[0].split(": ")[-1])


def test_it_fetches_nothing_runs_no_text_and_complains_of_nothing(browser, page):
    browser.open(page)
    assert browser.errors() == [] and browser.requests() == [page.as_uri()]
    assert browser.script("return document.title").startswith("Report: ill")
    assert browser.script("return document.images.length") == 0
    texts = browser.script(
        "return [...document.querySelectorAll('#advice p, #advice code, #events td')].map(e => e.textContent)"
    )
    assert texts.count(HOSTILE) == 4


def test_pointing_at_a_cell_reads_it_and_a_click_chooses_it(browser, page, runs):
    browser.open(page)
    names = sites(LAYERS)
    browser.point("#chart-map", 0.5, 0.06)
    browser.until("return document.querySelector('#pointed').textContent.startsWith('decoder')")
    assert browser.text("#pointed").split(",")[0] == names[0]
    browser.point("#chart-map", 0.9, 0.6, click=True)
    browser.until("return document.querySelector('#site').selectedIndex > 0")
    pointed, chosen = browser.text("#pointed"), browser.text("#readout")
    site, iteration = pointed.split(",")[0], 40
    assert site in names and f"{site}, iteration {iteration}: input sqnr_db = " in chosen
    value = recorded(runs[0], site, "input", "sqnr_db")[iteration]
    assert number(pointed) == number(chosen) == pytest.approx(value, rel=5e-3)
    assert browser.text("#site-title") == site
    browser.point("#chart-site", 0.97, 0.3)
    browser.until("return document.querySelector('#tip').textContent.startsWith('iteration 40')")
    assert "iteration 40" in browser.text("#tip") and f"{number(chosen):g}" in browser.text("#tip")


def test_pointing_at_a_curve_tells_every_run_and_what_stands_where_no_number_is(browser, page, runs):
    browser.open(page)
    browser.script(
        "const f = document.querySelector('#from'); f.value = 15; f.dispatchEvent(new Event('change'))"
    )
    browser.script(
        "const t = document.querySelector('#to'); t.value = 20; t.dispatchEvent(new Event('change'))"
    )
    browser.point("#chart-lm_loss", 0.5, 0.5)  # between 17 and 18
    browser.until("return !document.querySelector('#tip').hidden")
    told = browser.script("return [...document.querySelectorAll('#tip div')].map(e => e.textContent)")
    iteration = int(told[0].removeprefix("iteration "))
    losses = {
        e["iteration"]: e["lm_loss"]
        for e in map(json.loads, (runs[1] / "metrics.jsonl").read_text().splitlines())
    }
    assert iteration in (17, 18) and told[1] == "ill: null" and told[2].startswith(runs[1].name)
    assert number(told[2]) == pytest.approx(losses[iteration], rel=5e-3)


def test_the_keyboard_reaches_and_switches_everything(browser, page, runs):
    browser.open(page)
    code = """
    const e = document.activeElement, style = getComputedStyle(e);
    return [e.id || e.tagName, style.outlineStyle, parseFloat(style.outlineWidth), e.getBoundingClientRect().width]
    """
    stops = []
    for _ in range(60):
        browser.keys("\ue004")  # Tab
        stops.append(browser.script(code))
        if stops[-1][0] == "BODY":
            break
    assert stops.pop()[0] == "BODY", "the focus never leaves the page"
    assert all(style == "solid" and width >= 2 and size > 0 for _, style, width, size in stops), stops
    names = [stop[0] for stop in stops]
    switches = ["from", "to", "whole", "SUMMARY", "tensor", "statistic", "scale", "site", "iteration"]
    assert [name for name in names if name in switches][: len(switches)] == switches
    browser.script("document.querySelector('#tensor').focus()")
    browser.keys("g")
    browser.until("return document.querySelector('#readout').textContent.includes('grad_output')")
    browser.script("document.querySelector('#statistic').focus()")
    browser.keys("cur")
    browser.until("return document.querySelector('#readout').textContent.includes('cur_amax')")
    browser.script("document.querySelector('#iteration').focus()")
    shown = {}
    for iteration in (40, 30, 20, 10):
        text = browser.text("#readout")
        assert f"iteration {iteration}: " in text
        shown[iteration] = text.split(" = ")[1].split(" (")[0]
        browser.keys("\ue012")  # left
    assert shown == {40: "5", 30: "null", 20: "Infinity", 10: "NaN"}
    swatches = browser.text("#colours")
    assert all(f"{word} (1)" in swatches for word in ("NaN", "Infinity", "null"))
    browser.script("document.querySelector('#site').focus()")
    browser.keys("\ue015")  # down
    browser.until("return document.querySelector('#site').selectedIndex === 1")
    want = recorded(runs[0], sites(LAYERS)[1], "grad_output", "cur_amax")[10]
    browser.until(
        "return document.querySelector('#site-title').textContent === document.querySelector('#site').value"
    )
    assert number(browser.text("#readout")) == pytest.approx(want, rel=5e-3)
    browser.script("document.querySelector('#site-table summary').focus()")
    browser.keys("\ue007")  # Enter
    browser.until("return document.querySelectorAll('#site-table tbody tr').length === 4")


def test_a_part_of_the_run_and_one_run_alone(browser, page):
    browser.open(page)
    browser.script(
        "const f = document.querySelector('#from'); f.value = 16; f.dispatchEvent(new Event('change'))"
    )
    browser.script(
        "document.querySelectorAll('.shows')[1].click(); document.querySelector('#curves-table summary').click()"
    )
    browser.until("return document.querySelectorAll('#curves-table tbody tr').length === 25")
    rows = browser.script(
        "return [...document.querySelectorAll('#curves-table tr')].map(r => [...r.cells].map(c => c.textContent))"
    )
    head, first, second = rows[0], rows[1], rows[2]
    assert head[0] == "iteration" and all(title.startswith("ill: ") for title in head[1:])
    loss, norm = head.index("ill: lm_loss"), head.index("ill: grad_norm")
    assert first[0] == "16" and float(first[loss]) > 0
    assert (second[0], second[loss], second[norm]) == ("17", "null", "NaN")
    browser.script("document.querySelector('#whole').click()")
    browser.until("return document.querySelector('#from').value === '1'")


@pytest.mark.parametrize(("width", "dark"), [(400, True), (1600, False)])
def test_it_fits_and_takes_the_colours_of_the_scheme(browser, page, width, dark):
    code = """
    const light = (colour) => colour.match(/[0-9.]+/g).slice(0, 3).reduce((a, b) => a + Number(b), 0) / 765;
    const image = document.querySelector('#chart-map').getBoundingClientRect();
    return [document.documentElement.scrollWidth, light(getComputedStyle(document.body).backgroundColor),
            light(getComputedStyle(document.body).color), image.width, image.height]
    """
    browser.open(page, width=width, dark=dark)
    whole, back, ink, across, down = browser.script(code)
    assert whole <= width and across > 300 and down >= 200
    assert (back < 0.2 and ink > 0.8) if dark else (back > 0.8 and ink < 0.2)


def test_without_telemetry_it_says_how_to_have_it(browser, runs, tmp_path):
    path = tmp_path / "plain.html"
    assert main(["report", str(runs[1]), "--html", str(path)]) == 0
    browser.open(path)
    assert "--telemetry.every=10" in browser.text("#statistics") and browser.errors() == []
