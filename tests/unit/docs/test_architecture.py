"""docs/architecture.md: the paths and names of the map are those of the tree."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tests.support.architecture import PACKAGE, PAGE, STREAM

OTHERS = {
    "compressed_tensors_w8a8_fp8.py",
    "core/distributed/param_and_grad_buffer.py",
    "core/tensor_parallel/mappings.py",
    "distrib_optimizer.py",
    "fp8.py",
    "modeling_rope_utils.py",
    "plan_te.py",
    "quantization/lifecycle/initialize.py",
}
"""Files of Megatron-Core, vLLM, transformers and compressed-tensors that texts of the package name."""


def test_every_room_has_its_line():
    rows = re.findall(r"^\| `(\w+)/` \|", PAGE, re.M)
    assert sorted(rows) == sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))


def test_modules_and_functions_are_short():
    """Modules have at most 450 lines, bodies of functions 60, docstrings apart. Triton kernels may have
    more: a split one has other instructions."""
    long = []
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        long += [(path.name, lines) for lines in [len(text.splitlines())] if lines > 450]
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not any(
                "triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list
            ):
                body = node.body[ast.get_docstring(node) is not None :]
                lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0
                long += [(path.name, node.name, lines)] if lines > 60 else []
    assert not long


def test_the_import_order_is_the_tested_one():
    told = PAGE.split("## Import order")[1].split("Only `mcore`")[0]
    order = [tuple(name.split(" | ")) for name in re.split(r"\s*->\s*", told.strip())]
    assert [set(group) for group in order] == [
        set(group) for group in STREAM if not {"__main__", "moved"} & set(group)
    ]


def test_every_stop_is_there():
    stops = re.findall(r"`([\w/]+\.py)`(?: `(\w+)`)?", PAGE)
    assert len(stops) > 25
    for file, name in stops:
        if file.startswith("tests/"):
            continue
        path = PACKAGE / file
        assert path.is_file(), file
        if name:
            defined = {getattr(node, "name", None) for node in ast.walk(ast.parse(path.read_text()))}
            assert name in defined, f"{file} has no {name}"


def test_who_chooses_between_c_and_torch_is_on_the_map():
    """Files outside of kernels/cpu that ask C whether it takes a tensor; reports ask what a machine has, otherwise."""
    asks = re.compile(
        r"\b(emulation|stats|skinny_gemm|cpu_fp4)\.(usable|fits|multiplies|inner_loop|has_matmul|takes)\("
    )
    choosing = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if not path.is_relative_to(PACKAGE / "kernels" / "cpu") and asks.search(path.read_text())
    }
    told = PAGE.split("- **A kernel**")[1].split("\n- **")[0]
    assert set(re.findall(r"`([\w/]+\.py)`", told)) == choosing


def test_every_folder_is_there():
    for folder in re.findall(r"`([\w/]+)/`", PAGE):
        assert any((base / folder).is_dir() for base in (PACKAGE, *PACKAGE.glob("*"), PACKAGE.parent)), folder


def test_every_module_begins_with_what_it_is_in_at_most_fifteen_words():
    for path in sorted(PACKAGE.rglob("*.py")):
        told = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        assert told, path
        first = re.split(r"(?<=[.!?])\s", told.partition("\n\n")[0].replace("\n", " "))[0]
        assert len(first.split()) <= 15, (path, first)


def texts(path: Path) -> Iterator[str]:
    """Docstrings and comments of a module."""
    source = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield str(node.value.value)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def test_files_named_in_docstrings_and_comments_exist():
    root = PACKAGE.parent
    files = ["/setup.py"] + [
        f"/{path.relative_to(root)}"
        for folder in ("megatron_fp8", "tests", "benchmarks", "examples")
        for path in (root / folder).rglob("*.py")
    ]
    named = {
        (name, str(path.relative_to(PACKAGE)))
        for path in PACKAGE.rglob("*.py")
        for text in texts(path)
        for name in re.findall(r"[\w./-]*\w\.py\b", text)
    }
    assert len(named) > 50
    missing = {pair for pair in named if not any(file.endswith(f"/{pair[0]}") for file in files)}
    assert {pair for pair in missing if pair[0] not in OTHERS} == set()
    assert {name for name, _ in missing} == OTHERS
