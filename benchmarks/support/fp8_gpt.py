"""The small GPT of benchmarks/support/gpt.py trained in FP8, watched: what ran, what was sent, whether steps were taken.

    result = training(ranks, 2, Layout(tp=2), "mxfp8")[rank]

Trainings are remembered for the process: tests that look at one training from different sides pay for it once.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.support.gpt import gpt_config, train
from benchmarks.support.ranks import Layout, RankPool, model_parallel

RECIPES = ("delayed", "tensorwise", "rowwise", "blockwise", "mxfp8")
TWO_WAY = ("rowwise", "mxfp8")
"""Whose codes differ by the way in which a weight is read, so that FP8 weights are cast after they were gathered."""
SITES = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")

# 2 x 128 tokens a microbatch, so that half of them (sequence parallelism) are whole blocks of 128; two microbatches.
OPTIONS: dict[str, Any] = {"sequence": 128, "micro_batch": 2, "global_batch": 4}
CLIP = (
    0.1  # below every gradient norm of these trainings, so that the last bits of the norm reach every weight
)
DISTRIBUTED: dict[str, Any] = {"use_distributed_optimizer": True}
FP32: dict[str, Any] = {"bf16": False, "params_dtype": torch.float32, "pipeline_dtype": torch.float32}
NARROW: dict[str, Any] = {"hidden_size": 128, "ffn_hidden_size": 256}
"""Half of the width, where tensor parallelism does not halve it: blocks of 128 x 128 are whole."""
MOE: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 256,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall",
}
DEEPSEEK: dict[str, Any] = {
    **NARROW, **MOE, "moe_ffn_hidden_size": 128, "moe_grouped_gemm": True, "moe_shared_expert_intermediate_size": 128,
    "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_router_dtype": "fp32",
    "moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 1e-2, "mtp_num_layers": 1,
    "multi_latent_attention": True, "num_query_groups": None, "q_lora_rank": 64, "kv_lora_rank": 96,
    "qk_head_dim": 32, "qk_pos_emb_head_dim": 32, "v_head_dim": 32, "qk_layernorm": True, "rope_type": "rope",
}  # fmt: skip
"""DeepSeek-V3's architecture, small: latent attention, grouped experts beside a shared one, a bias of each expert that
balances them, multi-token prediction."""


@dataclass
class Watched:
    """What one rank saw of a training run. ``gemms`` counts (site name, GEMM, precision) of the last step."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    counts: list[dict[str, int]] = field(default_factory=list)
    gemms: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    digests: list[str] = field(default_factory=list)
    report: list[dict[str, Any]] = field(default_factory=list)
    records: int = 0

    def layers_in_fp8(self) -> dict[int, set[str]]:
        """Global layer number -> names of its sites that multiplied in FP8, in the last step."""
        found: dict[int, set[str]] = {}
        for name, _, precision in self.gemms:
            _, layer, site = name.removeprefix("decoder.").split(".", 2)
            if precision == "fp8":
                found.setdefault(int(layer), set()).add(site)
        return found


def fp8_config(layout: Layout, recipe: str | None, **fields: Any) -> Any:
    """This package's config of the small GPT, with latent attention where the fields have it; recipe None trains in the
    model's own dtype."""
    from megatron_fp8 import MLATransformerConfig, TransformerConfig

    fp8 = {} if recipe is None else {"fp8": "hybrid", "fp8_recipe": recipe}
    if recipe == "nvfp4":
        fp8 = {"fp4": "e2m1"}
    kind = MLATransformerConfig if fields.get("multi_latent_attention") else TransformerConfig
    return gpt_config(layout, cls=kind, **{**fp8, **fields})


def watched_training(
    layout: Layout, recipe: str | None, fields: dict[str, Any], options: dict[str, Any], steps: int
) -> Watched:
    """A rank case: trains and watches."""
    from megatron_fp8.mcore.iteration import iteration_counts
    from megatron_fp8.mcore.report import site_report
    from megatron_fp8.mcore.spec import get_gpt_layer_fp8_spec

    seen = Watched()

    def after_step(step: int, run: Any) -> None:
        seen.counts.append(iteration_counts())
        seen.digests.append(digest(run.chunks))
        if step < steps - 1:
            seen.gemms.clear()

    with model_parallel(layout), watched_gemms(seen):
        config = fp8_config(layout, recipe, **fields)
        merged = {"spec": get_gpt_layer_fp8_spec, **OPTIONS, **options}
        run = train(config, steps=steps, on_step=after_step, **merged)
        seen.losses, seen.norms = run.losses, run.grad_norms
        seen.report = site_report(run.chunks)
    return seen


