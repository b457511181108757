"""Diagnosis of Megatron-Core models over ranks, and the command on a run that was trained here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.support.fp8_gpt import MOE
from benchmarks.support.ranks import Layout
from tests.support.command import MODEL, run_each
from tests.support.diagnosis_cases import diagnosed, planned
from tests.support.long_cases import some

LAYOUTS = {
    "tensor and sequence": (Layout(tp=2, sp=True), {}),
    "pipeline": (Layout(pp=2), {}),
    "context, recomputed": (
        Layout(cp=2),
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ),
}
# A column-parallel linear of the first layer and a row-parallel one of the second; with all others it would be thrice as
# many passes.
SOME = {
    "fp8_overrides": {
        "*.linear_proj": "bf16",
        "*.linear_fc1": "bf16",
        "decoder.layers.0.mlp.linear_fc2": "bf16",
        "decoder.layers.1.self_attention.linear_qkv": "bf16",
    }
}
WRONG = ("decoder.layers.1.mlp.linear_fc2", "dgrad", 2.0)


@pytest.fixture(scope="module")
def alone(ranks) -> dict[str, Any]:
    return ranks(1).run(diagnosed, Layout(), "tensorwise", SOME, WRONG, timeout=120)[0]


@pytest.mark.parametrize("name", some(LAYOUTS, "tensor and sequence", "pipeline"))
def test_ranks_name_the_same_gemm_as_one_process_by_the_same_figures(ranks, alone, name):
    """Under tensor parallelism down to the GEMM and the override, else to the site, by its layer."""
    layout, fields = LAYOUTS[name]
    whole = layout.tp > 1
    passes = 160 if whole else 40
    results = ranks(2).run(diagnosed, layout, "tensorwise", {**SOME, **fields}, WRONG, passes, timeout=180)
    assert results[0] == results[1], "ranks do not agree"
    found = results[0]
    assert (found["ranking"][0]["site"], found["ranking"][0]["stands_out"]) == (WRONG[0], True)
    if whole:
        assert found["ranking"][0]["gemm"] == "dgrad"
        assert found["overrides"] == alone["overrides"] == {f"{WRONG[0]}:dgrad": "bf16"}
    losses, right = (of["high_precision"]["losses"] for of in (found, alone))
    assert losses == pytest.approx(right, rel=2e-3)
    for variant in ("planned", "at_best"):
        assert found[variant]["gradient_error"] == pytest.approx(alone[variant]["gradient_error"], rel=0.1)
        assert found[variant]["of_parameters"].keys() == alone[variant]["of_parameters"].keys()
    assert found["planned"]["distance"] > 3 * found["at_best"]["distance"]


def test_experts_on_two_ranks_cost_what_they_cost_on_one(ranks):
    biased = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    fields = {**MOE, **biased, "moe_ffn_hidden_size": 64, "num_layers": 1}
    results = [
        ranks(number).run(diagnosed, layout, "tensorwise", fields, None, 32, timeout=180)
        for number, layout in ((1, Layout()), (2, Layout(ep=2)))
    ]
    (one,), (two, other) = results
    assert two == other, "ranks do not agree"
    assert two["high_precision"]["losses"] == pytest.approx(one["high_precision"]["losses"], rel=2e-3)
    assert two["planned"]["gradient_error"] == pytest.approx(one["planned"]["gradient_error"], rel=0.1)
    assert two["planned"]["of_parameters"].keys() == one["planned"]["of_parameters"].keys()
    assert {part["site"] for part in two["ranking"]} == {part["site"] for part in one["ranking"]}


@pytest.mark.parametrize("layout", [Layout(), Layout(pp=2)], ids=["one rank", "pipeline"])
def test_a_layer_that_no_format_can_hold_stays_in_high_precision(ranks, layout):
    """The plan keeps its fprop in BF16 and gives NVFP4 to a healthy layer, the same on each rank of a pipeline."""
    results = ranks(layout.model_ranks).run(
        planned, layout, ("mxfp8", "nvfp4"), 0.05, SOME, "decoder.layers.0", timeout=240
    )
    assert all(result == results[0] for result in results), "ranks do not agree"
    plan, costs = results[0]["gemms"], results[0]["costs"]
    sensitive, healthy = "decoder.layers.0.self_attention.linear_qkv", "decoder.layers.1.mlp.linear_fc2"
    assert list(plan) == [sensitive, healthy] and len(costs) == 2 * 3 * 2
    assert plan[sensitive]["fprop"] == "bf16" and "nvfp4" in plan[healthy].values()
    worst = max(costs, key=lambda one: one["cost"])
    assert (worst["site"], worst["gemm"]) == (sensitive, "fprop")
    assert results[0]["whole"] <= 0.05 and results[0]["time"] < 0.7


# ----------------------------------------------------------------------------------------------------- the command

Heard = dict[str, tuple[int, str, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("diagnosis")


@pytest.fixture(scope="module")
def heard(folder) -> Heard:
    """A run whose weights live as FP8, another with another learning rate, and what is said of them."""
    (folder / "text.txt").write_text("abcdefghijklmnopqrstuvwxyz " * 400)
    content = {
        "model": {**MODEL, "num_layers": 3, "num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 1}
        | {"fp8_format": "tensorwise", "hidden_dropout": 0.0, "fp8_param": True},
        "train": {
            "train_iters": 6, "micro_batch_size": 2, "global_batch_size": 4, "seq_length": 32,
            "eval_interval": 0, "eval_iters": 0, "threads": 1,
        },
        "optimizer": {"lr": 0.01, "lr_warmup_iters": 2, "use_distributed_optimizer": True},
        "data": {"paths": [str(folder / "text.txt")], "split": "1,0,0", "cache_dir": str(folder / "cache")},
        "checkpoint": {"save_interval": 2, "keep_last": 0},
        "telemetry": {"every": 1},
    }  # fmt: skip
    config = folder / "small.yaml"
    config.write_text(yaml.safe_dump(content))
    trained, other = folder / "run", folder / "other"
    diagnose = ["diagnose", trained, "--budget", "60"]
    return run_each(
        folder,
        {
            "train": ["train", f"--config={config}", f"--run_dir={trained}"],
            "train other": [
                "train",
                f"--config={config}",
                f"--run_dir={other}",
                "--optimizer.adam_beta2=0.9",
            ],
            "latest": diagnose,
            "iteration": [
                *diagnose,
                "--iteration",
                "4",
                "--recipe",
                "mxfp8",
                "--json",
                folder / "four.json",
                "--budget",
                "32",
            ],
            "formats": [
                *(
                    "diagnose",
                    trained,
                    "--formats",
                    "bf16,nvfp4",
                    "--loss-budget",
                    "0.0002",
                    "--budget",
                    "100",
                ),
            ],
            "few passes": ["diagnose", trained, "--formats", "nvfp4", "--budget", "50"],
            "delayed": [*diagnose, "--formats", "nvfp4,delayed"],
            "loss budget": [*diagnose, "--formats", "nvfp4", "--loss-budget", "2"],
            "no formats": [*diagnose, "--loss-budget", "0.1"],
            "share of formats": [*diagnose, "--formats", "nvfp4", "--share", "0.5"],
            "against": ["diagnose", trained, "--against", other, "--json", folder / "parting.json"],
            "itself": ["diagnose", trained, "--against", trained],
            "too early": [*diagnose, "--iteration", "1"],
            "too late": [*diagnose, "--iteration", "99999"],
            "many batches": ["diagnose", trained, "--batches", "5000", "--budget", "100000"],
            "no such site": [*diagnose, "--model.fp8_overrides={'*.fc9': 'bf16'}"],
            "few batches": [*diagnose, "--batches", "3"],
            "small budget": ["diagnose", trained, "--budget", "5"],
            "bf16": [*diagnose, "--recipe", "bf16"],
            "missing": ["diagnose", folder / "nothing"],
            "no folder": [*diagnose, "--json", folder / "nowhere" / "x.json"],
            "not a run": ["diagnose", trained, "--against", folder],
            "share": [*diagnose, "--share", "2"],
        },
    )


def test_the_command_prints_a_table_and_a_verdict_and_writes_figures_and_a_plot(heard, folder):
    code, said, printed = heard["latest"]
    assert code == 0, said
    assert "iteration 6" in said and "from that of iteration 7 on" in said
    assert (
        printed.index("FP8 is not the cause at this checkpoint: all sites together cost no more")
        == 0
        < printed.index("| in FP8 alone")
    )
    found = json.loads((folder / "run" / "diagnosis" / "diagnosis.json").read_text())
    assert found["iteration"] == 6 and found["first_batch_of_iteration"] == 7 and found["passes"] <= 60
    assert found["ranking"][0]["site"].startswith("decoder.layers.1.")
    assert found["planned"]["gradient_error"] > 3 * found["bf16"]["gradient_error"] > 0
    assert found["planned"]["update_error"] > found["bf16"]["update_error"] > 0, "of the checkpoint's moments"
    assert (folder / "run" / "diagnosis" / "diagnosis.png").read_bytes()[:4] == b"\x89PNG"


def test_the_batch_of_an_iteration_is_replayed_from_the_checkpoint_before_it(heard, folder):
    code, said, _ = heard["iteration"]
    assert code == 0, said
    found = json.loads((folder / "four.json").read_text())
    assert (found["iteration"], found["first_batch_of_iteration"], found["recipe"]) == (2, 4, "mxfp8")
    assert "the weights are those after iteration 2, the batch is that of 4" in said


def test_high_precision_of_a_run_whose_weights_are_fp8_is_its_masters(heard, folder):
    """The loss of the next batch is that of the training's own next iteration, but for FP8."""
    found = json.loads((folder / "four.json").read_text())
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    third = json.loads((folder / "run" / "diagnosis" / "diagnosis.json").read_text())
    assert abs(found["high_precision"]["losses"][0] - rows[3]["lm_loss"]) < 0.5
    assert third["high_precision"]["losses"][0] < rows[0]["lm_loss"]


