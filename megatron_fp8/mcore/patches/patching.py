"""Named, checked, reversible replacements of attributes in other packages.

A `Patch` says which attribute of which module or class is replaced, by what, and why. Each file with patches has a
`PatchList`, which a decorator or `replace` fills. A `PatchSet` applies all of a list or none: every name is looked up
before the first one is replaced. So if Megatron-Core moved a function, an error names it, and no hook silently does
nothing.
"""

from __future__ import annotations

import functools
import pkgutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from ..environment import HOW_TO_GET, installed_megatron

_F = TypeVar("_F", bound=Callable[..., Any])
_ABSENT = object()  # the owner inherits the attribute, or has none: reverting deletes the replacement


@dataclass(frozen=True)
class Patch:
    """One attribute to replace.

    target       dotted path of a module ('torch.cuda') or of a class in one ('torch.Tensor')
    name         the attribute; it must exist, unless `create` is set
    replacement  the new value; with `wrap`, a function from the old value to the new one
    why          one line for the error message of a failed patch
    everywhere   also replace every attribute of a loaded Megatron-Core module that *is* the old value: modules
                 that ran 'from x import f' before the patch would not see a new x.f
    create       the attribute need not exist (Megatron reads it, but only an optional package defines it)
    """

    target: str
    name: str
    replacement: Any
    why: str
    wrap: bool = False
    everywhere: bool = False
    create: bool = False

    def __str__(self) -> str:
        return f"{self.target}.{self.name}"


class PatchList(list[Patch]):
    """The patches of one file; their paths are relative to ``inside``, a module or package.

    patches = PatchList("megatron.core.transformer")

    @patches.wrap("mlp.MLP.forward", "one line of reason")
    def with_something(original, self, *args): ...
    """

    def __init__(self, inside: str = "megatron.core") -> None:
        super().__init__()
        self._inside = inside

    def replace(self, path: str, replacement: Any, why: str, **options: bool) -> None:
        """Adds a patch of ``inside.path``; options: those of Patch."""
        target, _, name = f"{self._inside}.{path}".rpartition(".")
        self.append(Patch(target, name, replacement, why, **options))

    def wrap(self, path: str, why: str, **options: bool) -> Callable[[_F], _F]:
        """Decorates a function that replaces ``inside.path`` and gets the original as its first argument."""

        def add(function: _F) -> _F:
            self.replace(path, functools.partial(_bound, function), why, wrap=True, **options)
            return function

        return add


def _bound(function: Callable[..., Any], original: Any) -> Callable[..., Any]:
    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    return replaced


@dataclass(frozen=True)
class _Binding:
    """A replaced attribute: its old and new value in the owner's `__dict__`."""

    owner: Any
    name: str
    before: Any
    after: Any


class PatchSet:
    """A list of patches, applied together and reverted together. `apply` and `revert` are idempotent."""

    def __init__(self, patches: Iterable[Patch]):
        self.patches = tuple(patches)
        self._bindings: list[_Binding] = []
        # (old, new) of imported names: a module loaded while the patches are applied has only the new value
        self._imported: list[tuple[Any, Any]] = []
        self.applied = False

    def apply(self) -> None:
        """Applies every patch in order.

        Raises RuntimeError, and replaces nothing, if a name does not exist in the installed packages.
        """
        if self.applied:
            return
        owners = resolve(self.patches)
        names = ImportedNames()
        for patch, owner in zip(self.patches, owners, strict=True):
            old = getattr(owner, patch.name, None)
            new = patch.replacement(old) if patch.wrap else patch.replacement
            if patch.wrap and isinstance(vars(owner).get(patch.name), staticmethod | classmethod):
                new = staticmethod(new)  # `old` is bound already
            self._bind(owner, patch.name, new)
            if patch.everywhere:
                self._imported.append((old, new))
                for module, name in names.moved(old, new):
                    self._bind(module, name, new)
        self.applied = True

    def revert(self) -> None:
        """Restores, in reverse order, exactly the old content of each owner's `__dict__`.

        Raises RuntimeError, and reverts nothing, if other code replaced one of the names later: reverting would undo
        that.
        """
        if not self.applied:
            return
        latest = {(id(b.owner), b.name): b for b in self._bindings}
        for b in latest.values():
            if vars(b.owner).get(b.name, _ABSENT) is not b.after:
                raise RuntimeError(
                    f"{_path(b.owner)}.{b.name} was replaced by other code after megatron_fp8 patched it; "
                    "undo that replacement before uninstalling"
                )
        for b in reversed(self._bindings):
            if b.before is _ABSENT:
                delattr(b.owner, b.name)
            else:
                setattr(b.owner, b.name, b.before)
        names = ImportedNames()
        for old, new in reversed(self._imported):
            for module, name in names.moved(new, old):
                setattr(module, name, old)
        self._bindings.clear()
        self._imported.clear()
        self.applied = False

    def _bind(self, owner: Any, name: str, new: Any) -> None:
        before = vars(owner).get(name, _ABSENT)
        setattr(owner, name, new)
        # Read the stored value back: a class stores a descriptor unchanged, so `is` holds on revert.
        self._bindings.append(_Binding(owner, name, before, vars(owner)[name]))


def resolve(patches: Iterable[Patch]) -> list[Any]:
    """Returns the module or class that each patch changes; imports it if needed.

    Raises RuntimeError naming the attribute and the installed Megatron-Core version if one, or its owner, is missing.
    """
    patches = list(patches)
    # One lookup per target: to find that torch.Tensor is no module, Python searches torch's folder.
    owners = {target: _locate(target) for target in {patch.target: None for patch in patches}}
    for patch in patches:
        if owners[patch.target] is None or not (patch.create or hasattr(owners[patch.target], patch.name)):
            raise RuntimeError(
                f"cannot patch {patch}: no such name in the installed packages ({installed_megatron()}). "
                f"It is needed because: {patch.why}. "
                f"To get the supported release: {HOW_TO_GET}"
            )
    return [owners[patch.target] for patch in patches]


def _locate(path: str) -> Any:
    """Returns the module or class of a dotted path, imported if needed; None if there is none."""
    try:
        return pkgutil.resolve_name(path)
    except (AttributeError, ImportError):
        return None


class ImportedNames:
    """Finds the attributes of loaded Megatron-Core modules with a given value: reads all of them once."""

    def __init__(self) -> None:
        self._places: dict[int, list[tuple[Any, str]]] = {}
        for module in loaded_megatron_modules():
            for name, value in vars(module).items():
                self._places.setdefault(id(value), []).append((module, name))

    def of(self, value: Any) -> list[tuple[Any, str]]:
        """Returns every (module, attribute) that is `value` itself."""
        found = self._places.get(id(value), [])
        return [(module, name) for module, name in found if vars(module).get(name, _ABSENT) is value]

    def moved(self, old: Any, new: Any) -> list[tuple[Any, str]]:
        """Returns those of `old`, which the caller then sets to `new`."""
        found = self.of(old)
        self._places.setdefault(id(new), []).extend(found)
        return found


def loaded_megatron_modules() -> list[Any]:
    """Returns the imported modules of Megatron-Core."""
    return [
        m
        for name, m in list(sys.modules.items())
        if m is not None and f"{name}.".startswith("megatron.core.")
    ]


def _path(owner: Any) -> str:
    module = getattr(owner, "__module__", None)
    return f"{module}.{owner.__qualname__}" if module else owner.__name__
