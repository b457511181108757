"""What was asked for is what runs and what is reported; what cannot run is an error that says what to do."""

from __future__ import annotations

import contextlib
import io
import re
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from benchmarks.support.fp8_gpt import (
    MOE,
    OPTIONS,
    SITES,
    Watched,
    fp8_config,
    watched_collectives,
    watched_gemms,
)
from benchmarks.support.gpt import build_chunks, build_optimizer, gpt_config, train, train_step
from benchmarks.support.ranks import Layout, RankPool, model_parallel
from megatron_fp8 import mcore
from megatron_fp8.files import terminal
from megatron_fp8.mcore import print_plan
from megatron_fp8.mcore.iteration import finish_iteration, iteration_counts
from megatron_fp8.mcore.report import plan_lines, site_report
from megatron_fp8.mcore.runtime import state_of
from megatron_fp8.mcore.spec import get_gpt_layer_fp8_spec

ONE, TP, TP_SP, PP = Layout(), Layout(tp=2), Layout(tp=2, sp=True), Layout(pp=2)
TINY = {"hidden_size": 64, "ffn_hidden_size": 128}
SHORT = {"sequence": 32, "micro_batch": 1, "global_batch": 2, "vocab": 128}
DELAYED = {"fp8": "hybrid", "fp8_recipe": "delayed"}


def documented_check() -> str:
    """A rank case: what docs/megatron.md's own program prints after a step."""
    page = (Path(__file__).parents[2] / "docs" / "megatron.md").read_text()
    (program,) = (b for b in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "site_report(" in b)
    with model_parallel(ONE):
        config = fp8_config(ONE, "mxfp8", **TINY)
        chunks = build_chunks(config, spec=get_gpt_layer_fp8_spec, sequence=32, vocab=128)
        train_step(config, chunks, build_optimizer(config, chunks), 0, **SHORT)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(program, {"model": chunks[0]})
    return printed.getvalue()


def test_the_documented_check_prints_what_the_page_says(ranks: RankPool) -> None:
    printed = ranks(1).run(documented_check)[0].splitlines()
    assert printed[0].startswith(
        "decoder.layers.0.self_attention.linear_proj: fp8, mxfp8, emulated: fp8 recipe of the config; backend"
    )
    assert printed[-2] == (
        "output_layer: bf16, None, None: not inside a transformer layer: stays in the model's dtype"
    )
    assert printed[-1] == "48 GEMMs in FP8, 6 in high precision, 0 NaN or Inf cast"


def lines_on_the_plan(shown: bool) -> list[str]:
    """A rank case: what two iterations say of the plan."""
    with model_parallel(TP), contextlib.redirect_stderr(io.StringIO()) as said:
        config = fp8_config(TP, "mxfp8", **TINY)
        chunks = build_chunks(config, spec=get_gpt_layer_fp8_spec, sequence=32, vocab=128)
        if shown:
            print_plan(chunks)
        optimizer = build_optimizer(config, chunks)
        for step in range(2):
            train_step(config, chunks, optimizer, step, **SHORT)
    return [line for line in said.getvalue().splitlines() if "print_plan" in line]


def test_the_first_iteration_says_the_plan_unless_it_was_printed(ranks: RankPool) -> None:
    assert ranks(2).run(lines_on_the_plan, False) == [
        [
            "megatron_fp8: FP8 hybrid, fp8_recipe mxfp8: 8 of the first rank's 8 linears in layers are in FP8 (backend"
            " emulated); megatron_fp8.mcore.print_plan(model) says why"
        ],
        [],
    ]
    assert ranks(2).run(lines_on_the_plan, True) == [[], []]


# ---------------------------------------------------------------------------------------------------------- collectives


