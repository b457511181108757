"""Models whose experts' tokens are sent in FP8 (moe_fp8_dispatch): routing, layouts, layers that send BF16, telemetry."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.support.compare import assert_same_bytes
from benchmarks.support.gpt import build_chunks, train
from benchmarks.support.ranks import Layout, RankPool, model_parallel
from megatron_fp8.inference import prepare_for_inference
from megatron_fp8.mcore.iteration import move_unhealthy_sites
from megatron_fp8.mcore.report import site_report
from megatron_fp8.mcore.runtime import state_of
from megatron_fp8.mcore.spec import get_gpt_layer_fp8_spec, with_own_modules
from megatron_fp8.plan.autocast_state import fp8_disabled
from megatron_fp8.state.guard import Finding
from megatron_fp8.telemetry.telemetry import Telemetry
from tests.support.collectives import recorded
from tests.support.decoding import forward
from tests.support.fp8_dispatch import HIDDEN, config_of
from tests.support.long_cases import some


def train_case(layout: Layout, recipe: str, fields: dict[str, Any]) -> dict[str, Any]:
    """A rank case: two steps of two layers. Returns losses, norms, how many all-to-alls were of bytes, and notes."""
    with model_parallel(layout), recorded() as log:
        run = train(
            config_of(layout, recipe, **fields),
            spec=get_gpt_layer_fp8_spec,
            steps=2,
            sequence=64,
            micro_batch=1,
            global_batch=2,
        )
        report = site_report(run.chunks)
        notes = {entry["name"]: entry["notes"] for entry in report if "local_experts" in entry["name"]}
        return {
            "losses": run.losses,
            "norms": run.grad_norms,
            "bytes": sum(s.dtype == torch.uint8 for s in log.sent if s.name == "all_to_all_single"),
            "notes": {name: " ".join(found) for name, found in notes.items()},
            "layers": {entry["layer"] for entry in report if entry["notes"]},
        }


ALIKE: dict[str, dict[str, Any]] = {
    "experts in turn": {"moe_grouped_gemm": False},
    "fully recomputed": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}


@pytest.fixture(scope="module")
def trained(ranks: RankPool) -> dict[str, Any]:
    """On two ranks, blockwise."""
    return ranks(2).run(train_case, Layout(ep=2), "blockwise", {})[0]


@pytest.mark.parametrize("case", ALIKE)
def test_it_trains_alike(ranks: RankPool, trained: dict[str, Any], case: str) -> None:
    found = ranks(2).run(train_case, Layout(ep=2), "blockwise", ALIKE[case])[0]
    for what in ("losses", "norms", "notes"):
        assert found[what] == trained[what], what
    sent = 2 * 2 * 2  # steps, layers, and there in forward and in backward, of one microbatch
    assert trained["bytes"] == sent
    assert found["bytes"] == sent + (sent // 2 if "recomputed" in case else 0)


SENT_IN_BF16: dict[str, tuple[dict[str, Any], str]] = {
    "an expert in BF16": (
        {"fp8_overrides": {"*.layers.1.mlp.experts.local_experts.1.linear_fc?": "bf16"}},
        "tokens travel in high precision: decoder.layers.1.mlp.experts.local_experts.1.linear_fc1 is in high precision",
    ),
    "an input in BF16": (
        {
            "fp8_overrides": {
                "*.layers.1.*.linear_fc1:input": "bf16",
                "*.layers.1.*.linear_fc2:grad_output": "bf16",
            }
        },
        "tokens travel in high precision: fprop of",
    ),
    "a wgrad in BF16": (
        {"fp8_overrides": {"*.layers.1.*:wgrad": "bf16"}},
        "reads its input in high precision",
    ),
    "a recipe of tensors": (
        {"fp8_overrides": {"*.layers.1.*.linear_fc?": "tensorwise"}},
        "has a scale per tensor, which is not sent with a token",
    ),
    "two recipes": (
        {"fp8_overrides": {"*.layers.1.*.local_experts.1.linear_fc?": "mxfp8"}},
        "reads e4m3 1x32 e8m0, and other experts e4m3 1x128 pow2",
    ),
    "the last layer in BF16": (
        {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 0, "num_layers_at_end_in_bf16": 1},
        "is in high precision",
    ),
}


@pytest.mark.parametrize("case", SENT_IN_BF16)
def test_a_layer_whose_experts_read_no_such_codes_sends_bf16_and_says_so(ranks: RankPool, case: str) -> None:
    """The other layer sends codes; results are those of a model without the option where that layer is concerned."""
    fields, said = SENT_IN_BF16[case]
    found = ranks(2).run(train_case, Layout(ep=2), "blockwise", fields)[0]
    assert found["bytes"] == 2 * 2  # steps, and there in forward and in backward, of one layer
    notes = found["notes"]
    assert said in notes["decoder.layers.1.mlp.experts.local_experts.0.linear_fc1"]
    assert (
        "gradients travel in high precision"
        in notes["decoder.layers.1.mlp.experts.local_experts.0.linear_fc2"]
    )
    assert "tokens arrive as e4m3" in notes["decoder.layers.0.mlp.experts.local_experts.0.linear_fc1"]


RUNS: dict[str, tuple[int, Layout, dict[str, Any]]] = {
    "padded to capacity, z loss": (2, Layout(ep=2), {
        "moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True, "moe_z_loss_coeff": 0.1,
    }),
    "shared expert, sigmoid scores, expert bias, float32 router, groups": (2, Layout(ep=2), {
        "moe_shared_expert_intermediate_size": 128, "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True, "moe_router_dtype": "fp32", "moe_router_num_groups": 2,
        "moe_router_group_topk": 1,
    }),
    "dropped by position": (2, Layout(ep=2), {
        "moe_expert_capacity_factor": 0.5, "moe_token_drop_policy": "position",
    }),
    "cut experts, float32 router, gathered": (2, Layout(tp=2, sp=True), {
        "moe_token_dispatcher_type": "allgather", "moe_router_dtype": "fp32",
    }),
}  # fmt: skip


@pytest.mark.parametrize("case", some(RUNS, *list(RUNS)[1:4:2]))
def test_routing_of_any_kind(ranks: RankPool, case: str) -> None:
    """With powers of two the codes are those that experts would have made: the first loss is that of BF16 on the wire."""
    world, layout, fields = RUNS[case]
    on, off = (
        ranks(world).run(train_case, layout, "blockwise", {**fields, "moe_fp8_dispatch": wanted})[0]
        for wanted in (True, False)
    )
    said = [note for name, note in on["notes"].items() if name.endswith("linear_fc1")]
    assert said and all("tokens arrive as e4m3 1x128 pow2 codes" in note for note in said)
    assert on["losses"][0] == off["losses"][0]
    assert on["losses"][1] == pytest.approx(off["losses"][1], rel=1e-4)
    assert on["norms"][0] == pytest.approx(off["norms"][0], rel=1e-3)


def watched_case(layout: Layout) -> dict[str, Any]:
    """A rank case: telemetry of a step; a forward in evaluation, and one with FP8 switched off."""
    found: dict[str, Any] = {}

    def look(step: int, run: Any) -> None:
        if step == 0:
            found["telemetry"] = Telemetry(run.chunks, every=1, statistics=["max", "sqnr_db"])

    with model_parallel(layout):
        run = train(
            config_of(layout, "blockwise"),
            spec=get_gpt_layer_fp8_spec,
            steps=2,
            sequence=64,
            micro_batch=1,
            global_batch=2,
            on_step=look,
        )
        records = {(r["site"], r["tensor"]): r for r in found["telemetry"].records}
        found["telemetry"].close()
        (model,) = run.chunks
        tokens = torch.arange(64)[None]
        wires = {}
        for name, off in (("evaluation", None), ("off", "a test")):
            model.eval()
            with recorded() as log, torch.no_grad(), fp8_disabled(off):
                model(tokens, tokens, None)
            wires[name] = sum(s.dtype == torch.uint8 for s in log.sent if s.name == "all_to_all_single")
        return {"records": records, "wires": wires}


def test_telemetry_sees_it_and_contexts_switch_it_off(ranks: RankPool) -> None:
    found = ranks(2).run(watched_case, Layout(ep=2))[0]
    assert found["wires"] == {"evaluation": 2, "off": 0}
    for tensor in ("input", "grad_output"):
        record = found["records"]["decoder.layers.1.mlp.dispatch", tensor]
        assert 25 < record["sqnr_db"] < 40 and record["max"] > 0
    # What an expert casts is what arrived: nothing larger than what was sent, as far as codes can tell.
    fc1 = found["records"]["decoder.layers.1.mlp.experts.local_experts.0.linear_fc1", "input"]
    assert fc1["max"] <= found["records"]["decoder.layers.1.mlp.dispatch", "input"]["max"] * (1 + 2**-4)


def test_nan_and_inf_are_counted_where_tokens_are_cast(ranks: RankPool) -> None:
    """And the step is skipped."""
    (found,) = ranks(1).run(sick_case, Layout())
    assert found["nonfinite"] > 0 and found["slots"]["Dispatch.input"] == 2


def sick_case(layout: Layout) -> dict[str, Any]:
    """A rank case: a layer's forward of tokens of which one has a NaN, another an Inf."""
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer import spec_utils

    with model_parallel(layout):
        config = config_of(layout, "blockwise")
        spec = get_moe_module_spec(use_te=False, num_experts=4, moe_grouped_gemm=True)
        moe = spec_utils.build_module(with_own_modules(spec), config=config, pg_collection=None)
        dispatch = moe.fp8_dispatch
        x = torch.ones(8, 1, HIDDEN, dtype=torch.bfloat16)
        x[2, 0, 3], x[4, 0, 5] = float("nan"), float("inf")
        dispatch.tokens(x, training=True)
        state = state_of(config)
        slots = {q.slot.name: q.slot for q in dispatch.fp8_site.casts["input"].quantizers}
        counted = {name: float(slot.arena.rows[1, slot.index]) for name, slot in slots.items()}
        state.finish_iteration()
        return {"nonfinite": state.last.nonfinite, "slots": counted}


