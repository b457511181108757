"""diagnose: measures what FP8 costs a model, and at which sites."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..files.strict_json import nonfinite_as_text
from .attribution import Attribution, Finding, Limits, attribute
from .measurements import Experiments, Progress, VariantMeasurement
from .model_runner import ModelRunner, ModuleRunner, restore_after
from .output import bad_in_high_precision, excess_distance, verdict
from .override_search import Remedy, find_remedy

BUDGET = 1500
"""Passes, each a forward and a backward of one batch."""

LEAST_BATCHES = 4
"""Minimum for an estimate of the spread."""


@dataclass
class Diagnosis:
    """Result of a diagnosis.

    Attributes:
        ranking: findings, worst first: sites, and GEMMs and operands of the worst.
        overrides: for Fp8Config(overrides=...) and ``fp8_overrides``; empty if nothing stands out.
        verdict: the result in words.
        clean: nothing stands out, the plan is far off in no batch, and this could be measured.
        losses: in high precision, by batch.
        gradient_noise: distance of the batches' gradients from their mean, relative to its norm.
        passes: number of passes run.
        attribution: all measurements; None if high precision is not finite or has no gradient.
        remedy: what the overrides recover.
    """

    ranking: list[Finding]
    overrides: dict[str, str]
    verdict: str
    clean: bool
    losses: tuple[float, ...]
    gradient_noise: float
    passes: int
    attribution: Attribution | None
    remedy: Remedy

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; NaN and Inf as texts."""
        found = self.attribution
        values: dict[str, Any] = {
            "verdict": self.verdict,
            "clean": self.clean,
            "overrides": self.overrides,
            "ranking": [asdict(finding) for finding in self.ranking],
            "high_precision": {"losses": list(self.losses), "gradient_noise": self.gradient_noise},
            "passes": self.passes,
            "recovered": self.remedy.recovered,
        }
        if found is not None:
            for name in ("planned", "at_best", "bf16"):
                values[name] = _plain(getattr(found, name), found.counted)
            values["interaction"] = found.interaction
            values["groups"] = found.groups
            values["not_measured"] = found.skipped
        plain: dict[str, Any] = nonfinite_as_text(values)
        return plain


def diagnose(
    model: torch.nn.Module,
    loss_of: Callable[[Any, Any], torch.Tensor],
    batches: Sequence[Any],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    share: float = 0.9,
    budget: int = BUDGET,
    good_loss: float | None = None,
    limits: Limits | None = None,
    progress: Callable[[Progress], None] = lambda _: None,
) -> Diagnosis:
    """Measure what FP8 costs a model: each site alone in FP8 with the rest in high precision, and the parts
    of the worst sites.

    Restores the model bit for bit: parameters, buffers, gradients, random state, histories, modes, hooks.

    Args:
        model: converted (``convert_to_fp8``) or built from FP8 layers, in this process, with its current
            training state and delayed histories. Dropout is on.
        loss_of: (model, batch) -> the loss, a scalar tensor.
        batches: at least four, used for all measurements. More batches detect smaller costs.
        optimizer: Adam or AdamW; its next update is examined too.
        share: share of the detected cost that the overrides must recover; above 0, at most 1.
        budget: number of passes (forward and backward of a batch). If it is too small for every site, groups
            of layers are measured first, then the sites of the worst groups.
        good_loss: an earlier loss of the training; the verdict says if high precision is worse now.
        limits: thresholds beyond which a site stands out.
        progress: called after each pass.

    Memory: a copy of the gradient for each batch, and three more.

    Raises ValueError: no FP8 site, too few batches, a loss that is not a scalar, a ``loss_of`` that changes
    parameters or gradients, FP8 parameters, or sharded weights.
    """
    check_request(len(batches), share, budget)
    runner = ModuleRunner(model, loss_of, batches, optimizer)
    with restore_after(runner.model, runner.sites):
        return diagnose_runner(runner, share, budget, good_loss, limits or Limits(), progress)


def check_request(batches: int, share: float, budget: int, option: str = "{}={}") -> None:
    """Raise ValueError for arguments that cannot be used. ``option``: how the message spells a name and its value."""
    if batches < LEAST_BATCHES:
        raise ValueError(
            f"{option.format('batches', batches)} are too few: differences are judged by their spread over batches, give"
            f" {LEAST_BATCHES} or more"
        )
    if not 0 < share <= 1:
        raise ValueError(f"{option.format('share', f'{share:g}')} must be above 0 and at most 1")
    if not budget >= 8 * batches:
        raise ValueError(
            f"{option.format('budget', budget)} passes are too few: {batches} batches need {8 * batches} to measure a"
            " thing"
        )


def diagnose_runner(
    runner: ModelRunner,
    share: float,
    budget: int,
    good_loss: float | None,
    limits: Limits,
    progress: Callable[[Progress], None],
) -> Diagnosis:
    """As ``diagnose``, but the caller checks the arguments and restores the model."""
    experiments = Experiments(runner, budget, progress)
    if experiments.useless is not None:
        text = bad_in_high_precision(experiments.useless)
        return Diagnosis([], {}, text, False, experiments.losses, 0.0, experiments.passes, None, Remedy())
    found = attribute(experiments, limits)
    found_remedy = find_remedy(experiments, found, share)
    text = verdict(found, found_remedy, experiments.losses, good_loss)
    clean = (
        not any(finding.stands_out for finding in found.findings) and excess_distance(found, limits) is None
    )
    return Diagnosis(
        found.findings,
        found_remedy.overrides,
        text,
        clean,
        experiments.losses,
        experiments.gradient_noise,
        experiments.passes,
        found,
        found_remedy,
    )


def _plain(measured: VariantMeasurement, counted: list[str]) -> dict[str, Any]:
    return {
        "losses": list(measured.losses),
        "loss_change": measured.loss_changes.mean,
        "loss_spread": measured.loss_changes.spread,
        "gradient_error": measured.gradient_errors.mean,
        "cosine": measured.cosine,
        "bias": measured.bias,
        "distance": measured.distances(counted).mean,
        "update_error": measured.update_error,
        "of_parameters": measured.errors(),
    }