def collectives(
    layout: Layout, recipe: str, fields: dict[str, Any]
) -> tuple[list[int], list[int], dict[str, int]]:
    """A rank case, of the second iteration: slots that each amax collective settled; sizes of other maxima; counts."""
    with model_parallel(layout):
        config = fp8_config(layout, recipe, **{**TINY, **fields})
        chunks = build_chunks(config, spec=get_gpt_layer_fp8_spec, sequence=32, vocab=128)
        optimizer = build_optimizer(config, chunks)
        train_step(config, chunks, optimizer, 0, **SHORT)
        with watched_collectives("all_reduce") as calls:
            train_step(config, chunks, optimizer, 1, **SHORT)
        maxima = [
            tensor.shape for _, tensor, op in calls if op == dist.ReduceOp.MAX and tensor.is_floating_point()
        ]
        # Amaxes and non-finite counts of all slots, and a word between the ranks. The softmax over the vocabulary's
        # shards is a maximum too, one a token: [32, 1].
        wires = {2 * len(arena.slots) + 2: len(arena.slots) for arena in state_of(config).arenas}
        settled = [wires[shape.numel()] for shape in maxima if shape.numel() in wires]
        others = [shape.numel() for shape in maxima if shape.numel() not in wires and shape != (32, 1)]
        return settled, others, iteration_counts()


@pytest.mark.parametrize(("layout", "layers"), [(TP_SP, 2), (ONE, 8)], ids=["tp2-sp", "dp2"])
def test_one_amax_collective_an_iteration(ranks: RankPool, layout: Layout, layers: int) -> None:
    for recipe in ["delayed", "tensorwise", "rowwise", "mxfp8"] if layout.sp else ["delayed"]:
        fields = {"num_layers": layers, "num_attention_heads": 2}
        for settled, others, counts in ranks(2).run(collectives, layout, recipe, fields):
            assert settled == [layers * 4 * 3], recipe
            assert counts["amax_collectives"] == 1
            # Sequence parallelism shares what a shard's rows are cut through: the inputs of the column-parallel linears,
            # the gradients of the row-parallel ones; one amax of the tensor, or one a column. Delayed scales are warm.
            shared = 4 * layers * (2 if layout.sp and recipe in ("tensorwise", "rowwise") else 0)
            assert len(others) == shared and counts["scaling_collectives"] == shared, recipe
            assert set(others) <= {1} if recipe == "tensorwise" else set(others) <= {64}


def test_experts_are_a_group_of_their_own(ranks: RankPool) -> None:
    fields = {**MOE, "num_attention_heads": 2}
    for settled, _, counts in ranks(2).run(collectives, ONE, "delayed", fields):
        assert sorted(settled) == [2 * 2 * 3, 2 * 2 * 4 * 3]
        assert counts["amax_collectives"] == 2


# -------------------------------------------------------------------------------------------------- no silent fallback


