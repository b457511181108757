"""The first bad iteration of a site's tensor, and the reason.

It looks at three statistics, as far as they are measured. The limits are far from what training in good health shows:
they find what ruins a run, and not what costs a little precision.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

LIMITS = {"nonfinite": 0.0, "overflows%": 1.0, "underflows%": 50.0}
"""Statistic -> the largest value of a tensor in good health. Percent of the values; nonfinite is a count."""

REASONS = {"nonfinite": "non-finite", "overflows%": "saturation", "underflows%": "underflow"}
"""Statistic -> the word for a value beyond its limit."""


class FirstBad:
    """Remembers the first iteration at which each tensor went bad, for each reason.

    Args:
        records: of earlier iterations, as telemetry.jsonl has them: what they tell is known.
    """

    def __init__(self, records: Iterable[Mapping[str, Any]] = ()):
        self.found: dict[tuple[str, str, str], int] = {}
        """(site, tensor, reason) -> iteration."""
        for record in records:
            for reason in record.get("went_bad", ()):
                self.found.setdefault((record["site"], record["tensor"], reason), record["iteration"])

    def look(self, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The records of tensors that are beyond a limit for the first time; their 'went_bad' lists the reasons."""
        fresh = []
        for record in records:
            bad = []
            for statistic, limit in LIMITS.items():
                key = (record["site"], record["tensor"], REASONS[statistic])
                if record.get(statistic, 0.0) > limit and key not in self.found:
                    self.found[key] = record["iteration"]
                    bad.append(REASONS[statistic])
            if bad:
                record["went_bad"] = bad
                fresh.append(record)
        return fresh


def told(fresh: list[dict[str, Any]]) -> str:
    """A line for people about what went bad in an iteration (at least one record)."""
    first = fresh[0]
    statistic = next(name for name, reason in REASONS.items() if reason == first["went_bad"][0])
    value = f"{first[statistic]:.4g}{'%' if statistic.endswith('%') else ' values'}"
    more = f", and {len(fresh) - 1} more tensors" if len(fresh) > 1 else ""
    return (
        f"telemetry: iteration {first['iteration']}: {first['site']} {first['tensor']} went bad:"
        f" {first['went_bad'][0]} ({value}){more}"
    )