def guarded_case(layout: Layout, ill: str) -> dict[str, Any]:
    """A rank case: after the first step the guard finds a tensor ill."""
    moved: list[str] = []
    sent: list[int] = []
    config: Any = None

    def find(step: int, run: Any) -> None:
        sent.append(sum(s.dtype == torch.uint8 for s in log.sent if s.name == "all_to_all_single"))
        if step == 0:
            state = state_of(config)
            state.findings = [Finding(ill, "not finite", 3, 1.0)]
            moved.extend(move.site for move in move_unhealthy_sites(run.chunks, state, partial=True))

    with model_parallel(layout), recorded() as log:
        config = config_of(layout, "blockwise", fp8_guard=True)
        train(
            config,
            spec=get_gpt_layer_fp8_spec,
            steps=2,
            sequence=64,
            micro_batch=1,
            global_batch=2,
            on_step=find,
        )
    return {"moved": moved, "sent": sent}


ILL = {
    "what is sent": ("decoder.layers.1.mlp.dispatch.input", (0, 1, 2, 3)),
    "an expert's weight": ("decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight", (3,)),
}


@pytest.mark.parametrize("case", ILL)
def test_the_guard_moves_those_that_read_ill_tokens(ranks: RankPool, case: str) -> None:
    """All first linears of the layer's experts, or the one whose own tensor is ill: the layer's tokens go in BF16 then,
    from all ranks; gradients and the other layer as before."""
    ill, experts = ILL[case]
    for found in ranks(2).run(guarded_case, Layout(ep=2), ill):
        assert found["moved"] == [
            f"decoder.layers.1.mlp.experts.local_experts.{e}.linear_fc1" for e in experts
        ]
        assert found["sent"] == [4, 4 + 3]


