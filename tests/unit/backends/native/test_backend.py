"""When the native backend is taken, and why not."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megatron_fp8 import Format, backends, kernels
from megatron_fp8.backends import choose_backend, emulated
from megatron_fp8.backends.native import backend as native
from megatron_fp8.backends.native.probe import refusals
from megatron_fp8.files import terminal
from megatron_fp8.recipe import CustomRecipe, Float8BlockScaling, MXFP8BlockScaling
from megatron_fp8.study.support_matrix import torch_refusal
from tests.support.scaled_mm import fake_torch
from tests.support.sites import NATIVE_RECIPES as RECIPES

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


# ---------------------------------------------------------------------------------------------- when it is taken


def machine(capability: tuple[int, int] = (9, 0), hip: str | None = None, architecture: str = ""):
    """A machine whose GPU has these properties."""
    return (
        mock.patch.object(torch.cuda, "get_device_capability", return_value=capability),
        mock.patch.object(torch.cuda, "get_device_name", return_value="Some GPU"),
        mock.patch.object(torch.version, "hip", hip),
        mock.patch.object(
            torch.cuda, "get_device_properties", return_value=SimpleNamespace(gcnArchName=architecture)
        ),
    )


def reason(**properties) -> str | None:
    patches = machine(**properties)
    with patches[0], patches[1], patches[2], patches[3]:
        return native.supports(GPU)


def test_devices_that_cannot():
    assert "NVIDIA GPU of compute capability 8.9" in (native.supports(CPU) or "")
    assert "8.6" in (reason(capability=(8, 6)) or "")
    fnuz = reason(capability=(9, 4), hip="6.4", architecture="gfx942:sramecc+:xnack-") or ""
    assert "gfx942" in fnuz and "FNUZ" in fnuz and "240" in fnuz
    assert "AMD" in (reason(capability=(9, 5), hip="7.0", architecture="gfx950") or "")
    with mock.patch.object(kernels, "refusal", return_value="Triton cannot run a kernel here"):
        assert reason() == "Triton cannot run a kernel here"
    with mock.patch.object(kernels, "refusal", return_value=None):
        for good in ((8, 9), (9, 0), (10, 0), (12, 0)):
            assert reason(capability=good) is None


def test_automatic_choice_gives_the_reason():
    backend, why = choose_backend("auto", CPU, RECIPES["mxfp8"])
    assert backend is emulated and why.startswith("not native: it needs an NVIDIA GPU")
    with pytest.raises(
        ValueError, match="fp8_backend 'native' cannot run on cpu: it needs an NVIDIA GPU"
    ) as caught:
        choose_backend("native", CPU)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="'transformer' is not in this release"):
        choose_backend("transformer", CPU)


@pytest.fixture
def tensor_cores():
    """A machine that this CPU stands in for, with torch's products as the test makes them."""
    with mock.patch.object(native, "device_reason", return_value=None):
        yield


def test_each_recipe_is_asked_for_by_itself(tensor_cores):
    """As an H100 has it: no MXFP8; the others run, and what is not tried again is not asked again."""
    with fake_torch(refuse={"mx": "MX needs sm100"}) as fake:
        for name, recipe in RECIPES.items():
            backend, why = choose_backend("auto", CPU, recipe)
            if name == "mxfp8":
                assert backend is emulated
                assert why.startswith("not native: fprop: 1x32 scales, float8_e4m3fn by float8_e4m3fn -> ")
                assert "MX needs sm100" in why
            else:
                assert backend is native and why == "the fastest here"
        tried = fake.calls.total()
        assert [native.supports(CPU, recipe) is None for recipe in RECIPES.values()].count(True) == len(
            RECIPES
        ) - 1
        assert fake.calls.total() == tried
    with (
        fake_torch(refuse={"mx": "MX needs sm100"}),
        pytest.raises(
            ValueError, match=r"'native' cannot run on cpu: fprop: .*MX needs sm100; use fp8_backend='auto'"
        ),
    ):
        choose_backend("native", CPU, RECIPES["mxfp8"])


