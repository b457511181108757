"""Definitions in a checkout of Megatron-Core, found by their dotted names without importing it."""

from __future__ import annotations

import ast
import copy
import functools
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

Node = ast.stmt | ast.alias
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Definition:
    """What a name is: its parameters if it is a function, and a digest of its code without comments and docstrings."""

    signature: tuple[str, ...]
    digest: str


class Sources:
    """The sources under a folder that has ``megatron/core``.

    Raises ValueError if there is none.
    """

    def __init__(self, root: Path):
        if not (root / "megatron" / "core" / "__init__.py").is_file():
            raise ValueError(
                f"{root} has no megatron/core/__init__.py: give the folder of a checkout of Megatron-LM"
            )
        self.root = root
        self._trees: dict[str, ast.Module | None] = {}

    @property
    def version(self) -> str:
        """'0.16.1', from package_info.py."""
        names = {"MAJOR": "", "MINOR": "", "PATCH": "", "PRE_RELEASE": ""}
        for node in self._require("megatron.core.package_info").body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id
                if name in names and isinstance(node.value, ast.Constant):
                    names[name] = str(node.value.value)
        return ".".join(names[name] for name in ("MAJOR", "MINOR", "PATCH")) + names["PRE_RELEASE"]

    def find(self, path: str) -> Definition | None:
        """Returns the definition of a dotted name: of a function, class or value in a module, or of a class's member,
        inherited ones too. A module is one without code. None if there is none."""
        parts = path.split(".")
        for end in range(len(parts), 0, -1):
            module = ".".join(parts[:end])
            if (tree := self._tree(module)) is None:
                continue
            if end == len(parts):
                return Definition((), "")
            return _described(self._members(module, tree.body, parts[end:]))
        return None

    def others(self, path: str) -> list[str]:
        """Returns the modules that define a function or class of the same name, or of the same class and name."""
        *owner, name = path.split(".")
        wanted = f"{owner[-1]}.{name}" if owner[-1][:1].isupper() else name
        return self._index.get(wanted, [])

    @functools.cached_property
    def _index(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for file in sorted((self.root / "megatron" / "core").rglob("*.py")):
            parts = file.relative_to(self.root).with_suffix("").parts
            module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            for node in _flat(self._require(module).body):
                if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
                    found.setdefault(node.name, []).append(module)
                if isinstance(node, ast.ClassDef):
                    for member in node.body:
                        if isinstance(member, _FUNCTIONS):
                            found.setdefault(f"{node.name}.{member.name}", []).append(module)
        return found

    def _tree(self, module: str) -> ast.Module | None:
        if module not in self._trees:
            base = self.root.joinpath(*module.split("."))
            files = [file for file in (base / "__init__.py", base.with_suffix(".py")) if file.is_file()]
            self._trees[module] = ast.parse(files[0].read_text(encoding="utf-8")) if files else None
        return self._trees[module]

    def _require(self, module: str) -> ast.Module:
        tree = self._tree(module)
        assert tree is not None, module
        return tree

    def _members(self, module: str, body: list[ast.stmt], parts: list[str]) -> list[Node]:
        """Returns the nodes that bind ``parts`` in a body of this module: several where it depends on a condition."""
        name, *rest = parts
        found: list[Node] = [node for node in _bindings(body) if name in _names(node)]
        if not found or (not rest and not isinstance(found[0], ast.alias)):
            return found
        first = found[0]
        if isinstance(first, ast.alias):
            return self._imported(module, first, body, rest) or ([] if rest else found)
        if not isinstance(first, ast.ClassDef):
            return []
        own = self._members(module, first.body, rest)
        for base in first.bases:
            if not own:
                dotted = ast.unparse(base).split(".")
                own = self._members(module, self._require(module).body, [*dotted, *rest])
        return own

    def _imported(self, module: str, alias: ast.alias, body: list[ast.stmt], rest: list[str]) -> list[Node]:
        """Returns what an imported name, and the members of it, are where they are defined."""
        source = _source_of(
            alias, body, module, (self.root.joinpath(*module.split(".")) / "__init__.py").is_file()
        )
        if source is None or not source.startswith("megatron.core"):
            return []
        path = [*source.split("."), *rest]
        for end in range(len(path), 0, -1):
            if (tree := self._tree(".".join(path[:end]))) is not None:
                return self._members(".".join(path[:end]), tree.body, path[end:]) if end < len(path) else []
        return []


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a body, those under conditions and in try blocks too."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.With)):
            for field in ("body", "orelse", "finalbody"):
                yield from _flat(getattr(node, field, []))
            for handler in getattr(node, "handlers", []):
                yield from _flat(handler.body)


def _bindings(body: list[ast.stmt]) -> Iterator[Node]:
    for node in _flat(body):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from node.names
        else:
            yield node


def _names(node: Node) -> set[str]:
    if isinstance(node, ast.alias):
        return {node.asname or node.name.partition(".")[0]}
    if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
        return {node.name}
    targets = (
        node.targets
        if isinstance(node, ast.Assign)
        else [node.target]
        if isinstance(node, ast.AnnAssign)
        else []
    )
    return {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}


def _source_of(alias: ast.alias, body: list[ast.stmt], module: str, is_package: bool) -> str | None:
    """The dotted name that an alias stands for."""
    for node in _flat(body):
        if isinstance(node, ast.Import) and alias in node.names:
            return alias.name if alias.asname else alias.name.partition(".")[0]
        if isinstance(node, ast.ImportFrom) and alias in node.names:
            parents = module.split(".")
            up = parents[: len(parents) - node.level + is_package] if node.level else []
            return ".".join([*up, *([node.module] if node.module else []), alias.name])
    return None


def _described(nodes: list[Node]) -> Definition | None:
    if not nodes:
        return None
    functions = [node for node in nodes if isinstance(node, _FUNCTIONS)]
    signature = () if not functions else _parameters(functions[0].args)
    text = "\n".join(ast.unparse(_without_docstrings(node)) for node in nodes)
    return Definition(signature, hashlib.sha256(text.encode()).hexdigest()[:16])


def _parameters(arguments: ast.arguments) -> tuple[str, ...]:
    """The parameters with their defaults, in order; keyword-only ones after '*'."""
    a, plain = arguments, [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(plain) - len(a.defaults)) + list(a.defaults)
    found = [_parameter(argument, value) for argument, value in zip(plain, defaults, strict=True)]
    if a.vararg or a.kwonlyargs:
        found.append(f"*{a.vararg.arg}" if a.vararg else "*")
    found += [
        _parameter(argument, value) for argument, value in zip(a.kwonlyargs, a.kw_defaults, strict=True)
    ]
    return (*found, f"**{a.kwarg.arg}") if a.kwarg else tuple(found)


def _parameter(argument: ast.arg, default: ast.expr | None) -> str:
    return argument.arg if default is None else f"{argument.arg}={ast.unparse(default)}"


def _without_docstrings(node: Node) -> Node:
    plain = copy.deepcopy(node)
    for part in ast.walk(plain):
        if (
            isinstance(part, (*_FUNCTIONS, ast.ClassDef))
            and len(part.body) > 1
            and ast.get_docstring(part) is not None
        ):
            part.body = part.body[1:]
    return plain
