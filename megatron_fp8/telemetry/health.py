"""Reports tensors beyond a limit, and statistics that cannot be measured.

The limits concern three statistics, and are far from values of normal training: they detect what ruins a run,
not a small loss of precision.

Two kinds of statistics cannot be measured. A high-precision linear inside torch.compile cannot be observed: an
operator around it would break the graph, in layers that this package does not run. And if Megatron-Core adds the
weight gradient to main_grad inside the GEMM, there is no product to measure: main_grad before and after differ by
a rounded sum, and adding to a zeroed buffer would change the order of additions, and so the training's bits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ..files.terminal import warn_user

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

    def check(self, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
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


_FORWARD = ("input", "weight", "output")
_BACKWARD = ("grad_output", "dgrad", "wgrad")


def forward_order(sites: Iterable[str]) -> dict[str, int]:
    """Site -> position in the forward pass, for sites in module order.

    Module order is the order of computation except for Megatron-Core's attention, which creates ``linear_proj`` before
    the layers that feed it. For other models it is assumed to be so.
    """
    found = list(sites)
    last = {name.rpartition(".")[0]: place for place, name in enumerate(found)}

    def when(place: int) -> tuple[int, bool]:
        module, _, name = found[place].rpartition(".")
        projects = name == "linear_proj"
        return (last[module] if projects else place), projects

    return {found[place]: number for number, place in enumerate(sorted(range(len(found)), key=when))}


def execution_place(record: Mapping[str, Any], order: Mapping[str, int]) -> tuple[int, int, int]:
    """Sort key of a record's position in the iteration: forward, then backward in reverse.

    ``order``: ``forward_order`` of the sites.
    """
    tensor, place = record["tensor"].partition(".")[0], order[record["site"]]
    if tensor in _FORWARD:
        return 0, place, _FORWARD.index(tensor)
    return 1, -place, _BACKWARD.index(tensor) if tensor in _BACKWARD else len(_BACKWARD)


def by_origin(records: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The records with NaN or Inf, the likeliest origin first: a weight, else the first in the order of execution.

    Args:
        records: of one iteration, in the model's order.
    """
    bad = [record for record in records if record.get("nonfinite", 0.0) > 0]
    order = forward_order(dict.fromkeys(record["site"] for record in bad))
    return sorted(bad, key=lambda record: (record["tensor"] != "weight", execution_place(record, order)))


def is_of_forward(record: Mapping[str, Any]) -> bool:
    """Whether the record's tensor exists before any backward."""
    return record["tensor"].partition(".")[0] in _FORWARD


def limit_line(fresh: list[dict[str, Any]]) -> str:
    """One log line on the tensors that first exceeded a limit in an iteration (at least one record)."""
    first = next(iter(by_origin(fresh)), fresh[0])
    statistic = next(name for name, reason in REASONS.items() if reason == first["went_bad"][0])
    value = f"{first[statistic]:.4g}{'%' if statistic.endswith('%') else ' values'}"
    more = f", and {len(fresh) - 1} more tensors" if len(fresh) > 1 else ""
    return (
        f"telemetry: iteration {first['iteration']}: {first['site']} {first['tensor']} went bad:"
        f" {first['went_bad'][0]} ({value}){more}"
    )


_NAMED = 5


class MissingStats:
    """Warns once of each kind of gap."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def check(
        self,
        iteration: int,
        requested: Iterable[tuple[str, str]],
        records: Iterable[Mapping[str, Any]],
        fused: Collection[str],
    ) -> None:
        """Check at the end of a measured iteration.

        Args:
            requested: (site, tensor) pairs.
            records: what was measured.
            fused: sites of this rank whose GEMM adds wgrad to main_grad.
        """
        seen = {record["site"] for record in records}
        silent = dict.fromkeys(site for site, tensor in requested if tensor in _FORWARD and site not in seen)
        self._warn(
            silent,
            f"telemetry: iteration {iteration} has no figures of",
            "no tokens reached it, or it runs in high precision inside torch.compile, which telemetry cannot observe",
        )
        self._warn(
            sorted(fused),
            "telemetry: there is no wgrad of",
            "in high precision with gradient_accumulation_fusion it is added to main_grad inside the GEMM",
        )

    def _warn(self, sites: Collection[str], gap: str, why: str) -> None:
        if not sites or why in self._warned:
            return
        self._warned.add(why)
        names = list(sites)
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        warn_user(f"{gap} {', '.join(names[:_NAMED])}{more}: {why}.")