def test_mixed_recipes_are_judged_by_their_gemms(tensor_cores):
    mixed = CustomRecipe(lambda role: RECIPES["mxfp8" if role == "input" else "rowwise"])
    plain = CustomRecipe(lambda role: None if role == "weight" else RECIPES["rowwise"])
    with fake_torch():
        assert "fprop: no tensor-core GEMM multiplies 1x32" in (native.supports(CPU, mixed) or "")
        assert native.supports(CPU, plain) is None


def test_what_has_no_kernel_is_in_the_plans_reason(tensor_cores):
    with fake_torch():
        backend, why = choose_backend("native", CPU, MXFP8BlockScaling(stochastic_rounding=True))
    assert backend is native
    assert why == (
        "asked for; grad_output quantized without a kernel (the same codes, slower): stochastic rounding"
    )


# ------------------------------------------------------------------------------------- blocks of gradients in E5M2

HYBRID = Float8BlockScaling(fp8_format=Format.HYBRID)
NO_E5M2 = {"block v1": "no such cuBLASLt", "block 1d v1": "no such cuBLASLt", "mx": "needs sm100"}
NO_BLOCKS = {"block": "only sm90", "block 1d": "only sm90"}


def test_blocks_of_e5m2_are_multiplied_by_the_older_product(tensor_cores):
    """_scaled_mm_v2 takes E4M3 by E4M3 only; _scaled_mm hands the dtypes on."""
    with fake_torch():
        assert native.notes(CPU, HYBRID) == [] and native.advice(CPU, HYBRID) is None
        plans = {
            which: native.plan_for(*rules, torch.bfloat16, None, refusals(CPU, native.multiply))
            for which, rules in native.gemms_of(HYBRID).items()
        }
        assert [made.request.by for made in plans.values()] == ["torch", "torch v1", "torch v1"]


def test_what_will_be_slow_is_said_once_with_what_changes_it(tensor_cores, capsys, monkeypatch):
    monkeypatch.setattr(terminal, "_printed", set())
    with fake_torch(refuse=NO_E5M2):
        assert native.notes(CPU, HYBRID) == [
            f"{g} by this package's block-scaled kernel" for g in ("dgrad", "wgrad")
        ]
        for _ in range(2):
            backends.warn_slow_backend("native", CPU, HYBRID, "fp8='e4m3'")
        backends.warn_slow_backend("emulated", CPU, HYBRID, "fp8='e4m3'")
        backends.warn_slow_backend("native", CPU, Float8BlockScaling(), "fp8='e4m3'")
        (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "megatron_fp8: dgrad and wgrad by this package's Triton kernel, probably slower than BF16: torch has"
    )
    assert "float8_e5m2 by float8_e4m3fn" in line and line.endswith(
        "(Invalid scaling configuration); fp8='e4m3' gives it to torch"
    )
    with fake_torch(refuse=NO_BLOCKS | {"mx": "needs sm100"}):
        backends.warn_slow_backend("native", CPU, Float8BlockScaling(), "fp8='e4m3'")
    line = capsys.readouterr().err
    assert "fprop, dgrad and wgrad by" in line and "(only sm90); another recipe, such as rowwise" in line


@pytest.mark.parametrize(
    ("lacks_mx", "better"), [(False, "recipe mxfp8"), (True, "recipes tensorwise and delayed")]
)
def test_rows_by_cutlass_are_named_with_a_better_recipe(tensor_cores, capsys, monkeypatch, lacks_mx, better):
    """A B200, or an H100 with CUDA before 12.9; torch has no float32 result of theirs there."""
    monkeypatch.setattr(terminal, "_printed", set())
    with fake_torch(refuse={"row float32": "only bf16", **({"mx": "needs sm100"} if lacks_mx else {})}):
        for name in ("rowwise", "tensorwise"):
            backends.warn_slow_backend("native", CPU, RECIPES[name], "fp8='e4m3'")
    (line,) = capsys.readouterr().err.splitlines()
    assert "scales per row (fprop, dgrad, wgrad) are multiplied by CUTLASS" in line and better in line
    with fake_torch():
        assert native.advice(CPU, RECIPES["rowwise"]) is None


