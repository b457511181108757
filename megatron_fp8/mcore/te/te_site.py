"""A GEMM site of a Transformer Engine layer: an entry of the plan alone."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...numerics.formats import ROLES
from ...plan.site_plan import SitePlan
from ...quantizer import Casts
from ...state.fp8_state import Fp8State


@dataclass
class TeSite:
    """The attributes of a site (site.GemmSite) that reports, checkpoints and iterations read, for a layer that does
    its own casts.

    Attributes:
        plan: the site's entry.
        state: the model's FP8 state: its iteration and counts. There are no slots: TE does not expose amaxes and health.
        notes: for the report, made while it ran.
        verified: whether TE's quantizers were checked against the recipe.
        quantizers, casts: none, for every role.
    """

    plan: SitePlan
    state: Fp8State
    notes: set[str] = field(default_factory=set)
    verified: bool = False
    quantizers: dict[str, None] = field(default_factory=lambda: dict.fromkeys(ROLES))
    casts: dict[str, Casts] = field(default_factory=lambda: {role: Casts(None, None) for role in ROLES})

    @property
    def is_fp8(self) -> bool:
        """Whether this site is planned in FP8."""
        return self.plan.precision == "fp8"