def failure(layout: Layout, fields: dict[str, Any], foreign: str | None = None) -> str:
    """A rank case: the error of the first iteration, '' if there is none."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    class Special(ColumnParallelLinear):
        pass

    def spec(config: Any) -> Any:
        made = get_gpt_layer_fp8_spec(config)
        if foreign:
            made.submodules.mlp.submodules.linear_fc1 = (
                Special if foreign == "special" else ColumnParallelLinear
            )
        return made

    with model_parallel(layout):
        try:
            train(fp8_config(layout, "delayed", **TINY, **fields), spec=spec, **SHORT)
        except ValueError as error:
            return str(error)
        return ""


def test_linears_that_run_in_bf16_are_refused_unless_they_are_said_to(ranks: RankPool) -> None:
    for spec in (None, "plain"):  # Megatron-Core's class in a spec is built as this package's
        assert ranks(1).run(failure, ONE, {}, foreign=spec)[0] == ""
    message = ranks(1).run(failure, ONE, {}, foreign="special")[0]
    assert "layers.0.mlp.linear_fc1 is a Special, whose own forward runs in BF16" in message
    assert "fp8_overrides = {'decoder.layers.0.mlp.linear_fc1': 'bf16'}" in message
    fields = {"fp8_overrides": {"*.linear_fc1": "bf16"}}
    assert ranks(1).run(failure, ONE, fields, foreign="special")[0] == ""


def test_a_backend_that_cannot_run_is_refused(ranks: RankPool) -> None:
    message = ranks(1).run(failure, ONE, {"fp8_backend": "native"})[0]
    assert "fp8_backend 'native'" in message and "'emulated' runs on every device" in message


@pytest.mark.parametrize("glob", ["decoder.layers.2.*", "*.linear_pojr:wgrad"])
def test_a_glob_without_match_is_an_error_on_all_ranks(ranks: RankPool, glob: str) -> None:
    for message in ranks(2).run(
        failure, PP, {"fp8_overrides": {"*.layers.1.*": "bf16", glob: "mxfp8"}}, timeout=60
    ):
        assert f"{glob!r} matches no GEMM site" in message


def test_a_glob_of_another_stage_is_none(ranks: RankPool) -> None:
    assert ranks(2).run(failure, PP, {"fp8_overrides": {"*.layers.1.*": "bf16"}}) == ["", ""]


def fallback(layout: Layout, fields: dict[str, Any]) -> tuple[str, str, list[dict[str, Any]], dict[str, int]]:
    """A rank case: what is said on stderr, what print_plan prints, the report, what was counted."""
    said, printed = io.StringIO(), io.StringIO()
    with (
        model_parallel(layout),
        contextlib.redirect_stderr(said),
        mock.patch.object(terminal, "_printed", set()),
    ):
        run = train(fp8_config(layout, "mxfp8", **TINY, **fields), spec=get_gpt_layer_fp8_spec, **SHORT)
        with contextlib.redirect_stdout(printed):
            print_plan(run.chunks)
        return said.getvalue(), printed.getvalue(), site_report(run.chunks), iteration_counts()


@pytest.mark.parametrize("layout", [ONE, PP], ids=str)
def test_a_fallback_that_was_opted_into_is_said_and_recorded(layout: Layout, ranks: RankPool) -> None:
    """Each linear's once, those of other stages too, by the first rank."""
    fields = {"fp8_backend": "native", "fp8_fallback": "warn"}
    (said, plan, report, counts), *others = ranks(layout.model_ranks).run(fallback, layout, fields)
    sites = [entry for entry in report if entry["layer"] is not None]
    assert len(sites) == 8
    for entry in sites:
        assert entry["precision"] == "bf16" and entry["reason"].startswith(
            "fp8_fallback: fp8_backend 'native'"
        )
        assert said.count(f"megatron_fp8: {entry['name']} runs in BF16: {entry['reason']}\n") == 1
    assert plan.splitlines() == ["FP8 hybrid, fp8_recipe mxfp8", *plan_lines(report)]
    for elsewhere, no_plan, _, theirs in others:
        assert "runs in BF16" not in elsewhere and no_plan == ""
        counts = {kind: counts[kind] + theirs[kind] for kind in ("fp8_gemms", "hp_gemms")}
    assert (counts["fp8_gemms"], counts["hp_gemms"]) == (0, 9 * 3 * 2)


def without_install() -> list[str]:
    from megatron_fp8.mcore import spec

    messages = []
    with model_parallel():
        config = fp8_config(ONE, "delayed")
        chunks = build_chunks(config, spec=spec.get_gpt_layer_fp8_spec, sequence=128)
        mcore.uninstall()
        try:
            for call in (
                lambda: spec.get_gpt_layer_fp8_spec(config),
                lambda: spec.gpt_layer_fp8_spec,
                lambda: finish_iteration(chunks),
                lambda: config.finalize_model_grads_func(chunks),
            ):
                with pytest.raises(RuntimeError) as caught:
                    call()
                messages.append(str(caught.value))
        finally:
            mcore.install()
    return messages


