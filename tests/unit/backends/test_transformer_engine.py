"""Recipes of ours onto Transformer Engine's: what arrives, what is refused, what TE would have dropped."""

from __future__ import annotations

import re
import sys
import types
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_fp8 import Format
from megatron_fp8.backends import BACKENDS, choose_backend
from megatron_fp8.backends import transformer_engine as engine
from megatron_fp8.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
)
from tests.support.te.cases import MAPPED
from tests.support.te.signatures import recorded
from tests.support.te.standin import _quantizers, recipe_module

VERSIONS = sorted(recorded())
CUDA = torch.device("cuda")


@pytest.fixture(params=VERSIONS)
def te(request, monkeypatch):
    """The recipe classes of one version, as recorded; and its version."""
    module = recipe_module(request.param)
    monkeypatch.setitem(sys.modules, "transformer_engine.common.recipe", module)
    monkeypatch.setattr(engine, "version", lambda: request.param)
    monkeypatch.setattr(engine, "_made", {})
    module.known = recorded()[request.param]
    return module


def linear_of(te: Any, made: Any) -> Any:
    """A linear's quantizers and state, as TE makes them from its recipe."""
    length = getattr(made, "amax_history_len", 1)
    state = types.SimpleNamespace(amax_history=torch.zeros(length, 3))
    return types.SimpleNamespace(
        quantizers=_quantizers(made, te.known), fp8_meta={"scaling_fwd": state, "scaling_bwd": state}
    )


@pytest.mark.parametrize("recipe", MAPPED, ids=str)
def test_what_a_recipe_says_arrives_in_the_quantizers(te, recipe):
    made = engine.te_recipe(recipe)
    assert type(made).__name__ == type(recipe).__name__
    assert engine.disagreements(linear_of(te, made), recipe) == []
    for other in MAPPED:
        if type(other) is type(recipe) and _casts(other) != _casts(recipe):
            assert engine.disagreements(linear_of(te, made), other), f"{recipe} passed for {other}"


def _casts(recipe: Any) -> Any:
    """What can be seen of a recipe in quantizers and state: all but delayed scaling's margin and algorithm."""
    return getattr(recipe, "amax_history_len", None), [
        (rule.fmt.name, rule.granularity, rule.scale, rule.epsilon)
        for rule in map(recipe.rule, ("input", "weight", "grad_output"))
    ]


def test_keywords_alone_do_not_arrive(te):
    """Why the mapping sets attributes: the fault in Transformer Engine that it works around is still there."""
    made = te.Float8CurrentScaling(use_power_2_scales=True)
    assert made.use_power_2_scales and not made.fp8_quant_fwd_inp.power_2_scale
    (first, *_) = engine.disagreements(linear_of(te, made), Float8CurrentScaling(use_power_2_scales=True))
    assert first == "input: power-of-two scale is False, asked for was True"
    made = te.Float8BlockScaling(use_f32_scales=True)
    assert "input: power-of-two scale is True" in engine.disagreements(
        linear_of(te, made), Float8BlockScaling(use_f32_scales=True)
    )[0]  # fmt: skip
    assert not hasattr(
        te.DelayedScaling(override_linear_precision=(False, False, True)), "override_linear_precision"
    )


def test_a_setting_that_does_not_stick_is_an_error(te, monkeypatch):
    def shortened(self: Any, name: str, value: Any) -> None:
        object.__setattr__(self, name, 16 if name == "amax_history_len" else value)

    monkeypatch.setattr(te.DelayedScaling, "__setattr__", shortened, raising=False)
    with pytest.raises(
        RuntimeError, match=r"did not take amax_history_len=1024 .* it has 16\. Use fp8_backend"
    ):
        engine.te_recipe(DelayedScaling())


def test_a_setting_that_a_version_lacks_is_an_error(te, monkeypatch):
    del te.Float8CurrentScaling.fp8_quant_bwd_grad
    with pytest.raises(RuntimeError, match=r"did not take fp8_quant_bwd_grad=.* it has 'absent'"):
        engine.te_recipe(Float8CurrentScaling())


