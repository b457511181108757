"""`megatron-fp8 export`: a checkpoint in Hugging Face's format.

Write a checkpoint as a directory that transformers, vLLM and compressed-tensors read.

  megatron-fp8 export runs/mine out/mine                                  in the model's own dtype, BF16
  megatron-fp8 export runs/mine out/mine-fp8 --format=fp8-channel         FP8, a scale for every output row
  megatron-fp8 export runs/mine out/mine-fp8 --format=fp8-tensor --calibration=runs/mine/calibration
  megatron-fp8 export ... --format=fp8-channel --calibration=DIR --kv-cache=fp8       with scales of an FP8 KV cache
  megatron-fp8 export runs/mine out/mine-fp8 --format=fp8-block           FP8, 128x128 blocks, as DeepSeek-V3
  megatron-fp8 export runs/mine out/mine-fp4 --format=nvfp4               4-bit weights; inputs too with --calibration

CHECKPOINT is a run's folder or a checkpoint, of any parallel layout. OUT must be new. Models: Llama, Mistral, Qwen2,
Qwen3, Mixtral, Qwen3-MoE and DeepSeek-V3.

FP8, MXFP8 and NVFP4 are for the linears of the layers; embedding and output head stay in high precision, and so do
layers that training kept in BF16. Codes and scales are made as in training: these are the weights that such a run was
trained with.

An imported model keeps its names: --like=DIR takes over the further fields of DIR's config.json (positions, special
tokens), its generation_config.json and its tokenizer.

Exit codes: 0 done; 1 failed; 2 bad input.
"""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path
from typing import Any

from ..files.atomic_io import as_value_error
from ..files.terminal import printable
from ..files.user_paths import is_run
from ..huggingface import QUANTIZED_FORMATS
from .cli_common import CommandParser, run, with_progress


def main(arguments: list[str]) -> int:
    """Run `megatron-fp8 export`; return 0, or 2 for bad input."""
    parser = CommandParser("export", __doc__)
    add = parser.add_argument
    add("checkpoint", metavar="CHECKPOINT", help="a run's folder, or a checkpoint")
    add("out", metavar="OUT", help="the directory to write")
    formats = ("bf16", *QUANTIZED_FORMATS)
    add(
        "--format",
        choices=formats,
        default="bf16",
        metavar="FORMAT",
        help=f"{', '.join(formats)} (the model's dtype: bf16)",
    )
    add(
        "--calibration",
        metavar="DIR",
        help="static input scales of megatron-fp8 calibrate; with --kv-cache too",
    )
    add(
        "--kv-cache",
        choices=["fp8"],
        help="write --calibration's scales of keys and values, for an FP8 cache",
    )
    add("--ignore", metavar="GLOB", action="append", default=[], help="linears to leave in BF16")
    add("--quantize-all", action="store_true", help="also layers that training kept in BF16")
    add("--like", metavar="DIR", help="the directory that the model was imported from")
    add("--config", metavar="FILE", help="config.yaml of the run, if the checkpoint does not have it")
    add("--vocab-size", type=int, metavar="N", help="rows of the vocabulary without padding")
    add("--max-position-embeddings", type=int, metavar="N", help="default: YaRN's, else seq_length")
    add("--max-shard-size", default="5GB", metavar="SIZE", help="of a file (default: 5GB)")
    return run(parser, arguments, _export)


def _export(options: argparse.Namespace) -> None:
    from ..huggingface.checkpoint_reader import open_source
    from ..huggingface.exporter import export
    from ..huggingface.formats import FORMATS
    from ..huggingface.weight_plan import ExportOptions
    from ..inference.calibration import load_calibration

    form = FORMATS.get(options.format)
    if options.kv_cache and (form is None or not options.calibration):
        raise ValueError(
            "--kv-cache=fp8 needs a quantized --format, and --calibration=DIR of megatron-fp8 calibrate."
        )
    if options.calibration and not options.kv_cache and (form is None or form.input_scale is None):
        able = ", ".join(name for name, other in FORMATS.items() if other.input_scale is not None)
        raise ValueError(f"--calibration with --format={options.format}: static input scales are of {able}.")
    for name in ("vocab_size", "max_position_embeddings"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')}={value} must be at least 1.")
    request = ExportOptions(
        form=form,
        ignore=tuple(options.ignore),
        follow_training=not options.quantize_all,
        calibration=load_calibration(options.calibration) if options.calibration else None,
        kv_cache=options.kv_cache is not None,
        like=Path(options.like) if options.like else None,
        vocab_size=options.vocab_size,
        positions=options.max_position_embeddings,
        shard_bytes=size_in_bytes(options.max_shard_size),
    )
    run_config = _read_config(Path(options.config)) if options.config else None
    source = open_source(Path(options.checkpoint), run_config)
    done = export(source, Path(options.out), request, with_progress)
    numbers = "NVFP4" if form and form.tensor_scale else "FP8"
    dtype = done.config["torch_dtype"]
    what = f"{done.quantized} linears in {numbers} ({options.format})" if form else f"in {dtype}"
    unconverted = f", {len(done.kept)} kept in {dtype}" if done.kept else ""
    print(
        f"{done.config['architectures'][0]}, {what}{unconverted}: {options.out}, {len(done.files)} file(s) of tensors"
    )
    if not any((Path(options.out) / name).exists() for name in ("tokenizer.json", "tokenizer.model")):
        print(
            "no tokenizer: every byte is a token (ids: list(text.encode())), or it was imported without one"
        )
    for note in (*done.notes, *source.notes):
        print(printable(note))
    if form and is_run(Path(options.checkpoint)):  # parity takes a run, not one of its checkpoints
        print(f"next: megatron-fp8 parity {shlex.quote(options.checkpoint)} {shlex.quote(options.out)}")
    elif not form:
        print(f"next, in Python: transformers.AutoModelForCausalLM.from_pretrained({options.out!r})")


def _read_config(path: Path) -> dict[str, Any]:
    from ..files.strict_yaml import read_yaml

    with as_value_error(
        f"--config={str(path)!r} cannot be read", ": give another file.", (OSError, ValueError)
    ):
        content = read_yaml(path)
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
