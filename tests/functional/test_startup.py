"""Texts come at once: no --help of any command imports torch, numpy or Megatron-Core."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_fp8.commands.main import COMMANDS

ASKED = [["--help"], ["--version"], ["nothing"], *([name, "--help"] for name in COMMANDS)]

SCRIPT = f"""\
import contextlib, io, json, sys
from megatron_fp8.commands.main import main
found = []
for arguments in {ASKED!r}:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        try:
            code = main(arguments)
        except SystemExit as end:
            code = end.code or 0
    heavy = sorted({{name.partition(".")[0] for name in sys.modules}} & {{"torch", "numpy", "megatron", "yaml", "rich"}})
    found.append([" ".join(arguments), code, out.getvalue(), heavy])
print(json.dumps(found))
import megatron_fp8
assert "torch" not in sys.modules, "import megatron_fp8"
assert megatron_fp8.__version__ and "torch" not in sys.modules
assert megatron_fp8.Format.HYBRID and "torch" in sys.modules
assert megatron_fp8.recipe.RECIPES and megatron_fp8.quantize and megatron_fp8.Float8Tensor
assert megatron_fp8.convert_to_fp8 is megatron_fp8.nn.convert_to_fp8 and "megatron" not in sys.modules
"""
"""All texts, and then the package's names: torch comes with the first that needs it, Megatron-Core with none."""


@pytest.fixture(scope="module")
def texts() -> dict[str, tuple[int, str, list[str]]]:
    """What each command line printed in one fresh interpreter: (exit code, text, heavy packages loaded until then)."""
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=150)
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout)
    return {line: (code, text, heavy) for line, code, text, heavy in found}


@pytest.mark.parametrize("arguments", ASKED, ids=" ".join)
def test_a_text_needs_no_torch(arguments: list[str], texts: dict[str, tuple[int, str, list[str]]]) -> None:
    code, text, heavy = texts[" ".join(arguments)]
    assert heavy == [], "imported by this text, or by one before it"
    assert code == (2 if arguments == ["nothing"] else 0) and text.strip()
