"""`megatron-fp8 formats`: values, range and errors of formats and scaling.

The numbers behind FP8, computed by this package's own casts, scales and recipes:

  megatron-fp8 formats                          a picture and the tables below, on the terminal
  megatron-fp8 formats --csv codes.csv          every code of every format: format, code, value, spacing
  megatron-fp8 formats --csv d.csv --table delayed    another table as CSV
  megatron-fp8 formats --png formats.png        range, error, recipes on outliers and delayed scaling, drawn

  formats     what each format has: codes, largest and smallest values, dynamic range, largest error
  values      all values of the 8-bit (and smaller) formats
  magnitudes  spacing of the values and largest relative error, by power of two
  recipes     one tensor with outliers, quantized with a scale for the tensor, a row, a block, an MX block
  delayed     delayed scaling on tensors whose size stays, grows or jumps: saturation and noise

What the numbers mean: docs/recipes.md.

Exit codes: 0 done; 1 failed; 2 bad input.
"""

from __future__ import annotations

import sys
from argparse import ArgumentTypeError, Namespace
from pathlib import Path

from .cli_common import CommandParser, check_outputs, run, write_output

_TITLES = {
    "formats": "What each format has (of E8M0, a format of scales, no rounding error is given)",
    "values": "All values",
    "magnitudes": "Spacing and largest relative error of values from 2^n to 2^(n+1)",
    "recipes": (
        "SQNR in dB of the ordinary elements, and the share of them that became 0, beside\n"
        "outliers of that many standard deviations (E4M3; nvfp4: E2M1)"
    ),
    "delayed": (
        "Delayed scaling, 64 iterations: in how many something saturated, the largest\n"
        "share of a tensor that did, median SQNR and the worst iteration's"
    ),
}
"""Table -> its title."""


def main(arguments: list[str]) -> int:
    """Print or write the tables; return the exit code."""
    parser = CommandParser("formats", __doc__)
    add = parser.add_argument
    add("--table", metavar="NAME", choices=list(_TITLES), help="one table (of --csv: default values)")
    add("--csv", metavar="FILE", type=_file, help="write a table as CSV; -: to stdout")
    add("--png", metavar="FILE", type=_file, help="write the picture")
    return run(parser, arguments, _formats)


def _file(text: str) -> Path:
    """A file's path; raises the parser's error, which names the option, for an impossible path."""
    if not Path(text).name:
        raise ArgumentTypeError(f"{text!r} names no file")
    return Path(text)


def _formats(options: Namespace) -> None:
    """Raises ValueError for bad input."""
    from ..study import format_tables, plots

    if options.csv is None and options.png is None:
        _print(options.table)
        return
    to_stdout = str(options.csv) == "-"
    check_outputs({"--png": options.png, "--csv": None if to_stdout else options.csv})
    if options.png is not None:
        plots.draw(options.png)
        stream = sys.stderr if to_stdout else sys.stdout
        print(f"{options.png}: range, error, recipes on outliers, delayed scaling", file=stream)
    if options.csv is not None:
        name = options.table or "values"
        text = format_tables.as_csv(format_tables.TABLES[name].rows())
        if to_stdout:
            print(text, end="")
        else:
            write_output("--csv", options.csv, text)
            print(f"{options.csv}: {text.count(chr(10)) - 1:,} rows of {name}")


def _print(table: str | None) -> None:
    """Print one table, or the picture and all tables except the one of all values."""
    from ..study import format_tables, plots

    if table is not None:
        print(format_tables.TABLES[table].text())
        return
    print(plots.terminal())
    for name, title in _TITLES.items():
        if name != "values":
            print(f"\n{title}\n\n{format_tables.TABLES[name].text()}", flush=True)
    print("\nEvery value: --table values; as files: --csv FILE, --png FILE.")
