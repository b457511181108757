"""Versions, and combinations that are known not to work."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_fp8.study import requirements
from megatron_fp8.study.requirements import RULES, Facts, conflicts, driver, installed_version, megatron

GOOD = {
    "python": "3.11.7", "torch": "2.13.0+cu130", "cuda": "13.0", "driver": "580.95", "triton": "3.7.1", "numpy": "2.4.6",
    "megatron-core": "0.16.1", "transformer-engine": "2.20.2", "apex": "0.1",
}  # fmt: skip


def here(
    has_amp_c: bool = True, interpreted: bool = False, slow_bfloat16: bool = False, **changed: str | None
) -> list[str]:
    """What is told of a machine that is good but for what is given; names with _ for -."""
    other = {name.replace("_", "-"): value for name, value in changed.items()}
    found = conflicts(Facts({**GOOD, **other}, has_amp_c, interpreted, slow_bfloat16))
    return [conflict.what for conflict in found]


CASES = {
    "Triton older than 3.4": {"triton": "3.3.1"},
    "Triton 3.6's interpreter with NumPy 2.4": {"triton": "3.6.0", "interpreted": True},
    "torch 2.8 and 2.11 with torch.compile": {"torch": "2.11.0+cu130"},
    "apex without its CUDA extensions": {"has_amp_c": False},
    "torch's products of BF16 on a CPU without instructions for them": {"slow_bfloat16": True},
}


def test_each_combination_is_told_where_it_is_and_nowhere_else():
    assert here() == []
    for what, changed in CASES.items():
        assert here(**changed) == [what]
    assert set(CASES) == {what for _, what, *_ in RULES}, "every rule has a case"


def test_a_version_that_nobody_knows_is_no_conflict():
    assert here(triton=requirements.UNKNOWN, apex=None) == []


def test_the_driver_as_its_module_says_it(tmp_path: Path):
    assert driver(tmp_path / "absent") is None
    file = tmp_path / "version"
    file.write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.124.06  Wed Feb 26 01:58:14 UTC 2025\n"
    )
    assert driver(file) == "570.124.06"
    file.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n")
    assert driver(file) == "580.95.05"
    file.write_text("something else\n")
    assert driver(file) == requirements.UNKNOWN


def test_megatron_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A checkout on PYTHONPATH is what Python would import, whatever pip says."""
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("raise AssertionError('imported')\n")
    spec = SimpleNamespace(submodule_search_locations=[str(core)])
    monkeypatch.setattr(requirements.util, "find_spec", lambda name: spec)
    assert megatron() == requirements.UNKNOWN
    (core / "package_info.py").write_text("__version__ = '0.17.0rc1'\n")
    assert megatron() == "0.17.0rc1"
    monkeypatch.setattr(requirements.util, "find_spec", lambda name: None)
    assert megatron() is None


def test_packages():
    assert installed_version("torch", "torch") is not None
    assert installed_version("no-such-package", "no_such_package") is None
    assert installed_version("no-such-package", "no_such_package.part") is None
    assert installed_version("no-such-metadata", "json") == requirements.UNKNOWN
    assert dict.fromkeys(part.name for part in requirements.parts()).keys() >= {
        "driver",
        "nccl",
        "apex",
        "triton",
    }
    assert torch.__version__ in {part.version for part in requirements.parts()} and sys.version_info >= (
        3,
        10,
    )
