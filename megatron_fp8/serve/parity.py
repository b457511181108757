"""Compares a run's training with the served directory: precision, codes, config, tokenizer.

Nothing is multiplied here (numbers.py does). Weights are compared with what the run's checkpoint exports in the
directory's format, bit for bit, one tensor at a time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from ..files.checkpoint import iteration_of
from ..files.strict_json import nonfinite_as_text
from ..huggingface.aux_files import run_tokenizer
from ..huggingface.checkpoint_reader import Source
from ..huggingface.config import exported_architecture, hf_config, model_section
from ..huggingface.directory import CONFIG, GENERATION, Tensors, find_file, read_json
from ..huggingface.formats import FORMATS, WeightFormat
from ..huggingface.weight_decoder import is_of_cache
from ..huggingface.weight_plan import ExportOptions, Progress, WeightPlan, trained_in_bf16
from ..train.data.tokenizers import load_tokenizer
from ..train.run_record import RunRecord
from .engine_rules import EngineRefusal, input_rule, kv_cache_format, quantized_linears

KINDS = ("precision", "inputs", "cache", "weights", "config", "tokenizer", "numbers")
"""Kinds of differences."""


@dataclass(frozen=True)
class Difference:
    """One difference: its kind, where, and both sides in words."""

    kind: str
    name: str
    training: str
    engine: str


@dataclass(frozen=True)
class Gemm:
    """The forward GEMM of a Hugging Face linear: how weight and input are quantized; None: in high precision."""

    linear: str
    training: tuple[str | None, str | None]
    engine: tuple[str | None, str | None]


@dataclass(frozen=True)
class Part:
    """What a cause adds to the difference from training: means over tokens, in nats.

    Attributes:
        kl: KL(engine || training), over the whole vocabulary.
        k3: Schulman's estimator of it from the given tokens: r - 1 - log r, r being training's probability over the
            engine's.
        absolute, difference: of the tokens' log-probabilities, the engine's minus training's.
    """

    cause: str
    kl: float
    k3: float
    absolute: float
    difference: float


@dataclass(frozen=True)
class Numbers:
    """Log-probabilities of both computations on the same tokens.

    Attributes:
        parts: by cause. They add up to ``whole``.
        largest: largest difference of a token's log-probability.
        ratio: mean of exp(|difference|), NeMo-RL's token_mult_prob_error.
        flips, choices: number of (token, layer) whose experts differ, and of all.
        not_finite: cause -> number of tokens with NaN or Inf.
        ids: token ids of each sequence.
        training, engine: log-probabilities of all of a sequence's tokens but the first.
    """

    tokens: int
    parts: list[Part]
    whole: Part
    largest: float
    ratio: float
    flips: int
    choices: int
    not_finite: dict[str, int]
    ids: list[list[int]]
    training: list[list[float]]
    engine: list[list[float]]


@dataclass
class Parity:
    """What was compared, and how it differs.

    Attributes:
        tensors, values: number of compared tensors, and of their values.
        notes: what was not compared.
        numbers: None: not computed.
    """

    engine: str
    form: str
    gemms: list[Gemm] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    tensors: int = 0
    values: int = 0
    notes: list[str] = field(default_factory=list)
    numbers: Numbers | None = None

    def add_numbers(self, numbers: Numbers, max_kl: float) -> None:
        """Sets the numbers. KL or k3 above ``max_kl`` is a difference; so is NaN or Inf, which nothing accepts."""
        self.numbers, whole = numbers, numbers.whole
        for cause, count in numbers.not_finite.items():
            self.differences.append(Difference("NaN or Inf", cause, "none", f"{count:,} tokens"))
        if not (whole.kl <= max_kl and whole.k3 <= max_kl):
            largest = max(numbers.parts, key=lambda part: max(map(_nan_as_inf, (part.kl, part.k3))))
            asked, found = (
                f"asks for at most {max_kl:g}",
                f"has KL {whole.kl:.2g} and k3 {whole.k3:.2g}, most by",
            )
            self.differences.append(Difference("numbers", largest.cause, asked, found))

    def remaining(self, accepted: Iterable[str]) -> list[Difference]:
        """Differences that no KIND or KIND:GLOB of names accepts. Raises ValueError for an unknown kind."""
        pairs = []
        for text in accepted:
            kind, _, glob = text.partition(":")
            if kind not in KINDS:
                raise ValueError(f"--accept={text!r} must be one of {', '.join(KINDS)}, or KIND:GLOB.")
            pairs.append((kind, glob or "*"))
        return [
            each
            for each in self.differences
            if not any(each.kind == kind and fnmatchcase(each.name, glob) for kind, glob in pairs)
        ]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; NaN and Inf as texts."""
        plain: dict[str, Any] = nonfinite_as_text(asdict(self))
        return plain


def _nan_as_inf(value: float) -> float:
    return math.inf if math.isnan(value) else value


