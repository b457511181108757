"""What of Transformer Engine is refused or chosen, and why; tests/functional/te has its real classes."""

from __future__ import annotations

import re
import sys
import types
from typing import Any
from unittest import mock

import pytest
import torch

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

CUDA = torch.device("cuda")


@pytest.fixture
def a_version(monkeypatch):
    monkeypatch.setattr(engine, "version", lambda: "2.20.2")


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
def test_what_te_has_no_way_to_do_is_refused(recipe, reason):
    assert reason in (engine.unsupported_part(recipe) or "")
    with pytest.raises(ValueError, match=reason):
        engine.te_recipe(recipe)


def test_without_transformer_engine_the_install_line_is_said():
    assert engine.unavailable_reason() is not None, "these tests need a machine without Transformer Engine"
    for device in (torch.device("cpu"), CUDA):
        with pytest.raises(
            ValueError, match=r"not installed: pip install --no-build-isolation 'megatron_fp8\[te\]'"
        ):
            choose_backend("transformer_engine", device, Float8CurrentScaling(), layers=True)


def test_only_a_caller_with_layers_gets_it_and_never_by_itself(a_version):
    with mock.patch.object(engine, "unavailable_reason", lambda: None):
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


def test_its_own_reason_about_the_gpu_is_passed_on(a_version, monkeypatch):
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
    monkeypatch.setattr(engine, "unavailable_reason", lambda: None)
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
            reason = engine.unavailable_reason()
        finally:
            engine.import_failure.cache_clear()
    assert reason is not None and re.search(says, reason) and "pip install" in reason
