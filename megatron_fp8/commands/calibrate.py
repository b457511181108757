"""`megatron-fp8 calibrate`: activation ranges of a trained checkpoint, for static scales.

Runs text through the model of a checkpoint in high precision, measures the input of every FP8-capable linear, and the
keys and values of attention, prints the ranges, and writes calibration.safetensors and calibration.json. From those come
the static scales of `megatron-fp8 generate --activations static` and of exports, and an export's of an FP8 KV cache.

  megatron-fp8 calibrate runs/tiny_gpt_cpu                                on the run's own training data
  megatron-fp8 calibrate runs/tiny_gpt_cpu --data mine.txt --batches 32   on other text, or Megatron .bin/.idx prefixes
  megatron-fp8 calibrate runs/tiny_gpt_cpu --percentile 99.99             let the largest 0.01 % of values saturate

Sequences of the run's length are taken from all over the text, always the same ones. `max` is the largest magnitude that
was seen, p99.9 the one that 99.9 % of the values do not exceed, `amax` what the static scale represents as its largest
(the maximum, or the percentile asked for), and `above` the share of values beyond it, which saturate.

Exit codes: 0 done; 1 failed; 2 bad input.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files.atomic_io import as_value_error
from .cli_common import CheckpointParser, run_command, say, text_rows, with_progress

if TYPE_CHECKING:
    import torch


def main(arguments: list[str]) -> int:
    """Run `megatron-fp8 calibrate`; returns the exit code."""
    return run_command(_parser(), arguments, _prepare)


def _parser() -> CheckpointParser:
    parser = CheckpointParser("calibrate", __doc__)
    add = parser.add_argument
    add("--data", nargs="+", metavar="FILE", help="files or folders, as of train (default: the run's)")
    add("--batches", type=int, default=8, help="batches to run (default %(default)s)")
    add("--batch-size", type=int, default=8, help="sequences in each (default %(default)s)")
    add("--percentile", type=float, metavar="P", help="static ranges hold P %% of the values (default: all)")
    add("--out", metavar="DIR", help="where the files go (default: RUN_DIR/calibration)")
    return parser


def _prepare(options: argparse.Namespace, run_options: list[str], launch: Any) -> Callable[[], None]:
    for name in ("batches", "batch_size"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(options, name)} must be at least 1")
    if options.percentile is not None and not 0 < options.percentile <= 100:
        raise ValueError(
            f"--percentile {options.percentile:g} must be above 0 and at most 100, such as 99.99"
        )
    if options.recipe == "bf16":
        raise ValueError("--recipe bf16 has no scales to calibrate: leave it out, or give a recipe")
    from .. import mcore

    mcore.install()
    from ..train.resume.restore import restore
    from ..train.run_record import run_folder_of

    restored = restore(
        options.checkpoint, launch, run_options, config=options.config, recipe=options.recipe, fp8=options.fp8
    )
    batches = _batches(options, restored, launch)
    say(f"checkpoint  {restored.folder}, iteration {restored.iteration}", launch)
    for line in restored.lines:
        say(f"            {line}", launch)
    out = Path(options.out) if options.out else run_folder_of(restored.folder) / "calibration"
    with as_value_error(f"--out {str(out)!r} cannot be written", ": give another folder"):
        out.mkdir(parents=True, exist_ok=True)  # tested before the calibration, which may take minutes
    return partial(_calibrate, options, launch, restored, batches, out)


def _batches(options: argparse.Namespace, restored: Any, launch: Any) -> list[torch.Tensor]:
    """int64 [batch, sequence] each, from all over the data. Raises ValueError if it is too short."""
    length, count = restored.run.train.seq_length, options.batches * options.batch_size
    if count * length > _MOST_TOKENS:
        raise ValueError(
            f"--batches {options.batches} of --batch-size {options.batch_size} sequences of {length} tokens are"
            f" {count * length:,} tokens, more than the {_MOST_TOKENS:,} that are held at once: lower one of them"
        )
    return list(text_rows(options, restored, launch, count, length).split(options.batch_size))


_MOST_TOKENS = 2**28


def _calibrate(
    options: argparse.Namespace, launch: Any, restored: Any, batches: list[torch.Tensor], out: Path
) -> None:
    import torch
    import torch.distributed as dist

    from ..inference.calibration import calibrate

    def forward(tokens: torch.Tensor) -> None:
        positions = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.int64).expand_as(tokens)
        restored.model(tokens, positions, None)

    calibration = calibrate(
        restored.model,
        with_progress(batches, len(batches), "calibrating") if launch.rank == 0 else batches,
        forward,
        percentile=options.percentile,
        group=dist.group.WORLD,
    )
    calibration.facts.update(
        checkpoint=str(restored.folder),
        iteration=restored.iteration,
        sequences=options.batches * options.batch_size,
        tokens=sum(batch.numel() for batch in batches),
        tensor_parallel=launch.world_size,
    )
    if launch.rank == 0:
        print(format_ranges(calibration), flush=True)
        print(f"written     {calibration.save(out)}", flush=True)


def format_ranges(calibration: Any) -> str:
    """The ranges of inputs, keys and values as a table, and a line for each tensor with NaN or Inf."""
    from ..plan.timing import table

    rows, warnings = [], []
    for name, observed in calibration.ranges.items():
        statistics = observed.statistics
        if not name.endswith(".weight"):
            site = name.removesuffix(".input")
            numbers = [f"{statistics[key]:.5g}" for key in ("p50", "p99.9", "max", "amax")]
            rows.append([site, *numbers, f"{statistics['saturating']:.2%}"])
        if statistics["nonfinite"]:
            warnings.append(
                f"warning: {name} held {statistics['nonfinite']} NaN or Inf values, which count in no range"
            )
    return "\n".join([table(["input of, or cache", "p50", "p99.9", "max", "amax", "above"], rows), *warnings])
