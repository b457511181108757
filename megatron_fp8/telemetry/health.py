"""Detects the first iteration in which a site's tensor exceeds a limit.

It checks three statistics, if they are measured. The limits are far from values of normal training: they
detect what ruins a run, not a small loss of precision.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

LIMITS = {"nonfinite": 0.0, "overflows%": 1.0, "underflows%": 50.0}
"""Statistic -> its largest acceptable value. Percent of the values; nonfinite is a count."""

REASONS = {"nonfinite": "non-finite", "overflows%": "saturation", "underflows%": "underflow"}
"""Statistic -> the reason reported for a value above its limit."""


class FirstBad:
    """Remembers the first iteration in which each tensor exceeded each limit.

    Args:
        records: records of earlier iterations, as in telemetry.jsonl; their findings are not reported again.
    """

    def __init__(self, records: Iterable[Mapping[str, Any]] = ()):
        self.found: dict[tuple[str, str, str], int] = {}
        """(site, tensor, reason) -> iteration."""
        for record in records:
            for reason in record.get("went_bad", ()):
                self.found.setdefault((record["site"], record["tensor"], reason), record["iteration"])

    def look(self, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The records with a tensor above a limit for the first time. Sets their 'went_bad' to a list of reasons."""
        first_records = []
        for record in records:
            bad = []
            for statistic, limit in LIMITS.items():
                key = (record["site"], record["tensor"], REASONS[statistic])
                if record.get(statistic, 0.0) > limit and key not in self.found:
                    self.found[key] = record["iteration"]
                    bad.append(REASONS[statistic])
            if bad:
                record["went_bad"] = bad
                first_records.append(record)
        return first_records


def in_words(fresh: list[dict[str, Any]]) -> str:
    """One log line on the tensors that first exceeded a limit in an iteration (at least one record)."""
    first = fresh[0]
    statistic = next(name for name, reason in REASONS.items() if reason == first["went_bad"][0])
    value = f"{first[statistic]:.4g}{'%' if statistic.endswith('%') else ' values'}"
    more = f", and {len(fresh) - 1} more tensors" if len(fresh) > 1 else ""
    return (
        f"telemetry: iteration {first['iteration']}: {first['site']} {first['tensor']} went bad:"
        f" {first['went_bad'][0]} ({value}){more}"
    )
