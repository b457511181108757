"""The HTML report of runs: curves, statistics, precision map, events.

    runs' files -> curves, statistics, events, precision, advice (parsed and checked) -> charts, page

The file needs neither network nor server. It contains Bokeh's JavaScript, from the Python package, and the
numbers, deflated. Names and texts come from untrusted files: the template escapes them, and the script sets
them as text. Rejected: images of each statistic (no hover, and 3 MB hold only a few dozen), and Plotly (its
JavaScript exceeds the size limit of the whole file).
"""

from .page import html_of, write_html
from .run import Run, read_run, read_runs

__all__ = ["Run", "html_of", "read_run", "read_runs", "write_html"]
