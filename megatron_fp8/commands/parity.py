"""`megatron-fp8 parity`: whether a served directory computes what its run trained.

Compare a run's training with a directory as an inference engine reads it. No GPU is needed.

  megatron-fp8 export runs/mine out/mine-fp8 --format=fp8-channel
  megatron-fp8 parity runs/mine out/mine-fp8                       for vLLM
  megatron-fp8 parity runs/mine out/mine-fp8 --engine=transformers
  megatron-fp8 parity runs/mine out/mine-fp8 --accept=inputs --numbers

Kinds of differences:
  precision   the forward GEMM's weight, in the run's plan (report.json)
              and by the engine's rules for the directory's ignore list
  inputs      the forward GEMM's input
  cache       keys and values
  weights     codes and scales: are they, bit for bit, what the run's
              latest checkpoint exports?
  config      fields of config.json, rotary positions too
  tokenizer   its file, and the tokens that start and end a text
  numbers     with --numbers: log-probabilities, see below

--accept=KIND, or KIND:GLOB of names such as 'precision:*.layers.0.*', says which differences are meant.

--numbers computes log-probabilities of a text twice, by training's model and as the engine would, and splits their
difference (KL(engine || training), Schulman's k3 of the given tokens) by cause: causes are switched on one after the
other, and the parts add up to the whole. It is a difference if KL or k3 is above --max-kl. All of it runs
in one process, which needs the model, 4 bytes for each of its values, and 8 for each log-probability.

Exit codes: 0 no difference beside accepted ones; 1 a difference; 2 bad input.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files.terminal import printable
from ..serve import ENGINES, KV_CACHE_DTYPES
from .cli_common import (
    CommandParser,
    check_output,
    run,
    run_command,
    text_rows,
    with_progress,
    write_output,
)

if TYPE_CHECKING:
    from ..huggingface.checkpoint_reader import Source
    from ..serve.parity import Difference, Numbers, Parity, Part

_SHOWN = 3  # names of a kind of difference
_MOST_LINES = 8  # of a kind
_MAX_KL = 1e-3


def main(arguments: list[str]) -> int:
    """Run `megatron-fp8 parity`; return 0, 1 for a difference, or 2 for bad input."""
    parser = CommandParser("parity", __doc__, ("--data.tokenizer",))
    add = parser.add_argument
    add("run", metavar="RUN", help="the run's folder")
    add("directory", metavar="DIR", help="the directory that is served")
    add("--engine", choices=ENGINES, default="vllm", help="who serves DIR (default: vllm)")
    of_cache = f"the engine's KV cache: {', '.join(KV_CACHE_DTYPES)} (default: auto, by config.json)"
    add("--kv-cache-dtype", choices=KV_CACHE_DTYPES, metavar="DTYPE", default="auto", help=of_cache)
    add("--accept", metavar="KIND", action="append", default=[], help="a kind of differences that is meant")
    add("--json", metavar="FILE", help="write all of it: each linear, each token's log-probabilities")
    add("--numbers", action="store_true", help="compare log-probabilities too")
    add("--data", nargs="+", metavar="FILE", help="text of --numbers, as of train (default: the run's)")
    add("--tokens", type=int, metavar="N", help="about how many of it (default: 2048)")
    add(
        "--max-kl", type=float, metavar="NATS", help=f"largest mean KL and k3 accepted (default: {_MAX_KL:g})"
    )
    parser.set_defaults(config=None)
    if "--numbers" in arguments:
        return run_command(parser, arguments, _prepare_numbers)
    return run(parser, arguments, _parity)


def _parity(options: argparse.Namespace) -> int:
    for name in ("data", "tokens", "max_kl"):
        if getattr(options, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} is for --numbers: add it, or leave the option out")
    output = None if options.json is None else check_output("--json", options.json)
    found, _ = _static(options)
    return _print(options, found, output)


def _static(options: argparse.Namespace) -> tuple[Parity, Source]:
    from ..files.checkpoint import find_checkpoint
    from ..huggingface.checkpoint_reader import open_source
    from ..serve.parity import compare_static

    folder = Path(options.run)
    source = open_source(find_checkpoint(folder))
    directory, cache = Path(options.directory), options.kv_cache_dtype
    found = compare_static(folder, source, directory, options.engine, with_progress, cache)
    found.remaining(options.accept)  # checks them, before the numbers
    return found, source


def _prepare_numbers(options: argparse.Namespace, run_options: list[str], launch: Any) -> Callable[[], int]:
    if launch.world_size > 1:
        raise ValueError(f"parity computes in one process, and {launch.world_size} were started: start one")
    tokens = 2048 if options.tokens is None else options.tokens
    max_kl = _MAX_KL if options.max_kl is None else options.max_kl
    if tokens < 2:
        raise ValueError(f"--tokens={tokens} must be at least 2: a token's probability needs one before it")
    if not 0 <= max_kl < math.inf:
        raise ValueError(f"--max-kl={max_kl:g} must be a finite number from 0")
    output = None if options.json is None else check_output("--json", options.json)
    found, source = _static(options)
    from .. import mcore

    mcore.install()
    from ..diagnosis.replay import other_shards
    from ..mcore.sites import fp8_linears
    from ..serve.log_probs import check_size
    from ..train.resume.restore import restore

    restored = restore(options.run, launch, run_options)
    check_size(tokens, restored.vocab_size)
    length = min(restored.run.train.seq_length, tokens)
    rows = text_rows(options, restored, launch, max(1, tokens // length), length)
    plans = [linear.fp8_site.plan for linear in fp8_linears([restored.model])]
    shards = other_shards(restored.facts.get("layout") or {}, restored.run.model, plans, command=None)
    found.notes += [*restored.lines, *([shards] if shards else [])]

    def work() -> int:
        from ..serve.log_probs import add_numbers

        cache = options.kv_cache_dtype
        add_numbers(found, source, Path(options.directory), restored, rows, max_kl, cache, with_progress)
        return _print(options, found, output)

    return work


def _print(options: argparse.Namespace, found: Parity, output: Path | None) -> int:
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
    text += [] if found.numbers is None else number_lines(found.numbers)
    groups: dict[tuple[str, str, str], list[str]] = {}
    for each in left:
        groups.setdefault((each.kind, each.training, each.engine), []).append(each.name)
    for kind in dict.fromkeys(each.kind for each in left):
        of_kind = [(key, names) for key, names in groups.items() if key[0] == kind]
        for (_, training, engine), names in of_kind[:_MOST_LINES]:
            more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
            where = "" if names == ["*"] else f": {', '.join(names[:_SHOWN])}{more}"
            text.append(f"{kind}: training {training}, engine {engine}{where}")
        if len(of_kind) > _MOST_LINES:
            text.append(f"{kind}: {len(of_kind) - _MOST_LINES:,} more such lines; --json=FILE has all")
    accepted = len(found.differences) - len(left)
    text += [f"note: {note}" for note in found.notes]
    summary = f"{len(left):,} difference(s)" if left else "no difference"
    text.append(f"{summary}{f', and {accepted:,} accepted' if accepted else ''}")
    return text


def number_lines(numbers: Numbers) -> list[str]:
    """The parts as a table, and what does not add up."""
    from ..plan.timing import table

    def share(part: Part) -> str:
        return f"{part.kl / numbers.whole.kl:.0%}" if numbers.whole.kl > 0 else "-"

    rows = [
        [
            part.cause,
            f"{part.kl:.2e}",
            share(part),
            f"{part.k3:.2e}",
            f"{part.absolute:.2e}",
            f"{part.difference:+.2e}",
        ]
        for part in (*numbers.parts, numbers.whole)
    ]
    header = ["cause", "KL", "share", "k3", "|dlogp|", "dlogp"]
    text = [
        f"log-probabilities of {numbers.tokens:,} tokens, the engine's less training's (dlogp): means, in nats"
    ]
    text += table(header, rows).splitlines()
    text.append(f"largest |dlogp| {numbers.largest:.3g}, mean exp|dlogp| {numbers.ratio:.6f}")
    if numbers.choices:
        text.append(
            f"router flips: other experts for {numbers.flips:,} of {numbers.choices:,} (token, layer)"
        )
    return text


def _numberless(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "#", name)


def _words(pair: tuple[str | None, str | None]) -> str:
    """'weight x input'."""
    return " x ".join(part or "BF16" for part in pair) if any(pair) else "high precision"