def test_without_install_is_an_error(ranks: RankPool) -> None:
    messages = ranks(1).run(without_install)[0]
    assert len(messages) == 4 and all("call megatron_fp8.mcore.install() before" in m for m in messages)


# ------------------------------------------------------------------------------------------------------ interval, plain


def plain_config(layout: Layout) -> tuple[list[dict[str, int]], list[bool], int, list[float], list[float]]:
    """Megatron-Core's own config and spec, after install()."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    counts, moved, losses = [], [], []
    for fp8 in (DELAYED, {}):
        with model_parallel(layout):
            config = gpt_config(layout, **TINY, **fp8)
            assert type(config).__module__.startswith("megatron.core")

            def on_step(step: int, run: Any, config: Any = config) -> None:
                if config.fp8:
                    counts.append(iteration_counts())
                    state = state_of(config)
                    assert state.iteration == step + 1
                    moved.append(any(float(slot.scale) != 1 for slot in state.slots()))

            def spec(config: Any) -> Any:
                return get_gpt_layer_local_spec(normalization=config.normalization)

            losses.append(train(config, spec=spec, steps=3, on_step=on_step, **SHORT).losses)
    return counts, moved, len(counts), *losses


def test_a_plain_megatron_config_trains_in_fp8(ranks: RankPool) -> None:
    for counts, moved, steps, fp8, bf16 in ranks(2).run(plain_config, TP):
        assert steps == 3 and moved == [True] * 3
        assert [c["fp8_gemms"] for c in counts] == [2 * 4 * 3 * 2] * 3
        assert [c["amax_collectives"] for c in counts] == [1] * 3
        assert fp8 != bf16 and fp8 == pytest.approx(bf16, rel=5e-3)


# ------------------------------------------------------------------------------------------------------------------ specs


def spec_case(name: str) -> tuple[Counter[tuple[str, str, str]], list[dict[str, Any]], list[float], str]:
    fields, options = SPECS[name]
    seen = Watched()
    with model_parallel(), watched_gemms(seen):
        if name == "object":

            def spec(config: Any) -> Any:
                from megatron_fp8.mcore.spec import gpt_layer_fp8_spec

                return gpt_layer_fp8_spec
        else:
            spec = get_gpt_layer_fp8_spec
        config = fp8_config(ONE, "mxfp8", num_layers=1, **fields)
        run = train(config, spec=spec, **{**OPTIONS, "global_batch": 2, **options})
        return seen.gemms, site_report(run.chunks), run.losses, str(run.chunks[0])


SPECS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "object": ({"normalization": "LayerNorm"}, {}),
    "qk-layernorm": ({"qk_layernorm": True}, {}),
    "gpt-biases": ({"llama": False}, {"tied": True}),
    "moe": (MOE, {}),
}


@pytest.mark.parametrize("name", SPECS)
def test_specs(ranks: RankPool, name: str) -> None:
    """Query, key and value are one GEMM, and so are gate and up: every linear multiplies once, each way."""
    gemms, report, losses, model = ranks(1).run(spec_case, name)[0]
    experts = [f"mlp.experts.local_experts.{n}.linear_fc{i}" for n in range(4) for i in (1, 2)]
    sites = [*SITES[:2], *experts] if name == "moe" else SITES
    names = [f"decoder.layers.0.{site}" for site in sites]
    assert gemms == Counter({(n, gemm, "fp8"): 1 for n in names for gemm in ("fprop", "dgrad", "wgrad")})
    assert sorted(entry["name"] for entry in report if entry["layer"] == 0) == sorted(names)
    assert all(
        entry["backend"] == "emulated" and entry["recipe"] == "mxfp8" for entry in report[: len(names)]
    )
    assert losses[0] < 6.6
    assert bool(re.search(r"\(q_layernorm\): Norm", model)) == (name == "qk-layernorm")
    assert torch.tensor(losses).isfinite().all()
