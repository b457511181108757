"""`megatron-fp8 report`: a run's precision and progress, on the terminal or as a page.

Prints the device, versions, parallel layout, parameters and the precision of every layer of a run, and
its losses.

Advice is what the run's figures call for (docs/telemetry.md): rules over --telemetry.every, each with a line
to paste. --advice FILE writes it as JSON.

With --html one file is written in place of that, of one run or of several: curves, statistics of every
site (of runs with --telemetry.every), the precision map, events and advice. It needs no network.

Exit codes: 0 done; 1 failed; 2 bad input.
"""

from __future__ import annotations

import json
import shlex
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files.terminal import printable
from .cli_common import CommandParser, run, write_output

if TYPE_CHECKING:
    from ..train.run_record import RunRecord


def main(arguments: list[str]) -> int:
    """Print the report of the run in `arguments`, or write the page of several; returns the exit code."""
    parser = CommandParser("report", __doc__)
    add = parser.add_argument
    add("runs", metavar="RUN_DIR", nargs="*", help="a run's folder")
    add("--html", metavar="FILE", type=Path, help="write a page of the runs")
    add("--advice", metavar="FILE", type=Path, help="write the run's advice as JSON")
    return run(parser, arguments, _report)


def _report(options: Namespace) -> None:
    """Raises ValueError for bad input."""
    if options.html is not None and options.advice is not None:
        raise ValueError("--html and --advice are two files: give one of them at a time")
    if "" in options.runs:
        raise ValueError(
            "a run's folder was given as an empty text: give its path (. for the current folder)"
        )
    runs = [Path(run) for run in options.runs]
    if options.html is not None:
        write_page(runs, options.html)
    elif options.advice is not None and len(runs) == 1:
        write_advice(runs[0], options.advice)
    elif len(runs) == 1:
        print(terminal_report(runs[0]))
    else:
        raise ValueError("give one run folder: megatron-fp8 report RUN_DIR (several with --html FILE)")


class BokehMissing(ValueError):
    """The package bokeh is not installed."""


def write_page(folders: list[Path], path: Path) -> None:
    """Write the page of some runs, and print its path. Raises ValueError for bad input, BokehMissing."""
    try:
        import bokeh  # noqa: F401
    except ModuleNotFoundError as error:
        raise BokehMissing("the page needs the package bokeh: pip install 'bokeh>=3.9'.") from error
    from ..report import read_runs, write_html

    runs = read_runs(folders)
    size = write_html(runs, path)
    for line in (line for run_data in runs for line in run_data.unfinished):
        print(printable(f"note        {line}"))
    print(f"{path} ({size / 1e6:.1f} MB): open it in a browser")


def terminal_report(folder: Path) -> str:
    """The report of one run for the terminal. Raises ValueError if it is no run's folder, or damaged."""
    from ..diagnosis.advice import advice_of
    from ..train.report import format_report
    from ..train.run_record import record_of

    record = record_of(folder)
    report = record.report()
    advice = [f"advice      {piece}" for piece in advice_of(record, report)]
    notes = [f"note        {line}" for line in record.unfinished()]
    page = f"page        with curves and statistics: megatron-fp8 report {shlex.quote(str(folder))} --html report.html"
    return printable("\n".join([format_report(report), *loss_lines(record), *advice, *notes, page]))


def write_advice(folder: Path, path: Path) -> None:
    """Write a run's advice as a JSON file, a list of objects. Raises ValueError for bad input."""
    from ..diagnosis.advice import advice_of
    from ..train.run_record import record_of

    record = record_of(folder)
    pieces = [piece.as_dict() for piece in advice_of(record, record.report())]
    if path.is_file() and not path.read_bytes().lstrip().startswith(b"["):
        raise ValueError(
            f"--advice={path} is there and is no list of advice, so it is not replaced: give another file."
        )
    write_output("--advice", path, json.dumps(pieces, indent=1) + "\n")
    for line in record.unfinished():
        print(printable(f"note        {line}"))
    print(f"{path}: {len(pieces)} pieces of advice")


def loss_lines(record: RunRecord) -> list[str]:
    """One line about training and one about validation, if the run has them."""
    lines = []
    steps = [line.content for line in record.metrics()]
    if steps:
        skipped = sum(int(step.get("skipped", 0)) for step in steps)
        lines.append(
            f"training    {len(steps)} iterations, loss {_loss_text(steps[0]['lm_loss'])} ->"
            f" {_loss_text(steps[-1]['lm_loss'])}, {skipped} steps skipped"
        )
    if skips := [line for line in record.events() if line.content["event"] == "skip"]:
        lines.append(
            f"skipped     first in iteration {skips[0].content['iteration']}: {skips[0].content['text']}"
        )
    validations = [line.content for line in record.validation()]
    if validations:
        last = validations[-1]
        lines.append(
            f"validation  loss {_loss_text(last['validation_loss'])} after iteration {last['iteration']}"
        )
    return lines


def _loss_text(loss: Any) -> str:
    """The loss as training prints it; None, a loss that was not finite, unchanged."""
    return f"{loss:.4f}" if isinstance(loss, (int, float)) else str(loss)
