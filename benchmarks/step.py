"""An emulated FP8 training step against the BF16 step, on Megatron-Core: `python benchmarks/step.py`.

Blocks of a Llama-like GPT, 4 x 256 tokens, one rank: forward and backward through Megatron-Core's schedule and
DistributedDataParallel, with the weights quantized anew (as after an optimizer step) and the amaxes settled. BF16
is the same model without fp8, whose linears are Megatron-Core's own: they round weight gradients to BF16 before
they add them up, while FP8 weight gradients are added in float32. Wider models have fewer layers, so that all
contenders fit into memory at once. Without instructions for BF16 torch's products of it take float32, as in
`megatron-fp8 train`, on both sides (kernels/torch_products.py). `ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16` in the
environment keeps both sides from AMX.
Goals: <= 1.08 x BF16 in every recipe; 1.20 at hidden size 256; for nvfp4 1.35 at hidden size 512 and above.
"""

from __future__ import annotations

import argparse
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
from benchmarks.one_rank import one_rank
from benchmarks.small_gpt import VOCAB, small_gpt
from megatron_fp8.kernels.cpu import emulation
from megatron_fp8.kernels.torch_products import replace_slow

BATCH, SEQUENCE = 4, 256
RECIPES = ("rowwise", "blockwise", "mxfp8", "tensorwise", "delayed", "nvfp4")
NAMES = {emulation.AMX: "step", emulation.AVX512: "step_avx512", emulation.FLOAT32: "step_avx2"}
"""Inner loop of the products -> the name of its results."""
LAYERS_OF = {256: 8, 512: 8, 1024: 4, 2048: 2}
"""Hidden size -> layers."""
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


def goal_of(name: str, hidden: int) -> float | None:
    """The most that a step may take, as a multiple of BF16's."""
    if name in ("bf16", "nvfp4"):
        return 1.35 if name == "nvfp4" and hidden >= 512 else None
    return 1.20 if hidden < 512 else 1.08


def build(name: str, hidden: int = 512) -> Contender:
    """The model with the recipe of this name, or in 'bf16'; the same initial weights for all."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    recipe = name if name in RECIPES else None
    sizes = {"layers": LAYERS_OF[hidden], "hidden": hidden, "heads": hidden // 64, "ffn": hidden * 11 // 4}
    model = small_gpt(recipe, SEQUENCE, **sizes)
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


def check(contenders: dict[str, Contender], hidden: int) -> None:
    """The gate: every FP8 step multiplied in FP8 where it should, and agrees with BF16. No time before this."""
    from megatron_fp8.mcore.iteration import iteration_counts

    bf16 = contenders["bf16"]
    bf16.step()
    norm = bf16.gradient_norm()
    for name, contender in contenders.items():
        contender.step()
        assert math.isfinite(contender.loss), f"{name}: loss {contender.loss}"
        if name not in RECIPES:
            continue
        counts, expected = iteration_counts(), LAYERS_OF[hidden] * SITES_PER_LAYER * GEMMS_PER_SITE
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


def measure(hidden: int, names: list[str], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Gate, then time, the contenders of one hidden size; a result for each."""
    contenders = {name: build(name, hidden) for name in names}
    check(contenders, hidden)
    steps = {name: contender.step for name, contender in contenders.items()}
    times = interleave(steps, args.repetitions, warmup=1, clock=clock_of(args)[0])
    results = []
    for name, timing in times.items():
        ratio, spread = timing.ratio_to(times["bf16"])
        results.append(
            {
                "hidden": hidden,
                "recipe": name,
                "seconds": timing.seconds,
                "loss": contenders[name].loss,
                "ratio": ratio,
                "spread": spread,
                "goal": goal_of(name, hidden),
            }
        )
    return results


def row_of(result: dict[str, Any]) -> list[str]:
    """One line of the table."""
    goal, milliseconds = result["goal"], statistics.median(result["seconds"]) * 1e3
    verdict = "" if goal is None else f"<= {goal:.2f} {'met' if result['ratio'] <= goal else 'MISSED'}"
    shown = [f"{milliseconds:.0f}", f"{result['ratio']:.2f}", f"{result['spread']:.0%}"]
    return [str(result["hidden"]), result["recipe"], *shown, verdict]


def main() -> int:
    """Gate, time, print; exit code 1 where a goal is missed."""
    parser = argument_parser((__doc__ or "").splitlines()[0], repetitions=9)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=RECIPES)
    parser.add_argument(
        "--hidden", nargs="+", type=int, default=list(LAYERS_OF), choices=list(LAYERS_OF), help="hidden sizes"
    )
    parser.add_argument(
        "--profile", choices=["bf16", *RECIPES], help="print where one step's time goes, and stop"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    replace_slow()  # as train does: the baseline is what a user of BF16 gets
    keep_memory()
    if args.profile:
        with one_rank():
            contenders = {name: build(name, args.hidden[0]) for name in dict.fromkeys(("bf16", args.profile))}
            check(contenders, args.hidden[0])
            print(profile(contenders[args.profile], rows=30))
        return 0
    record = environment(["megatron-core"])
    record["measured"] = clock_of(args)[1]
    record["amx"] = emulation.inner_loop() == emulation.AMX
    print(describe(record), "with AMX" if record["amx"] else "without AMX", flush=True)
    data: list[dict[str, Any]] = []
    with one_rank():
        for hidden in args.hidden:
            data += measure(hidden, ["bf16", *args.recipes], args)
            print(f"hidden {hidden} done", flush=True)
    body = table(["hidden", "step", "ms", "x bf16", "spread", "goal"], [row_of(each) for each in data])
    print(body)
    if args.write:
        loop = emulation.inner_loop()
        assert loop is not None, "FP8's products need a C compiler"
        name = NAMES[loop]
        write_results(name, "A training step on CPU, FP8 against BF16", command_line(), record, body, data)
    return int(any(each["goal"] is not None and each["ratio"] > each["goal"] for each in data))


if __name__ == "__main__":
    raise SystemExit(main())
