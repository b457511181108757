"""Overrides by name: exceptions for linears, GEMMs or operands.

    NAME                            the whole linear
    NAME:fprop, :dgrad, :wgrad      one of its GEMMs, both operands
    NAME:input, :weight, :grad_output   one operand, in both GEMMs that read it

NAME is a glob over full names or their last parts. The value is a precision ('bf16', the model's own dtype, or 'fp8',
the recipe of all linears), a recipe, or a format ('e4m3', 'e5m2', 'hybrid'), which does not change the scales.
Overrides are applied in order, each to its part, so the last match wins. A role's value sets how that operand is
quantized in GEMMs that run in FP8, and puts no GEMM into FP8.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from ..numerics.formats import ROLES
from ..recipe import GEMM_OPERANDS, RECIPES, Recipe

PARTS = (*GEMM_OPERANDS, *ROLES)
PRECISIONS = ("bf16", "fp8")
FORMATS = ("e4m3", "e5m2", "hybrid")


@dataclass(frozen=True)
class Override:
    """One entry: ``key`` as the user wrote it, its glob, its part of the linear ('': all), and the value."""

    key: str
    glob: str
    part: str
    value: Any

    @staticmethod
    def of(key: str, value: Any) -> Override:
        """Parses an entry whose key ``check_overrides`` has accepted."""
        glob, colon, part = key.rpartition(":")
        return Override(key, glob, part, value) if colon else Override(key, key, "", value)

    def matches(self, name: str) -> bool:
        """Whether the glob matches the name or its last dotted part."""
        return fnmatchcase(name, self.glob) or fnmatchcase(name.rpartition(".")[2], self.glob)

    @property
    def gemms(self) -> tuple[str, ...]:
        """The GEMMs to which it applies."""
        return (self.part,) if self.part in GEMM_OPERANDS else tuple(GEMM_OPERANDS)

    def covers(self, role: str) -> bool:
        """Whether it applies to this operand."""
        return self.part not in ROLES or self.part == role


def matching_overrides(name: str, overrides: Mapping[str, Any], also: Iterable[str] = ()) -> list[Override]:
    """Returns the overrides whose glob matches the name or one of ``also``, in order."""
    every = [Override.of(key, value) for key, value in overrides.items()]
    return [override for override in every if any(override.matches(called) for called in (name, *also))]


def named_gemms(names: Iterable[str], parts: Iterable[str]) -> frozenset[str]:
    """Returns the GEMMs that these keys name, of a linear with these names."""
    name, *also = names
    return frozenset(
        gemm for found in matching_overrides(name, dict.fromkeys(parts, "bf16"), also) for gemm in found.gemms
    )


def whole_override(name: str, overrides: Mapping[str, Any]) -> Override | None:
    """Returns the last override that matches the name and applies to the whole linear, or None."""
    return next((found for found in reversed(matching_overrides(name, overrides)) if not found.part), None)


def check_overrides(overrides: Any, field: str) -> None:
    """Raises ValueError, naming ``field``, unless all keys and values are valid overrides."""
    if not isinstance(overrides, Mapping):
        raise ValueError(
            f"{field}={overrides!r} must map globs over module names to 'bf16' or a recipe, such as "
            "{'*.linear_proj': 'bf16'}."
        )
    choices = (*PRECISIONS, *RECIPES, *FORMATS)
    for key, value in overrides.items():
        if not isinstance(key, str) or not Override.of(key, value).glob:
            raise ValueError(f"{field} has the key {key!r}: keys are globs such as '*.linear_proj'.")
        part = Override.of(key, value).part
        if ":" in key and part not in PARTS:
            raise ValueError(
                f"{field} has the key {key!r}, and {part!r} is no part of a linear: after the colon stands one of"
                f" {', '.join(PARTS)}.{_hint(part, PARTS)}"
            )
        if not isinstance(value, Recipe) and value not in choices:
            raise ValueError(
                f"{field}[{key!r}]={value!r} is unknown: it must be one of {', '.join(map(repr, choices))}."
                f"{_hint(value, choices)}"
            )


def check_parts(parts: Any, field: str) -> None:
    """Raises ValueError, naming ``field``, unless these are keys of overrides that name linears or their GEMMs."""
    if isinstance(parts, str) or not isinstance(parts, Sequence) or not parts:
        raise ValueError(
            f"{field}={parts!r} must be a list of globs over module names, such as ['*:fprop'] or ['*.linear_fc2']."
        )
    check_overrides(dict.fromkeys(parts, "bf16"), field)
    for key in parts:
        if (part := Override.of(key, "bf16").part) in ROLES:
            raise ValueError(
                f"{field} has the key {key!r}, and {part} is an operand: name one of the GEMMs that read it"
                f" ({', '.join(GEMM_OPERANDS)}), such as {key.rpartition(':')[0] + ':fprop'!r}."
            )


def _hint(value: Any, choices: Iterable[str]) -> str:
    near = difflib.get_close_matches(str(value).lower(), list(choices), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def match_flags(overrides: Mapping[str, Any], names: Iterable[str]) -> list[bool]:
    """Returns for each override, in order, whether its glob matches any of these sites."""
    names = list(names)
    every = [Override.of(key, value) for key, value in overrides.items()]
    return [any(override.matches(name) for name in names) for override in every]


def check_overrides_match(
    overrides: Mapping[str, Any], names: Iterable[str], field: str = "fp8_overrides"
) -> None:
    """Raises ValueError for a glob that matches no site: a typing error must not pass as a setting.

    Args:
        names: the sites of the whole model, over all pipeline stages.
    """
    names = list(names)
    for key, found in zip(overrides, match_flags(overrides, names), strict=True):
        if not found:
            more = ", ..." if len(names) > 6 else ""
            raise ValueError(
                f"{field}: {key!r} matches no GEMM site; the sites are {', '.join(names[:6])}{more}"
            )
