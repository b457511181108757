"""Reads a run's config for estimates, without Megatron-Core.

    settings = read(["--config=examples/configs/llama3_8b.yaml", "--model.fp8_param=true"], gpus=64)

Files and dotted options have the syntax of `megatron-fp8 train`; later options win, and options win over
files. Keys are checked against the tables of train/config. Values are checked by their rules, except model
fields that the estimate does not use. For errors that Megatron-Core, the data or the machine would raise, use
`train --dry-run`.

Rejected: train's own parser. Its model section is built from Megatron-Core's dataclass, whose import takes
longer than the whole estimate and fails on a laptop without it. A test compares the two parsers.
"""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass, field
from typing import Any

from ..files.data_option import data_as_paths
from ..files.example_configs import config_hint, find_config
from ..files.strict_yaml import load_yaml
from ..mcore.config.fields import RELATIONS
from ..mcore.config.rules import check, check_relation, shown
from ..plan.overrides import check_overrides, check_overrides_match
from ..plan.settings import field_meant, nearest_key, refuse_recipe_alone
from ..train.config.field_rules import check_rules
from ..train.config.model_fields import known_fields
from ..train.config.options import by_dotted_key, read_config
from ..train.config.ranks import AUTO, least_ranks, tensor_ranks
from ..train.config.sections import (
    CheckpointSection,
    DataSection,
    OptimizerSection,
    TelemetrySection,
    TrainSection,
    check_loss_scaling,
    check_rewinds,
    check_sections,
    check_telemetry,
    settle_warmup,
)
from .model import Model
from .model_rules import MODEL_RULES, UNKNOWN_SHAPES
from .parameters import of_chunk

_SECTIONS: dict[str, Any] = {
    "train": TrainSection,
    "optimizer": OptimizerSection,
    "data": DataSection,
    "checkpoint": CheckpointSection,
    "telemetry": TelemetrySection,
}
_TOP = {"run_dir", "resume", "dry_run", "debug"}
_NAMES = ("model", *_SECTIONS)
_BYTES_VOCABULARY = 257  # without a tokenizer: all bytes, and the end of a document


class LayoutError(ValueError):
    """The number of GPUs is not a multiple of the layout's ranks, or the batch is not divisible among them."""


