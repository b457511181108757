"""The report's page: tables and texts as HTML, and data for its script."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ..files.atomic_io import as_value_error, replace_file
from ..files.terminal import number_ranges
from ..plan.settings import entry_format
from .curves import VALIDATION, Curve
from .heatmaps import ABSENT, BITS, NAN, NULL, Statistics, definition, encode_array, encode_map
from .run import Run

LARGEST = 3_000_000
"""Size limit of a report in bytes."""
_LEAST_FOR_MAPS = 200_000
_COLUMNS = 8
_EVENTS = 300
"""Most rows of the table of events, per run."""
_START = ("sqnr_db", "underflows%", "cur_amax")
"""The page first shows the first measured one of these statistics."""


def write_html(runs: Sequence[Run], path: Path) -> int:
    """Write the report of ``runs`` to ``path`` atomically; returns its size in bytes.

    Raises ValueError: the file cannot be written, or exists and is not HTML (protects against a mistaken
    name).
    """
    if path.exists() and not path.is_file():
        raise ValueError(f"--html={path} is a folder or no ordinary file. Give the name of a file to write.")
    with as_value_error(f"--html={path} cannot be written", ": give another file."):
        if path.exists() and not path.read_bytes()[:1024].lstrip().lower().startswith(b"<!doctype html"):
            raise ValueError(
                f"--html={path}: it is there and is no HTML file, so it is not replaced. Give another name."
            )
        text = html_of(runs)
        replace_file(path, text)
    return len(text.encode())


def html_of(runs: Sequence[Run]) -> str:
    """The page as a string."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    from .charts import javascript, models, present_quantities

    templates = Environment(
        loader=PackageLoader("megatron_fp8.report", "templates"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    texts: dict[str, Any] = {
        "runs": [_summary(run) for run in runs],
        "charts": [
            {"name": q.name, "title": q.title, "unit": q.unit, "words": _alt_text(runs, q.name)}
            for q in present_quantities(runs)
        ],
        "events": [_events(run) for run in runs],
        "several": len(runs) > 1,
        "advice": [(run.name, run.advice) for run in runs if run.advice],
        "statistics": [run.name for run in runs if run.statistics],
        "without_statistics": [run.name for run in runs if not run.statistics],
        "maps": _maps_of_precision(runs),
        "gemms": GEMMS,
        "bokeh": encode_array(np.frombuffer(javascript().encode(), dtype=np.uint8)),
        "models": _json(models(runs)),
    }  # fmt: skip
    template = templates.get_template("page.html")
    without = template.render(**texts, data=_json(_data(runs, [None] * len(runs))))
    room = max(LARGEST - len(without.encode()), _LEAST_FOR_MAPS)
    return template.render(**texts, data=_json(_data(runs, _maps_that_fit(runs, room))))


def _json(value: Any) -> str:
    """JSON that is safe inside a script element: it has no '<'. The template does not escape it again."""
    from markupsafe import Markup

    text = json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


# ------------------------------------------------------------------------------------------------ numbers for the script


def _data(runs: Sequence[Run], maps: Sequence[dict[str, Any] | None]) -> dict[str, Any]:
    from bokeh.palettes import Viridis256

    return {
        "runs": [
            {
                "name": run.name,
                "last": run.last,
                "curves": {name: _curve(curve) for name, curve in run.curves.items()},
                "events": [
                    [e.first, e.last, e.kind, e.text] for e in run.events[:_EVENTS] if e.kind != "skip"
                ],
                "statistics": found,
            }
            for run, found in zip(runs, maps, strict=True)
        ],
        "codes": {"nan": NAN, "null": NULL, "absent": ABSENT},
        "palette": "".join(colour.removeprefix("#") for colour in Viridis256),
        "start": _START,
        "meanings": {
            name: words
            for run in runs
            if run.statistics
            for name in sorted({statistic for _, statistic in run.statistics.maps})
            if (words := definition(name))
        },
    }


def _curve(curve: Curve) -> dict[str, Any]:
    iterations, values = curve.thinned()
    return {
        "x": encode_array(iterations.astype(np.float64)),
        "y": encode_array(values.astype(np.float32)),
        "gaps": curve.gaps[:_EVENTS],
    }


def _maps_that_fit(runs: Sequence[Run], room: int) -> list[dict[str, Any] | None]:
    """Every run's maps in at most ``room`` bytes: the most mantissa bits that fit, the same for all; then fewer
    columns."""
    found = [run.statistics for run in runs]
    while True:
        for bits in BITS:
            maps = [_statistics(run, s, bits) for run, s in zip(runs, found, strict=True)]
            if len(_json(maps)) <= room:
                return maps
        if all(s is None or len(s.iterations) <= _COLUMNS for s in found):
            raise ValueError(
                f"a report of {len(runs)} runs with these many sites and statistics does not fit into {LARGEST:,} bytes:"
                " give fewer runs, or measure fewer sites."
            )
        found = [s.coarser() if s and len(s.iterations) > _COLUMNS else s for s in found]


def _statistics(run: Run, found: Statistics | None, bits: int) -> dict[str, Any] | None:
    if found is None:
        return None
    plans: dict[str, int] = {}
    sentences = {site["name"]: sentence(site) for site in run.sites}
    planned = [plans.setdefault(sentences.get(name, ""), len(plans)) for name in found.sites]
    maps: dict[str, dict[str, str]] = {}
    for (tensor, statistic), codes in found.maps.items():
        maps.setdefault(tensor, {})[statistic] = encode_map(codes, bits)
    return {
        "sites": found.sites,
        "plans": list(plans),
        "planned": planned,
        "iterations": encode_array(found.iterations.astype(np.float64)),
        "merged": found.merged,
        "bits": bits,
        "maps": maps,
    }


# ------------------------------------------------------------------------------------------------------ tables and texts


def _summary(run: Run) -> dict[str, Any]:
    precision = run.report.get("precision")
    precision = precision if isinstance(precision, dict) else {}
    loss, validation = run.curves.get("lm_loss"), run.curves.get(VALIDATION.name)
    speed, memory = run.curves.get("tokens_per_s"), run.curves.get("peak_memory")
    fp8 = ", ".join(entry_format(precision) or ("no FP8",))
    return {
        "name": run.name,
        "device": run.report.get("device") or "not known",
        "precision": fp8 if precision else "not known",
        "iterations": run.last,
        "first": _figure(loss, 0),
        "last": _figure(loss, -1),
        "validation": _figure(validation, -1),
        "skipped": sum(event.last - event.first + 1 for event in run.events if event.kind == "skip"),
        "speed": f"{np.median(speed.finite):,.0f}" if speed and len(speed.finite) else "–",
        "memory": f"{memory.finite.max():,.0f}" if memory and len(memory.finite) else "–",
        "phases": [{"name": n, "precision": p, "first": a, "last": b} for n, p, a, b in run.phases],
    }


def _figure(curve: Curve | None, place: int) -> str:
    """The value at one end of a curve, the text of a gap there, or a dash."""
    if curve is None or not len(curve.iterations):
        return "–"
    value, iteration = curve.values[place], int(curve.iterations[place])
    if np.isfinite(value):
        return f"{value:.4f}"
    return next((word for first, last, word in curve.gaps if first <= iteration <= last), "–")


def _alt_text(runs: Sequence[Run], name: str) -> str:
    """A chart in words, for screen readers."""
    parts = []
    for run in runs:
        curve = run.curves.get(name)
        if curve is not None and len(curve.finite):
            low, high = curve.finite.min(), curve.finite.max()
            ends = f"from {curve.finite[0]:.4g} to {curve.finite[-1]:.4g}, between {low:.4g} and {high:.4g}"
            ends = f"always {low:.4g}" if low == high else ends
        else:
            ends = "no number"
        gaps = sum(last - first + 1 for first, last, _ in curve.gaps) if curve is not None else 0
        parts.append(f"{run.name}: {ends}" + (f", {gaps} iterations without one" if gaps else ""))
    return "; ".join(parts)


def _events(run: Run) -> dict[str, Any]:
    """Rows of a run's table of events, including starts of phases."""
    rows = [
        (first, f"iteration {first}", "phase", f"{name}: iterations {first}–{last} in {precision}")
        for name, precision, first, last in run.phases
    ]
    rows += [
        (
            e.first,
            f"iteration {e.first}" if e.first == e.last else f"iterations {e.first}–{e.last}",
            e.kind,
            e.text,
        )
        for e in run.events
    ]
    rows.sort(key=lambda row: row[0])
    return {
        "name": run.name,
        "rows": [row[1:] for row in rows[:_EVENTS]],
        "more": max(len(rows) - _EVENTS, 0),
    }


def _maps_of_precision(runs: Sequence[Run]) -> list[tuple[list[str], list[Row]]]:
    """(run names, rows); runs with the same map share one table."""
    found: list[tuple[list[str], list[Row]]] = []
    for run in runs:
        rows = precision_map(run.sites)
        same = next((names for names, others in found if others == rows), None)
        if same is not None:
            same.append(run.name)
        else:
            found.append(([run.name], rows))
    return [(names, rows) for names, rows in found if rows]


GEMMS = ("fprop", "dgrad", "wgrad")
_LISTED = 500
"""Most names listed in a row if ranges are not exact."""


@dataclass(frozen=True)
class Row:
    """Sites with the same plan for the same reason.

    Attributes:
        name: the site's name; for several sites with ranges: 'decoder.layers.1–30.mlp.linear_fc1'.
        sites: number of sites.
        listed: their names, if ``name`` has '*' because ranges would include other sites; else empty.
        precision, recipe, backend, reason: from the plan; '' for none.
        gemms: for each of GEMMS 'fp8', 'bf16', ...; '' if unknown.
        roles: 'input: e4m3 tensor fp32', ...
        notes: notes recorded at run time.
    """

    name: str
    sites: int
    listed: tuple[str, ...]
    precision: str
    recipe: str
    backend: str
    reason: str
    gemms: tuple[str, ...]
    roles: tuple[str, ...]
    notes: tuple[str, ...]


def precision_map(sites: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Rows in the order of their first sites."""
    groups: dict[tuple, list[str]] = {}
    for site in sites:
        stem = tuple("*" if part.isdecimal() else part for part in site["name"].split("."))
        groups.setdefault((stem, _content(site)), []).append(site["name"])
    return [_row(stem, names, content) for (stem, content), names in groups.items()]


def sentence(site: Mapping[str, Any]) -> str:
    """A site's precision and the reason, in one line."""
    precision, recipe, backend, reason, *_ = _content(site)
    what = " ".join(part for part in (precision.upper(), recipe) if part)
    return f"{what} on {backend}: {reason}" if backend else f"{what}: {reason}"


def _content(site: Mapping[str, Any]) -> tuple:
    gemms, roles, notes = site.get("gemms"), site.get("roles"), site.get("notes")
    gemms = gemms if isinstance(gemms, dict) else {}
    roles = roles if isinstance(roles, dict) else {}
    return (
        *(_text(site.get(name)) for name in ("precision", "recipe", "backend", "reason")),
        tuple(_text(gemms.get(gemm)) for gemm in GEMMS),
        tuple(f"{role}: {rule}" for role, rule in roles.items() if rule),
        tuple(str(note) for note in notes) if isinstance(notes, list) else (),
    )


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _row(stem: tuple[str, ...], names: list[str], content: tuple) -> Row:
    """One row, named by ranges of numbers, or by the stem and a list if ranges would include other sites."""
    numbers = [{int(name.split(".")[i]) for name in names} for i, part in enumerate(stem) if part == "*"]
    if prod(map(len, numbers)) == len(set(names)):
        ranges = (number_ranges(sorted(found), "–", ",") for found in numbers)
        return Row(".".join(next(ranges) if part == "*" else part for part in stem), len(names), (), *content)
    more = (f"and {len(names) - _LISTED} more",) if len(names) > _LISTED else ()
    return Row(".".join(stem), len(names), (*names[:_LISTED], *more), *content)
