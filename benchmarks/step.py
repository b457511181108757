"""An emulated FP8 training step against the BF16 step, on Megatron-Core: `python benchmarks/step.py`.

A Llama-like GPT of 8 layers, hidden size 512, 4 x 256 tokens, one rank: forward and backward through Megatron-Core's
schedule and DistributedDataParallel, with the weights quantised anew (as after an optimizer step) and the amaxes
settled. BF16 is the same model without fp8, whose linears are Megatron-Core's own: they round weight gradients to BF16
before they add them up, while FP8 weight gradients leave their GEMM in float32. Where the processor has AVX512-BF16 that
costs nothing (megatron_fp8/kernels/gemm.c); elsewhere a BF16 GEMM with a float32 result takes two to four times as long.
Goals: <= 1.25 x BF16 where scales are powers of two, <= 1.75 x where they are float32.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
from collections.abc import Callable, Iterator
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

BATCH, SEQUENCE = 4, 256
GOALS = {"rowwise": 1.25, "blockwise": 1.25, "mxfp8": 1.25, "tensorwise": 1.75, "delayed": 1.75}
SITES_PER_LAYER, GEMMS_PER_SITE = 4, 3


@dataclass
class Contender:
    """A model and its step."""

    model: Any
    loss: float = math.nan

    def step(self) -> None:
        """Zero the gradient buffer, forward, backward, finalize."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.model.zero_grad_buffer()
        results = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=batches(),
            model=self.model,
            num_microbatches=1,
            seq_length=SEQUENCE,
            micro_batch_size=BATCH,
            forward_only=False,
        )
        self.loss = float(results[0]["loss"])

    def gradient_norm(self) -> float:
        """Of the float32 gradients in DistributedDataParallel's buffer."""
        return math.sqrt(sum(float(p.main_grad.double().square().sum()) for p in self.model.parameters()))


def build(name: str) -> Contender:
    """The model with the recipe of this name, or in 'bf16'; the same initial weights for all."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    model = small_gpt(name if name in GOALS else None, SEQUENCE)
    config = model.config
    config.finalize_model_grads_func = finalize_model_grads
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    return Contender(DistributedDataParallel(config, ddp, model))


def batches() -> Iterator[dict[str, torch.Tensor]]:
    """One microbatch of random tokens, the same every time."""
    tokens = torch.randint(VOCAB, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(2))
    positions = torch.arange(SEQUENCE).expand(BATCH, -1)
    yield {"input": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous(), "positions": positions}


def forward(data: Iterator[dict[str, torch.Tensor]], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
    """Megatron-Core's forward_step_func."""
    batch = next(data)
    losses = model(batch["input"], batch["positions"], None, labels=batch["labels"])
    return losses, partial(mean_loss)


def mean_loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(loss for backward, what is reported)."""
    loss = losses.float().mean()
    return loss, {"loss": loss.detach()}


def check(contenders: dict[str, Contender]) -> None:
    """The gate: every FP8 step multiplied in FP8 where it should, and agrees with BF16. No time before this."""
    from megatron_fp8.mcore.iteration import iteration_counts

    bf16 = contenders["bf16"]
    bf16.step()
    norm = bf16.gradient_norm()
    for name, contender in contenders.items():
        contender.step()
        assert math.isfinite(contender.loss), f"{name}: loss {contender.loss}"
        if name not in GOALS:
            continue
        counts, expected = iteration_counts(), LAYERS * SITES_PER_LAYER * GEMMS_PER_SITE
        assert counts["fp8_gemms"] == expected, (
            f"{name}: {counts['fp8_gemms']} FP8 GEMMs, expected {expected}"
        )
        assert counts["nonfinite"] == 0, f"{name}: {counts['nonfinite']} non-finite values"
        assert contender.loss != bf16.loss, f"{name}: the loss is BF16's to the bit"
        assert abs(contender.loss - bf16.loss) < 0.01 * bf16.loss, (
            f"{name}: {contender.loss}, BF16 {bf16.loss}"
        )
        apart = abs(contender.gradient_norm() / norm - 1)
        assert apart < 0.05, f"{name}: gradient norm {apart:.1%} from BF16's"


def profile(contender: Contender, rows: int) -> str:
    """Where one step's time goes, by operator."""
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profiler:
        contender.step()
    return profiler.key_averages().table(
        sort_by="self_cpu_time_total", row_limit=rows, max_name_column_width=40
    )


def main() -> int:
    """Gate, time, print; exit code 1 where a goal is missed."""
    parser = argument_parser((__doc__ or "").splitlines()[0], repetitions=9)
    parser.add_argument("--recipes", nargs="+", default=list(GOALS), choices=list(GOALS))
    parser.add_argument(
        "--profile", choices=["bf16", *GOALS], help="print where one step's time goes, and stop"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_memory()
    clock, measured = clock_of(args)
    mcore.install()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    names = ["bf16", *args.recipes] if args.profile is None else list(dict.fromkeys(["bf16", args.profile]))
    contenders = {name: build(name) for name in names}
    check(contenders)
    if args.profile:
        print(profile(contenders[args.profile], rows=30))
        return 0
    record = environment(["megatron-core"])
    record["measured"] = measured
    print(describe(record), flush=True)
    times = interleave(
        {name: c.step for name, c in contenders.items()}, args.repetitions, warmup=1, clock=clock
    )
    rows: list[list[str]] = []
    data: list[dict[str, Any]] = []
    missed = False
    for name, timing in times.items():
        ratio, spread = timing.ratio_to(times["bf16"])
        goal = GOALS.get(name)
        missed |= goal is not None and ratio > goal
        verdict = "" if goal is None else f"<= {goal:g} {'met' if ratio <= goal else 'MISSED'}"
        rows.append([name, f"{timing.median * 1e3:.0f}", f"{ratio:.2f}", f"{spread:.0%}", verdict])
        data.append(
            {
                "recipe": name,
                "seconds": timing.seconds,
                "loss": contenders[name].loss,
                "ratio": ratio,
                "spread": spread,
                "goal": goal,
            }
        )
    body = table(["step", "ms", "x bf16", "spread", "goal"], rows)
    print(body)
    if args.write:
        write_results("step", "A training step on CPU, FP8 against BF16", command_line(), record, body, data)
    tokens = BATCH * SEQUENCE / statistics.median(times["bf16"].seconds)
    print(f"BF16: {tokens:.0f} tokens/s")
    dist.destroy_process_group()
    return int(missed)


if __name__ == "__main__":
    raise SystemExit(main())
