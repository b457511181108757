"""Megatron-Core with Transformer Engine's layers, and with apex: stand-ins on a CPU, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.te.signatures import recorded

VERSION = max(recorded(), key=lambda version: [int(part) for part in version.split(".")])
SITES = {"self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2"}


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    """What both processes saw, by case."""
    commands = (VERSION, "parity", "delayed", "refusals", "checkpoints", "doctor"), ("apex",)
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.support.te.cases", *arguments],
            cwd=Path(__file__).parents[2],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for arguments in commands
    ]
    found: dict[str, Any] = {}
    for process in processes:
        out, error = process.communicate(timeout=200)
        assert process.returncode == 0, error[-4000:]
        for line in out.splitlines():
            found |= json.loads(line)
    return found


# ----------------------------------------------------------------------------------------------------- Transformer Engine


def test_recipe_reaches_the_layers_casts(seen):
    """The stand-in casts as its quantizers say: losses are the emulated backend's bits only if every setting arrived."""
    losses = set()
    for name, by_backend in seen["parity"].items():
        te, emulated = by_backend["transformer_engine"], by_backend["emulated"]
        assert te["losses"] == emulated["losses"], name
        assert te["counts"]["fp8_gemms"] == emulated["counts"]["fp8_gemms"] == 48, name
        assert te["counts"]["hp_gemms"] == emulated["counts"]["hp_gemms"], name
        assert len(te["entered"]) == 8 and not emulated["entered"], "two layers, two microbatches, two steps"
        assert te["fp8_calls"] == 4 * 8
        losses.add(tuple(te["losses"]))
    assert len(losses) == len(seen["parity"]), "recipes that give one loss show nothing"


def test_sites_are_reported_alike(seen):
    for name, by_backend in seen["parity"].items():
        te, emulated = by_backend["transformer_engine"]["sites"], by_backend["emulated"]["sites"]
        assert [site["name"] for site in te] == [site["name"] for site in emulated]
        inside = [(a, b) for a, b in zip(te, emulated, strict=True) if a["layer"] is not None]
        assert {a["name"].split(".", 3)[3] for a, _ in inside} == SITES
        for a, b in inside:
            assert {k: a[k] for k in ("precision", "recipe", "roles", "gemms", "layer")} == {
                k: b[k] for k in ("precision", "recipe", "roles", "gemms", "layer")
            }, name
            assert a["backend"] == "transformer_engine" and f"Transformer Engine {VERSION}" in a["reason"]


def test_delayed_scaling_with_a_layer_in_bf16(seen):
    run = seen["delayed"]["first"]
    precisions = {(site["layer"], site["precision"]) for site in run["sites"] if site["layer"] is not None}
    assert precisions == {(0, "bf16"), (1, "fp8")}
    assert run["counts"]["fp8_gemms"] == 4 * 3 * 2 and run["counts"]["hp_gemms"] == 4 * 3 * 2 + 3 * 2
    assert run["fp8_calls"] == 4 * 2, "the linears of the layer in BF16 leave the context"
    assert run["updates"] == len(run["entered"]) == 2, "one update a microbatch, as Transformer Engine has it"
    assert all("starts anew" in site["notes"][0] for site in run["sites"] if site["precision"] == "fp8")


def test_recompute_finds_its_context(seen):
    delayed, tensorwise = seen["delayed"]["recomputed"], seen["delayed"]["tensorwise recomputed"]
    assert delayed["entered"].count("checkpoint") == 4, "Transformer Engine's own, which knows its history"
    assert "checkpoint" not in tensorwise["entered"]
    assert tensorwise["losses"] == seen["parity"]["tensorwise"]["transformer_engine"]["losses"][:1]
    assert tensorwise["counts"]["fp8_gemms"] == delayed["counts"]["fp8_gemms"] == 8 * 2 * (3 + 1)


