"""Warns once about requested statistics that cannot be measured.

There are two gaps. A high-precision linear inside torch.compile cannot be observed: an operator around it
would break the graph, in layers that this package does not run. And if Megatron-Core adds the weight gradient
to main_grad inside the GEMM, there is no product to measure: main_grad before and after differ by a rounded
sum, and adding to a zeroed buffer would change the order of additions, and so the training's bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping
from typing import Any

_SHOWN_BY_FORWARD = {"input", "weight", "output"}
_NAMED = 5


class MissingStats:
    """Warns once of each kind of gap."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def look(
        self,
        iteration: int,
        asked: Iterable[tuple[str, str]],
        records: Iterable[Mapping[str, Any]],
        fused: Collection[str],
    ) -> None:
        """Check at the end of a measured iteration.

        Args:
            asked: (site, tensor) pairs that were requested.
            records: what was measured.
            fused: sites of this rank whose GEMM adds wgrad to main_grad.
        """
        seen = {record["site"] for record in records}
        silent = dict.fromkeys(
            site for site, tensor in asked if tensor in _SHOWN_BY_FORWARD and site not in seen
        )
        self._say(
            silent,
            f"telemetry: iteration {iteration} has no figures of",
            "no tokens reached it, or it runs in high precision inside torch.compile, which telemetry cannot observe",
        )
        self._say(
            sorted(fused),
            "telemetry: there is no wgrad of",
            "in high precision with gradient_accumulation_fusion it is added to main_grad inside the GEMM",
        )

    def _say(self, sites: Collection[str], gap: str, why: str) -> None:
        if not sites or why in self._told:
            return
        self._told.add(why)
        names = list(sites)
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        warnings.warn(f"{gap} {', '.join(names[:_NAMED])}{more}: {why}.", stacklevel=2)
