"""What a diagnosis says in words: only what its figures support."""

from __future__ import annotations

import math
from statistics import fmean, stdev

from .attribution import Attribution, Finding, Limits
from .search import Cure


def bad_in_high_precision(what: str) -> str:
    """Where high precision gives NaN or Inf, or no gradient."""
    return (
        f"bad in high precision too: not FP8. With every GEMM in high precision {what}, so nothing can be said of what"
        " FP8 costs; look at the model, its data and the learning rate."
    )


def too_high(losses: tuple[float, ...], good_loss: float | None) -> bool:
    """Whether the losses in high precision are beyond the good one by more than their spread."""
    return good_loss is not None and fmean(losses) - 2 * stdev(losses) > good_loss


def verdict(
    found: Attribution, cure: Cure, losses: tuple[float, ...], noise: float, good_loss: float | None
) -> str:
    """One paragraph. ``losses``: in high precision; ``noise``: of the gradient between batches, relative."""
    outstanding = [finding for finding in found.findings if finding.stands_out]
    lines = [_headline(outstanding) if outstanding else _nothing(found)]
    lines += [_of(finding) for finding in _one_a_site(outstanding)[:4]]
    mean = fmean(losses)
    lines.append(_all_at_once(found, mean))
    lines.append(_against_noise(found, noise))
    if too_high(losses, good_loss):
        lines.append(
            f"The loss is bad in high precision too: {mean:.4g}, and was {good_loss:.4g}."
            + ("" if outstanding else " That is not FP8: look at the learning rate and the data.")
        )
    elif not outstanding and far_off(found, Limits()) is None:
        lines.append("If something is wrong with the training, it is in high precision too, and not FP8.")
    if cure.parts:
        lines.append(_cured(cure))
    elif outstanding:
        lines.append("Taking what stands out into high precision does not bring the gradient nearer.")
    if found.skipped:
        lines.append(f"{len(found.skipped)} sites were not measured alone: the budget of passes was spent.")
    return " ".join(line for line in lines if line)


def far_off(found: Attribution, limits: Limits) -> float | None:
    """How many times as far as rounding alone all sites together are from high precision; None if that is near."""
    distances, best = (measured.distances(found.counted) for measured in (found.planned, found.at_best))
    times = distances.mean / best.mean if best.mean else 1.0
    return times if times > limits.ratio else None


def _nothing(found: Attribution) -> str:
    """Says that nothing stands out, and, if so, that all sites together are far off in some batches."""
    distances, best = (measured.distances(found.counted) for measured in (found.planned, found.at_best))
    times = far_off(found, Limits())
    if times is None:
        who = "all sites together cost no" if found.skipped else "no site costs"
        return f"nothing stands out: {who} more than rounding to FP8's significant bits does."
    if found.skipped:
        return (
            f"nothing stands out of what was measured alone, and as planned the gradient is {times:.3g} times as far from"
            " high precision as rounding to FP8's significant bits puts it: a larger budget would tell where."
        )
    ratios = [a / b if b else 1.0 for a, b in zip(distances.values, best.values, strict=True)]
    worst = max(range(len(ratios)), key=ratios.__getitem__)
    return (
        f"nothing stands out in all batches alike: as planned the gradient is {times:.3g} times as far from high"
        f" precision as rounding to FP8's significant bits puts it, {ratios[worst]:.3g} times in batch {worst},"
        f" {min(ratios):.3g} times in another; {found.findings[0].key} has most of that. More batches would"
        " tell whether it is chance."
    )


def _headline(outstanding: list[Finding]) -> str:
    sites = list(dict.fromkeys(finding.site for finding in outstanding))
    if len(sites) == 1:
        return f"{sites[0]} stands out."
    return f"{len(sites)} sites stand out, {sites[0]} most."


def _one_a_site(outstanding: list[Finding]) -> list[Finding]:
    first: dict[str, Finding] = {}
    for finding in outstanding:
        first.setdefault(finding.site, finding)
    return list(first.values())


def _of(finding: Finding) -> str:
    figures = ""
    if math.isfinite(finding.gradient_error) and math.isfinite(finding.loss_change):
        figures = (
            f" (gradient error {_percent(finding.gradient_error)}, loss {finding.loss_change:+.3g};"
            f" {finding.worst_parameter} {_percent(finding.worst_error)})"
        )
    return f"{finding.key} in FP8 alone: {finding.why}{figures}."


def _all_at_once(found: Attribution, mean: float) -> str:
    planned, best = found.planned, found.at_best
    change = planned.loss_changes
    if not planned.finite:
        return f"As planned, losses or gradients are not finite; in high precision the loss is {mean:.4g}."
    sure = "" if abs(change.mean) > change.spread else f", within its spread of {change.spread:.2g}"
    text = (
        f"As planned the loss is {mean + change.mean:.4g}, in high precision {mean:.4g} ({change.mean:+.2g}{sure}); the"
        f" gradient's error is {_percent(planned.gradient_errors.mean)}, by rounding alone"
        f" {_percent(best.gradient_errors.mean)}, by rounding to BF16 {_percent(found.bf16.gradient_errors.mean)}."
    )
    if found.interaction is not None:
        text += f" All at once changes the loss by {found.interaction:+.2g} more than the sum of each alone."
    return text


def _against_noise(found: Attribution, noise: float) -> str:
    if not noise or not math.isfinite(found.planned.bias):
        return ""
    changed = found.planned.update_error
    update = (
        "" if changed is None else f", and of the update that the optimizer makes of it {_percent(changed)}"
    )
    return (
        f"Batches differ from each other's mean gradient by {_percent(noise)}; what FP8 changes of the mean gradient is"
        f" {_percent(found.planned.bias)}{update}."
    )


def _cured(cure: Cure) -> str:
    back = (
        "" if cure.given_back is None else f" gives back {_percent(cure.given_back)} of what stands out costs"
    )
    left = f", and leaves a gradient error of {_percent(cure.gradient_error or 0.0)}"
    short = "" if cure.complete else "; that is less than was asked for"
    return f"In high precision, {', '.join(part.key for part in cure.parts)}{back}{left}{short}."


def _percent(value: float) -> str:
    return f"{100 * value:.3g} %" if math.isfinite(value) else "beyond any number"
