"""Patches: all or nothing, idempotent, reversible to the object; and install() on the real package."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.support.ranks import RankPool
from megatron_fp8.mcore import environment as compat
from megatron_fp8.mcore.patches.patching import Patch, PatchList, PatchSet
from tests.support.compiled_megatron import as_if_compiled


class Parent:
    def inherited(self) -> str:
        return "parent"


class Child(Parent):
    @staticmethod
    def static() -> str:
        return "old"


def old() -> str:
    return "old"


def new() -> str:
    return "new"


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """A module that defines `f`, and a Megatron-Core module that imported it by name under another one."""
    home, user = types.ModuleType("pretend.home"), types.ModuleType("megatron.core.pretend")
    home.f, home.Child, user.g = old, Child, old  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pretend", types.ModuleType("pretend"))
    monkeypatch.setitem(sys.modules, "pretend.home", home)
    monkeypatch.setitem(sys.modules, "megatron.core.pretend", user)
    yield home, user


def patch(name: str, replacement: Any = new, **options: bool) -> Patch:
    target, _, name = f"pretend.home.{name}".rpartition(".")
    return Patch(target, name, replacement, "the reason given", **options)


def test_apply_and_revert_are_idempotent_and_exact(packages: Any) -> None:
    home, user = packages
    patches = PatchSet([patch("f"), patch("Child.static"), patch("fresh", None, create=True)])
    before = vars(Child)["static"]
    for _ in range(2):
        patches.apply()
        patches.apply()
        assert home.f is new and Child.static() == "new" and home.fresh is None
        assert user.g is old, "imported by name elsewhere: touched only with everywhere=True"
        patches.revert()
        patches.revert()
        assert home.f is old and vars(Child)["static"] is before, "a staticmethod comes back as one"
        assert not hasattr(home, "fresh")


def test_an_inherited_name_is_removed_again(packages: Any) -> None:
    patches = PatchSet([patch("Child.inherited", lambda self: "patched")])
    patches.apply()
    assert Child().inherited() == "patched" and Parent().inherited() == "parent"
    patches.revert()
    assert "inherited" not in vars(Child) and Child().inherited() == "parent"


@pytest.mark.parametrize("path", ["pretend.home.gone", "pretend.home.Gone.f", "pretend.gone.f", "absent.f"])
def test_a_missing_name_is_named_and_nothing_is_replaced(packages: Any, path: str) -> None:
    home, _ = packages
    target, _, name = path.rpartition(".")
    patches = PatchSet([patch("f"), Patch(target, name, new, "the reason given")])
    with pytest.raises(RuntimeError, match=rf"{path}.*megatron-core 0\.16\.1.*the reason given"):
        patches.apply()
    assert home.f is old and not patches.applied


@pytest.mark.parametrize("everywhere", [False, True])
def test_wrapping_twice_unwinds_in_order(packages: Any, everywhere: bool) -> None:
    """Everywhere, the second one finds the first one's function where that was put."""
    home, user = packages
    patches = PatchList("pretend.home")
    for _ in range(2):

        @patches.wrap("f", "test", everywhere=everywhere)
        def louder(original: Any) -> str:
            return original() + "!"

    together = PatchSet(patches)
    together.apply()
    assert home.f() == "old!!" and user.g() == ("old!!" if everywhere else "old") and home.f.__name__ == "old"
    together.revert()
    assert home.f is old and user.g is old


def test_a_wrapped_static_method_stays_one(packages: Any) -> None:
    patches = PatchList("pretend.home")
    patches.wrap("Child.static", "test")(lambda original: original() + "!")
    together = PatchSet(patches)
    together.apply()
    assert Child.static() == Child().static() == "old!"
    together.revert()


def test_somebody_elses_later_replacement_is_not_undone(packages: Any) -> None:
    home, _ = packages
    patches = PatchSet([patch("f")])
    patches.apply()
    home.f = other = lambda: "other"
    with pytest.raises(RuntimeError, match=r"pretend\.home\.f was replaced by other code"):
        patches.revert()
    assert home.f is other and patches.applied
    home.f = new
    patches.revert()
    assert home.f is old


