"""The page without a browser: one file that fits, loads nothing, escapes what it shows, in colours that can be read."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from megatron_fp8.report import html_of, page, read_run, read_runs, write_html
from megatron_fp8.report.heatmaps import Statistics, codes_of
from megatron_fp8.report.run import Run
from tests.support.run_folders import OF_CODES, OF_VALUES, TENSORS, sites, write_run

HOSTILE = "</script><script>alert(1)</script><img src=x>&"


def large(columns: int = 80) -> Run:
    """32 layers of 4 linears, measured 80 times: every statistic of every tensor, as noisy as values are."""
    random, names = np.random.default_rng(0), tuple(sites(32))
    maps = {}
    for tensor in TENSORS:
        for statistic in (*OF_VALUES, *(OF_CODES if tensor in TENSORS[:3] else ())):
            level = random.normal(0, 2, (len(names), 1))
            maps[tensor, statistic] = codes_of(np.exp(level + random.normal(0, 0.2, (len(names), columns))))
    statistics = Statistics(names, np.arange(10, 10 * columns + 1, 10), maps)
    return Run("large", {}, [], {}, (), (), statistics, ())


def test_a_large_run_fits_and_says_how_much_was_left_out():
    text = html_of([large()])
    assert len(text.encode()) <= page.LARGEST == 3_000_000
    data = json.loads(re.search(r'id="data">(.*?)</script>', text)[1])
    found = data["runs"][0]["statistics"]
    assert found["bits"] >= 4 and found["merged"] == 1


def test_what_does_not_fit_shares_columns_and_what_never_does_is_refused():
    run = large(32)
    (found,) = page._maps_that_fit([run], 150_000)
    assert found["merged"] > 1 and len(json.dumps(found)) <= 150_000 * 1.02
    with pytest.raises(ValueError, match="does not fit"):
        page._maps_that_fit([run], 10_000)


def test_nothing_is_loaded_and_texts_are_escaped(tmp_path):
    def named(line):
        return line | {"site": HOSTILE, HOSTILE: 1.0}

    run = write_run(tmp_path / HOSTILE.replace("/", "|"), fields=named)
    report = json.loads((run / "report.json").read_text())
    report["device"] = report["sites"][0]["name"] = report["sites"][1]["reason"] = HOSTILE
    (run / "report.json").write_text(json.dumps(report))
    (run / "advice.json").write_text(json.dumps([{"cause": HOSTILE, HOSTILE: HOSTILE}]))
    text = html_of([read_run(run)])
    assert "alert(1)</script" not in text and "<img src=x" not in text
    assert text.count("</script>") == 4 and "default-src 'none'" in text
    assert not re.search(
        r"""(?:src|href)=["'](?!#|data:,)""", re.sub(r"<script>.*?</script>", "", text, flags=re.S)
    )


def test_runs_without_telemetry_or_anything_else(tmp_path):
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "metrics.jsonl").write_text('{"iteration": 1, "lm_loss": NaN}\n')
    text = html_of(read_runs([tmp_path / "bare", write_run(tmp_path / "run", every=0)]))
    assert (
        "--telemetry.every=10" in text and 'id="chart-map"' not in text and '<td class="n">NaN</td>' in text
    )
    assert 'id="advice"' not in html_of(read_runs([tmp_path / "bare"]))
    assert "--model.fp8=e4m3" in text  # the other run's: it is MXFP8 with E5M2 gradients


def test_files_that_cannot_be_or_must_not_be_written(tmp_path):
    runs = [read_run(write_run(tmp_path / "run", every=0))]
    path = tmp_path / "out.html"
    size = write_html(runs, path)
    assert path.stat().st_size == size
    for wrong, said in ((tmp_path, "is a folder"), (tmp_path / "no" / "x", "cannot be written"),
                        (tmp_path / "run" / "metrics.jsonl", "is no HTML file")):  # fmt: skip
        before = wrong.read_bytes() if wrong.is_file() else None
        with pytest.raises(ValueError, match=said):
            write_html(runs, wrong)
        assert before is None or wrong.read_bytes() == before


def luminance(colour: str) -> float:
    """Of #rrggbb, as WCAG 2 defines it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return math.fsum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_contrast(scheme):
    """4.5 for text and 3 for lines and borders (WCAG 2.2, 1.4.3 and 1.4.11)."""
    css = (Path(page.__file__).parent / "templates" / "page.css").read_text()
    block = re.findall(r":root \{(.*?)\}", css, re.S)[scheme]
    colours = dict(re.findall(r"--([\w-]+): (#\w{6})", block))
    for back in ("page", "panel", "note", "fp8", "high"):
        assert contrast(colours["ink"], colours[back]) >= 4.5, back
    for back in ("page", "panel"):
        for text in ("soft", "accent"):
            assert contrast(colours[text], colours[back]) >= 4.5, (text, back)
    for run in range(6):
        assert contrast(colours[f"run-{run}"], colours["panel"]) >= 3, run
