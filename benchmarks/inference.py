"""Inference in FP8 against BF16 on this CPU: latency, throughput and memory: `python benchmarks/inference.py`.

A Llama-like GPT on Megatron-Core with a KV cache, one rank, 6 layers whose largest linears are 2048 x 11264 and
5632 x 2048, so that its weights come from memory:

* prefill: a prompt of 256 tokens at once; decode: one token after it, for 1 and for 8 sequences;
* memory: the bytes of all parameters and buffers, each storage once, and of the linears of the layers alone;
* BF16, to which all is compared.

The gate before any time: logits are, byte for byte, those of the training forward of the same recipe; with static scales,
which no training has, they are within twice the distance of the dynamic ones from BF16.

Then linears alone, against torchao and ggml too (inference_linears.py).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
# Megatron-Core jits small functions, which would need a C++ compiler.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

from benchmarks import inference_linears
from benchmarks.common import (
    Timing,
    argument_parser,
    clock_of,
    command_line,
    describe,
    environment,
    interleave,
    keep_memory,
    table,
    write_results,
)
from benchmarks.one_rank import one_rank
from benchmarks.small_gpt import VOCAB, small_gpt

SIZES = {"layers": 6, "hidden": 2048, "heads": 16, "ffn": 5632}
PROMPT, BATCHES = 256, (1, 8)
RECIPES = ("tensorwise", "delayed", "rowwise", "blockwise", "mxfp8")
CONTENDERS = ("bf16", *RECIPES, "tensorwise, static")


@dataclass
class Contender:
    """A model ready for inference, its bytes, and decoders that hold a prompt each."""

    model: Any
    total: int
    linears: int
    decoders: dict[int, Any]

    def prefill(self) -> torch.Tensor:
        """A prompt from the start; logits of its last token."""
        decoder = self.decoders[1]
        decoder.reset()
        return decoder(tokens(1, PROMPT))

    def decode(self, batch: int) -> torch.Tensor:
        """One token for each sequence, after a prompt that is in the cache."""
        decoder = self.decoders[batch]
        decoder.context.sequence_len_offset = PROMPT
        return decoder(tokens(batch, 1))


def tokens(batch: int, length: int) -> torch.Tensor:
    """Random ids [batch, length], the same every time."""
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(2))


def forward(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits of all tokens, without a cache."""
    return model(ids, torch.arange(ids.shape[1]).expand_as(ids), None, runtime_gather_output=True)


def make_ready(name: str, bf16_logits: torch.Tensor | None) -> tuple[Contender, torch.Tensor]:
    """The contender, through the gate; and its logits."""
    from megatron_fp8.inference import model_bytes, prepare_for_inference, storage_bytes, tensors_of
    from megatron_fp8.inference.calibration import calibrate
    from megatron_fp8.mcore.generation import Decoder

    in_fp8 = not name.startswith("bf16")
    model = small_gpt(name.partition(",")[0] if in_fp8 else None, PROMPT + 1, **SIZES)
    ids = tokens(2, PROMPT)
    linears = [m for m in model.modules() if hasattr(type(m), "fp8_site")]
    assert len(linears) == SIZES["layers"] * 4, f"{len(linears)} linears"
    calibration = calibrate(model, [ids], partial(forward, model)) if in_fp8 else None
    if name == "delayed":
        assert calibration is not None
        calibration.fill_history(model)
    model.train()
    trained = forward(model, ids).detach()
    if not in_fp8:
        model.eval().requires_grad_(False)
    else:
        static = calibration if name.endswith("static") else None
        assert len(prepare_for_inference(model, calibration=static).fp8_inference.sites) == len(linears)
    with torch.no_grad():
        logits = forward(model, ids)
    if name.endswith("static"):
        assert bf16_logits is not None
        dynamic, found = (float((x - bf16_logits).norm()) for x in (trained, logits))
        assert 0 < found < 2 * dynamic, f"{name}: {found} from BF16, dynamic scales {dynamic}"
    else:
        assert torch.equal(logits, trained), f"{name}: not the training forward's logits"
    decoders = {batch: Decoder(model, batch, PROMPT + 1) for batch in BATCHES}
    for batch, decoder in decoders.items():
        decoder(tokens(batch, PROMPT))
    held = storage_bytes(tensor for linear in linears for tensor in tensors_of(linear))
    return Contender(model, model_bytes(model), held, decoders), logits