def compare_static(
    run: Path, source: Source, directory: Path, engine: str, progress: Progress, kv_cache_dtype: str = "auto"
) -> Parity:
    """Compares a run's training with a directory as an engine reads it.

    Args:
        run: a run's folder. An imported model that has not trained computes in high precision.
        source: its checkpoint.
        directory: config.json, safetensors, tokenizer.
        engine: of serve.ENGINES.
        kv_cache_dtype: of serve.KV_CACHE_DTYPES.

    Raises ValueError: no run, no directory, or a format without rules for the engine.
    """
    imported = iteration_of(source.folder) == 0 and not RunRecord(run).has("report.json")
    sites = None if imported else RunRecord(run).report()["sites"]
    config = read_json(directory / CONFIG)
    quantization = config.get("quantization_config") or {}
    form = format_of(quantization)
    result = Parity(engine, "high precision" if form is None else form.name)
    if sites is None:
        result.notes.append("the run was imported and has not trained: its GEMMs are in high precision")
    with Tensors(directory) as tensors:
        plan = _plan(source, config, form, tensors)
        _compare_gemms(result, plan, source, sites, quantization)
        _compare_weights(result, plan, tensors, source.label, progress)
    if (cached := kv_cache_format(quantization, kv_cache_dtype)) is not None:
        result.differences.append(Difference("cache", "keys and values", "high precision", cached.name))
    _compare_config(result, source, config, plan)
    _compare_tokenizer(result, source, config, directory)
    return result


def format_of(quantization: Mapping[str, Any]) -> WeightFormat | None:
    """The export format of a quantization_config; None: none. Raises ValueError if no export writes it."""
    if not quantization:
        return None
    method = quantization.get("quant_method")
    group: dict[str, Any] = next(iter((quantization.get("config_groups") or {}).values()), {})
    strategy = (group.get("weights") or {}).get("strategy")
    for form in FORMATS.values():
        same_algorithm = form.algorithms is None or quantization.get("quant_algo") in form.algorithms
        if form.method == method and form.strategy == strategy and same_algorithm:
            return form
    raise ValueError(
        f"config.json has quant_method={method!r} with strategy={strategy!r}: megatron-fp8 export writes"
        f" {', '.join(FORMATS)}."
    )


def _plan(source: Source, config: dict[str, Any], form: WeightFormat | None, tensors: Tensors) -> WeightPlan:
    """The export plan with the directory's format and choice of linears."""
    architecture, names = exported_architecture(source.section), tensors.names()
    rows = config.get("vocab_size")
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
        raise ValueError(f"config.json has vocab_size={rows!r}: it must be a whole number of at least 1.")
    plain = WeightPlan(source, ExportOptions(), architecture, rows)
    if form is None:
        return plain
    linears = [part for parts in plan_linears(plain) for part in parts]
    kept = tuple(name for name in linears if f"{name}.{form.scale}" not in names)
    if len(kept) == len(linears):
        raise ValueError("config.json has a quantization_config, and no linear has a scale.")
    return WeightPlan(source, ExportOptions(form, kept, follow_training=False), architecture, rows)


def plan_linears(plan: WeightPlan) -> list[tuple[str, ...]]:
    """Hugging Face linears of each GEMM of the layers."""
    return list(plan.sites.values())


# ------------------------------------------------------------------------------------------------------------ precision


def _compare_gemms(
    result: Parity,
    plan: WeightPlan,
    source: Source,
    sites: list[dict[str, Any]] | None,
    quantization: dict[str, Any],
) -> None:
    entries = {entry["name"]: entry for entry in sites or ()}
    linears = [part for parts in plan_linears(plan) for part in parts]
    try:
        in_engine = quantized_linears(result.engine, quantization, linears)
    except EngineRefusal as error:
        result.differences.append(Difference("precision", "*", "runs", f"{result.engine} refuses: {error}"))
        return
    weight = None if plan.recipe is None else str(plan.recipe.rule("weight"))
    inputs = input_rule(result.engine, quantization)
    phases = {str(phase) for entry in entries.values() for phase in entry["phases"]}
    if phases:
        result.notes.append(f"training had phases in another precision: {'; '.join(sorted(phases))}")
    if (head := entries.get("output_layer")) is not None and head["gemms"]["fprop"] in ("fp8", "fp4"):
        _compare_gemm(result, "lm_head", (head["roles"]["weight"], head["roles"]["input"]), (None, None))
    for site, parts in plan.sites.items():
        trained, entry = (None, None), entries.get(site)
        if sites is not None:
            if entry is None:
                result.notes.append(f"the run's report has no {site}: its precision in training is not known")
                continue
            if entry["gemms"]["fprop"] in ("fp8", "fp4") and not trained_in_bf16(site, source.section):
                trained = entry["roles"]["weight"], entry["roles"]["input"]
        for part in parts:
            _compare_gemm(result, part, trained, (weight, inputs) if in_engine[part] else (None, None))
            has_codes = plan.recipe is not None and part not in plan.high_precision
            if in_engine[part] != has_codes:
                stored = "as codes" if has_codes else "in high precision"
                result.differences.append(
                    Difference("weights", part, f"stored {stored}", "reads it otherwise, by its ignore list")
                )


