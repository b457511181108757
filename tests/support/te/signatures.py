"""What Transformer Engine's recipes, layers and contexts look like, by version: recorded from its wheels.

    pip download --no-deps -d FOLDER transformer-engine==2.20.2        # small: Python only, no CUDA
    python -m tests.support.te.signatures FOLDER  # writes signatures.json
    python -m tests.support.te.signatures FOLDER --check  # compares, and maps our recipes onto the classes

The wheels import neither without their CUDA library nor beside Megatron-Core's tests (it changes its behaviour where
Transformer Engine is), so the tests work on the record. The recipe module alone loads without CUDA (it needs pydantic).
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib.util
import json
import sys
import tempfile
import types
import zipfile
from pathlib import Path
from typing import Any

RECORD = Path(__file__).with_suffix(".json")
RECIPES = ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling")
# class or function -> file it is in, under transformer_engine/pytorch
CALLS = {
    "Linear": "module/linear.py",
    "LayerNormLinear": "module/layernorm_linear.py",
    "autocast": "quantization.py",
    "checkpoint": "distributed.py",
    "activation_recompute_forward": "distributed.py",
}
QUANTIZERS = {
    "Float8Quantizer": "tensor/float8_tensor.py",
    "Float8CurrentScalingQuantizer": "tensor/float8_tensor.py",
    "Float8BlockQuantizer": "tensor/float8_blockwise_tensor.py",
    "MXFP8Quantizer": "tensor/mxfp8_tensor.py",
}

# what a quantizer factory makes; older versions have no hybrid ones
MADE = QUANTIZERS | {
    "NVFP4Quantizer": "tensor/nvfp4_tensor.py",
    "HybridQuantizer": "tensor/hybrid_tensor.py",
    "IdentityQuantizer": "tensor/identity_tensor.py",
}


def recorded() -> dict[str, Any]:
    """Version -> what it has."""
    return json.loads(RECORD.read_text())["versions"]


def load_recipes(folder: Path) -> types.ModuleType:
    """transformer_engine.common.recipe from an unpacked wheel, without the package around it."""
    path = folder / "transformer_engine/common/recipe/__init__.py"
    spec = importlib.util.spec_from_file_location("transformer_engine.common.recipe", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its annotations are looked up there
    spec.loader.exec_module(module)
    return module


def describe(folder: Path) -> dict[str, Any]:
    """All that is recorded of one version."""
    recipes = load_recipes(folder)
    engine = folder / "transformer_engine/pytorch"
    return {
        "recipes": {name: describe_recipe(getattr(recipes, name)) for name in RECIPES},
        "qparams": [field.name for field in dataclasses.fields(recipes.QParams)],
        "swallows_unknown_keywords": swallows(recipes.DelayedScaling),
        "calls": {name: parameters(engine / file, name) for name, file in CALLS.items()},
        "quantizers": {name: attributes(engine / file, name) for name, file in QUANTIZERS.items()},
        "made": {
            name: parameters(engine / file, name)["__init__"]
            for name, file in MADE.items()
            if (engine / file).exists() and imported(engine / "tensor/__init__.py", name)
        },
        "role": fields(engine / "quantization.py", "QuantizerRole"),
        "exports": exports(engine / "__init__.py"),
        "manager": methods(engine / "quantization.py", "FP8GlobalStateManager"),
    }


def describe_recipe(kind: type) -> dict[str, Any]:
    """Fields and attributes of a recipe class with their defaults, and which of them its repr shows."""
    fields = {field.name: plain(getattr(kind(), field.name)) for field in dataclasses.fields(kind)}
    others = {name: plain(value) for name, value in vars(kind).items() if type(value).__name__ == "QParams"}
    shown = repr(kind())
    printed = [name for name in (*fields, *others) if f"{name.removeprefix('fp8_')}=" in shown]
    return {"fields": fields, "attributes": others, "printed": printed}


def plain(value: Any) -> Any:
    """A default as JSON: formats and parameter objects by name."""
    if hasattr(value, "max_fwd") or type(value).__name__ == "Format":
        return {"Format": value.name}
    if dataclasses.is_dataclass(value):
        return {type(value).__name__: dataclasses.asdict(value)}  # type: ignore[call-overload]
    return value


def swallows(kind: type) -> bool:
    """Whether a keyword that the class does not have passes unnoticed."""
    try:
        return not hasattr(kind(no_such_keyword=1), "no_such_keyword")
    except TypeError:
        return False


def parameters(path: Path, name: str) -> dict[str, list[str]]:
    """Method -> parameter names, of a class's __init__ and forward; of a function under ''."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return {"": names_of(node)}
        if isinstance(node, ast.ClassDef) and node.name == name:
            methods = [m for m in node.body if isinstance(m, ast.FunctionDef)]
            return {m.name: names_of(m)[1:] for m in methods if m.name in ("__init__", "forward")}
    raise ValueError(f"{path} has no {name}")