def test_recipes_that_te_cannot_tell_apart_are_not_mixed(te):
    engine.te_recipe(DelayedScaling(amax_compute_algo="max"))
    engine.te_recipe(DelayedScaling(amax_compute_algo="max"))
    engine.te_recipe(DelayedScaling(amax_compute_algo="most_recent", margin=1))
    with pytest.raises(ValueError, match="are one to Transformer Engine"):
        engine.te_recipe(DelayedScaling(amax_compute_algo="most_recent"))


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        (Float8RowwiseScaling(), "no rowwise recipe"),
        (CustomRecipe(lambda role: None), "its own quantizers"),
        (Float8CurrentScaling(stochastic_rounding=True), "does not round FP8 stochastically"),
        (MXFP8BlockScaling(stochastic_rounding=True), "does not round FP8 stochastically"),
        (DelayedScaling(amax_epsilon=1e-3), "no amax epsilon"),
        (DelayedScaling(interval=4), "every iteration, not every 4"),
        (Float8CurrentScaling(margin=1), "no margin"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_te_has_no_way_to_do_is_refused(te, recipe, reason):
    assert reason in (engine.unmapped(recipe) or "")
    with pytest.raises(ValueError, match=reason):
        engine.te_recipe(recipe)


def test_the_refused_settings_would_have_been_dropped(te):
    """None of them is a field of TE's recipe: its classes would have taken and forgotten them."""
    assert not {"interval", "amax_epsilon", "stochastic_rounding", "fp8_wgrad"} & set(
        vars(te.DelayedScaling())
    )
    assert not {"margin", "stochastic_rounding"} & set(vars(te.Float8CurrentScaling()))


def test_without_transformer_engine_the_install_line_is_said():
    assert engine.missing() is not None, "these tests need a machine without Transformer Engine"
    for device in (torch.device("cpu"), CUDA):
        with pytest.raises(
            ValueError, match=r"not installed: pip install --no-build-isolation 'megatron_fp8\[te\]'"
        ):
            choose_backend("transformer_engine", device, Float8CurrentScaling(), layers=True)


def test_only_a_caller_with_layers_gets_it_and_never_by_itself(te):
    with mock.patch.object(engine, "missing", lambda: None):
        with pytest.raises(
            ValueError, match=r"has layers of its own, .* here use 'auto' or one of native, emulated"
        ):
            choose_backend("transformer_engine", CUDA)
        with mock.patch.object(engine, "_refusal_of_te", lambda recipe: None):
            assert choose_backend("transformer_engine", CUDA, DelayedScaling(), layers=True)[0] is engine
            assert choose_backend("auto", torch.device("cpu"), DelayedScaling(), layers=True)[0] is not engine
        with pytest.raises(ValueError, match="needs a CUDA device, this is cpu"):
            choose_backend("transformer_engine", torch.device("cpu"), layers=True)
    assert engine.name not in BACKENDS


def test_its_own_reason_about_the_gpu_is_passed_on(te, monkeypatch):
    asked: list[str] = []

    def says(kind: str) -> Any:
        def available(return_reason: bool) -> tuple[bool, str]:
            asked.append(kind)
            return kind == "fp8", f"{kind} needs another GPU"

        return available

    pytorch = types.SimpleNamespace(
        is_fp8_available=says("fp8"),
        is_mxfp8_available=says("mxfp8"),
        is_fp8_block_scaling_available=says("block"),
    )
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", pytorch)
    monkeypatch.setattr(engine, "missing", lambda: None)
    assert engine.supports(CUDA, DelayedScaling()) is engine.supports(CUDA, Float8CurrentScaling()) is None
    assert engine.supports(CUDA, MXFP8BlockScaling()).endswith("mxfp8 needs another GPU")
    assert engine.supports(CUDA, Float8BlockScaling()).endswith("block needs another GPU")
    assert asked == ["fp8", "fp8", "mxfp8", "block"]


@pytest.mark.parametrize(
    ("version", "error", "says"),
    [
        ("2.4.0", None, "Transformer Engine 2.4.0 is installed, 2.9 or newer is needed"),
        (
            "2.20.2",
            RuntimeError("Found empty meta package\nmore"),
            r"does not import \(RuntimeError: Found empty meta",
        ),
        ("2.20.2", OSError("libcudart.so.12: cannot open"), r"does not import \(OSError: libcudart"),
    ],
    ids=["old", "meta-package", "no-library"],
)
def test_an_installation_that_does_not_serve_says_why(monkeypatch, version, error, says):
    real = engine.import_module

    def fake(name: str) -> Any:
        if not name.startswith("transformer_engine"):
            return real(name)
        if error is not None:
            raise error
        return types.SimpleNamespace(__version__=version)

    monkeypatch.setattr(engine, "import_module", fake)
    with mock.patch.object(engine.util, "find_spec", lambda name: object()):
        engine.import_failure.cache_clear()
        try:
            reason = engine.missing()
        finally:
            engine.import_failure.cache_clear()
    assert reason is not None and re.search(says, reason) and "pip install" in reason


def test_formats_by_role(te):
    made = engine.te_recipe(MXFP8BlockScaling(fp8_format=Format.HYBRID))
    found = linear_of(te, made).quantizers
    assert [
        found[key][i].dtype.name for key, i in (("scaling_fwd", 0), ("scaling_fwd", 1), ("scaling_bwd", 0))
    ] == ["kFloat8E4M3", "kFloat8E4M3", "kFloat8E5M2"]


def test_what_is_used_is_there_in_every_recorded_version(te):
    """Names and parameters that backends/transformer_engine.py takes from Transformer Engine."""
    known = te.known
    used = {"Linear", "LayerNormLinear", "autocast"}
    used |= {f"is_{kind}_available" for kind in ("fp8", "mxfp8", "fp8_block_scaling")}
    assert used <= set(known["exports"])
    assert {"is_fp8_enabled", "get_fp8_recipe"} <= set(known["manager"])
    (autocast,) = known["calls"]["autocast"].values()
    assert {"enabled", "recipe", "amax_reduction_group"} <= set(autocast)
    assert {"in_features", "out_features", "bias", "params_dtype", "device"} <= set(
        known["calls"]["Linear"]["__init__"]
    )
    read = {
        "Float8Quantizer": {"dtype"},
        "Float8CurrentScalingQuantizer": {"dtype", "force_pow_2_scales", "amax_epsilon"},
        "Float8BlockQuantizer": {"dtype", "force_pow_2_scales", "amax_epsilon", "block_scaling_dim"},
        "MXFP8Quantizer": {"dtype"},
    }
    for kind, attributes in read.items():
        assert attributes <= set(known["quantizers"][kind]), kind
