"""Kernel variants compiled ahead of a GPU run: which they are, what is cached, and what a compiler that fails costs."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_variants_are_compiled_ahead(tmp_path: Path):
    env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.support.compile_gpu_variants"]
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout)
    assert set(found["names"]) == kernels(), "every kernel that the package has"
    told = {result["check"].split()[-1]: result["detail"] for result in found["told"]}
    assert told == {"raises[E4M3]": "TypeError: type mismatch", "aborts[E4M3]": "its compiler ended with -6"}
    assert found["late"] == "no end within 1 s"
    assert f"2 of {found['real'] + 2} variants do not compile" in found["problem"], "and the others do"
    assert found["compiled"] == found["after"] == found["real"], "in the cache, and found there"
    assert found["said"].startswith(f"{found['real']} variants of {found['kernels']} kernels in ")
    assert not found["blackwell"], "experts' products compile for sm_100 too"
    (ptx,) = tmp_path.glob("*/_grouped_block_matmul.ptx")
    assert ".target sm_100" in (text := ptx.read_text()) and "kind::f8f6f4" in text, "on FP8 tensor cores"
    assert found["dry"] == f"dry run: {found['count']} kernel variants are found, and none is compiled"


def kernels() -> set[str]:
    """Names of the package's kernels: jitted functions that are launched, not called by others."""
    jitted: set[str] = set()
    called: set[str] = set()
    for path in (ROOT / "megatron_fp8" / "kernels").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any(
                "jit" in ast.unparse(d) for d in node.decorator_list
            ):
                jitted.add(node.name)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                called.add(node.func.id)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.reduce":  # what it combines by
                called |= {argument.id for argument in node.args if isinstance(argument, ast.Name)}
    return jitted - called - {"_probe"}
