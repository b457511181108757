"""How big the project is, in the measures that it is kept small by.

    python -m benchmarks.house

Code lines are without docstrings, comments and blank lines. The functions of a warm linear are those of this package that
Python enters in its second training step: a converted nn.Linear with delayed scaling, on a CPU.
"""

from __future__ import annotations

import ast
import io
import statistics
import sys
import tokenize
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "megatron_fp8"
NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip


def code_lines(source: str) -> int:
    """Lines of Python source that hold code."""
    strings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            strings |= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines |= {*range(token.start[0], token.end[0] + 1)}
    return len(lines - strings)


def words(pages: Iterable[Path]) -> int:
    """Words of these files, as `wc -w` counts them."""
    return sum(len(page.read_text(encoding="utf-8").split()) for page in pages)


def entered(call: Callable[[], Any]) -> set[CodeType]:
    """The package's functions that Python enters in a call; comprehensions belong to the function around them."""
    found: set[CodeType] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(PACKAGE)) and not code.co_name.startswith("<"):
            found.add(code)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return found


def warm_linear() -> tuple[int, int]:
    """Distinct functions of this package in forward and in backward of a linear that has taken a step."""
    import torch

    from megatron_fp8.nn import convert_to_fp8, fp8_step
    from megatron_fp8.recipe import DelayedScaling

    with torch.autograd.set_multithreading_enabled(False):  # backward runs where it is profiled
        model = torch.nn.Sequential(torch.nn.Linear(256, 256, dtype=torch.bfloat16))
        convert_to_fp8(model, DelayedScaling())
        x = torch.randn(64, 256, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3):
            outputs: list[torch.Tensor] = []
            forward = entered(lambda: outputs.append(model(x)))  # noqa: B023
            gradient = torch.ones_like(outputs[0])
            backward = entered(lambda: outputs[0].backward(gradient))  # noqa: B023
            fp8_step(model)
    return len(forward), len(backward)


def measures() -> dict[str, str]:
    """Measure -> value."""
    sources = {path: path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    modules = sorted(len(text.splitlines()) for path, text in sources.items() if path.name != "__init__.py")
    tests = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")]
    forward, backward = warm_linear()
    return {
        "code lines of the package": f"{sum(map(code_lines, sources.values())):,}",
        "files of Python in the package": f"{len(sources)}",
        "lines of a module": f"median {statistics.median_low(modules)}, most {modules[-1]}",
        "modules under 60 lines": f"{sum(lines < 60 for lines in modules)}",
        "functions of a warm linear": f"forward {forward}, backward {backward}",
        "words of docs": f"{words((ROOT / 'docs').rglob('*.md')):,}",
        "words of decisions": f"{words((ROOT / 'docs' / 'decisions').rglob('*.md')):,}",
        "lines of tests": f"{sum(len(text.splitlines()) for text in tests):,}",
    }


if __name__ == "__main__":
    for measure, value in measures().items():
        print(f"{measure:32}{value}")