def test_a_module_loaded_while_patched_is_reverted_too(
    packages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, user = packages
    patches = PatchSet([patch("f", everywhere=True)])
    patches.apply()
    late = types.ModuleType("megatron.core.late")
    late.f = home.f  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.core.late", late)
    patches.revert()
    assert late.f is old and user.g is old


@pytest.mark.parametrize("found", ["megatron-core 0.160.1 in /somewhere", "megatron-core is not installed"])
def test_another_megatron_on_the_path_is_refused(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(compat, "installed_megatron", lambda: found)
    with pytest.raises(RuntimeError, match=f"needs megatron-core 0.16.x, found: {found}"):
        compat.require_megatron()


def test_a_missing_megatron_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core.package_info", None)
    with pytest.raises(RuntimeError, match="not installed"):
        compat.require_megatron()


def names_that_changed() -> dict[str, Any]:
    """In a rank: which attributes install() changes, and which of those uninstall() leaves changed."""
    import torch
    import torch.distributed

    from megatron_fp8 import mcore
    from megatron_fp8.mcore.patches.patching import loaded_megatron_modules

    def snapshot() -> dict[tuple[str, str], Any]:
        owners = {m.__name__: m for m in [torch, torch.cuda, torch.distributed, *loaded_megatron_modules()]}
        owners["torch.Tensor"] = torch.Tensor
        for module in loaded_megatron_modules():
            owners |= {f"{module.__name__}.{n}": c for n, c in vars(module).items() if isinstance(c, type)}
        return {(o, n): v for o, owner in owners.items() for n, v in list(vars(owner).items())}

    mcore.uninstall()
    mcore.install()  # now everything is imported
    mcore.uninstall()
    assert not mcore.is_installed()
    before = snapshot()
    mcore.install()
    during = snapshot()
    mcore.install()
    assert {k for k, v in snapshot().items() if v is not during.get(k)} == set(), (
        "the second install() did something"
    )
    mcore.uninstall()
    after = snapshot()
    ignored = {"__warningregistry__", "_installed"}

    def difference(a: dict, b: dict) -> list[str]:
        return sorted(
            f"{o}.{n}"
            for o, n in a.keys() | b.keys()
            if a.get((o, n), a) is not b.get((o, n), b) and n not in ignored
        )

    return {"changed": difference(before, during), "left": difference(before, after)}


def names_that_changed_beside_a_compiled_one() -> dict[str, Any]:
    """A rank case: as above, where a function of Megatron-Core's was compiled before."""
    with as_if_compiled("megatron.core.fusions.fused_bias_swiglu", "swiglu"):
        return names_that_changed()


def test_install_is_reversible_to_the_object(ranks: RankPool) -> None:
    result = ranks(1).run(names_that_changed_beside_a_compiled_one)[0]
    assert result["left"] == []
    for name in (
        "torch.zeros",
        "torch.cuda.current_device",
        "torch.Tensor.cuda",
        "megatron.core.utils._te_version",
        "megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu",
        "megatron.core.fusions.fused_bias_swiglu.swiglu",
    ):
        assert name in result["changed"]


def test_a_transformer_engine_that_does_not_import_is_one_line(monkeypatch):
    """As when torch was replaced under it: Megatron-Core would end in the traceback of its own import."""
    from megatron_fp8 import mcore
    from megatron_fp8.backends import transformer_engine

    monkeypatch.setattr(mcore, "_installed", None)
    monkeypatch.setattr(compat, "has_te", lambda: True)
    reason = (
        "Transformer Engine is installed and does not import (ImportError: undefined symbol): pip install it"
    )
    monkeypatch.setattr(transformer_engine, "import_failure", lambda: reason)
    with pytest.raises(
        RuntimeError, match=r"undefined symbol.*or pip uninstall transformer-engine"
    ) as raised:
        mcore.install()
    assert "\n" not in str(raised.value) and not mcore.is_installed()
