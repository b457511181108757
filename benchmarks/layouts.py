"""How far apart are parallel layouts after one iteration from the same weights? `python -m benchmarks.layouts [--write]`

A small Llama-like GPT on one rank and with TP=2 (two gloo ranks), for 16 seeds: the mean difference of loss and gradient
norm between the layouts, beside two yardsticks: what BF16 itself shows between them, and what FP8 and BF16 show on one
rank. One seed says little, since a mean loss is a sum of errors of both signs.

Tensorwise, delayed and rowwise should be within FP8-to-BF16. Blockwise and MXFP8, whose blocks do not cross shards,
should be within BF16's own difference; they are, far, where activations are float32. Where activations are BF16,
row-parallel partial sums are rounded to BF16 on each rank, which flips FP8 codes next to a rounding boundary.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch

from benchmarks.common import environment, table, write_results
from benchmarks.support.gpt import gpt_config, train
from benchmarks.support.ranks import Layout, RankPool, model_parallel

SEEDS = range(1, 17)
FLOAT32 = {"bf16": False, "params_dtype": torch.float32}
RECIPES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "BF16": ({}, ("delayed", "tensorwise", "rowwise", "blockwise", "mxfp8")),
    "float32": (FLOAT32, ("blockwise", "mxfp8")),
}
"""Activations -> fields of the config, and the recipes that are shown with them."""
Runs = list[tuple[float, float]]


def first_iterations(layout: Layout, fields: dict[str, Any]) -> Runs:
    """(loss, gradient norm) of the first iteration for each seed; one rank's part."""
    found = []
    with model_parallel(layout):
        from megatron_fp8 import TransformerConfig
        from megatron_fp8.mcore.spec import get_gpt_layer_fp8_spec

        for seed in SEEDS:
            config = gpt_config(layout, cls=TransformerConfig, **fields)
            run = train(
                config,
                spec=get_gpt_layer_fp8_spec,
                sequence=128,
                micro_batch=2,
                global_batch=4,
                seed=seed,
            )
            found.append((run.losses[0], run.grad_norms[0]))
    return found


def apart(a: Runs, b: Runs) -> tuple[float, float]:
    """Mean absolute difference of loss and of gradient norm."""
    return tuple(statistics.mean(abs(x[k] - y[k]) for x, y in zip(a, b, strict=True)) for k in (0, 1))  # type: ignore[return-value]


def main() -> int:
    """Run and tabulate; exit code 1 where a bound is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/layouts.*")
    args = parser.parse_args()
    pool = RankPool()

    def run(fields: dict[str, Any]) -> tuple[Runs, Runs]:
        one = pool(1).run(first_iterations, Layout(), fields, timeout=300)[0]
        return one, pool(2).run(first_iterations, Layout(tp=2), fields, timeout=300)[0]

    rows, data = [], []
    try:
        bf16, bf16_tp2 = run({})
        own = apart(bf16_tp2, bf16)
        rows.append(["bf16", "BF16", f"{own[0]:.1e}", f"{own[1]:.1e}", "", "", ""])
        for activations, (more, recipes) in RECIPES.items():
            for recipe in recipes:
                one, tp2 = run({"fp8": "hybrid", "fp8_recipe": recipe, **more})
                between, from_bf16 = apart(tp2, one), apart(one, bf16)
                bound, name = (own, "BF16's own") if more else (from_bf16, "FP8 to BF16")
                within = between[0] <= bound[0] and between[1] <= bound[1]
                data.append(
                    {
                        "recipe": recipe,
                        "activations": activations,
                        "between_layouts": between,
                        "bound": bound,
                        "bound_name": name,
                        "within": within,
                    }
                )
                rows.append(
                    [
                        recipe,
                        activations,
                        *(f"{value:.1e}" for value in (*between, *bound)),
                        f"{name}: {'within' if within else 'OUTSIDE'}",
                    ]
                )
    finally:
        pool.close()
    header = ["recipe", "activations", "loss apart", "norm apart", "bound, loss", "bound, norm", "bound"]
    body = table(header, rows)
    print(body)
    if args.write:
        record = {**environment(["megatron-core"]), "measured": f"means over {len(SEEDS)} seeds"}
        title = "TP=2 against one rank after the first iteration"
        write_results("layouts", title, "python -m benchmarks.layouts --write", record, body, data)
    return int(not all(entry["within"] for entry in data))


if __name__ == "__main__":
    raise SystemExit(main())