def names_of(function: ast.FunctionDef) -> list[str]:
    """Parameter names of a function, in order; * and ** with their signs."""
    a = function.args
    found = [arg.arg for arg in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
    return [
        *found,
        *(f"{sign}{arg.arg}" for sign, arg in (("*", a.vararg), ("**", a.kwarg)) if arg is not None),
    ]


def methods(path: Path, name: str) -> list[str]:
    """The methods of a class, sorted."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return sorted(m.name for m in node.body if isinstance(m, ast.FunctionDef) and m.name[0] != "_")
    raise ValueError(f"{path} has no {name}")


def attributes(path: Path, name: str) -> list[str]:
    """What a class's __init__ assigns to self."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            (init,) = (m for m in node.body if isinstance(m, ast.FunctionDef) and m.name == "__init__")
            targets = [
                n for n in ast.walk(init) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)
            ]
            return sorted({n.attr for n in targets})
    raise ValueError(f"{path} has no {name}")


def fields(path: Path, name: str) -> list[str]:
    """The annotated fields of a dataclass; empty without it."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            targets = [line.target for line in node.body if isinstance(line, ast.AnnAssign)]
            return [target.id for target in targets if isinstance(target, ast.Name)]
    return []


def imported(path: Path, name: str) -> bool:
    """Whether a package imports this name."""
    imports = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom)]
    return name in {alias.name for n in imports for alias in n.names}


def exports(path: Path) -> list[str]:
    """Names of transformer_engine.pytorch that this package or Megatron-Core uses."""
    wanted = {
        *CALLS, "LayerNorm", "RMSNorm", "GroupedLinear", "DotProductAttention", "fp8_autocast", "fp8_model_init",
        "is_fp8_available", "is_mxfp8_available", "is_fp8_block_scaling_available",
    }  # fmt: skip
    imports = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom)]
    return sorted({alias.name for n in imports for alias in n.names} & wanted)


def versions_in(wheels: Path, into: Path) -> dict[str, Path]:
    """Version -> unpacked wheel."""
    found = {}
    for wheel in sorted(wheels.glob("transformer_engine-*.whl")):
        version = wheel.name.split("-")[1]
        zipfile.ZipFile(wheel).extractall(into / version)
        found[version] = into / version
    return found


def map_onto_real_classes(folder: Path) -> int:
    """Put every recipe of tests/support/te/cases.py through the mapping, onto a wheel's own classes; how many."""
    from megatron_fp8.backends import transformer_engine as engine
    from tests.support.te.cases import MAPPED

    load_recipes(folder)
    engine._made.clear()
    for recipe in MAPPED:
        engine.te_recipe(recipe)  # reads everything back itself
    return len(MAPPED)


def main() -> int:
    """Record, or compare with what is recorded."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheels", type=Path)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--date", default="", help="written into the record")
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        unpacked = versions_in(wanted.wheels, Path(folder))
        found = {version: describe(path) for version, path in unpacked.items()}
        if not wanted.check:
            RECORD.write_text(json.dumps({"recorded": wanted.date, "versions": found}, indent=1) + "\n")
            return 0
        for version, path in unpacked.items():
            same = recorded().get(version) == found[version]
            print(
                f"{version}: {'as recorded' if same else 'DIFFERS'}, {map_onto_real_classes(path)} recipes map"
            )
            if not same:
                return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
