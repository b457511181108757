"""The report's charts: Bokeh models without data, filled by the page's script.

So models contain no names or texts of a run, and each curve is stored once, deflated, not again as Bokeh
JSON. The script finds models by name: figures by quantity, sources by 'quantity/run', 'gaps/quantity/run' and
so on. The script also sets colours, since it knows whether the screen is light or dark.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from bokeh.document import Document
from bokeh.models import BasicTickFormatter, BoxAnnotation, ColumnDataSource, Range1d
from bokeh.models.ranges import DataRange1d
from bokeh.plotting import figure
from bokeh.resources import INLINE

from .curves import QUANTITIES, Quantity
from .run import Run

_DASHES = ("solid", "dashed", "dotted", "dotdash", "dashdot")
_CURVE_HEIGHT, _MAP_ROW, _MAP_EDGES = 240, 5, 60
_MAP_LEAST, _MAP_MOST = 220, 620


def javascript() -> str:
    """BokehJS, core only (charts; no widgets or tables)."""
    return INLINE.js_raw[INLINE.components.index("bokeh")]


def present_quantities(runs: Sequence[Run]) -> list[Quantity]:
    """The quantities that at least one run has."""
    return [quantity for quantity in QUANTITIES if any(quantity.name in run.curves for run in runs)]


def models(runs: Sequence[Run]) -> Any:
    """The document of all charts as Bokeh JSON. Each root is drawn in the element 'chart-' plus its name."""
    document = Document()
    iterations = Range1d(0, 1, name="iterations")
    roots = [_curves(quantity, runs, iterations) for quantity in present_quantities(runs)]
    if any(run.statistics for run in runs):
        roots += [_map(runs), _site(len(runs))]
    with document.models.freeze():  # otherwise each added root searches all models again
        for root in roots:
            document.add_root(root)
    return document.to_json(deferred=False)


def _figure(name: str, **options: Any) -> Any:
    chart = figure(
        name=name, height=options.pop("height", _CURVE_HEIGHT), sizing_mode="stretch_width", toolbar_location=None,
        background_fill_color=None, border_fill_color=None, outline_line_color=None, min_border_right=12, **options,
    )  # fmt: skip
    # Otherwise the script is not notified of them.
    chart.subscribed_events = {"mousemove", "mouseleave", "tap", "doubletap"}
    return chart


def _curves(quantity: Quantity, runs: Sequence[Run], iterations: Range1d) -> Any:
    chart = _figure(
        quantity.name, x_range=iterations, y_range=DataRange1d(name=f"range/{quantity.name}"),
        y_axis_type="log" if quantity.log else "linear", tools="xbox_zoom", x_axis_label="iteration",
    )  # fmt: skip
    chart.extra_y_ranges = {"edge": Range1d(0, 1)}
    if not quantity.log:
        chart.yaxis.formatter = BasicTickFormatter(power_limit_low=-6)
    lines = _lines(chart, quantity.name, len(runs))
    points = []
    if quantity.name == "lm_loss":
        for number in range(len(runs)):
            source = _source(f"validation_loss/{number}")
            points.append(
                chart.scatter(
                    "x",
                    "y",
                    source=source,
                    marker="circle",
                    size=7,
                    fill_alpha=0.35,
                    name=f"color/validation/{number}",
                )
            )
        _edge(chart, "events", len(runs), "triangle")
    _edge(chart, f"gaps/{quantity.name}", len(runs), "x")
    chart.y_range.renderers = [*lines, *points]
    for number, run in enumerate(runs):
        for name, _, first, last in run.phases:
            if name != "fp8":
                band = BoxAnnotation(
                    left=first - 0.5,
                    right=last + 0.5,
                    fill_alpha=0.12,
                    name=f"phase/{number}",
                    level="underlay",
                )
                chart.add_layout(band)
    return chart


def _source(name: str) -> ColumnDataSource:
    return ColumnDataSource(data={"x": [], "y": []}, name=name)


def _lines(chart: Any, name: str, runs: int) -> list[Any]:
    return [
        chart.line(
            "x", "y", source=_source(f"{name}/{run}"), line_width=2, line_dash=_DASHES[run % len(_DASHES)],
            line_join="round", name=f"color/{name}/{run}",
        )
        for run in range(runs)
    ]  # fmt: skip


def _edge(chart: Any, name: str, runs: int, marker: str) -> None:
    """Marks at the edge of a chart, independent of its axis range."""
    for run in range(runs):
        chart.scatter(
            "x", "y", source=_source(f"{name}/{run}"), y_range_name="edge", marker=marker, size=9, line_width=2,
            name=f"color/{name}/{run}",
        )  # fmt: skip


def _map(runs: Iterable[Run]) -> Any:
    rows = max(len(run.statistics.sites) for run in runs if run.statistics)
    height = min(max(_MAP_LEAST, rows * _MAP_ROW + _MAP_EDGES), _MAP_MOST)
    chart = _figure(
        "map", height=height, x_range=Range1d(0, 1), y_range=Range1d(0, 1), tools="box_zoom",
        x_axis_label="iteration",
    )  # fmt: skip
    chart.grid.visible = False
    empty: dict[str, list] = {"image": [], "x": [], "y": [], "dw": [], "dh": []}
    chart.image_rgba(
        "image", "x", "y", "dw", "dh", source=ColumnDataSource(data=empty, name="image"), dilate=True
    )
    for name in ("row", "cell"):
        box = ColumnDataSource(data={"left": [], "right": [], "top": [], "bottom": []}, name=name)
        chart.quad(
            "left", "right", "top", "bottom", source=box, fill_color=None, line_width=2, name=f"box/{name}"
        )
    return chart


def _site(runs: int) -> Any:
    chart = _figure(
        "site", x_range=DataRange1d(), y_range=DataRange1d(name="range/site"), tools="xbox_zoom",
        x_axis_label="iteration",
    )  # fmt: skip
    chart.extra_y_ranges = {"edge": Range1d(0, 1)}
    lines = _lines(chart, "site", runs)
    chart.y_range.renderers = chart.x_range.renderers = lines
    for run, line in enumerate(lines):  # points too: a single value between two gaps has no line
        chart.scatter("x", "y", source=line.data_source, size=5, name=f"color/points/{run}")
    _edge(chart, "gaps/site", runs, "x")
    return chart
