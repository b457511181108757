"""`megatron-fp8 report`: what a run ran and how it went, on the terminal or, of several runs, as a page to look at."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

from ..train.report import format_report, read_report
from .line import CommandParser, run

DESCRIPTION = """\
Prints the device, versions, parallel layout, parameters and the precision of every layer of a run, and
its losses.

With --html one file is written in place of that, of one run or of several: curves, statistics of every
site (of runs with --telemetry.every), the precision map, events and advice. It needs no network.
"""


def main(arguments: list[str]) -> int:
    """Print the report of the run in `arguments`, or write the page of several; returns the exit code."""
    parser = CommandParser("report", DESCRIPTION)
    parser.add_argument("runs", metavar="RUN_DIR", nargs="*", type=Path, help="a run's folder")
    parser.add_argument(
        "--html", metavar="FILE", type=Path, help="write a page of the runs, to open in a browser"
    )
    return run(parser, arguments, _report)


def _report(options: Namespace) -> None:
    """Raises ValueError: bad input."""
    if options.html is not None:
        write_page(options.runs, options.html)
    elif len(options.runs) == 1:
        print(terminal(options.runs[0]))
    else:
        raise ValueError("give one run folder: megatron-fp8 report RUN_DIR (several with --html FILE)")


def write_page(folders: list[Path], path: Path) -> None:
    """The page of some runs, and a line that says where it is. Raises ValueError: bad input."""
    try:
        import bokeh  # noqa: F401
    except ModuleNotFoundError as error:
        raise ValueError(
            f"--html needs the package {error.name}, which is not installed: pip install 'bokeh>=3.9'."
        ) from error
    from ..report import read_runs, write_html

    size = write_html(read_runs(folders), path)
    print(f"{path} ({size / 1e6:.1f} MB): open it in a browser")


def terminal(folder: Path) -> str:
    """The report of one run for the terminal. Raises ValueError: it is no run's folder, or its files are damaged."""
    try:
        report = read_report(folder)
        return "\n".join([format_report(report), *losses(folder if folder.is_dir() else folder.parent)])
    except KeyError as error:
        raise ValueError(f"{str(folder)!r} is not a run's report or metrics: {error} is missing") from error
    except (TypeError, AttributeError, IndexError) as error:  # other JSON than a run writes
        raise ValueError(f"{str(folder)!r} is not a run's report or metrics ({error})") from error


def losses(folder: Path) -> list[str]:
    """One line about training and one about validation, if the run got that far."""
    lines = []
    steps = records(folder / "metrics.jsonl")
    if steps:
        skipped = sum(step["skipped"] for step in steps)
        lines.append(
            f"training    {len(steps)} iterations, loss {steps[0]['lm_loss']} -> {steps[-1]['lm_loss']}, "
            f"{skipped} steps skipped"
        )
    validations = records(folder / "validation.jsonl")
    if validations:
        last = validations[-1]
        lines.append(f"validation  loss {last['validation_loss']} after iteration {last['iteration']}")
    return lines


def records(path: Path) -> list[dict]:
    """The objects of a .jsonl file; an unfinished last line, of a run that was killed, is left out."""
    if not path.is_file():
        return []
    complete = path.read_text(encoding="utf-8").rpartition("\n")[0]
    try:
        return [json.loads(line) for line in complete.splitlines()]
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{str(path)!r} holds a line that is no record ({error}): remove it.") from error
