"""`megatron-fp8 import`: a Hugging Face directory as a run for further training.

Make a run of a directory of Hugging Face's form, to train on from: BF16, FP8 as compressed-tensors (per tensor, per
channel) or DeepSeek (128x128 blocks) write it, or MXFP8 and NVFP4 as compressed-tensors and modelopt do.

  megatron-fp8 import Llama-3.2-1B runs/llama
  megatron-fp8 train --config=runs/llama/config.yaml --model.fp8=hybrid --data my_text.txt --optimizer.lr=1e-5
  megatron-fp8 export runs/llama out/llama-fp8 --format=fp8-channel --like=Llama-3.2-1B
  megatron-fp8 launch --ranks 8 import DeepSeek-V3 runs/deepseek        eight processes, an eighth of the tensors each

RUN_DIR must be new. It gets config.yaml and a checkpoint of iteration 0, which any parallel layout reads, however many
ranks made it. Quantized weights become codes times scales in float32: nothing is rounded before the optimizer's float32
masters are made.

Exit codes: 0 done; 1 failed; 2 bad input.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from ..files.resource_limits import usable_cores
from ..files.terminal import printable
from .cli_common import CommandParser, run_command, with_progress

_LONGEST = timedelta(hours=12)
"""Longest wait for a rank: it reads hundreds of GB, perhaps from a slower disk."""


def main(arguments: list[str]) -> int:
    """Run `megatron-fp8 import`; return 0, or 2 for bad input."""
    parser = CommandParser("import", __doc__)
    parser.add_argument("source", metavar="DIR", help="the model's directory")
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the folder of the new run")
    parser.add_argument("--tokenizer", metavar="FILE", help="a tokenizer.json, if DIR has none")
    try:
        return run_command(parser, arguments, _prepare)
    except _Terminated:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)  # the sender expects an end by this signal
        raise


def _prepare(options: argparse.Namespace, _: list[str], launch: Any) -> Callable[[], None]:
    tokenizer = Path(options.tokenizer) if options.tokenizer else None
    if tokenizer and not tokenizer.is_file():
        raise ValueError(f"--tokenizer={str(tokenizer)!r} is not a file: give a tokenizer.json.")
    source = Path(options.source)
    return partial(_import, source, Path(options.run_dir), tokenizer, _sharing(launch, source, options))


def _sharing(launch: Any, source: Path, options: argparse.Namespace) -> Any:
    """The ranks that share the import. Raises ValueError if their directories differ."""
    import torch
    import torch.distributed as dist

    from ..files.checkpoint import digest
    from ..huggingface.directory import CONFIG, INDEX
    from ..huggingface.import_plan import Sharing

    if launch.world_size == 1:
        return Sharing()
    signal.signal(signal.SIGTERM, _end)
    torch.set_num_threads(max(1, usable_cores() // launch.local_world_size))
    digests = {name: digest(source / name) if (source / name).is_file() else None for name in (CONFIG, INDEX)}
    launch.barrier.agree("the import", {"DIR": options.source, "RUN_DIR": options.run_dir, **digests})
    store = launch.barrier.group_store(_LONGEST.total_seconds())
    dist.init_process_group(
        "gloo", rank=launch.rank, world_size=launch.world_size, store=store, timeout=_LONGEST
    )
    return Sharing(dist.PrefixStore("import", store))


class _Terminated(BaseException):
    """SIGTERM from a launcher: an exception, so that incomplete output is removed."""


def _end(*_: object) -> None:
    raise _Terminated


def _import(source: Path, run_dir: Path, tokenizer: Path | None, sharing: Any) -> None:
    from ..huggingface.importer import import_directory

    progress = with_progress if sharing.rank == 0 else lambda names, _: names
    done = import_directory(source, run_dir, progress, tokenizer, sharing)
    if sharing.rank != 0:
        return
    kept_scales = f" ({done.kept_scales} keep their scales beside them)" if done.kept_scales else ""
    fp8 = f", {done.fp8_weights} FP8 weights decoded{kept_scales}" if done.fp8_weights else ""
    fp4 = f", {done.fp4_weights} NVFP4 weights decoded" if done.fp4_weights else ""
    padding = f"; vocabulary padded by {done.padding} rows" if done.padding else ""
    print(f"{done.architecture}, {done.parameters:,} parameters{fp8}{fp4}{padding}: {run_dir}")
    for note in done.notes:
        print(printable(note))
    if not done.has_tokenizer:
        print(
            "no tokenizer: train and generate need --data.tokenizer=FILE (bytes, if that is what the model was trained"
            " on), or data that is tokens already"
        )
    print(f"next: megatron-fp8 train --config={run_dir}/config.yaml --data FILE")