def main() -> int:
    """Gate, time, print."""
    parser = argument_parser((__doc__ or "").splitlines()[0], repetitions=15)
    parser.add_argument("--ggml", type=Path, help="folder of a build of ggml with shared libraries")
    parser.add_argument("--only", choices=("gpt", "linears"), help="one of the two tables")
    size = inference_linears.K, inference_linears.N, inference_linears.LAYERS
    parser.add_argument(
        "--size", nargs=3, type=int, metavar=("K", "N", "LAYERS"), default=size, help="of the linears"
    )
    args = parser.parse_args()
    inference_linears.K, inference_linears.N, inference_linears.LAYERS = args.size
    torch.set_num_threads(args.threads)
    keep_memory()
    clock, measured = clock_of(args)
    record = environment(["megatron-core", "torchao"])
    record["measured"] = measured
    print(describe(record), flush=True)
    bodies, data = [], {}
    for name, compare in (("gpt", compare_gpt), ("linears", compare_linears)):
        if args.only in (None, name):
            body, data[name] = compare(args, clock)
            print(body, flush=True)
            bodies.append(body)
    if args.write:
        note = "Median time (over BF16's in the same round +- its interquartile range). Bytes are counted storages."
        title = "Inference on CPU, FP8 against BF16"
        write_results("inference", title, command_line(), record, "\n\n".join([note, *bodies]), data)
    return 0


@one_rank()
def compare_gpt(args: argparse.Namespace, clock: Callable[[], float]) -> tuple[str, list[dict[str, Any]]]:
    """Gate and times of the GPT: a table, and its data."""
    contenders, logits = {}, None
    for name in CONTENDERS:
        contenders[name], found = make_ready(name, logits)
        logits = found if logits is None else logits
    runs = {"prefill": {name: c.prefill for name, c in contenders.items()}}
    for batch in BATCHES:
        runs[f"decode {batch}"] = {name: partial(c.decode, batch) for name, c in contenders.items()}
    with torch.no_grad():
        times = {
            what: interleave(each, args.repetitions, warmup=2, clock=clock) for what, each in runs.items()
        }
    rows: list[list[str]] = []
    data: list[dict[str, Any]] = []
    for name, contender in contenders.items():
        entry: dict[str, Any] = {
            "contender": name,
            "linear_bytes": contender.linears,
            "model_bytes": contender.total,
        }
        row = [name, f"{contender.linears / 2**20:.1f}", f"{contender.total / 2**20:.1f}"]
        for what, timing in times.items():
            cell, entry[what] = told(timing[name], timing["bf16"])
            row.append(cell)
        rows.append(row)
        data.append(entry)
    header = ["GPT", "linears MiB", "model MiB", "prefill 256, ms", "decode 1, ms", "decode 8, ms"]
    return table(header, rows), data


def compare_linears(args: argparse.Namespace, clock: Callable[[], float]) -> tuple[str, list[dict[str, Any]]]:
    """Gate and times of linears alone: a table, and its data."""
    contenders = inference_linears.make()
    if args.ggml:
        contenders["ggml Q8_0"] = inference_linears.Ggml(args.ggml, args.threads)
    found: dict[str, dict[str, Any]] = {name: {} for name in contenders}
    rows: dict[str, list[str]] = {name: [name] for name in contenders}
    for tokens in inference_linears.TOKENS:
        x = inference_linears.activations(tokens)
        with torch.no_grad():
            runs = {name: partial(run, x) for name, run in contenders.items()}
            times = inference_linears.in_turns(runs, args.repetitions, clock)
        for name, timing in times.items():
            rounds = len(timing.seconds)
            same_rounds = Timing(times["torch BF16"].seconds[:rounds])
            cell, found[name][f"{tokens} tokens"] = told(timing, same_rounds, inference_linears.LAYERS)
            print(f"{tokens} tokens, {name}: {rounds} rounds, {cell}", flush=True)
            rows[name].append(cell)
    n, k = inference_linears.N, inference_linears.K
    header = [f"a linear of {k} x {n}", *(f"{tokens} tokens, ms" for tokens in inference_linears.TOKENS)]
    return table(header, list(rows.values())), [{"contender": name} | each for name, each in found.items()]


def told(timing: Timing, bf16: Timing, parts: int = 1) -> tuple[str, dict[str, Any]]:
    """A time for each of so many parts against BF16's: as a cell of a table, and as data."""
    ratio, spread = timing.ratio_to(bf16)
    entry = {"seconds": timing.seconds, "parts": parts, "ratio": ratio, "spread": spread}
    return f"{timing.median / parts * 1e3:.3g} ({ratio:.2f}x +- {spread:.0%})", entry


if __name__ == "__main__":
    raise SystemExit(main())