def record_steps(optimizer: Any, stepped: list[bool]) -> None:
    """Note whether each of the optimizer's steps was taken; train_step takes a skipped one for a failure."""
    step = optimizer.step

    def recorded_step() -> tuple[bool, float, Any]:
        taken, norm, zeros = step()
        stepped.append(taken)
        return True, norm or 0.0, zeros

    optimizer.step = recorded_step


@contextmanager
def watched_gemms(seen: Watched) -> Iterator[None]:
    """Counts every GEMM that a site multiplies, and every amax that a cast records."""
    from megatron_fp8.linear.gemm_site import GemmSite
    from megatron_fp8.quantizer import Quantizer

    multiply, accumulate = GemmSite.multiply, GemmSite.accumulate
    request, record = Quantizer.request, Quantizer.record

    def counting_multiply(self: Any, gemm: str, *args: Any, **kwargs: Any) -> Any:
        seen.gemms[self.plan.name, gemm, self.plan.gemms[gemm]] += 1
        return multiply(self, gemm, *args, **kwargs)

    def counting_accumulate(self: Any, gemm: str, *args: Any, **kwargs: Any) -> None:
        before = seen.gemms.total()
        accumulate(self, gemm, *args, **kwargs)
        if seen.gemms.total() == before:  # it was added inside the product
            seen.gemms[self.plan.name, gemm, self.plan.gemms[gemm]] += 1

    def counting_request(self: Any, job: Any) -> Any:
        seen.records += job.record
        return request(self, job)

    def counting_record(self: Any, *args: Any) -> None:
        seen.records += 1
        record(self, *args)

    with (
        mock.patch.object(GemmSite, "multiply", counting_multiply),
        mock.patch.object(GemmSite, "accumulate", counting_accumulate),
        mock.patch.object(Quantizer, "request", counting_request),
        mock.patch.object(Quantizer, "record", counting_record),
    ):
        yield


@contextmanager
def watched_collectives(*names: str) -> Iterator[list[tuple[str, torch.Tensor, Any]]]:
    """Every call of these functions of torch.distributed: (name, first tensor, group), Megatron's imports included.

    The first tensor is the one that holds the result.
    """
    import sys

    calls: list[tuple[str, torch.Tensor, Any]] = []
    patches = []
    for name in names:
        original = getattr(dist, name)

        def call(*args: Any, _name: str = name, _original: Any = original, **kwargs: Any) -> Any:
            tensor = args[0] if args else next(iter(kwargs.values()))
            calls.append((_name, tensor, kwargs.get("op", args[1] if len(args) > 1 else None)))
            return _original(*args, **kwargs)

        for module_name, module in list(sys.modules.items()):
            if module_name == "torch.distributed" or module_name.startswith("megatron."):
                patches += [
                    mock.patch.object(module, attribute, call)
                    for attribute, value in list(vars(module).items())
                    if value is original
                ]
    for patch in patches:
        patch.start()
    try:
        yield calls
    finally:
        for patch in reversed(patches):
            patch.stop()


def digest(chunks: list[Any]) -> str:
    """Of all bytes of this rank's parameters and float32 gradients."""
    hasher = hashlib.sha256()
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            hasher.update(name.encode())
            for tensor in (parameter.detach(), parameter.main_grad):
                hasher.update(tensor.contiguous().view(torch.uint8).numpy())
    return hasher.hexdigest()


_known: dict[str, list[Watched]] = {}


def training(
    ranks: RankPool,
    world: int,
    layout: Layout,
    recipe: str | None,
    fields: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    steps: int = 1,
) -> list[Watched]:
    """watched_training on every rank, once per session for the same arguments."""
    fields, options = fields or {}, options or {}
    key = repr(
        (world, layout, recipe, sorted(fields.items(), key=str), sorted(options.items(), key=str), steps)
    )
    if key not in _known:
        _known[key] = ranks(world).run(watched_training, layout, recipe, fields, options, steps)
    return _known[key]
