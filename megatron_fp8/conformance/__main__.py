"""`python -m megatron_fp8.conformance`: the table of cases and libraries."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..plan.settings import import_factory
from ..plan.timing import table
from .adapters import Adapter, installed_adapters, version
from .golden import GOLDEN, Case, differences, load

DESCRIPTION = """Hold libraries against golden codes and scales of FP8, MXFP8 and NVFP4, to the bit.

  python -m megatron_fp8.conformance
      all installed libraries with an adapter: megatron_fp8, torch, ml_dtypes, torchao,
      mx (microxcaling), transformer_engine (on a GPU)
  python -m megatron_fp8.conformance --library my_package.quantize
      your function: it takes a megatron_fp8.conformance.Case and returns its tensors by
      name ('codes', 'scale_inv', 'amax'), or None for a rule that it does not have

same: to the bit; -: no such rule. What differs is listed below the table, with its first
place. docs/conformance.md defines the cases. Exit code 1: this package, or the function
that was given, differs somewhere.
"""


def main(arguments: list[str] | None = None) -> int:
    """Prints the table; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_fp8.conformance",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--library",
        metavar="FUNCTION",
        help="import path of a function, in the place of the installed libraries",
    )
    add("--cases", metavar="TEXT", default="", help="only cases whose names contain this")
    add("--golden", metavar="FILE", type=Path, default=GOLDEN, help="another golden file")
    options = parser.parse_args(arguments)
    try:
        cases = [case for case in load(options.golden) if options.cases in case.name]
        if not cases:
            raise ValueError(f"--cases={options.cases}: no case's name contains it")
        own = (
            {} if options.library is None else {options.library: import_factory(options.library, "--library")}
        )
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    libraries: dict[str, Adapter] = own or installed_adapters()
    results = {name: [_result(adapter, case) for case in cases] for name, adapter in libraries.items()}
    heads = [name if own else f"{name} {version(name)}".strip() for name in libraries]
    words = [[_word(found) for found in column] for column in results.values()]
    print(table(("case", *heads), [(case.name, *row) for case, *row in zip(cases, *words, strict=True)]))
    for name, column in results.items():
        for case, found in zip(cases, column, strict=True):
            for line in found or ():
                print(f"{name}: {case.name}: {line}")
    judged = next(iter(results.values())) if own else results["megatron_fp8"]
    return 1 if any(judged) else 0


def _word(found: list[str] | None) -> str:
    return "-" if found is None else "differs" if found else "same"


def _result(adapter: Adapter, case: Case) -> list[str] | None:
    """What differs; None without such a rule. An exception is a difference: the library cannot take the case."""
    try:
        found = adapter(case)
    except Exception as error:
        return [f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"]
    return None if found is None else differences(case, found)


if __name__ == "__main__":
    sys.exit(main())
