"""Training with FP8 parameters beside training without them: everything that must be the same, to the bit.

mine = param_training(ranks, 2, Layout(), "blockwise", fp8_param=True, ddp=DISTRIBUTED)[rank]
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.support.fp8_gpt import CLIP, DISTRIBUTED, TWO_WAY, fp8_config, record_steps
from benchmarks.support.gpt import build_chunks, build_optimizer, train_step
from benchmarks.support.ranks import Layout, RankPool, model_parallel

SEQUENCE = 64
OVERLAP: dict[str, Any] = {**DISTRIBUTED, "overlap_grad_reduce": True, "overlap_param_gather": True}


def mixed_factory(role: str) -> Any:
    """A custom recipe: square blocks for weights, rows for the rest."""
    from megatron_fp8.recipe import Float8BlockScaling, Float8RowwiseScaling

    return Float8BlockScaling() if role == "weight" else Float8RowwiseScaling()


@dataclass
class Trained:
    """What one rank saw, a list entry for each step."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    stepped: list[bool] = field(default_factory=list)
    masters: dict[tuple[Any, ...], tuple[int, bytes]] = field(default_factory=dict)
    nonfinite: list[int] = field(default_factory=list)
    evaluated: list[float] = field(default_factory=list)
    fp8_weights: list[str] = field(default_factory=list)


def train_params(
    layout: Layout,
    recipe: str | None,
    fp8_param: bool,
    fields: dict[str, Any],
    ddp: dict[str, Any],
    steps: int,
    sick: tuple[int, ...],
    evaluate: bool,
    batch: int,
    clip: float,
    optim: dict[str, Any] | None = None,
) -> Trained:
    """A rank case. ``sick`` steps meet an Inf in a linear's input on rank 0 and are skipped by all."""
    from megatron_fp8.mcore.iteration import iteration_counts
    from megatron_fp8.mcore.spec import get_gpt_layer_fp8_spec
    from megatron_fp8.params.fp8_parameter import Fp8Parameter

    seen = Trained()
    options = {"sequence": SEQUENCE, "micro_batch": 2, "global_batch": batch}
    shared = fp8_param and recipe in (*TWO_WAY, "nvfp4") and ddp.get("use_distributed_optimizer", False)
    shared = shared and not ddp.get("unshared", False)
    ddp = {k: v for k, v in ddp.items() if k != "unshared"}
    optim = {"clip_grad": clip, **(optim or {})}
    if shared:
        ddp = {**ddp, "reuse_grad_buf_for_mxfp8_param_ag": True, "fp8_param_gather": True}
        optim["reuse_grad_buf_for_mxfp8_param_ag"] = True
    with model_parallel(layout):
        keep = "fp4_param" if recipe == "nvfp4" else "fp8_param"
        config = fp8_config(layout, recipe, **{keep: fp8_param}, **fields)
        chunks = build_chunks(config, spec=get_gpt_layer_fp8_spec, sequence=SEQUENCE, ddp=ddp)
        optimizer = build_optimizer(config, chunks, ddp=ddp, optim=optim)
        record_steps(optimizer, seen.stepped)
        for index in range(steps):
            with poisoned_input(chunks[0]) if index in sick and dist.get_rank() == 0 else nullcontext():
                loss, norm = train_step(config, chunks, optimizer, index, **options)
            seen.losses.append(loss)
            seen.norms.append(norm)
            seen.nonfinite.append(iteration_counts()["nonfinite"])
            if evaluate:
                loss, _ = train_step(config, chunks, optimizer, 1000, forward_only=True, **options)
                seen.evaluated.append(loss)
        names = [(name, p) for chunk in chunks for name, p in chunk.named_parameters()]
        seen.masters = masters(optimizer, chunks)
        seen.fp8_weights = [name for name, p in names if isinstance(p, Fp8Parameter)]
    return seen


def masters(optimizer: Any, chunks: list[Any]) -> dict[tuple[Any, ...], tuple[int, bytes]]:
    """This rank's piece of every float32 weight: (place in the model, chunk, name) -> (start, bytes)."""
    from megatron.core import parallel_state as ps

    place = (
        ps.get_tensor_model_parallel_rank(),
        ps.get_pipeline_model_parallel_rank(),
        ps.get_expert_model_parallel_rank(),
    )
    names = {p: (index, name) for index, chunk in enumerate(chunks) for name, p in chunk.named_parameters()}
    found = {}
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        sharded = hasattr(one, "model_float16_groups")
        groups = one.model_float16_groups if sharded else one.float16_groups
        for param in (p for group in groups for p in group):
            start = one._get_model_param_range_map(param)["param"].start if sharded else 0
            key = (*place, *names[param])
            found[key] = (start, param.main_param.detach().numpy().tobytes())
    return found


def whole_masters(everyone: list[Trained]) -> dict[tuple[Any, ...], bytes]:
    """The float32 weights, put together from all ranks' pieces."""
    pieces: dict[tuple[Any, ...], dict[int, bytes]] = {}
    for seen in everyone:
        for key, (start, data) in seen.masters.items():
            assert pieces.setdefault(key, {}).setdefault(start, data) == data
    return {key: b"".join(parts[start] for start in sorted(parts)) for key, parts in pieces.items()}


@contextmanager
def poisoned_input(chunk: Any) -> Iterator[None]:
    """Inf in one element of the input of the first layer's last linear: the cast saturates it, all else stays finite."""
    from megatron_fp8.mcore.runtime import unwrap

    def poison(_: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x = args[0].clone()
        x.view(-1)[7] = torch.inf
        return x, *args[1:]

    hook = unwrap(chunk).decoder.layers[0].mlp.linear_fc2.register_forward_pre_hook(poison)
    yield
    hook.remove()


_known: dict[str, list[Trained]] = {}


def param_training(
    ranks: RankPool,
    world: int,
    layout: Layout,
    recipe: str | None,
    *,
    fp8_param: bool,
    fields: dict[str, Any] | None = None,
    ddp: dict[str, Any] | None = None,
    steps: int = 3,
    sick: tuple[int, ...] = (),
    evaluate: bool = False,
    batch: int = 4,
    clip: float = CLIP,
) -> list[Trained]:
    """train_params on every rank, once per session for the same arguments."""
    arguments = (layout, recipe, fp8_param, fields or {}, ddp or {}, steps, sick, evaluate, batch, clip)
    key = repr((world, arguments))
    if key not in _known:
        _known[key] = ranks(world).run(train_params, *arguments)
    return _known[key]
