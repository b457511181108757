"""The format of tokens sent to experts (MoE dispatch).

It is FP8 if all experts of a layer read the same codes, and each scale belongs to one token.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..numerics.rule import Rule
from .cast_spec import READERS, CastSpec
from .site_plan import SitePlan


def is_by_token(rule: Rule) -> bool:
    """Whether each scale belongs to one row alone, so that a row can be sent with its scales."""
    return rule.granularity.rows == 1


def sent_as(plans: Sequence[SitePlan], role: str) -> tuple[CastSpec | None, str | None]:
    """Returns how tokens are quantised before they are sent to the linears of these plans, or None and the reason.

    Args:
        role: 'input' for the experts' first linears, 'grad_output' for the gradients of their second ones.
    """
    first = plans[0].operands[READERS[role][0]][role]
    rule = None if first is None else first.rule
    for plan in plans:
        if (why := refusal(plan, role, rule)) is not None:
            return None, why
    return first, None


def refusal(plan: SitePlan, role: str, rule: Rule | None) -> str | None:
    """Returns why a linear of this plan cannot receive an operand in codes by this rule; None if it can."""
    (reader, wgrad), (one, other) = READERS[role], (plan.operands[gemm][role] for gemm in READERS[role])
    if plan.precision != "fp8":
        return f"{plan.name} is in high precision"
    if one is None or rule is None:
        return f"{reader} of {plan.name} reads its {role} in high precision"
    if other is None:
        return f"{wgrad} of {plan.name} reads its {role} in high precision"
    if one.rule != rule:
        return f"{plan.name} reads {one.rule}, and other experts {rule}"
    return (
        None
        if is_by_token(rule)
        else f"{plan.name} has a scale per {rule.granularity}, which is not sent with a token"
    )
