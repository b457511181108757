"""Inference in FP8 against BF16 on this CPU: latency, throughput and memory: `python benchmarks/inference.py`.

A Llama-like GPT of 8 layers, hidden size 512, on Megatron-Core with a KV cache, one rank:

* prefill: a prompt of 256 tokens at once; decode: one token after it, for 1 and for 8 sequences;
* memory: the bytes of all parameters and buffers, each storage once, and of the linears of the layers alone.

The gate before any time: logits are, byte for byte, those of the training forward of the same recipe; with static scales,
which no training has, they are within twice the distance of the dynamic ones from BF16. A CPU has no FP8 units: codes are
decoded in every product, and a decode step decodes every weight to use it once. What is saved here is memory.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
# Megatron-Core jits small functions, which would need a C++ compiler.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

from benchmarks.common import (
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
from benchmarks.small_gpt import LAYERS, VOCAB, small_gpt
from megatron_fp8 import mcore

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

    model = small_gpt(None if name == "bf16" else name.partition(",")[0], PROMPT + 1)
    ids = tokens(2, PROMPT)
    linears = [m for m in model.modules() if hasattr(type(m), "fp8_site")]
    assert len(linears) == LAYERS * 4, f"{len(linears)} linears"
    calibration = calibrate(model, [ids], partial(forward, model)) if name != "bf16" else None
    if name == "delayed":
        assert calibration is not None
        calibration.fill_history(model)
    model.train()
    trained = forward(model, ids).detach()
    if name == "bf16":
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
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_memory()
    clock, measured = clock_of(args)
    mcore.install()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    contenders, logits = {}, None
    for name in CONTENDERS:
        contenders[name], found = make_ready(name, logits)
        logits = found if logits is None else logits
    record = environment(["megatron-core"])
    record["measured"] = measured
    print(describe(record), flush=True)
    runs = {"prefill": {name: c.prefill for name, c in contenders.items()}}
    for batch in BATCHES:
        runs[f"decode {batch}"] = {name: partial(c.decode, batch) for name, c in contenders.items()}
    times = {what: interleave(each, args.repetitions, warmup=2, clock=clock) for what, each in runs.items()}
    rows: list[list[str]] = []
    data: list[dict[str, Any]] = []
    for name, contender in contenders.items():
        row = [name, f"{contender.linears / 2**20:.2f}", f"{contender.total / 2**20:.2f}"]
        entry: dict[str, Any] = {
            "contender": name,
            "linear_bytes": contender.linears,
            "model_bytes": contender.total,
        }
        for what, timing in times.items():
            ratio, spread = timing[name].ratio_to(timing["bf16"])
            count = {"prefill": PROMPT, "decode 1": 1, "decode 8": 8}[what]
            rate = count / timing[name].median
            row.append(f"{timing[name].median * 1e3:.1f} ({ratio:.2f}x, {rate:.0f}/s)")
            entry[what] = {
                "seconds": timing[name].seconds,
                "ratio": ratio,
                "spread": spread,
                "tokens_per_s": rate,
            }
        rows.append(row)
        data.append(entry)
    header = ["inference", "linears MiB", "model MiB", "prefill 256, ms", "decode 1, ms", "decode 8, ms"]
    body = table(header, rows)
    print(body)
    if args.write:
        note = "Median time (over BF16's in the same round, tokens a second). Bytes are counted storages."
        write_results(
            "inference",
            "Inference on CPU, FP8 against BF16",
            command_line(),
            record,
            f"{note}\n\n{body}",
            data,
        )
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