def test_an_override_leaves_the_context_for_its_call(seen):
    run = seen["delayed"]["override"]
    names = {
        site["name"] for site in run["sites"] if site["precision"] == "bf16" and site["layer"] is not None
    }
    assert names == {f"decoder.layers.{layer}.self_attention.linear_proj" for layer in (0, 1)}
    assert run["counts"]["fp8_gemms"] == 6 * 3 * 2 and run["counts"]["hp_gemms"] == 2 * 3 * 2 + 3 * 2
    assert run["fp8_calls"] == 6 * 2


@pytest.mark.parametrize(
    ("case", "says"),
    [
        (
            "megatrons_te_spec",
            "linear_proj is Transformer Engine's linear, which runs in BF16: build the model from",
        ),
        (
            "our_layers",
            "is no Transformer Engine layer, and the backend is 'transformer_engine': build the model",
        ),
        ("te_layers_of_another_backend", "is a Transformer Engine layer, and the backend is 'emulated'"),
        ("outside_the_context", "outside Transformer Engine's FP8 context, where it would run in BF16"),
        ("another_recipe", "context with another recipe (recipe_type=MXFP8BlockScaling"),
        ("quantizers_that_disobey", "grad_output: power-of-two scale is True, asked for was False"),
        ("no_gpu", "cannot run on cpu: Transformer Engine needs a CUDA device"),
    ],
)
def test_nothing_runs_in_bf16_in_silence(seen, case, says):
    assert says in seen["refusals"][case]


def test_checkpoints_are_interchangeable_and_hold_no_pickle(seen):
    keys = seen["checkpoints"]["keys"]
    plain = [key for key in keys["emulated"] if not key.endswith("_extra_state")]
    assert keys["transformer_engine"] == plain and seen["checkpoints"]["loaded"]
    assert any(key.endswith("linear_qkv.layer_norm_weight") for key in plain)


def test_doctor_runs_a_linear_in_each_recipe(seen):
    found = seen["doctor"]
    assert found["code"] == 0
    assert found["version"] == "installed, version unknown", "it has no metadata"
    results = {trial["recipe"]: trial["result"] for trial in found["trials"]}
    refused = {name for name, result in results.items() if result == "refused"}
    assert refused == {"rowwise", "nvfp4", "custom"} and list(results.values()).count("good") == 4, results
    assert found["cells"] == {name: name not in refused for name in results if name != "custom"}


def test_without_transformer_engine(seen):
    """An error with the install line before a model is built; BF16 only where that was opted into, and recorded."""
    found = seen["without_te"]
    says = "Transformer Engine is not installed: pip install --no-build-isolation 'megatron_fp8[te]'"
    assert says in found["refused"] and "use fp8_backend='auto'" in found["refused"]
    inside = [site for site in found["sites"] if site["layer"] is not None]
    assert len(inside) == 8 and found["counts"]["fp8_gemms"] == 0
    assert all(
        s["precision"] == "bf16" and says in s["reason"] and "fp8_fallback" in s["reason"] for s in inside
    )


# ------------------------------------------------------------------------------------------------------------------ apex


def test_apex_serves_where_its_extensions_are(seen):
    run, plain = seen["apex"]["fused"], seen["apex"]["plain"]
    # Two microbatches: four BF16 linears and the output projection. FP8 linears accumulate by themselves.
    assert run["calls"] == {
        "wgrad_gemm_accum_fp32": 5 * 2,
        "adam": 1,
        "multi_tensor_l2norm": 1,
        "multi_tensor_scale": 1,
    }
    assert "wgrad_gemm_accum_fp32" not in plain["calls"]
    assert run["losses"] == plain["losses"]


def test_rmsnorm_is_ours_beside_apex(seen):
    """Megatron-Core's FusedLayerNorm refuses it: a final norm taken from apex would stop the model from being built."""
    run = seen["apex"]["rms_norm"]
    assert "layer_norm" not in run["calls"] and run["calls"]["adam"] == 1
    assert run["losses"] == seen["parity"]["tensorwise"]["emulated"]["losses"][:1]


def test_apex_without_a_gpu_is_left_alone(seen):
    assert seen["apex"]["on_cpu"]["calls"] == {}
