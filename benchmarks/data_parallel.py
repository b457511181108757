"""How far apart are DP=1, 2 and 4 on the same tokens? `python -m benchmarks.data_parallel [--write]`

The small Llama-like GPT with the distributed optimizer, FP8 weights (fp8_param) and clipping that is always met, 30 steps
from each of 8 seeds, on one, two and four gloo ranks. Layouts differ in the order in which gradients are summed, and
training amplifies a last bit.

The yardstick is what BF16 shows between the same layouts. Like FP8's, its weight gradients are float32 products that are
added to the float32 buffer: Megatron-Core's gradient_accumulation_fusion, its default on GPUs, with that one kernel
written in torch here. Without it each microbatch's gradient is rounded to BF16 first, and a float32 sum of a few numbers
of 8 bits is exact in any order, so that nothing at all differs: 'bf16, rounded wgrad'.

apart         largest |difference of loss| of a layout to one rank; mean over seeds, at some steps
first step    the earliest step at which a layout's loss differs at all; median over seeds
final loss    difference of the mean loss of the last ten steps, with its sign; mean over seeds and layouts
"""

from __future__ import annotations

import argparse
import statistics
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from benchmarks.common import environment, table, write_results
from benchmarks.support.fp8_gpt import CLIP, DISTRIBUTED, RECIPES, TWO_WAY, fp8_config
from benchmarks.support.gpt import train
from benchmarks.support.ranks import Layout, RankPool, model_parallel

SEEDS, STEPS, SHOWN = range(1, 9), 30, (1, 3, 10, 30)
SHARED = {"reuse_grad_buf_for_mxfp8_param_ag": True}


def accumulate_wgrad(x: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
    """What Apex's wgrad_gemm_accum_fp32 does: main_grad [N, K] float32 += grad_output [M, N]^T @ x [M, K], BF16."""
    main_grad.addmm_(grad_output.float().t(), x.float())


def losses(name: str, seeds: list[int]) -> list[list[float]]:
    """A rank case: the losses of every seed's training."""
    from megatron.core.tensor_parallel import layers

    from megatron_fp8.mcore.spec import get_gpt_layer_fp8_spec

    recipe = name if name in RECIPES else None
    fused = name == "bf16"
    kernel = SimpleNamespace(wgrad_gemm_accum_fp32=accumulate_wgrad)
    patched = mock.patch.multiple(
        layers, create=True, fused_weight_gradient_mlp_cuda=kernel, _grad_accum_fusion_available=True
    )
    shared = SHARED if recipe in TWO_WAY else {}
    gather = {"fp8_param_gather": True} if recipe in TWO_WAY else {}
    found = []
    with model_parallel(Layout()), patched if fused else nullcontext():
        for seed in seeds:
            config = fp8_config(
                Layout(), recipe, fp8_param=recipe is not None, gradient_accumulation_fusion=fused
            )
            found.append(
                train(
                    config,
                    spec=get_gpt_layer_fp8_spec,
                    steps=STEPS,
                    sequence=128,
                    micro_batch=1,
                    global_batch=4,
                    seed=seed,
                    ddp={**DISTRIBUTED, **shared, **gather},
                    optim={"clip_grad": CLIP, **shared},
                ).losses
            )
    return found


def compare(runs: dict[int, list[list[float]]]) -> dict[str, Any]:
    """What one precision shows: ``runs`` maps ranks to the losses of every seed."""
    others = [ranks for ranks in runs if ranks != 1]
    apart = [
        [max(abs(runs[n][seed][step] - runs[1][seed][step]) for n in others) for step in range(STEPS)]
        for seed in range(len(runs[1]))
    ]
    first = [next((step + 1 for step in range(STEPS) if row[step]), STEPS + 1) for row in apart]
    final = [
        statistics.mean(runs[n][seed][-10:]) - statistics.mean(runs[1][seed][-10:])
        for n in others
        for seed in range(len(runs[1]))
    ]
    return {
        "apart": {step: statistics.mean(max(row[:step]) for row in apart) for step in SHOWN},
        "first_step": statistics.median(first),
        "final_loss": statistics.mean(final),
        "final_loss_spread": statistics.stdev(final),
        "loss": statistics.mean(row[-1] for row in runs[1]),
    }


def main() -> int:
    """Run and tabulate."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/data_parallel.*")
    args = parser.parse_args()
    pool = RankPool()
    data = {}
    try:
        for name in ("bf16", "bf16, rounded wgrad", *RECIPES):
            runs = {n: pool(n).run(losses, name, list(SEEDS), timeout=1800)[0] for n in (1, 2, 4)}
            data[name] = compare(runs)
            print(name, data[name], flush=True)
    finally:
        pool.close()
    header = [
        "",
        *(f"apart by step {step}" for step in SHOWN),
        "first step",
        "final loss",
        "loss after step 30",
    ]
    rows = [
        [
            name,
            *(f"{value:.1e}" for value in found["apart"].values()),
            f"{found['first_step']:g}",
            f"{found['final_loss']:+.1e} ± {found['final_loss_spread']:.1e}",
            f"{found['loss']:.3f}",
        ]
        for name, found in data.items()
    ]
    body = table(header, rows)
    print(body)
    if args.write:
        record = {
            **environment(["megatron-core"]),
            "measured": f"{len(SEEDS)} seeds, {STEPS} steps, clipped at {CLIP}",
        }
        write_results(
            "data_parallel",
            "DP=2 and 4 against one rank over 30 steps",
            "python -m benchmarks.data_parallel --write",
            record,
            body,
            data,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
