"""Megatron-Core with Transformer Engine's real layers, and with a stand-in of apex, each in a process of its own.

Transformer Engine's wheel is fetched from the package index (1.2 MB of Python, no CUDA). What its extension would compute
raises (tests/support/te/engine.py), or is this package's where a training needs it (products.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.te.engine import NEWEST, OLDEST, download

SITES = {"self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2"}


def started(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    """A Python of its own: Megatron-Core and torch differ where Transformer Engine or apex is."""
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", *arguments],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def cases(*arguments: str) -> dict[str, Any]:
    """What a process saw, by case."""
    process = started("tests.support.te.cases", *arguments)
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error[-4000:]
    found: dict[str, Any] = {}
    for line in out.splitlines():
        found |= json.loads(line)
    return found


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> dict[str, Path]:
    """Version -> the folder of an installed wheel."""
    folders = {version: tmp_path_factory.mktemp("engine") for version in (OLDEST, NEWEST)}
    for version, folder in folders.items():
        if (reason := download(version, folder)) is not None:
            pytest.skip(
                f"Transformer Engine {version} cannot be fetched, its classes ARE NOT TESTED: {reason}"
            )
    return folders


@pytest.fixture(scope="module")
def seen(wheels) -> dict[str, Any]:
    """What a process with the newest Transformer Engine saw."""
    return cases(str(wheels[NEWEST]), "parity", "delayed", "refusals", "checkpoints", "doctor")


@pytest.fixture(scope="module")
def beside_apex() -> dict[str, Any]:
    """What a process with apex, and without Transformer Engine, saw."""
    return cases("apex")


# ----------------------------------------------------------------------------------------------------- Transformer Engine


@pytest.mark.parametrize("version, tests", [(OLDEST, "test_recipes.py"), (NEWEST, "")])
def test_real_classes(wheels, version, tests):
    """tests/functional/te: recipes in every version that is accepted; factories, layouts and names in the newest."""
    process = started(
        "pytest", "-q", "-p", "no:cacheprovider", f"tests/functional/te/{tests}",
        TRANSFORMER_ENGINE=str(wheels[version]),
    )  # fmt: skip
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, out[-6000:] + error[-2000:]


def test_train_on_two_ranks(wheels, tmp_path):
    """Tensor and sequence parallel, through the command: the emulated backend's losses, and a checkpoint at the end."""
    config = ["--config=examples/configs/tiny_gpt_cpu.yaml", "--model.first_last_layers_bf16=false"]
    processes = [
        started(
            *["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tests.support.te.app", "train"],
            *config, "--model.tensor_model_parallel_size=2", "--model.sequence_parallel=true",
            "--train.train_iters=2", f"--model.fp8_backend={backend}", f"--run_dir={tmp_path / backend}",
            TRANSFORMER_ENGINE=str(wheels[NEWEST]),
        )
        for backend in ("transformer_engine", "emulated")
    ]  # fmt: skip
    for process in processes:
        out, error = process.communicate(timeout=300)
        assert process.returncode == 0, out[-3000:] + error[-3000:]
    wanted, found = (
        [
            {name: row[name] for name in ("lm_loss", "grad_norm", "fp8_gemms", "hp_gemms")}
            for row in map(json.loads, (tmp_path / backend / "metrics.jsonl").read_text().splitlines())
        ]
        for backend in ("emulated", "transformer_engine")
    )
    assert found == wanted and len(found) == 2
    assert (tmp_path / "transformer_engine" / "checkpoints" / "iter_0000002").is_dir()


def test_recipe_reaches_the_layers_casts(seen):
    """Products are cast as the quantizers say: losses are the emulated backend's bits only if every setting arrived."""
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
            assert a["backend"] == "transformer_engine" and f"Transformer Engine {NEWEST}" in a["reason"]


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
    found = seen["checkpoints"]
    assert found["resumed"] and found["read by emulated"]
    assert not [key for key in found["keys"] if key.endswith("_extra_state")]
    assert any(key.endswith("linear_qkv.layer_norm_weight") for key in found["keys"])


def test_doctor_runs_a_linear_in_each_recipe(seen):
    found = seen["doctor"]
    assert found["code"] == 0
    assert found["version"] == NEWEST
    results = {trial["recipe"]: trial["result"] for trial in found["trials"]}
    refused = {name for name, result in results.items() if result == "refused"}
    assert refused == {"rowwise", "nvfp4", "custom"} and list(results.values()).count("good") == 4, results
    assert found["cells"] == {name: name not in refused for name in results if name != "custom"}


def test_without_transformer_engine(beside_apex):
    """An error with the install line before a model is built; BF16 only where that was opted into, and recorded."""
    found = beside_apex["without_te"]
    says = "Transformer Engine is not installed: pip install --no-build-isolation 'megatron_fp8[te]'"
    assert says in found["refused"] and "use fp8_backend='auto'" in found["refused"]
    inside = [site for site in found["sites"] if site["layer"] is not None]
    assert len(inside) == 8 and found["counts"]["fp8_gemms"] == 0
    assert all(
        s["precision"] == "bf16" and says in s["reason"] and "fp8_fallback" in s["reason"] for s in inside
    )


# ------------------------------------------------------------------------------------------------------------------ apex


def test_apex_serves_where_its_extensions_are(beside_apex):
    run, plain = beside_apex["apex"]["fused"], beside_apex["apex"]["plain"]
    # Two microbatches: four BF16 linears and the output projection. FP8 linears accumulate by themselves.
    assert run["calls"] == {
        "wgrad_gemm_accum_fp32": 5 * 2,
        "adam": 1,
        "multi_tensor_l2norm": 1,
        "multi_tensor_scale": 1,
    }
    assert "wgrad_gemm_accum_fp32" not in plain["calls"]
    assert run["losses"] == plain["losses"]


def test_rmsnorm_is_ours_beside_apex(beside_apex):
    """Megatron-Core's FusedLayerNorm refuses it: a final norm taken from apex would stop the model from being built."""
    run = beside_apex["apex"]["rms_norm"]
    assert "layer_norm" not in run["calls"] and run["calls"]["adam"] == 1
    assert run["losses"] == beside_apex["apex"]["on_cpu"]["losses"]


def test_apex_without_a_gpu_is_left_alone(beside_apex):
    assert beside_apex["apex"]["on_cpu"]["calls"] == {}
