"""A backend that has what docs/architecture.md says one has, and nothing else, runs what the others run."""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks.support.compare import assert_all_same_bytes, assert_same_bytes
from megatron_fp8 import TransformerConfig, backends
from megatron_fp8.backends import BACKENDS, emulated
from megatron_fp8.linear.function import grouped_linear
from megatron_fp8.linear.gemm_site import GemmSite
from megatron_fp8.mcore.sites import site_request
from megatron_fp8.plan.resolve import SiteRequest, resolve
from megatron_fp8.state.fp8_state import Fp8State
from tests.support.architecture import PACKAGE, PAGE
from tests.support.sites import ALL_RECIPES, data, randn, run

NAMES = re.findall(r"`(\w+)`", PAGE.split("- **A backend**")[1].split("`BACKENDS`")[0])
CPU = torch.device("cpu")


@pytest.fixture
def used(monkeypatch):
    """Of a backend of these names, which multiplies as the emulated one does: what it was asked for."""
    seen: set[str] = set()

    def noted(name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            seen.add(name)
            return getattr(emulated, name)(*args, **options)

        return call

    another = ModuleType("another")
    for name in NAMES:
        setattr(another, name, "another" if name == "name" else noted(name))
    monkeypatch.setitem(BACKENDS, "another", another)
    return seen


def site(backend: str, recipe: str, state: Fp8State | None = None) -> GemmSite:
    wanted = SiteRequest(ALL_RECIPES[recipe], backend=backend)
    return GemmSite(resolve(wanted, "layers.0.linear", 0, CPU), state or Fp8State(), None)


def experts(backend: str, recipe: str) -> list[torch.Tensor]:
    """Result and gradients of three experts' linears in one call."""
    tokens, state = (40, 1, 23), Fp8State()
    sites = [site(backend, recipe, state) for _ in tokens]
    x = randn(sum(tokens), 64, seed=1).requires_grad_()
    weights = [randn(48, 64, seed=10 + e).requires_grad_() for e in range(len(tokens))]
    y = grouped_linear(x, weights, tokens, sites)
    y.backward(randn(sum(tokens), 48, seed=2))
    return [y.detach(), *(leaf.grad for leaf in (x, *weights) if leaf.grad is not None)]


@pytest.mark.parametrize("recipe", ["delayed", "rowwise", "mxfp8", "no-weight"])
def test_a_backend_of_the_pages_names_runs_linears_and_experts(recipe, used):
    mine, theirs = (run(site(backend, recipe), *data(96, 64, 48)) for backend in ("another", "emulated"))
    for part in ("y", "dx", "dw"):
        assert_same_bytes(getattr(mine, part), getattr(theirs, part))
    assert_all_same_bytes(experts("another", recipe), experts("emulated", recipe))
    assert used == set(NAMES) - {"name"}


def test_megatrons_config_takes_its_name(used):
    shape = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "bf16": True, "fp8": "e4m3"}
    config = TransformerConfig(**shape, fp8_format="mxfp8", fp8_backend="another")
    assert resolve(site_request(config), "layers.0.linear", 0, CPU).backend == "another"


def test_the_package_lists_the_same():
    assert re.findall(r"^\* ``(\w+)", backends.__doc__ or "", re.M) == NAMES
    assert all(hasattr(module, name) for module in BACKENDS.values() for name in NAMES)
    optional = set(re.findall(r"^- ``(\w+)", backends.__doc__ or "", re.M))
    assert optional == {name for module in BACKENDS.values() for name in asked_for() if hasattr(module, name)}


def asked_for() -> set[str]:
    """Names of optional attributes that the package outside of backends/ looks for."""
    look = re.compile(r"(?:get|has)attr\([^,()]*\bbackend\b[^,]*,\s*\"(\w+)\"")
    return {
        name
        for path in PACKAGE.rglob("*.py")
        if not path.is_relative_to(PACKAGE / "backends")
        for name in look.findall(path.read_text())
    }


def test_no_module_outside_compares_with_a_backend():
    """But for the support matrix, which has each backend's rules."""
    compares = re.compile(r"backend is (not )?(native|emulated)\b|[=!]= (native|emulated)\.name")
    found = {path.name for path in PACKAGE.rglob("*.py") if compares.search(path.read_text())}
    assert found == {"support_matrix.py"}
