"""`megatron-fp8 parity`: whether a served directory computes what its run trained."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from ..files.terminal import printable
from ..serve import ENGINES
from .cli_common import CommandParser, check_output, run, with_progress, write_output

if TYPE_CHECKING:
    from ..serve.parity import Difference, Parity

HELP = """\
Compare a run's training with a directory as an inference engine reads it: nothing is multiplied, no GPU is needed.

  megatron-fp8 export runs/mine out/mine-fp8 --format=fp8-channel
  megatron-fp8 parity runs/mine out/mine-fp8                       for vLLM
  megatron-fp8 parity runs/mine out/mine-fp8 --engine=transformers
  megatron-fp8 parity runs/mine out/mine-fp8 --accept=inputs

Five kinds of differences:
  precision   the forward GEMM's weight, in the run's plan (report.json)
              and by the engine's rules for the directory's ignore list
  inputs      the forward GEMM's input
  weights     codes and scales: are they, bit for bit, what the run's
              latest checkpoint exports?
  config      fields of config.json, rotary positions too
  tokenizer   its file, and the tokens that start and end a text

--accept=KIND, or KIND:GLOB of names such as 'precision:*.layers.0.*', says which differences are meant.

Exit codes: 0 no difference beside accepted ones; 1 a difference; 2 bad input.
"""
_SHOWN = 3  # names of a kind of difference


def main(arguments: list[str]) -> int:
    """Run `megatron-fp8 parity`; return 0, 1 for a difference, or 2 for bad input."""
    parser = CommandParser("parity", HELP)
    add = parser.add_argument
    add("run", metavar="RUN", help="the run's folder")
    add("directory", metavar="DIR", help="the directory that is served")
    add("--engine", choices=ENGINES, default="vllm", help="who serves DIR (default: vllm)")
    add("--accept", metavar="KIND", action="append", default=[], help="a kind of differences that is meant")
    add("--json", metavar="FILE", help="write all of it, one entry per linear")
    return run(parser, arguments, _parity)


def _parity(options: argparse.Namespace) -> int:
    from ..serve.parity import compare_static

    output = None if options.json is None else check_output("--json", options.json)
    found = compare_static(Path(options.run), Path(options.directory), options.engine, with_progress)
    left = found.remaining(options.accept)
    if output is not None:
        write_output("--json", output, json.dumps(found.as_dict(), indent=1, allow_nan=False) + "\n")
    for line in lines(found, left):
        print(printable(line))
    return 1 if left else 0


def lines(found: Parity, left: list[Difference]) -> list[str]:
    """The comparison as text: GEMMs that differ only in their layer share a line, and so do differences."""
    text = [f"forward GEMMs in training and in {found.engine} ({found.form}): weight x input"]
    alike: dict[tuple[str, str, str], int] = {}
    for gemm in found.gemms:
        key = (_numberless(gemm.linear), _words(gemm.training), _words(gemm.engine))
        alike[key] = alike.get(key, 0) + 1
    widths = [max((len(key[i]) for key in alike), default=0) for i in range(2)]
    for (name, training, engine), count in alike.items():
        sign = "=" if training == engine else "!"
        text.append(f"{count:>5} x {name:<{widths[0]}}  {training:<{widths[1]}}  {sign} {engine}")
    text.append(f"{found.tensors:,} tensors, {found.values:,} values compared bit for bit")
    groups: dict[tuple[str, str, str], list[str]] = {}
    for each in left:
        groups.setdefault((each.kind, each.training, each.engine), []).append(each.name)
    for (kind, training, engine), names in groups.items():
        more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
        text.append(f"{kind}: training {training}, engine {engine}: {', '.join(names[:_SHOWN])}{more}")
    accepted = len(found.differences) - len(left)
    text += [f"note: {note}" for note in found.notes]
    summary = f"{len(left):,} difference(s)" if left else "no difference"
    text.append(f"{summary}{f', and {accepted:,} accepted' if accepted else ''}")
    return text


def _numberless(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "#", name)


def _words(pair: tuple[str | None, str | None]) -> str:
    """'weight x input'."""
    return " x ".join(part or "BF16" for part in pair) if any(pair) else "high precision"