def _compare_gemm(
    result: Parity, linear: str, trained: tuple[str | None, str | None], served: tuple[str | None, str | None]
) -> None:
    result.gemms.append(Gemm(linear, trained, served))
    for kind, ours, theirs in zip(("precision", "inputs"), trained, served, strict=True):
        if ours != theirs:
            words = (text or "high precision" for text in (ours, theirs))
            result.differences.append(Difference(kind, linear, *words))


# -------------------------------------------------------------------------------------------------------------- weights


def _compare_weights(
    result: Parity, plan: WeightPlan, tensors: Tensors, label: str, progress: Progress
) -> None:
    left, differ = set(tensors.names()), 0
    for name, expected in plan.tensors(progress):
        if name not in left:
            result.differences.append(Difference("weights", name, "exported", "missing"))
            continue
        left.discard(name)
        result.tensors, result.values = result.tensors + 1, result.values + expected.numel()
        if text := first_difference(expected, tensors[name]):
            differ += 1
            result.differences.append(Difference("weights", name, *text))
    if 2 * differ > result.tensors:
        result.notes.append(f"{differ:,} of {result.tensors:,} tensors differ: is it an export of {label}?")
    inputs = {name for name in left if name.rpartition(".")[2] in ("input_scale", "input_global_scale")}
    if inputs:
        result.notes.append(f"{len(inputs)} static input scales are not compared: they are a calibration's")
    cached = {
        name for name in left if is_of_cache(name) or name.endswith((".k_proj.k_scale", ".v_proj.v_scale"))
    }
    if cached:
        result.notes.append(f"{len(cached)} scales of the KV cache are not compared: training has none")
    for name in sorted(left - inputs - cached):
        result.differences.append(Difference("weights", name, "not exported", "stored"))


def first_difference(ours: torch.Tensor, theirs: torch.Tensor) -> tuple[str, str] | None:
    """None if all bytes are equal, else both sides in words."""
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        described = [
            f"{str(each.dtype).removeprefix('torch.')} {list(each.shape)}" for each in (ours, theirs)
        ]
        return described[0], described[1]
    flat = [each.contiguous().reshape(-1) for each in (ours, theirs)]
    size = flat[0].element_size()
    differ = (
        (flat[0].view(torch.uint8) != flat[1].view(torch.uint8)).view(-1, size).any(1).nonzero().reshape(-1)
    )
    if not len(differ):
        return None
    at = int(differ[0])
    place = [int(n) for n in torch.unravel_index(differ[0], ours.shape)]
    values = [float(each[at].float()) for each in flat]
    return f"{values[0]:g} at {place}, the first of {len(differ):,} values", f"{values[1]:g}"


# --------------------------------------------------------------------------------------------------- config, tokenizer


def _compare_config(result: Parity, source: Source, config: dict[str, Any], plan: WeightPlan) -> None:
    family, length = config.get("architectures", [None])[0], config.get("max_position_embeddings")
    trained = source.run.get("train", {}).get("seq_length")
    positions = length if isinstance(length, int) and not isinstance(length, bool) else 0
    ours = hf_config(source.section, config["vocab_size"], positions, family)
    try:
        theirs = hf_config(model_section(config), config["vocab_size"], positions, family)
    except ValueError as error:
        result.differences.append(Difference("config", CONFIG, "computable", str(error)))
        return
    ours["torch_dtype"] = str(source.dtype).removeprefix("torch.")
    theirs["torch_dtype"] = config.get("torch_dtype", config.get("dtype"))
    for name in ours.keys() | theirs.keys():
        if ours.get(name) != theirs.get(name):
            result.differences.append(
                Difference("config", name, json.dumps(ours.get(name)), json.dumps(theirs.get(name)))
            )
    if isinstance(trained, int) and positions < trained:
        result.differences.append(
            Difference("config", "max_position_embeddings", f"sequences of {trained}", f"{length}")
        )


def _compare_tokenizer(result: Parity, source: Source, config: dict[str, Any], directory: Path) -> None:
    tokenizer = run_tokenizer(source)
    if tokenizer is None:
        result.notes.append("the checkpoint does not say which tokenizer its run had")
        return
    file = find_file(directory, "tokenizer.json")
    served = load_tokenizer(None if file is None else str(file))
    add = result.differences.append
    if tokenizer.name != served.name:
        add(Difference("tokenizer", "tokenizer.json", tokenizer.name, served.name))
    first = tokenizer.start[0] if tokenizer.start else None
    defaults = read_json(directory / GENERATION) if find_file(directory, GENERATION) else {}
    for name, ours in (("bos_token_id", first), ("eos_token_id", tokenizer.eod)):
        if config.get(name) != ours:
            add(Difference("tokenizer", f"{CONFIG} {name}", json.dumps(ours), json.dumps(config.get(name))))
        theirs = defaults.get(name, ours)
        if ours != theirs and not (isinstance(theirs, list) and ours in theirs):
            add(Difference("tokenizer", f"{GENERATION} {name}", json.dumps(ours), json.dumps(theirs)))