def test_a_run_with_the_plan_s_overrides_plans_these_precisions(heard, folder):
    """The plan is printed with its sum and its cost as a whole; training by plan.yaml reports its formats."""
    code, said, printed = heard["formats"]
    assert code == 0, said
    here = folder / "run" / "diagnosis"
    found = json.loads((here / "formats.json").read_text())
    plan = found["gemms"]
    formats = {fmt for gemms in plan.values() for fmt in gemms.values()}
    assert formats == {"bf16", "nvfp4"} and all(site.startswith("decoder.layers.1.") for site in plan)
    assert f"as a whole {found['whole']:.3g}" in printed and "| GEMM " in printed
    overrides = yaml.safe_load((here / "plan.yaml").read_text())
    assert overrides == found["overrides"]
    matchers = yaml.safe_load((here / "plan_megatron.yaml").read_text())["matchers"]
    assert list(matchers) == [*plan, "all others"]
    compile((here / "plan_te.py").read_text(), "plan_te.py", "exec")
    options = [f"--run_dir={folder / 'planned'}", "--train.train_iters=1", "--model.fp8_param=false"]
    text = (here / "plan.yaml").read_text()
    train = ["train", f"--config={folder / 'small.yaml'}", *options, f"--model.fp8_overrides={text}"]
    code, said, _ = run_each(folder, {"train": train})["train"]
    assert code == 0, said
    report = json.loads((folder / "planned" / "report.json").read_text())
    sites = {site["name"]: site["gemms"] for site in report["sites"]}
    for site, gemms in plan.items():
        assert sites[site] == {gemm: "fp4" if fmt == "nvfp4" else "bf16" for gemm, fmt in gemms.items()}, site


