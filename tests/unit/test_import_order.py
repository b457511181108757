"""Import order is the architecture: a file imports only what stands to its left, and the package loads torch only."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

from tests.support.architecture import PACKAGE, STREAM

POSITION = {name: i for i, group in enumerate(STREAM) for name in group}


def part_of(module: str) -> str | None:
    """The name in STREAM that a module, relative to the package, belongs to; None for the package itself."""
    name = module.partition(".")[0]
    assert name == "" or name in POSITION, f"{module} has no place in the stream: give it one"
    return name or None


def module_name(path: Path) -> str:
    """'mcore.config' for mcore/config/__init__.py, '' for the package's own."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def nodes(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """Every import of a file, wherever it stands."""
    return [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.Import, ast.ImportFrom))
    ]


@cache
def imports(path: Path) -> list[tuple[int, str]]:
    """(line, module relative to the package) of every import of our own, wherever in the file it stands."""
    found = []
    package = ["megatron_fp8", *path.relative_to(PACKAGE).parent.parts]
    for node in nodes(path):
        targets: list[str] = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            targets = [_submodule(module, alias.name) for alias in node.names]
        found += [
            (node.lineno, target.partition(".")[2])
            for target in targets
            if target.partition(".")[0] == "megatron_fp8"
        ]
    return found


def _submodule(module: str, name: str) -> str:
    """`from a import b` names module a.b if that is a file, else something inside a."""
    path = PACKAGE.parent.joinpath(*module.split("."), name)
    return f"{module}.{name}" if path.is_dir() or path.with_suffix(".py").exists() else module


SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def test_imports_point_left():
    for path in SOURCES:
        mine = part_of(module_name(path))
        assert mine is not None
        for line, target in imports(path):
            theirs = part_of(target)
            # None: the package's public names, which mcore and train may use; they are to the left of both.
            assert theirs in (None, mine) or POSITION[theirs] < POSITION[mine], (
                f"{path}:{line} imports {theirs}"
            )


def test_imports_inside_the_package_are_relative():
    for path in SOURCES:
        for node in nodes(path):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            assert not any(name.partition(".")[0] == "megatron_fp8" for name in names), (
                f"{path}:{node.lineno}"
            )


def test_the_native_backend_does_not_go_through_the_emulated_one():
    """Nor through its parts: what both need is in backends/base.py and backends/reference.py."""
    native = sorted((PACKAGE / "backends" / "native").glob("*.py"))
    found = {target for path in native for _, target in imports(path) if target.startswith("backends.")}
    assert {"backends.base", "backends.reference"} <= found
    assert not found & {f"backends.{name}" for name in ("emulated", "cpu_cast", "skinny_gemm")}


def test_the_root_holds_what_users_name():
    """At most ten modules: everything else has a room."""
    modules = sorted(path.stem for path in PACKAGE.glob("*.py"))
    assert len(modules) <= 10, modules
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert rooms | set(modules) - {"__init__"} == set(POSITION)


def test_public_names_are_used_only_from_the_right():
    """`from megatron_fp8 import ...` inside the package loads __init__, so it must stand right of all it holds."""
    for path in SOURCES:
        if any(target == "" for _, target in imports(path)):
            assert part_of(module_name(path)) in {"mcore", "train", "commands", "__main__"}, path.name


def test_no_cycles_at_import():
    """Inside rooms too: modules whose top-level imports lead back to themselves. A module loads its packages first."""
    graph = {}
    for path in SOURCES:
        top = {
            n.lineno for n in ast.parse(path.read_text()).body if isinstance(n, (ast.Import, ast.ImportFrom))
        }
        name = module_name(path)
        loaded = {target for line, target in imports(path) if line in top}
        rooms = {
            ".".join(target.split(".")[:n]) for target in loaded for n in range(1, target.count(".") + 1)
        }
        mine = {".".join(name.split(".")[:n]) for n in range(1, name.count(".") + 1)}
        graph[name] = (loaded | rooms - mine) - {"", name}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join([*trail[trail.index(name) :], name])
        if name in done:
            return
        for target in graph.get(name, ()):
            visit(target, (*trail, name))
        done.add(name)

    for name in graph:
        visit(name, ())


def test_only_mcore_train_and_replays_import_megatron_only_kernels_triton():
    for path in SOURCES:
        for node in nodes(path):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            roots = {name.partition(".")[0] for name in names}
            if roots & {"megatron", "transformer_engine"}:
                room, name = part_of(module_name(path)), module_name(path)
                assert room in ("mcore", "train") or name == "diagnosis.checkpoint_runner", (
                    f"{path}:{node.lineno}"
                )
            if "triton" in roots:
                assert part_of(module_name(path)) == "kernels", f"{path.name}:{node.lineno}"


def test_importing_the_package_loads_torch_and_nothing_heavy():
    loaded = "sorted({m.partition('.')[0] for m in sys.modules})"
    code = f"import json, sys, torch; before = {loaded}; import megatron_fp8.nn; print(json.dumps([before, {loaded}]))"
    code += "; assert 'torch._dynamo' not in sys.modules"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent
    )
    before, after = (set(names) for names in json.loads(out.stdout))
    heavy = {"megatron", "triton", "transformer_engine", "torchao", "numpy", "tensorboard"}
    heavy |= {"transformers", "accelerate", "lightning", "pytorch_lightning"}
    assert "megatron_fp8" in after
    assert not (after - before) & heavy and not after & {"megatron", "triton", "transformer_engine"}


HERE = PACKAGE.parent
OUTSIDE = [*sorted((HERE / "tests").rglob("*.py")), *sorted((HERE / "benchmarks").rglob("*.py"))]


def test_benchmarks_import_no_tests_and_tests_no_test() -> None:
    """What both need is in benchmarks/support, what several tests need in tests/support; and each such file is there."""
    for path in OUTSIDE:
        file = path.relative_to(HERE)
        for node in nodes(path):
            names = {alias.name for alias in node.names}
            if isinstance(node, ast.ImportFrom):
                names = {_submodule(node.module or "", name) for name in names} if not node.level else set()
            for module in names:
                room, _, rest = module.partition(".")
                if room not in ("tests", "benchmarks"):
                    continue
                assert file.parts[0] == "tests" or room == "benchmarks", f"{file} imports {module}"
                assert not rest.rpartition(".")[2].startswith("test_"), f"{file} imports {module}"
                place = HERE.joinpath(*module.split("."))
                assert place.is_dir() or place.with_suffix(".py").exists(), (
                    f"{file} imports {module}: not there; see benchmarks/support and tests/support"
                )
