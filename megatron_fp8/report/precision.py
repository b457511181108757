"""The precision map of report.json: sites and GEMMs, similar layers in one row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ..files.terminal import number_ranges

GEMMS = ("fprop", "dgrad", "wgrad")
_LISTED = 500
"""Most names listed in a row if ranges are not exact."""


@dataclass(frozen=True)
class Row:
    """Sites with the same plan for the same reason.

    Attributes:
        name: the site's name; for several sites with ranges: 'decoder.layers.1–30.mlp.linear_fc1'.
        sites: number of sites.
        listed: their names, if ``name`` has '*' because ranges would include other sites; else empty.
        precision, recipe, backend, reason: from the plan; '' for none.
        gemms: for each of GEMMS 'fp8', 'bf16', ...; '' if unknown.
        roles: 'input: e4m3 tensor fp32', ...
        notes: notes recorded at run time.
    """

    name: str
    sites: int
    listed: tuple[str, ...]
    precision: str
    recipe: str
    backend: str
    reason: str
    gemms: tuple[str, ...]
    roles: tuple[str, ...]
    notes: tuple[str, ...]


def precision_map(sites: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Rows in the order of their first sites."""
    groups: dict[tuple, list[str]] = {}
    for site in sites:
        stem = tuple("*" if part.isdecimal() else part for part in site["name"].split("."))
        groups.setdefault((stem, _content(site)), []).append(site["name"])
    return [_row(stem, names, content) for (stem, content), names in groups.items()]


def sentence(site: Mapping[str, Any]) -> str:
    """A site's precision and the reason, in one line."""
    precision, recipe, backend, reason, *_ = _content(site)
    what = " ".join(part for part in (precision.upper(), recipe) if part)
    return f"{what} on {backend}: {reason}" if backend else f"{what}: {reason}"


def _content(site: Mapping[str, Any]) -> tuple:
    gemms, roles, notes = site.get("gemms"), site.get("roles"), site.get("notes")
    gemms = gemms if isinstance(gemms, dict) else {}
    roles = roles if isinstance(roles, dict) else {}
    return (
        *(_text(site.get(name)) for name in ("precision", "recipe", "backend", "reason")),
        tuple(_text(gemms.get(gemm)) for gemm in GEMMS),
        tuple(f"{role}: {rule}" for role, rule in roles.items() if rule),
        tuple(str(note) for note in notes) if isinstance(notes, list) else (),
    )


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _row(stem: tuple[str, ...], names: list[str], content: tuple) -> Row:
    """One row, named by ranges of numbers, or by the stem and a list if ranges would include other sites."""
    numbers = [{int(name.split(".")[i]) for name in names} for i, part in enumerate(stem) if part == "*"]
    if prod(map(len, numbers)) == len(set(names)):
        ranges = (number_ranges(sorted(found), "–", ",") for found in numbers)
        return Row(".".join(next(ranges) if part == "*" else part for part in stem), len(names), (), *content)
    more = (f"and {len(names) - _LISTED} more",) if len(names) > _LISTED else ()
    return Row(".".join(stem), len(names), (*names[:_LISTED], *more), *content)
