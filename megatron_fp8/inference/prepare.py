"""prepare_for_inference: quantizes weights once and frees the high-precision ones.

    model = prepare_for_inference(model)                             # activations scaled as in training
    model = prepare_for_inference(model, calibration=calibration)    # ... with static scales

Every linear keeps its module, name and GEMM site. Its weight becomes codes (params/frozen_parameter.py). With static
scales its input's quantizer changes (static_scales.py). Whatever is no GEMM (state dicts, copies, exports) sees the
dequantized matrix. Training's forward and inference run the same code, so their logits are bit-identical.

Rejected: separate modules for inference. Code that checks a module's class (parallel layouts, checkpoints,
export) would have to support them, and two forward passes diverge over time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from ..linear.gemm_site import GemmSite
from ..linear.weight_cache import untrained_quantizer
from ..nn.experts import Fp8ExpertLinear
from ..nn.frozen_weights import codes_key, save_in_high_precision
from ..nn.sites import Preparation
from ..numerics.rule import Rule
from ..params.fp8_parameter import Fp8Parameter
from ..params.frozen_parameter import frozen_parameter
from ..plan.site_plan import bf16_site
from ..recipe import alignment, recipe_name
from ..state.precision_schedule import PrecisionSchedule
from .batch_invariant import BatchInvariantSite, check_batch_invariant, make_batch_invariant
from .calibration import Calibration, fp8_modules
from .model_size import model_bytes
from .static_scales import Padding, StaticQuantizer, StaticScale, static_refusal

Model = TypeVar("Model", bound=torch.nn.Module)


@dataclass(frozen=True)
class PreparedSite:
    """One linear: its recipe, the scaling of weights and activations, and its bytes before and after."""

    name: str
    recipe: str
    weight: str
    activations: str
    bytes_before: int
    bytes_after: int


@dataclass
class InferenceReport:
    """What was prepared.

    Attributes:
        sites: linears whose weights are now codes.
        high_precision: names of the other FP8 linears, whose weights are unchanged.
        not_called: those of them that were never called since the conversion: other code may read their
            weights.
        replaced: names of those in ``sites`` whose weight exceeded its delayed scale and got a current one.
        ran: whether the model has run since its conversion; if not, ``not_called`` is unknown.
        total_before, total_after: bytes of all parameters and buffers of the model.
    """

    sites: list[PreparedSite] = field(default_factory=list)
    high_precision: list[str] = field(default_factory=list)
    not_called: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    ran: bool = True
    total_before: int = 0
    total_after: int = 0

    def __str__(self) -> str:
        before, after = (
            sum(getattr(s, f"bytes_{moment}") for s in self.sites) for moment in ("before", "after")
        )
        kinds = sorted({(s.recipe, s.weight, s.activations) for s in self.sites})
        lines = [f"{r}: weights {w}, activations {a}" for r, w, a in kinds]
        lines.append(
            f"{len(self.sites)} linears in FP8: {before:,} -> {after:,} bytes;"
            f" {len(self.high_precision)} stay as they are; model {self.total_before:,} -> {self.total_after:,} bytes"
        )
        if self.not_called:
            lines.append(
                f"weights stay as they are, since no call reached these linears and other code may read the weights:"
                f" {', '.join(self.not_called)}"
            )
        if self.replaced:
            lines.append(
                "weights that were replaced and exceed their delayed scale have current scales:"
                f" {', '.join(self.replaced)}"
            )
        if not self.ran:
            lines.append(
                "whether other code reads these weights is not known, since the model has not run since its conversion:"
                " run a batch first, then prepare"
            )
        return "\n".join(lines)


@torch.no_grad()
def prepare_for_inference(
    model: Model,
    *,
    calibration: Calibration | None = None,
    pad_tokens: int | None = None,
    batch_invariant: bool = False,
) -> Model:
    """Quantize the weights of all FP8 linears once, free the high-precision weights, and switch to
    evaluation. In place.

    Args:
        model: a Megatron-Core model built from this package's layers, or a converted model. None of its
            parameters takes gradients afterwards; to keep a trainable model, prepare a deep copy. In a
            converted model that has run, two kinds of linears are unchanged: those never called, since other
            code may read their weights; and those with a parametrised weight (weight_norm, ...), until the
            parametrization is removed. save_pretrained of a transformers model writes dequantized weights.
        calibration: static activation scales; None: as in the recipe (delayed: from the history). Weights use
            the scales of evaluation: delayed if they fit, otherwise current.
        pad_tokens: pad every FP8 linear's tokens to a multiple of this; None: the recipe's alignment, on
            backends that benefit; 1: no padding. The result is the same. Linears under sequence parallelism
            and stacked experts are never padded.
        batch_invariant: a row's bits do not depend on the rest of its batch (batch_invariant.py). Per-tensor scales
            of inputs are replaced by scales per row, unless they are stored. On CPUs only, and slower.

    Returns:
        The model; ``model.fp8_inference`` is its InferenceReport.

    Raises:
        ValueError: the model has no FP8 linear, the calibration is of another model or lacks a tensor, a
            recipe does not support static scales, pad_tokens is less than 1, or the model cannot be batch invariant
            here. The model is unchanged then.
    """
    if pad_tokens is not None and pad_tokens < 1:
        raise ValueError(f"pad_tokens={pad_tokens}: give a number of tokens from 1, or None")
    linears = fp8_modules(model)
    quantized = [linear for linear in linears if linear.fp8_site.casts["weight"].rowwise is not None]
    active = [linear for linear in quantized if _weight_parameter(linear) is not None]
    if not active:
        raise ValueError(_nothing_to_prepare(linears))
    static = {} if calibration is None else _static_scales(active, calibration)
    if batch_invariant:
        check_batch_invariant(model, active, static=calibration is not None)
    report = InferenceReport(total_before=model_bytes(model))
    for tied in (of for of in quantized if not hasattr(of, "fp8_sites") and of.weight is None):
        _keep_in_high_precision(tied)
    uncalled = _never_called(active)
    report.ran = uncalled is not None
    report.not_called = [linear.fp8_site.plan.name for linear in uncalled or []]
    uncalled_ids = {id(linear) for linear in uncalled or []}  # ids: a model may have 100,000 linears
    active = [linear for linear in active if id(linear) not in uncalled_ids]
    prepared = {id(linear) for linear in active}
    report.high_precision = [linear.fp8_site.plan.name for linear in linears if id(linear) not in prepared]
    counts = Counter(map(codes_key, active))
    last = {linear.around: linear for linear in active if isinstance(linear, Fp8ExpertLinear)}
    # Codes of weights shared by several linears.
    shared: dict[tuple[int, Rule], Any] = {}
    for linear in active:
        key = codes_key(linear)
        weight = shared.get(key)
        if weight is None:
            quantizer = linear.fp8_site.weights.frozen_quantizer()
            weight = frozen_parameter(getattr(linear, "matrix", linear.weight), quantizer)
            if (misfits := getattr(quantizer, "misfits", None)) is not None and bool(misfits):
                report.replaced.append(linear.fp8_site.plan.name)
        if counts[key] > 1:
            shared[key] = weight
        change: Preparation | None = static.get(linear.fp8_site.plan.name)
        if batch_invariant:
            change = BatchInvariantSite(static.get(linear.fp8_site.plan.name))
        report.sites.append(_prepare(linear, weight, change, pad_tokens))
        if isinstance(linear, Fp8ExpertLinear) and last[linear.around] is linear:
            linear.around.split_stacks()
    for module in model.modules():
        if (dispatch := getattr(module, "fp8_dispatch", None)) is not None:
            dispatch.stop("in inference experts pad their tokens, or have static scales")
    if batch_invariant:
        for linear in linears:
            linear.fp8_site.batch_invariant = True
        make_batch_invariant(model)
    model.requires_grad_(False)
    model.eval()
    report.total_after = model_bytes(model)
    save_in_high_precision(model)
    model.fp8_inference = report  # type: ignore[assignment]
    return model


def _weight_parameter(linear: Any) -> torch.Tensor | None:
    """The parameter that is or contains its weight; None for a tied or parametrised weight."""
    parameter: torch.Tensor | None = (
        linear.weight_parameter if hasattr(linear, "fp8_sites") else linear.weight
    )
    return parameter


def _never_called(linears: list[Any]) -> list[Any] | None:
    """Linears never called since the conversion; None if no linear was called, so nothing is known.

    Not included: Megatron-Core's linears, and experts, which are called only if they get tokens.
    """
    converted = [linear for linear in linears if hasattr(linear, "fp8_sites")]
    if converted and not any(linear.fp8_sites.was_called for linear in converted):
        return None
    return [
        linear
        for linear in converted
        if not (isinstance(linear, Fp8ExpertLinear) or linear.fp8_sites.was_called)
    ]


def _keep_in_high_precision(linear: Any) -> None:
    """Give a linear with an embedding's weight a site without FP8: embeddings need the high-precision weight, so codes
    would be recomputed in each call."""
    site = linear.fp8_site
    reason = "its weight is the embedding's, which inference keeps in high precision"
    linear.bind_fp8_site(GemmSite(bf16_site(site.plan.name, site.plan.layer, reason), site.state, None))


def _nothing_to_prepare(linears: list[Any]) -> str:
    backends = {site.plan.backend for linear in linears if (site := linear.fp8_site).plan.precision == "fp8"}
    if "transformer_engine" in backends:
        return (
            "the model's linears are Transformer Engine's, which quantizes their weights itself: use Megatron-Core's own"
            " inference, or another backend: fp8_backend='auto' (commands: --model.fp8_backend=auto)"
        )
    return (
        "the model has no FP8 linear with quantized weights to prepare: build it with fp8='hybrid' (Megatron-Core), or"
        " convert it with convert_to_fp8 first"
    )


def _static_scales(linears: list[Any], calibration: Calibration) -> dict[str, StaticScale]:
    calibration.check(linears)
    found = {}
    for linear in linears:
        site = linear.fp8_site
        quantizer = site.casts["input"].rowwise
        if quantizer is None:
            continue
        if reason := static_refusal(quantizer.rule):
            raise ValueError(
                f"static activation scales do not exist for recipe {recipe_name(site.plan.recipe)!r} ({site.plan.name}):"
                f" {reason}"
            )
        found[site.plan.name] = StaticScale(calibration.scale(site.plan.name, quantizer.rule))
    return found


def _prepare(
    linear: Any, weight: Fp8Parameter, change: Preparation | None, pad_tokens: int | None
) -> PreparedSite:
    site = linear.fp8_site
    before = model_bytes(linear) or linear.weight.nbytes
    linear._parameters["weight"] = weight  # keeps the order of parameters
    site.weights.forget()
    # Removes the training's precision phases: inference is always FP8.
    if hasattr(linear, "fp8_sites"):  # an nn linear: copies, and other devices, have their own sites
        linear.fp8_group.set_phases(PrecisionSchedule())
        if change is not None:
            linear.fp8_sites.prepare(change)
    else:
        site.state.phases = PrecisionSchedule()
        weight.quantized_by(untrained_quantizer(weight.quantizer))
        if change is not None:
            change(site)
    any_size = getattr(site.backend, "takes_any_size", False)
    multiple = pad_tokens or (1 if any_size else alignment(site.plan.recipe))
    # Under sequence parallelism a linear's input and output have different numbers of tokens.
    # Experts in a grouped GEMM are not called one by one.
    in_group = isinstance(linear, Fp8ExpertLinear)
    if multiple > 1 and not (in_group or getattr(linear, "sequence_parallel", False)):
        Padding(linear, multiple)
    quantizer = site.casts["input"].rowwise
    if quantizer is None:
        activations = "in high precision"
    elif isinstance(quantizer, StaticQuantizer):
        activations = "static, one scale per tensor"
    elif quantizer.delayed_scale() is not None:
        activations = "static, by the history of delayed scaling"
    else:
        activations = f"dynamic, one scale per {quantizer.rule.granularity}"
    return PreparedSite(
        site.plan.name,
        recipe_name(site.plan.recipe),
        f"{weight.rule.fmt.name} per {weight.rule.granularity}",
        activations,
        before,
        model_bytes(linear),
    )
