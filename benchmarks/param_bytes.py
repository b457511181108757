"""What FP8 parameters save, in bytes, counted: `python -m benchmarks.param_bytes [--write]`

A small Llama-like GPT trains two iterations on two data-parallel ranks, in BF16 and in every recipe with and without
fp8_param. Then, on one rank:

* GEMM weights: every tensor that holds them between iterations, once: BF16 parameters, codes and scales, and the codes
  that a run without fp8_param keeps from one forward pass to the next;
* all parameters: those, embeddings and norms, and buffers that parameters are gathered into;
* gathered: what the parameter all-gathers of one iteration receive, seen where they are called;
* optimizer: float32 masters and Adam's two moments.

Nothing is computed from a formula. tests/functional/test_fp8_param_bytes.py holds the numbers to their exact values.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from benchmarks.common import environment, table, write_results
from benchmarks.support.fp8_gpt import RECIPES, TWO_WAY, fp8_config
from benchmarks.support.gpt import build_chunks, build_optimizer, train_step
from benchmarks.support.ranks import Layout, RankPool, model_parallel

RANKS = 2
MODEL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "ffn_hidden_size": 1024,
}
STEP: dict[str, Any] = {"sequence": 32, "micro_batch": 1, "global_batch": 2, "vocab": 128}
Counts = dict[str, int]


def count_bytes(
    recipe: str | None, fp8_param: bool, distributed: bool, shared: bool, columnwise: bool = True
) -> Counts:
    """A rank case: bytes on this rank after two iterations; ``values``: how many GEMM weight values it holds.

    Args:
        recipe: None for BF16.
        distributed: with the distributed optimizer.
        shared: with reuse_grad_buf_for_mxfp8_param_ag.
        columnwise: fp8_keep_columnwise.
    """
    from megatron_fp8.mcore.spec import get_gpt_layer_fp8_spec

    ddp = {
        "use_distributed_optimizer": distributed,
        "fp8_param_gather": fp8_param,
        "reuse_grad_buf_for_mxfp8_param_ag": shared,
    }
    with model_parallel():
        fields = MODEL | ({"fp8_param": True} if fp8_param else {})
        config = fp8_config(
            Layout(), recipe, **fields, **({} if columnwise else {"fp8_keep_columnwise": False})
        )
        build = {"sequence": STEP["sequence"], "vocab": STEP["vocab"], "ddp": ddp}
        chunks = build_chunks(config, spec=get_gpt_layer_fp8_spec, **build)
        optimizer = build_optimizer(
            config, chunks, ddp=ddp, optim={"reuse_grad_buf_for_mxfp8_param_ag": shared}
        )
        train_step(config, chunks, optimizer, 0, **STEP)
        with gathered_bytes() as gathered:
            train_step(config, chunks, optimizer, 1, **STEP)
        linears = [m for m in chunks[0].modules() if hasattr(m, "bind_fp8_site")]
        weights = [t for linear in linears for t in held(linear)]
        rest = [p for p in chunks[0].parameters() if not any(p is m.weight for m in linears)]
        buffers = [
            b.param_data for b in chunks[0].buffers if b.param_data is not None and not in_gradients(b)
        ]
        adam = [t for one in inner_optimizers(optimizer) for t in adam_tensors(one)]
        return {
            "values": sum(m.weight.numel() for m in linears),
            "weights": size(weights),
            "parameters": size([*weights, *rest, *buffers]),
            "gathered": sum(gathered),
            "optimizer": size(adam),
        }


def held(linear: Any) -> list[torch.Tensor]:
    """Every tensor that holds a linear's weight between iterations."""
    from megatron_fp8.linear.tensor_parallel import weight_of
    from megatron_fp8.params.fp8_parameter import Fp8Parameter

    if isinstance(linear.weight, Fp8Parameter):
        return linear.weight.stored_tensors()
    held = linear.fp8_site.weights.entry
    kept = None if held is None else held.quantized
    sides = [] if kept is None else [kept.rowwise, kept.columnwise]
    return [weight_of(linear).detach(), *(t for side in sides if side for t in (side.codes, side.scale_inv))]


def in_gradients(buffer: Any) -> bool:
    """Whether a parameter buffer is memory of the gradient buffer."""
    return buffer.param_data.untyped_storage().data_ptr() == buffer.grad_data.untyped_storage().data_ptr()


def inner_optimizers(optimizer: Any) -> list[Any]:
    """The torch optimizers inside Megatron's."""
    return [one.optimizer for one in getattr(optimizer, "chained_optimizers", [optimizer])]


def adam_tensors(inner: Any) -> list[torch.Tensor]:
    """Masters and moments of one optimizer."""
    masters = [p.detach() for group in inner.param_groups for p in group["params"]]
    return masters + [
        v for p in inner.state.values() for v in p.values() if torch.is_tensor(v) and v.numel() > 1
    ]


def size(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of memory that tensors cover, each byte once: views of one buffer may overlap."""
    spans = sorted(
        (t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in map(torch.Tensor.detach, tensors)
    )
    total, covered = 0, 0
    for start, end in spans:
        total += max(0, end - max(start, covered))
        covered = max(covered, end)
    return total


@contextmanager
def gathered_bytes() -> Iterator[list[int]]:
    """The bytes that each parameter all-gather receives inside."""
    from megatron.core.distributed import param_and_grad_buffer as buffers

    calls: list[int] = []
    gather = buffers.dist_all_gather_func

    def counted(output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(output.numel() * output.element_size())
        return gather(output, *args, **kwargs)

    with mock.patch.object(buffers, "dist_all_gather_func", counted):
        yield calls


def cases() -> dict[str, tuple[str | None, bool, bool, bool, bool]]:
    """Row title -> arguments of count_bytes."""
    found: dict[str, tuple[str | None, bool, bool, bool, bool]] = {
        "BF16 training": (None, False, True, False, True)
    }
    for recipe in RECIPES:
        found[recipe] = (recipe, False, True, False, True)
        if recipe in TWO_WAY:
            found[f"{recipe}, columnwise made again"] = (recipe, False, True, False, False)
        found[f"{recipe}, fp8_param"] = (recipe, True, True, recipe in TWO_WAY, True)
        if recipe in TWO_WAY:
            found[f"{recipe}, fp8_param, buffer not shared"] = (recipe, True, True, False, True)
    return found


def main() -> int:
    """Count and tabulate."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/param_bytes.*")
    args = parser.parse_args()
    pool = RankPool()
    try:
        counts = {name: pool(RANKS).run(count_bytes, *case)[0] for name, case in cases().items()}
    finally:
        pool.close()
    bf16 = counts["BF16 training"]
    rows = []
    for name, found in counts.items():
        above = found["parameters"] > bf16["parameters"]
        rows.append(
            [
                name,
                f"{found['weights']:,}",
                f"{found['weights'] / found['values']:.4f}",
                f"{found['parameters']:,}" + (" (above BF16)" if above else ""),
                f"{found['gathered']:,}",
                f"{found['optimizer']:,}",
            ]
        )
    header = ["", "GEMM weights", "a value", "all parameters", "gathered", "optimizer"]
    body = table(header, rows)
    print(body)
    if args.write:
        record = {
            **environment(["megatron-core"]),
            "measured": f"bytes on one of {RANKS} data-parallel ranks",
        }
        title = "Bytes of parameters, of their all-gather, and of optimizer state"
        write_results("param_bytes", title, "python -m benchmarks.param_bytes --write", record, body, counts)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