def test_float32_scales_where_blocks_run_as_mx(tensor_cores, capsys, monkeypatch):
    """They are no E8M0 scales: the line says which setting makes them so."""
    monkeypatch.setattr(terminal, "_printed", set())
    with fake_torch(refuse=NO_BLOCKS):
        for recipe in (Float8BlockScaling(), HYBRID):
            assert native.supports(CPU, recipe) is None and native.advice(CPU, recipe) is None
            assert native.mx_gemms(recipe, refusals(CPU, native.multiply)) == ["fprop", "dgrad", "wgrad"]
        assert native.mx_gemms(RECIPES["mxfp8"], refusals(CPU, native.multiply)) == []
        backends.warn_slow_backend("native", CPU, Float8BlockScaling(use_f32_scales=True), "fp8='e4m3'")
    line = capsys.readouterr().err
    assert "fprop, dgrad and wgrad by this package's Triton kernel" in line and "(only sm90); " in line
    assert "powers of two (fp8_pow2_scales=true) give it to torch's MX product" in line


def test_every_start_says_what_will_be_slow(tensor_cores, capsys, monkeypatch):
    """Megatron-Core's sites (which the training command prepares), converted models, and bench."""
    from megatron_fp8 import TransformerConfig
    from megatron_fp8.commands import bench as bench_command
    from megatron_fp8.mcore.sites import resolve
    from megatron_fp8.nn.config import Fp8Config
    from megatron_fp8.nn.sites import plan_linear
    from megatron_fp8.study import bench as bench_run

    monkeypatch.setattr(bench_run, "SECTIONS", {"gemm": lambda *_: None})
    config = TransformerConfig(
        num_layers=1, hidden_size=64, num_attention_heads=4, bf16=True, fp8="hybrid", fp8_format="blockwise"
    )
    starts = {
        "fp8='e4m3' (--model.fp8=e4m3)": lambda: resolve(config, "layers.0.linear", None, CPU),
        "backward_format='e4m3'": lambda: plan_linear(
            Fp8Config("blockwise", backward_format="e5m2"), "fc", (64, 64), CPU
        ),
        "--fp8 e4m3": lambda: bench_command.main(["--recipe=blockwise", "--only=gemm", "--shape=16x16x16"]),
    }
    with fake_torch(refuse=NO_E5M2):
        for remedy, start in starts.items():
            monkeypatch.setattr(terminal, "_printed", set())
            start()
            (line,) = [line for line in capsys.readouterr().err.splitlines() if "Triton kernel" in line]
            assert remedy in line and "dgrad and wgrad" in line


@pytest.mark.parametrize("gradients", [Format.E4M3, Format.HYBRID])
@pytest.mark.parametrize(
    ("capability", "torch_has_blocks", "pow2", "float32"),
    [((8, 9), True, True, True), ((9, 0), False, True, True), ((9, 0), True, False, False), ((10, 0), True, False, True)],
    ids=["RTX 40", "H100, CUDA before 12.9", "H100", "B200"],
)  # fmt: skip
def test_whose_products_of_blocks_are_this_packages(capability, torch_has_blocks, pow2, float32, gradients):
    """Those of experts are one launch, and no others, as docs/megatron.md has it."""

    def refusal(request):
        lacking = "blocks begin with CUDA 12.9" if "block" in request.mode.name.lower() else None
        if lacking and not torch_has_blocks and not request.triton:
            return lacking
        return torch_refusal(capability)(request)

    for f32_scales, ours in ((False, pow2), (True, float32)):
        recipe = Float8BlockScaling(fp8_format=gradients, use_f32_scales=f32_scales)
        assert native.kernel_gemms(recipe, refusal) == (["fprop", "dgrad", "wgrad"] if ours else [])
    for name in ("delayed", "tensorwise", "rowwise"):
        assert not native.kernel_gemms(RECIPES[name], refusal)
