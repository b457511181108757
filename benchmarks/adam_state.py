"""What does compact optimizer state cost and save? `python -m benchmarks.adam_state [--write]`

Trains a small Llama-like GPT on synthetic sequences, on one rank, with Adam's moments in float32 and compact (the first
in E4M3, the second in float16), in BF16 and in FP8 with FP8 parameters: bytes of masters and moments, counted, and the
mean loss of the last tenth of the iterations, for three seeds of initial weights.
"""

from __future__ import annotations

import argparse
import statistics
from contextlib import nullcontext
from typing import Any

from benchmarks.common import environment, table, write_results
from benchmarks.param_bytes import adam_tensors, inner_optimizers, size
from benchmarks.support.fp8_gpt import fp8_config
from benchmarks.support.gpt import build_chunks, build_optimizer, train_step
from benchmarks.support.ranks import Layout, RankPool, model_parallel

SEEDS = (1, 2, 3)
PRECISIONS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "BF16": (None, {}),
    "delayed, fp8_param": ("delayed", {"fp8_param": True}),
}
STATES = ("float32", "fp8")


def trained(
    recipe: str | None, fields: dict[str, Any], state: str, iterations: int, seed: int
) -> tuple[int, int, float]:
    """A rank case: (bytes of masters and moments, how many parameters, mean loss of the last tenth)."""
    from megatron_fp8.mcore.optimizer.adam import Moment, compact_state
    from megatron_fp8.mcore.spec import get_gpt_layer_fp8_spec

    with model_parallel():
        config = fp8_config(Layout(), recipe, **fields)
        chunks = build_chunks(config, spec=get_gpt_layer_fp8_spec, seed=seed)
        with compact_state() if state == "fp8" else nullcontext():
            optimizer = build_optimizer(config, chunks, optim={"adam_beta2": 0.95})
        losses = [
            train_step(config, chunks, optimizer, step, micro_batch=4, global_batch=4)[0]
            for step in range(iterations)
        ]
        tensors = [t for inner in inner_optimizers(optimizer) for t in adam_tensors(inner)]
        kept = [part for t in tensors for part in (t.stored_tensors() if isinstance(t, Moment) else [t])]
        parameters = sum(p.numel() for p in chunks[0].parameters())
        return size(kept), parameters, statistics.mean(losses[-max(1, iterations // 10) :])


def main() -> int:
    """Train, count, tabulate."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--iterations", type=int, default=120)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/adam_state.*")
    wanted = parser.parse_args()
    pool = RankPool()
    rows: list[list[str]] = []
    data: list[dict[str, Any]] = []
    try:
        for precision, (recipe, fields) in PRECISIONS.items():
            plain: list[float] = []
            for state in STATES:
                runs = [
                    pool(1).run(trained, recipe, fields, state, wanted.iterations, seed, timeout=1800)[0]
                    for seed in SEEDS
                ]
                total, parameters, _ = runs[0]
                losses = [loss for _, _, loss in runs]
                plain = plain or losses
                changes = [f"{loss / before - 1:+.2%}" for loss, before in zip(losses, plain, strict=True)]
                rows.append(
                    [
                        f"{precision}, moments {state}",
                        f"{total / parameters:.3f}",
                        ", ".join(f"{loss:.4f}" for loss in losses),
                        ", ".join(changes) if state != "float32" else "",
                    ]
                )
                data.append({"precision": precision, "state": state, "bytes": total, "losses": losses})
    finally:
        pool.close()
    body = table(["", "bytes a parameter, with master", f"loss, seeds {SEEDS}", "change"], rows)
    print(body)
    if wanted.write:
        record = {**environment(["megatron-core"]), "measured": f"{wanted.iterations} iterations"}
        title = "Adam's moments: float32 against E4M3 and float16"
        write_results("adam_state", title, "python -m benchmarks.adam_state --write", record, body, data)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
