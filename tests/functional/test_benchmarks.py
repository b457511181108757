"""Every script of benchmarks/ runs, as small as it can be: what it measures is not looked at."""

from __future__ import annotations

import importlib
import re
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from benchmarks.layouts import FLOAT32
from benchmarks.support.fp8_gpt import NARROW, fp8_config
from benchmarks.support.gpt import gpt_config
from benchmarks.support.ranks import RankPool
from tests.support.command import ROOT, run

BENCHMARKS = ROOT / "benchmarks"
ONCE = "--repetitions=1"
SMALL: dict[str, tuple[dict[str, Any], list[str]]] = {
    "cast": ({"SHAPES": [(32, 64)]}, [ONCE]),
    "gpu_environment": ({}, ["--dry"]),
    "gradient_formats": ({"NAMES": ("mxfp8",), "SPREADS": {"normal": 0.0}}, []),
    "grouped": (
        {"SHAPES": {"8 x 512": (2, 32, 32)}, "TOKENS": 64},
        ["--recipes=mxfp8", "--shapes=8 x 512", ONCE],
    ),
    "inference": (
        {
            "SIZES": {"layers": 1, "hidden": 128, "heads": 4, "ffn": 128}, "PROMPT": 8, "BATCHES": (1, 2),
            "CONTENDERS": ("bf16", "mxfp8"), "inference_linears.N": 64, "inference_linears.K": 64,
            "inference_linears.LAYERS": 1, "inference_linears.TOKENS": (1,),
        },
        [ONCE],
    ),
    "scale": ({"SIZES": {"dense": (2,), "experts": (2,), "linears": (2,), "replicas": (1,)}, "EXPERTS": 2}, []),
    "state": ({"SLOTS": 10}, [ONCE]),
    "step": (
        {"BATCH": 1, "SEQUENCE": 32, "LAYERS_OF": {256: 1}}, ["--recipes=mxfp8", "--hidden=256", ONCE],
    ),
    "step_parts": ({"TOKENS": 64}, ["--recipes=mxfp8", "--hidden=256", ONCE]),
    "telemetry": ({"step.BATCH": 1, "step.SEQUENCE": 32}, [ONCE]),
}  # fmt: skip
"""Script -> constants of it, or of another one as `script.NAME`, and its options."""
ON_RANKS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "adam_state": ({"SEEDS": (1,)}, ["--iterations=1"]),
    "data_parallel": (
        {
            "SEEDS": (1,), "STEPS": 1, "SHOWN": (1,), "RECIPES": ("mxfp8",),
            "fp8_config": partial(fp8_config, num_layers=1, **NARROW),
        },
        [],
    ),
    "layouts": (
        {
            "SEEDS": (1,), "RECIPES": {"BF16": ({}, ("mxfp8",)), "float32": (FLOAT32, ("blockwise",))},
            "gpt_config": partial(gpt_config, num_layers=1),
        },
        [],
    ),
}  # fmt: skip
"""Those that start ranks of their own: here they have the tests'."""
ELSEWHERE = {
    "conformance": "tests/unit/conformance/test_conformance.py",
    "estimates": "tests/functional/test_estimate_page.py",
    "gpu_bench": "tests/functional/test_gpu_scripts.py",
    "gpu_check": "tests/functional/test_gpu_scripts.py",
    "gpu_child": "tests/unit/benchmarks/test_gpu_groups.py",
    "gpu_digests": "tests/unit/kernels/test_digests.py",
    "gpu_site": "tests/unit/benchmarks/test_gpu_site.py",
    "gpu_variants": "tests/functional/test_gpu_variants.py",
    "house": "tests/unit/benchmarks/test_house.py",
    "instructions": "tests/unit/benchmarks/test_instructions.py",
    "kills": "tests/functional/test_kills.py",
    "megatron_sources": "tests/unit/benchmarks/test_megatron_sources.py",
    "mutants": "tests/unit/benchmarks/test_mutants.py",
    "options": "tests/unit/docs/test_options.py",
    "param_bytes": "tests/functional/test_fp8_param_bytes.py",
    "watchdog": "tests/unit/benchmarks/test_watchdog.py",
    "soak": "tests/functional/test_soak.py",
}
"""Run by another test."""
IMPORTED = {
    "gpu_sanitiser": "needs a GPU and compute-sanitizer",
    "block_products": "compiles for half a minute; tests/functional/test_hopper.py asks the same of some",
    "host_time": "compiles C++ over torch's headers, and kernels for a GPU, for a minute",
    "recipes": "what it runs, tests/functional/test_compare.py does",
    "roofline": "starts real processes for minutes",
    "startup": "starts real processes for a minute",
    "transformers_tests": "needs a network",
}
"""Not run by any, and why."""

DRIVER = """
import ast, importlib, sys
name, constants, *arguments = sys.argv[1:]
module = importlib.import_module(f"benchmarks.{name}")
for key, value in ast.literal_eval(constants).items():
    script, _, constant = key.rpartition(".")
    of = importlib.import_module(f"benchmarks.{script or name}")
    assert hasattr(of, constant), key
    setattr(of, constant, value)
sys.argv[:] = [f"benchmarks/{name}.py", *arguments]
sys.exit(module.main() if hasattr(module, "main") else print(module.section()))
"""


def test_every_script_is_here():
    scripts = {path.stem for path in BENCHMARKS.glob("*.py") if "__main__" in path.read_text()}
    assert scripts == {*SMALL, *ON_RANKS, *ELSEWHERE, *IMPORTED}
    assert all((ROOT / file).exists() for file in ELSEWHERE.values())


@pytest.mark.parametrize("name", SMALL)
def test_it_runs(name: str, tmp_path: Path) -> None:
    """1: it missed its goal, of a size that it is not run in."""
    constants, options = SMALL[name]
    (tmp_path / "driver.py").write_text(DRIVER)
    done = run(tmp_path / "driver.py", name, repr(constants), *options, timeout=200, cwd=tmp_path)
    assert done.returncode in (0, 1) and "Traceback" not in done.stderr, done.stdout + done.stderr
    assert re.search(r"\|.*\|" if name != "gpu_environment" else r".", done.stdout), done.stderr


def as_small(name: str, constants: dict[str, Any], case: str, *args: Any) -> Any:
    """A rank case: another one, with these constants of its module."""
    module = importlib.import_module(name)
    with ExitStack() as stack:
        for constant, value in constants.items():
            stack.enter_context(mock.patch.object(module, constant, value))
        return getattr(module, case)(*args)


@pytest.mark.parametrize("name", ON_RANKS)
def test_it_runs_on_ranks(name: str, ranks: RankPool, monkeypatch: Any, capsys: Any) -> None:
    module = importlib.import_module(f"benchmarks.{name}")
    constants, options = ON_RANKS[name]

    class Pool:
        def __call__(self, count: int) -> Pool:
            self.count = count
            return self

        def run(self, case: Any, *args: Any, timeout: float = 0) -> list[Any]:
            return ranks(self.count).run(as_small, case.__module__, constants, case.__name__, *args)

        def close(self) -> None:
            pass

    monkeypatch.setattr(module, "RankPool", Pool)
    for key, value in constants.items():
        monkeypatch.setattr(module, key, value)
    monkeypatch.setattr(sys, "argv", [name, *options])
    assert module.main() in (0, 1) and "|" in capsys.readouterr().out


@pytest.mark.parametrize("name", IMPORTED)
def test_it_is_imported(name: str) -> None:
    importlib.import_module(f"benchmarks.{name}")
