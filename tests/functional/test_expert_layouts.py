"""Experts in FP8: layouts of up to four ranks train the model of one rank, with latent attention and multi-token
prediction.

With float32 activations a code is what it is on one rank, so layouts agree as BF16's do. With BF16 activations a code may
flip (test_fp8_layouts.py); then a layout's loss and gradient are no further from one rank's than FP8's are from BF16's.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.support.fp8_gpt import DEEPSEEK, FP32, fp8_config
from benchmarks.support.gpt import build_chunks, build_optimizer, train, train_step
from benchmarks.support.ranks import Layout, RankPool, model_parallel
from tests.support.long_cases import some
from tests.support.nonfinite_models import OVERLAP

OPTIONS: dict[str, Any] = {"sequence": 64, "micro_batch": 1}
# gloo cannot gather the parts of unequal size of the other one
GATHER = {"moe_token_dispatcher_type": "allgather"}

LAYOUTS: dict[str, tuple[int, Layout, dict[str, Any], dict[str, Any]]] = {
    "ep2-tp2-etp2": (4, Layout(tp=2, sp=True, ep=2), GATHER, {}),
    "ep2-tp2-etp1": (2, Layout(tp=2, sp=True, ep=2, etp=1), {}, {}),
    "tp2-etp2": (2, Layout(tp=2, sp=True), {}, {}),
    "etp2": (2, Layout(etp=2), {}, {}),
    "ep2-pp2-vpp2": (4, Layout(ep=2, pp=2, vpp=2), {"num_layers": 4}, {}),
    "ep2-cp2-dp2": (4, Layout(ep=2, cp=2), {}, OVERLAP),
}


def batch_of(name: str) -> int:
    """Sequences of an iteration: one for each replica, two where stages are interleaved."""
    world, layout, *_ = LAYOUTS[name]
    return world // layout.model_ranks * (2 if layout.vpp else 1)


def first_iteration(
    layout: Layout, recipe: str | None, fields: dict[str, Any], ddp: dict[str, Any], batch: int
) -> tuple[float, float]:
    """A rank case: loss and gradient norm."""
    from megatron_fp8.mcore.spec import get_gpt_layer_fp8_spec

    with model_parallel(layout):
        config = fp8_config(layout, recipe, **{**DEEPSEEK, **fields})
        run = train(config, spec=get_gpt_layer_fp8_spec, ddp=ddp, global_batch=batch, **OPTIONS)
        return run.losses[0], run.grad_norms[0]


def of_layout(
    ranks: RankPool, name: str, recipe: str | None, fields: dict[str, Any], batch: int | None = None
) -> tuple[float, float]:
    batch = batch or batch_of(name)
    world, layout, own, ddp = LAYOUTS[name]
    if layout.pp == 1:
        fields = {key: value for key, value in fields.items() if key != "pipeline_dtype"}
    return ranks(world).run(first_iteration, layout, recipe, {**fields, **own}, ddp, batch)[-1]


@pytest.fixture(scope="module")
def of_one(ranks: RankPool) -> Any:
    """The first iteration of one rank, each run once."""
    known: dict[str, tuple[float, float]] = {}

    def run(recipe: str | None, fields: dict[str, Any], batch: int) -> tuple[float, float]:
        fields = {key: fields[key] for key in sorted(fields) if key not in (*GATHER, "pipeline_dtype")}
        key = repr((recipe, fields, batch))
        if key not in known:
            known[key] = ranks(1).run(first_iteration, Layout(), recipe, fields, {}, batch)[0]
        return known[key]

    return run


def apart(found: tuple[float, float], reference: tuple[float, float]) -> tuple[float, float]:
    loss, norm = (abs(a - b) / abs(b) for a, b in zip(found, reference, strict=True))
    return loss, norm


@pytest.fixture(scope="module")
def own_difference(ranks: RankPool, of_one: Any) -> tuple[float, float]:
    """BF16's, of loss and norm, between tensor parallel ranks and one."""
    found = apart(of_layout(ranks, "tp2-etp2", None, {}, 4), of_one(None, {}, 4))
    assert all(1e-6 < difference < 1e-3 for difference in found), "BF16 is no yardstick"
    return found


@pytest.mark.parametrize("name", some(LAYOUTS, "ep2-tp2-etp1", "tp2-etp2", "ep2-pp2-vpp2"))
def test_layout_is_one_rank_as_bf16_has_it(
    ranks: RankPool, of_one: Any, own_difference: Any, name: str
) -> None:
    """Float32 activations. Measured: losses within 1e-8, norms within 2e-5; BF16: 2e-5 and 2e-4."""
    found = of_layout(ranks, name, "blockwise", FP32)
    loss, norm = apart(found, of_one("blockwise", {**FP32, **LAYOUTS[name][2]}, batch_of(name)))
    print(f"{name}: loss {loss:.1e}, norm {norm:.1e}")
    assert loss <= own_difference[0] and norm <= own_difference[1]


def test_layout_with_tokens_in_fp8_is_one_rank(ranks: RankPool, of_one: Any, own_difference: Any) -> None:
    """Float32 activations, and codes on the wire."""
    name = "ep2-tp2-etp2"
    fields = {**FP32, "moe_fp8_dispatch": True}
    found, one = (
        of_layout(ranks, name, "blockwise", fields),
        of_one("blockwise", {**fields, **LAYOUTS[name][2]}, batch_of(name)),
    )
    loss, norm = apart(found, one)
    print(f"{name}: loss {loss:.1e}, norm {norm:.1e}")
    assert loss <= own_difference[0] and norm <= own_difference[1]


def distances(recipe: str, batch: int) -> tuple[float, float]:
    """A rank case: how far FP8 is from BF16, relative: RMS over tokens of the loss, and of the gradient as a vector."""
    from megatron_fp8.mcore.spec import get_gpt_layer_fp8_spec

    found = []
    with model_parallel():
        for wanted in (recipe, None):
            config = fp8_config(Layout(), wanted, **DEEPSEEK)
            chunks = build_chunks(config, spec=get_gpt_layer_fp8_spec, sequence=OPTIONS["sequence"])
            optimizer = build_optimizer(config, chunks, optim={"clip_grad": 0.0})
            losses: list[torch.Tensor] = []
            chunks[0].register_forward_hook(lambda _, args, output, kept=losses: kept.append(output.detach()))
            train_step(config, chunks, optimizer, 0, global_batch=batch, **OPTIONS)
            gradient = torch.cat([p.main_grad.flatten() for p in chunks[0].parameters()])
            found.append((torch.cat(losses).flatten(), gradient))
    (fp8_losses, fp8), (bf16_losses, bf16) = found
    token = (fp8_losses - bf16_losses).square().mean().sqrt() / bf16_losses.mean()
    return float(token), float((fp8 - bf16).norm() / bf16.norm())


def test_layout_is_as_near_as_fp8_is_to_bf16(ranks: RankPool, of_one: Any) -> None:
    """BF16 activations. Means and norms are nearer than what they are of."""
    name, recipe = "ep2-tp2-etp2", "tensorwise"
    loss, norm = apart(of_layout(ranks, name, recipe, {}), of_one(recipe, {}, batch_of(name)))
    token, gradient = ranks(1).run(distances, recipe, batch_of(name))[0]
    print(f"{name}, {recipe}: loss {loss:.1e} of {token:.1e}, norm {norm:.1e} of {gradient:.1e}")
    assert loss <= token < 0.01 and norm <= gradient < 0.2
