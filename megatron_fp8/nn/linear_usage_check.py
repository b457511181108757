"""Audits a conversion during training: converted linears that never run or were replaced.

Some modules own a linear and never call it: their code reads ``.weight`` and multiplies by itself (WavLM's
attention, Mamba's dt_proj). Conversion cannot detect that, but the first iterations can. So fp8_step checks,
warns once and marks the report.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch

from ..files.terminal import warn_user
from .report import Row, keep_report, report_of

if TYPE_CHECKING:
    from .fp8_group import Fp8Group

LOOK_AFTER = 3
"""Number of iterations with FP8 GEMMs after which linears that never ran are reported."""

_NOT_IN_FP8 = "not in FP8"


class UsageCheck:
    """The linears of a group that did not run in FP8 in its first iterations."""

    def __init__(self) -> None:
        self._iterations = 0  # with FP8 GEMMs
        self._marked: dict[str, Row] = {}  # rows of the report, as they were before the mark

    def look(self, group: Fp8Group) -> None:
        """Check after an iteration with FP8 GEMMs. Warns once of linears that ran in none of the first LOOK_AFTER
        iterations and marks them in the model's report. Removes the mark from those that run later (experts that get
        their first tokens)."""
        self._iterations += 1
        if self._iterations > LOOK_AFTER and self._marked:
            self._unmark(group)
        if self._iterations != LOOK_AFTER:
            return
        members = group.members
        idle = [sites.name for sites, linear in members if linear.fp8_site.is_fp8 and not sites.has_run]
        if not idle:
            return
        report = report_of(group.root)
        if report is not None:
            self._marked = {row.name: row for row in report.rows if row.name in idle}
        _mark(group, idle, f"converted, but did not run in the first {LOOK_AFTER} iterations")
        warn_user(
            f"{len(idle)} of {len(members)} FP8 linears did not run in the first {LOOK_AFTER} iterations"
            f" ({_shortened(idle)}): where other code reads a linear's weight, or no token was sent, nothing runs in FP8;"
            " model.fp8_report marks them"
        )

    def _unmark(self, group: Fp8Group) -> None:
        active = [sites.name for sites, _ in group.members if sites.name in self._marked and sites.has_run]
        rows = [self._marked.pop(name) for name in active]
        root, report = group.root, report_of(group.root)
        if rows and root is not None and report is not None:
            keep_report(root, report.with_rows(rows))


def warn_replaced(group: Fp8Group, found: Collection[torch.nn.Module]) -> None:
    """Warn once of converted linears that were replaced by linears without FP8 (a resized lm_head), and mark
    them.

    Args:
        found: the model's FP8 linears.
    """
    root = group.root
    if root is None or len(found) >= len(group.names):
        return
    names = [name for name in group.names if _is_plain(root, name)]
    group.leave(*(sites for sites in group.sites if sites.linear is None or sites.name in names))
    if names:
        _mark(group, names, "replaced by a linear without FP8 since the conversion")
        warn_user(
            f"converted linears were replaced by linears without FP8: {len(names)} ({_shortened(names)}); call"
            " convert_to_fp8(model) again to run them in FP8"
        )


def _is_plain(root: torch.nn.Module, name: str) -> bool:
    """Whether the name belongs to a linear without FP8."""
    try:
        module = root.get_submodule(name)
    except AttributeError:
        return False  # a layer was removed, or the model was wrapped
    return isinstance(module, torch.nn.Linear) and not hasattr(module, "fp8_sites")


def _mark(group: Fp8Group, names: list[str], reason: str) -> None:
    root, report = group.root, report_of(group.root)
    if root is not None and report is not None:
        keep_report(root, report.without(names, _NOT_IN_FP8, reason))


def _shortened(names: list[str]) -> str:
    return ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
