"""Megatron-Bridge 0.3.1, in an environment of its own: its providers train in FP8, and Hugging Face weights come back.

pip installs it when the test runs. Without a package index these tests are skipped, and pytest's summary says so.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import ROOT, environment
from tests.support.long_cases import some

# Without its dependencies: most are kernels for GPUs. It does not take transformers 5, which this project's tests have.
PACKAGES = (
    "megatron-bridge==0.3.1",
    "transformers==4.57.6",
    "huggingface_hub==0.36.2",
    "tokenizers==0.22.2",
    "omegaconf==2.3.0",
    "antlr4-python3-runtime==4.9.3",
    "hydra-core==1.3.2",
)
FP8 = ("delayed", "tensorwise", "rowwise", "blockwise", "mxfp8")
TRAINED = [
    (name, recipe) for name in ("gpt", "llama", "qwen3", "qwen3moe", "deepseek") for recipe in (*FP8, "nvfp4")
]
CONVERTED = [
    *((name, recipe, "") for name in ("llama", "qwen3", "qwen3moe", "deepseek") for recipe in (*FP8, "nvfp4", None)),
    *(("llama", "tensorwise", layout) for layout in ("dp", "tp", "pp")),
    *(("deepseek", "mxfp8", layout) for layout in ("dp", "tp", "ep")),
    ("qwen3moe", "blockwise", "ep"),
]  # fmt: skip
MIXED = (
    "bf16_with_fp8_delayed_scaling_mixed",
    "bf16_with_fp8_current_scaling_mixed",
    "bf16_with_fp8_subchannel_scaling_mixed",
    "bf16_with_mxfp8_mixed",
    "bf16_with_nvfp4_mixed",
    "nemotron_h_bf16_with_fp8_current_scaling_mixed",
    "nanov2_bf16_with_fp8_current_scaling_mixed",
)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Megatron-Bridge's environment, with this environment's packages behind it."""
    folder = tmp_path_factory.mktemp("bridge")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=60)
    found = folder / "bin" / "python"
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        found,
        "install",
        "--quiet",
        "--no-deps",
        "--no-compile",
    ]
    options = ["--disable-pip-version-check", "--retries=1", "--timeout=15"]
    done = subprocess.run([*command, *options, *PACKAGES], capture_output=True, text=True, timeout=300)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        pytest.skip(f"the tests of Megatron-Bridge DID NOT RUN: pip could not install it: {last}")
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    return found


@pytest.fixture(scope="module")
def results(python: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    """Case -> its result on each rank, of all tests that are to run: one process imports Megatron-Bridge once."""
    cases = [json.dumps(_case(item)) for item in request.session.items if item.fspath == request.node.fspath]
    done = subprocess.run(
        [python, "-W", "ignore", "-m", "tests.support.bridge_cases", *cases],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120 + 40 * len(cases),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(cases, map(json.loads, done.stdout.splitlines()), strict=True))


def _case(item: Any) -> list[Any]:
    kind = item.function.__name__.split("_")[1]
    return [kind, *(value for value in item.callspec.params.values() if value != "")]


@pytest.fixture
def ranks(results: dict[str, Any], request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """The result of this test's case on each rank."""
    found: list[dict[str, Any]] = results[json.dumps(_case(request.node))]
    assert not any("error" in result for result in found), "\n".join(r.get("error", "") for r in found)
    return found


@pytest.mark.parametrize("name, recipe", some(TRAINED, ("deepseek", "mxfp8")))
def test_train_every_linear_in_fp8(ranks: list[dict[str, Any]], name: str, recipe: str) -> None:
    """And with the fusions that the provider asks for, whose kernels are not here."""
    (found,) = ranks
    assert found["precisions"] == ["fp4" if recipe == "nvfp4" else "fp8"] and found["recipes"] == [recipe]
    assert found["sites"] == {"qwen3moe": 30, "deepseek": 28}.get(name, 12)
    assert found["gemms"] == [3 * found["sites"], 3], "the output layer's are BF16"
    first, second = found["losses"]
    assert first == pytest.approx(math.log(128), rel=0.05) and second < first - 0.1


@pytest.mark.parametrize("name, recipe, layout", some(CONVERTED, ("deepseek", "mxfp8", "")))
def test_convert_loses_nothing(
    ranks: list[dict[str, Any]], name: str, recipe: str | None, layout: str
) -> None:
    """With FP8 parameters, whose codes have other values than the weights, on one rank and on two."""
    for found in ranks:
        assert found["names"] == found["changed"] == [] and found["weights"] >= 30
        # Rowwise weights stay BF16 under the distributed optimizer, which says so.
        assert (found["params"] > 0) == (recipe not in (None, "nvfp4", "rowwise"))


@pytest.mark.parametrize("name", some(MIXED, "bf16_with_fp8_current_scaling_mixed"))
def test_precision_recipes_mean_the_same(ranks: list[dict[str, Any]], name: str) -> None:
    """A model of this package's config, with the same fields, has the same losses to the bit."""
    (found,) = ranks
    assert found["losses"] == found["ours"] and found["losses"][1] < found["losses"][0]
    assert found["params"] == found["our_params"]
    assert (found["params"] > 0) == (
        name not in ("bf16_with_fp8_subchannel_scaling_mixed", "bf16_with_nvfp4_mixed")
    )