# -------------------------------------------------------------------------------------------------------------- inference


def prepared_case(recipe: str) -> tuple[torch.Tensor, torch.Tensor, set[str]]:
    """A rank case: logits before and after the model was prepared for inference, its tokens padded; experts' notes."""
    with model_parallel(Layout()):
        chunks = build_chunks(config_of(Layout(), recipe), spec=get_gpt_layer_fp8_spec, sequence=64)
        model = chunks[0].module.eval()
        tokens = torch.randint(512, (1, 41), generator=torch.Generator().manual_seed(3))
        with torch.no_grad():
            before = forward(model, tokens)
            prepare_for_inference(model, pad_tokens=16)
            after = forward(model, tokens)
        notes = {" ".join(e["notes"]) for e in site_report(chunks) if "local_experts" in e["name"]}
        return before, after, notes


@pytest.mark.parametrize("recipe", some(["rowwise", "blockwise"], "blockwise"))
def test_in_inference_experts_cast_what_they_read(ranks: RankPool, recipe: str) -> None:
    """They pad it, or give it a static scale, which codes would not take; without those the bits are the same."""
    before, after, notes = ranks(1).run(prepared_case, recipe)[0]
    assert_same_bytes(after, before)
    assert len(notes) == 2 and all("travel in high precision: in inference" in note for note in notes), notes
