"""Does the report tell the truth? What was converted and never runs, and what was put in a converted linear's place.

Some modules own a linear and never call it: their code reads ``.weight`` and multiplies by itself (WavLM's attention,
Mamba's dt_proj). No conversion can see that; the first iterations can. So fp8_step looks, says it once, and marks the
report.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch

from .family import Family
from .linear import Fp8Layer

LOOK_AFTER = 3
"""Iterations with FP8 GEMMs after which a linear that ran in none of them is named."""


def note_unused(family: Family) -> None:
    """Warn of linears that did not run in FP8 in the first iterations, once, and mark them in the model's report; those
    that ran later (experts that got their first tokens) lose the mark."""
    family.fp8_iterations += 1
    if family.fp8_iterations < LOOK_AFTER or (family.fp8_iterations > LOOK_AFTER and not family.idle):
        return
    report = getattr(family.root, "fp8_report", None)
    if family.fp8_iterations > LOOK_AFTER:
        awake = [m.fp8_name for m in family.members if m.fp8_name in family.idle and m.has_run]
        rows = [family.idle.pop(name) for name in awake]
        if rows and report is not None:
            family.root.fp8_report = report.with_rows(rows)  # type: ignore[union-attr]
        return
    idle = [linear.fp8_name for linear in family.members if linear.fp8_site.is_fp8 and not linear.has_run]
    if not idle:
        return
    if report is not None:
        family.idle = {row.name: row for row in report.rows if row.name in idle}
    _mark(family, idle, "not in FP8", f"converted, but did not run in the first {LOOK_AFTER} iterations")
    warnings.warn(
        f"{len(idle)} of {len(family.members)} FP8 linears did not run in the first {LOOK_AFTER} iterations"
        f" ({_some(idle)}): where other code reads a linear's weight, or no token was sent, nothing runs in FP8;"
        " model.fp8_report marks them",
        stacklevel=3,
    )


def note_replaced(family: Family, found: Mapping[str, Fp8Layer]) -> None:
    """Warn of converted linears in whose place stands a linear without FP8 (a resized lm_head), once, and mark them.

    Args:
        found: the model's FP8 linears.
    """
    root = family.root
    if root is None or len(found) >= family.joined:
        return
    names = [name for name in family.names() if _is_plain(root, name)]
    family.forget(names)
    if names:
        _mark(family, names, "not in FP8", "replaced by a linear without FP8 since the conversion")
        warnings.warn(
            f"a linear without FP8 stands in the place of {len(names)} that were converted ({_some(names)}): call"
            " convert_to_fp8(model) again to have it run in FP8",
            stacklevel=3,
        )


def _is_plain(root: torch.nn.Module, name: str) -> bool:
    """Whether a linear of that name is there, and is none of FP8."""
    try:
        module = root.get_submodule(name)
    except AttributeError:
        return False  # the model was cut, or wrapped
    return isinstance(module, torch.nn.Linear) and not isinstance(module, Fp8Layer)


def _mark(family: Family, names: list[str], runs: str, reason: str) -> None:
    report = getattr(family.root, "fp8_report", None)
    if report is not None:
        family.root.fp8_report = report.without(names, runs, reason)  # type: ignore[union-attr]


def _some(names: list[str]) -> str:
    return ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
