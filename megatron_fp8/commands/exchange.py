"""`megatron-fp8 export` and `megatron-fp8 import`: command lines around exporter and importer."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from ..huggingface.formats import FORMATS
from .line import EXIT_DONE, CommandParser, refuse

EXPORT = """\
Write a checkpoint as a directory that transformers, vLLM and compressed-tensors read.

  megatron-fp8 export runs/mine out/mine                                  in the model's own dtype, BF16
  megatron-fp8 export runs/mine out/mine-fp8 --format=fp8-channel         FP8, a scale for every output row
  megatron-fp8 export runs/mine out/mine-fp8 --format=fp8-tensor --calibration=runs/mine/calibration
                                                                          FP8, a scale per tensor, static input scales
  megatron-fp8 export runs/mine out/mine-fp8 --format=fp8-block           FP8, 128x128 blocks, as DeepSeek-V3

CHECKPOINT is a folder such as RUN_DIR/checkpoints/iter_0000100, a folder of checkpoints, or a run's folder (then: its
latest), of any parallel layout. OUT must be new. Models: Llama, Qwen2 and Qwen3 (dense).

FP8 is for the linears of the layers; embedding and output head stay in high precision, and so do layers that training
kept in BF16. Codes and scales are made as in training: an FP8 run has seen these weights.

An imported model keeps its names: --like=DIR takes over the further fields of DIR's config.json (positions, special
tokens), its generation_config.json and its tokenizer.
"""

IMPORT = """\
Make a run of a directory of Hugging Face's form, to train on from: BF16, or FP8 as compressed-tensors (per tensor, per
channel) or DeepSeek (128x128 blocks) write it.

  megatron-fp8 import Llama-3.2-1B runs/llama
  megatron-fp8 train --config=runs/llama/config.yaml --model.fp8=hybrid --data my_text.txt --optimizer.lr=1e-5
  megatron-fp8 export runs/llama out/llama-fp8 --format=fp8-channel --like=Llama-3.2-1B

RUN_DIR must be new. It gets config.yaml and a checkpoint of iteration 0, which any parallel layout reads. FP8 weights
become codes times scales in float32: nothing is rounded before the optimizer's float32 masters are made.
"""


def export_main(arguments: list[str]) -> int:
    """`megatron-fp8 export`; 0, or 2 for bad input."""
    parser = CommandParser("export", EXPORT)
    parser.add_argument("checkpoint", metavar="CHECKPOINT")
    parser.add_argument("out", metavar="OUT")
    parser.add_argument(
        "--format", choices=("bf16", *FORMATS), default="bf16", help="bf16 is the model's own dtype"
    )
    parser.add_argument("--calibration", metavar="DIR", help="input scales: of megatron-fp8 calibrate")
    parser.add_argument(
        "--ignore", metavar="GLOB", action="append", default=[], help="linears to leave in BF16"
    )
    parser.add_argument("--quantize-all", action="store_true", help="also layers that training kept in BF16")
    parser.add_argument("--like", metavar="DIR", help="the directory that the model was imported from")
    parser.add_argument(
        "--config", metavar="FILE", help="config.yaml of the run, if the checkpoint does not have it"
    )
    parser.add_argument("--vocab-size", type=int, metavar="N", help="rows of the vocabulary without padding")
    parser.add_argument("--max-position-embeddings", type=int, metavar="N", help="default: train.seq_length")
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of a file (default: 5GB)")
    return _run(parser, arguments, _export)


def import_main(arguments: list[str]) -> int:
    """`megatron-fp8 import`; 0, or 2 for bad input."""
    parser = CommandParser("import", IMPORT)
    parser.add_argument("source", metavar="DIR")
    parser.add_argument("run_dir", metavar="RUN_DIR")
    parser.add_argument("--tokenizer", metavar="FILE", help="a tokenizer.json, if DIR has none")
    return _run(parser, arguments, _import)


def _run(parser: CommandParser, arguments: list[str], work: Callable[[argparse.Namespace], None]) -> int:
    try:
        work(parser.parse_args(arguments))
    except ValueError as error:
        return refuse(error, debug="--debug" in arguments)
    return EXIT_DONE


def _export(options: argparse.Namespace) -> None:
    from ..huggingface.exporter import Wanted, export
    from ..huggingface.source import open_source
    from ..inference.calibration import load_calibration

    form = FORMATS.get(options.format)
    if options.calibration and (form is None or form.strategy is None):
        raise ValueError(
            f"--calibration with --format={options.format}: static input scales are of fp8-tensor and fp8-channel."
        )
    for name in ("vocab_size", "max_position_embeddings"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')}={value} must be at least 1.")
    wanted = Wanted(
        form=form,
        ignore=tuple(options.ignore),
        follow_training=not options.quantize_all,
        calibration=load_calibration(options.calibration) if options.calibration else None,
        like=Path(options.like) if options.like else None,
        vocab_size=options.vocab_size,
        positions=options.max_position_embeddings,
        shard_bytes=size_in_bytes(options.max_shard_size),
    )
    run = _read_config(Path(options.config)) if options.config else None
    source = open_source(Path(options.checkpoint), run)
    done = export(source, Path(options.out), wanted, _shown)
    what = (
        f"{done.quantised} linears in FP8 ({options.format})" if form else f"in {done.config['torch_dtype']}"
    )
    kept = f", {len(done.kept)} kept in {done.config['torch_dtype']}" if done.kept else ""
    print(
        f"{done.config['architectures'][0]}, {what}{kept}: {options.out}, {len(done.files)} file(s) of tensors"
    )
    for note in source.notes:
        print(note)


def _import(options: argparse.Namespace) -> None:
    from ..huggingface.importer import import_directory

    tokenizer = Path(options.tokenizer) if options.tokenizer else None
    if tokenizer and not tokenizer.is_file():
        raise ValueError(f"--tokenizer={str(tokenizer)!r} is not a file: give a tokenizer.json.")
    done = import_directory(Path(options.source), Path(options.run_dir), _shown, tokenizer)
    fp8 = f", {done.fp8_weights} FP8 weights decoded" if done.fp8_weights else ""
    padding = f"; vocabulary padded by {done.padding} rows" if done.padding else ""
    print(f"{done.architecture}, {done.parameters:,} parameters{fp8}{padding}: {options.run_dir}")
    if not done.has_tokenizer:
        print("no tokenizer: train and generate need --data.tokenizer=FILE, or data that is tokens already")
    print(f"next: megatron-fp8 train --config={options.run_dir}/config.yaml --data FILE")


def _read_config(path: Path) -> dict[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"--config={str(path)!r} cannot be read: {error}.") from error
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        raise ValueError(f"--config={str(path)!r} has no section 'model': give the config.yaml of a run.")
    return content


def size_in_bytes(text: str) -> int:
    """'5GB', '200 MB', '1GiB' or a number as bytes. Raises ValueError for anything else, and for 0."""
    units = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
    match = re.fullmatch(r"(\d+) ?([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in units or not int(match[1]):
        raise ValueError(f"--max-shard-size={text!r} must be a size such as 5GB or 500MB.")
    return int(match[1]) * units[match[2].upper()]


def _shown(items: Iterable[Any], count: int) -> Iterator[Any]:
    """The items, with a bar on a terminal while they pass."""
    from rich.progress import track

    if not sys.stderr.isatty():
        return iter(items)
    from rich.console import Console

    return iter(track(items, total=count, console=Console(stderr=True), description="tensors"))