@dataclass(frozen=True)
class Settings:
    """Settings for an estimate.

    Attributes:
        model: the model's section, with derived values.
        train, optimizer: the run's sections.
        gpus: ranks of the whole run.
        notes: settings that the estimate does not model.
    """

    model: Model
    train: TrainSection
    optimizer: OptimizerSection
    gpus: int
    notes: tuple[str, ...] = field(default=())

    @property
    def data_parallel(self) -> int:
        """Ranks with the same dense parameters, not counting context-parallel ranks."""
        return self.gpus // self.model.model_ranks

    @property
    def microbatches(self) -> int:
        """Microbatches per iteration and rank."""
        return self.train.global_batch_size // (self.train.micro_batch_size * self.data_parallel)

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch on one context-parallel rank: those that a tensor-parallel group multiplies at
        once."""
        return self.train.micro_batch_size * self.train.seq_length // self.model.context_parallel_size


def read(options: list[str], gpus: int | None = None) -> Settings:
    """The settings from `--config=FILE` and dotted options.

    Args:
        options: as for `megatron-fp8 train`, each `--name=value`.
        gpus: GPUs of the run; None: the smallest number that holds the model and its experts.

    Raises:
        ValueError: a key is unknown, a value is out of range, sizes are not divisible, or the model has an
            unsupported part; the message names the key and the remedy.
    """
    return settle(given_keys(options), gpus)


def joined(arguments: list[str]) -> list[str]:
    """A command line's options as `--name=value`: accepts `--name value`, `--data FILE...` and bare flags.

    Raises ValueError: `--data` names no file.
    """
    found: list[str] = []
    for argument in data_as_paths(arguments):
        if argument.startswith("--"):
            found.append(f"{argument}=true" if argument in ("--dry_run", "--dry-run") else argument)
        elif not found or "=" in found[-1]:
            found.append(argument)
        else:
            found[-1] = f"{found[-1]}={argument}"
    return found


def given_keys(options: list[str]) -> dict[str, Any]:
    """Dotted key -> value, from `--config=FILE` and dotted options. Raises ValueError for an unreadable file or an
    unknown key. Values are not checked."""
    given: dict[str, Any] = {}
    for option in data_as_paths(options):
        name, equals, value = option.removeprefix("--").partition("=")
        if not option.startswith("--") or not equals:
            raise ValueError(
                f"{option!r} is not an option: options are --config FILE and --section.key=value.{config_hint(option)}"
            )
        name = name.replace("-", "_")
        if name == "config":
            content = by_dotted_key(read_config(find_config(value), _NAMES), _NAMES)
            for key in content:
                _check_key(key, f"{value}: ")
            given.update(content)
        elif name == "data.paths+":
            given["data.paths"] = [*(given.get("data.paths") or []), value]
        elif name == "data.paths" and not value.startswith("["):
            given[name] = value.split(",")
        else:
            if name == "model.fp8_format":
                name = f"model.{field_meant(value)}"
            _check_key(name, "--")
            given[name] = _value(name, value)
    return given


def settle(given: dict[str, Any], gpus: int | None = None) -> Settings:
    """The settings from values by dotted key; otherwise as ``read``."""
    sections: dict[str, Any] = {}
    for name in _SECTIONS:
        keys = {item.name for item in dataclasses.fields(_SECTIONS[name])}
        sections[name] = _SECTIONS[name](**{k: given[f"{name}.{k}"] for k in keys if f"{name}.{k}" in given})
        check_rules(name, sections[name])
    section = {key.partition(".")[2]: value for key, value in given.items() if key.startswith("model.")}
    if section.get("tensor_model_parallel_size") == AUTO:
        names = ("num_attention_heads", "num_query_groups", "ffn_hidden_size")
        size = tensor_ranks(gpus or 1, *(section.get(name) for name in names))
        section = {"sequence_parallel": size > 1, **section, "tensor_model_parallel_size": size}
    train = sections["train"]
    model, notes = _model(section, given, train.seq_length)
    _check_together(sections, model, given.get("model.fp8_guard"))
    ranks = model.model_ranks
    if gpus is None:
        gpus = least_ranks(model)
    if gpus < 1:
        raise ValueError(f"--gpus={gpus} must be at least 1: how many the whole run has.")
    if gpus % ranks:
        raise LayoutError(
            f"--gpus={gpus} must be a multiple of the {ranks} ranks that hold one model (tensor"
            f" {model.tensor_model_parallel_size} x pipeline {model.pipeline_model_parallel_size} x context"
            f" {model.context_parallel_size}): change one of them."
        )
    if gpus % model.expert_ranks:
        raise LayoutError(
            f"--gpus={gpus} must be a multiple of the {model.expert_ranks} ranks that hold all experts once"
            f" (model.expert_model_parallel_size={model.expert_model_parallel_size} x expert tensor parallel"
            f" {model.expert_tp} x pipeline {model.pipeline_model_parallel_size}): change one of them."
        )
    settings = Settings(model, train, sections["optimizer"], gpus, tuple(notes))
    _check_batch(settings)
    return settings


def _check_together(sections: dict[str, Any], model: Model, guard: Any) -> None:
    """Raises ValueError if sections are inconsistent, as train does."""
    train, optimizer, checkpoint, telemetry = (
        sections[name] for name in ("train", "optimizer", "checkpoint", "telemetry")
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # train shows the warning
        settle_warmup(train, optimizer)
    check_sections(train, optimizer, checkpoint)
    check_loss_scaling(optimizer, fp16=model.fp16)
    check_telemetry(telemetry)
    check_rewinds(train, checkpoint, telemetry, guard)


def _check_batch(settings: Settings) -> None:
    train, model = settings.train, settings.model
    per_step = train.micro_batch_size * settings.data_parallel
    if train.global_batch_size % per_step:
        raise LayoutError(
            f"train.global_batch_size={train.global_batch_size} must be a multiple of train.micro_batch_size="
            f"{train.micro_batch_size} x {settings.data_parallel} data-parallel ranks (--gpus={settings.gpus}): change"
            " one of them."
        )
    if train.seq_length % model.context_parallel_size or (
        model.sequence_parallel
        and train.seq_length // model.context_parallel_size % model.tensor_model_parallel_size
    ):
        raise ValueError(
            f"train.seq_length={train.seq_length} is shared by {model.context_parallel_size} context-parallel and, with"
            f" sequence_parallel, {model.tensor_model_parallel_size} tensor-parallel ranks: make it a multiple."
        )


def _value(name: str, text: str) -> Any:
    try:
        value = load_yaml(text.encode())
    except UnicodeEncodeError as error:
        raise ValueError(
            f"--{name}={shown(text)} holds bytes that are no UTF-8: choose another name."
        ) from error
    except ValueError as error:
        raise ValueError(f"--{name}={shown(text)} is not YAML: {error}") from error
    if isinstance(value, str):
        try:
            return float(value)  # YAML reads 1e-4 as text
        except ValueError:
            return value
    return value


def known_keys() -> list[str]:
    """All dotted keys of a run's config."""
    inner = [f"{name}.{item.name}" for name, kind in _SECTIONS.items() for item in dataclasses.fields(kind)]
    return [*(f"model.{name}" for name in sorted(known_fields())), *inner, *sorted(_TOP)]


