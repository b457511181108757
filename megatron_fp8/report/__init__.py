"""The HTML report of runs: curves, statistics, precision map, events.

    runs' files -> curves, statistics, events, precision, advice (what they hold, checked) -> packing -> charts, page

The file needs no network and no server: Bokeh's JavaScript, which its Python package brings, is inside it, and so are the
numbers, deflated. Names and texts come from files of other people: the template escapes them, and what the script draws
it sets as text. Rejected: a picture of each statistic drawn here (no hover, and 3 MB hold a few dozen), and Plotly (its
JavaScript is larger than the whole file may be).
"""

from .page import html_of, write_html
from .run import Run, read_run, read_runs

__all__ = ["Run", "html_of", "read_run", "read_runs", "write_html"]