def test_two_runs_part_where_their_losses_and_weights_do(heard, folder):
    code, said, printed = heard["against"]
    assert code == 0, said
    found = json.loads((folder / "parting.json").read_text())
    assert found["loss"]["iteration"] >= 2
    assert found["checkpoint"]["name"] == "iter_0000002"
    assert f"differs first in iteration {found['loss']['iteration']}" in printed
    first = found["telemetry_first"]
    assert first["iteration"] == 2 <= found["loss"]["iteration"]
    assert first["tensor"] in ("input", "weight") and first["values"][0] != first["values"][1]
    assert f"differs first in iteration {first['iteration']}, {first['site']}, {first['tensor']}" in printed
    assert "the same in 6 iterations" in heard["itself"][2]
    assert "nothing differs in 6 measured iterations" in heard["itself"][2]
    assert "the same weights in iter_0000002, iter_0000004, iter_0000006" in heard["itself"][2]


BAD = {
    "too early": "--iteration 1: no checkpoint in",
    "too late": "--iteration 99999: the run's last iteration is 6; give one up to 7",
    "many batches": "--batches 5000: the run's training data has",
    "no such site": "'*.fc9' matches no GEMM site; the sites are decoder.layers.0.self_attention.linear_proj",
    "few batches": "--batches 3 are too few",
    "small budget": "--budget 5 passes are too few: 4 batches need 32",
    "bf16": "--recipe bf16 has nothing in FP8 to diagnose",
    "missing": "is not a checkpoint of megatron_fp8",
    "no folder": "there is no such folder; make it first",
    "not a run": "is not a run's folder: it has no config.yaml",
    "few passes": "--budget 50: 12 GEMMs in 1 formats need 73 passes",
    "delayed": "--formats nvfp4,delayed: 'delayed' must be one of bf16, tensorwise",
    "loss budget": "--loss-budget 2 must be above 0 and below 1",
    "no formats": "--loss-budget is of --formats: give that too",
    "share of formats": "--formats measures a plan by GEMM: leave out --share",
    "share": "--share 2 must be above 0 and at most 1",
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_one_line(heard, name):
    code, said, _ = heard[name]
    assert code == 2
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and BAD[name] in errors[0], said
    assert "Traceback" not in said