def _check_key(key: str, where: str) -> None:
    known = known_keys()
    if key in known or key.startswith("model.fp8_overrides."):
        return
    near = nearest_key(key, known)
    hint = f" Did you mean {near}?" if near else ""
    raise ValueError(f"{where}{key} is not a known key.{hint}")


def _model(section: dict[str, Any], given: dict[str, Any], positions: int) -> tuple[Model, list[str]]:
    section = dict(section)
    refuse_recipe_alone(section.get("fp8_recipe"), fp8_given="fp8" in section)
    for name in ("num_layers", "hidden_size", "num_attention_heads"):
        if not section.get(name):
            problem = f"={shown(section[name])} must be at least 1" if name in section else " is missing"
            raise ValueError(f"model.{name}{problem}: give it, or a config such as --config tiny_gpt_cpu.")
    for name, usual in UNKNOWN_SHAPES.items():
        if section.get(name, usual) != usual:
            raise ValueError(
                f"model.{name}={shown(section[name])}: no estimate is known for it. Leave it {shown(usual)} to have one"
                " of the rest."
            )
    values = {}
    for name, rule in MODEL_RULES.items():
        if name in section:
            check(f"model.{name}", section[name], rule)
            values[name] = section[name]
    section_overrides = section.get("fp8_overrides")
    overrides = {} if section_overrides is None else section_overrides
    check_overrides(overrides, "model.fp8_overrides")
    overrides = dict(overrides) | {
        key.removeprefix("model.fp8_overrides."): value
        for key, value in given.items()
        if key.startswith("model.fp8_overrides.")
    }
    check_overrides(overrides, "model.fp8_overrides")
    options: dict[str, Any] = {
        name: section[name] for name in ("fp8_margin", "fp8_amax_history_len", "fp8_pow2_scales",
                                         "fp8_quantizer_factory", "fp8_amax_compute_algo", "fp8_interval",
                                         "fp8_stochastic_rounding", "fp8_amax_epsilon")
        if name in section
    }  # fmt: skip
    has_experts = bool(values.get("num_moe_experts"))
    model = Model(**values, positions=positions, fp8_overrides=overrides, fp8_options=options)
    if overrides and model.fp8:
        whole = dataclasses.replace(model, expert_model_parallel_size=1)  # experts of all ranks
        sites = [p.site for chunk in whole.chunks() for p in of_chunk(whole, chunk) if p.site]
        check_overrides_match(overrides, [*sites, "output_layer"], "model.fp8_overrides")
    if model.fp8_param and not model.fp8:
        raise ValueError(
            f"model.fp8_param=True needs FP8 training, and model.fp8 is {model.fp8!r}. Set model.fp8=hybrid or e4m3, or"
            " drop it."
        )
    for relation in RELATIONS:
        if all(hasattr(model, name) for name in relation.names):
            check_relation(model, relation, "model.")
    notes = []
    if section.get("fp8_size_filter"):
        notes.append("fp8_size_filter: not read; sites that it leaves in BF16 are counted as FP8")
    if section.get("fp8_high_precision_warmup") or section.get("fp8_high_precision_healing"):
        notes.append("phases in BF16: the figures are of iterations in FP8")
    if section.get("fp8_backend") == "transformer_engine":
        notes.append(
            "fp8_backend=transformer_engine: what its layers save is unknown; the figures are for this package's layers"
        )
    if model.attention_dropout:
        notes.append(
            "attention_dropout: scores are written out, and what is kept of them is about right only"
        )
    if section.get("vocab_size") is None:
        if given.get("data.tokenizer") not in (None, "bytes"):
            raise ValueError(
                "model.vocab_size is the tokenizer's, which is not read here: give --model.vocab_size=N."
            )
        model = dataclasses.replace(model, vocab_size=_BYTES_VOCABULARY)
    if has_experts:
        notes.append("experts: all experts are assumed to get the same number of tokens")
    if any("local_experts." in key for key in overrides) and model.expert_model_parallel_size > 1:
        notes.append(
            "overrides that differ between experts: the figures are those of the rank with the first experts"
        )
    if has_experts and section.get("moe_token_dispatcher_type", "allgather") != "alltoall":
        notes.append(
            "moe_token_dispatcher_type: what it sends is not known; these are the bytes of 'alltoall'"
        )
    if has_experts and section.get("moe_expert_capacity_factor") is not None:
        notes.append("moe_expert_capacity_factor: not read; the estimate drops no tokens and pads no expert")
    if has_experts and model.expert_tp > 1:
        notes.append("experts that tensor parallelism cuts: what their ranks send was never counted in a run")
    return model, notes
