"""`megatron-fp8 import`: a directory of Hugging Face's form as a run to train on from."""

from __future__ import annotations

import argparse
from pathlib import Path

from .line import CommandParser, run, tensors_shown

HELP = """\
Make a run of a directory of Hugging Face's form, to train on from: BF16, or FP8 as compressed-tensors (per tensor, per
channel) or DeepSeek (128x128 blocks) write it.

  megatron-fp8 import Llama-3.2-1B runs/llama
  megatron-fp8 train --config=runs/llama/config.yaml --model.fp8=hybrid --data my_text.txt --optimizer.lr=1e-5
  megatron-fp8 export runs/llama out/llama-fp8 --format=fp8-channel --like=Llama-3.2-1B

RUN_DIR must be new. It gets config.yaml and a checkpoint of iteration 0, which any parallel layout reads. FP8 weights
become codes times scales in float32: nothing is rounded before the optimizer's float32 masters are made.
"""


def main(arguments: list[str]) -> int:
    """`megatron-fp8 import`; 0, or 2 for bad input."""
    parser = CommandParser("import", HELP)
    parser.add_argument("source", metavar="DIR")
    parser.add_argument("run_dir", metavar="RUN_DIR")
    parser.add_argument("--tokenizer", metavar="FILE", help="a tokenizer.json, if DIR has none")
    return run(parser, arguments, _import)


def _import(options: argparse.Namespace) -> None:
    from ..huggingface.importer import import_directory

    tokenizer = Path(options.tokenizer) if options.tokenizer else None
    if tokenizer and not tokenizer.is_file():
        raise ValueError(f"--tokenizer={str(tokenizer)!r} is not a file: give a tokenizer.json.")
    done = import_directory(Path(options.source), Path(options.run_dir), tensors_shown, tokenizer)
    kept = f" ({done.kept_scales} keep their scales beside them)" if done.kept_scales else ""
    fp8 = f", {done.fp8_weights} FP8 weights decoded{kept}" if done.fp8_weights else ""
    padding = f"; vocabulary padded by {done.padding} rows" if done.padding else ""
    print(f"{done.architecture}, {done.parameters:,} parameters{fp8}{padding}: {options.run_dir}")
    if not done.has_tokenizer:
        print("no tokenizer: train and generate need --data.tokenizer=FILE, or data that is tokens already")
    print(f"next: megatron-fp8 train --config={options.run_dir}/config.yaml --data FILE")
