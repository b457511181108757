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
import functools
import warnings
from dataclasses import dataclass
from typing import Any, get_type_hints

from ..fp8_utils import quantizes
from ..mcore.config.fields import FIELD_RULES, OWN_RULES, RELATIONS
from ..mcore.config.rules import (
    FLAG,
    Rule,
    check,
    check_relation,
    format_value,
    list_of,
    one_of,
    optional,
    text,
)
from ..plan.overrides import check_overrides, check_overrides_match
from ..plan.settings import FP4_OPTIONS, refuse_recipe_alone
from ..plan.site_plan import SitePlan
from ..train.config.field_rules import RULES, check_rules
from ..train.config.model_fields import known_fields
from ..train.config.options import read_options
from ..train.config.ranks import AUTO, least_ranks, tensor_ranks
from ..train.config.sections import (
    CheckpointSection,
    DataSection,
    OptimizerSection,
    TelemetrySection,
    TrainSection,
    check_decay,
    check_rewinds,
    check_telemetry,
    shorten_warmup,
)
from .model import Model
from .parameter_counts import chunk_parameters

_SECTIONS: dict[str, Any] = {
    "train": TrainSection,
    "optimizer": OptimizerSection,
    "data": DataSection,
    "checkpoint": CheckpointSection,
    "telemetry": TelemetrySection,
}
_BYTES_VOCABULARY = 257  # without a tokenizer: all bytes, and the end of a document


@dataclass(frozen=True)
class Settings:
    """Settings for an estimate.

    Attributes:
        model: the model's section, with derived values.
        train, optimizer: the run's sections.
        gpus: ranks of the whole run.
        notes: settings that the estimate does not model.
        on_gpu: whether bytes are those of a GPU's kernels and the native backend, which save other tensors than CPUs.
    """

    model: Model
    train: TrainSection
    optimizer: OptimizerSection
    gpus: int
    notes: tuple[str, ...] = ()
    on_gpu: bool = False

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

    @property
    def local_tokens(self) -> int:
        """Tokens of a microbatch on one rank between linears."""
        return self.tokens // self.model.token_share

    @property
    def positions(self) -> int:
        """Positions of a sequence on one context-parallel rank."""
        return self.tokens // self.train.micro_batch_size

    def plan(self, site: str) -> SitePlan:
        """The plan of a site, by its name."""
        return self.model.plans.of(site)


def read(options: list[str], gpus: int | None = None) -> Settings:
    """The settings from `--config=FILE` and dotted options.

    Args:
        options: as for `megatron-fp8 train`.
        gpus: GPUs of the run; None: the smallest number that holds the model and its experts.

    Raises:
        ValueError: a key is unknown, a value is out of range, sizes are not divisible, or the model has an
            unsupported part; the message names the key and the remedy.
    """
    return resolve(given_keys(options), gpus)


def given_keys(options: list[str]) -> dict[str, Any]:
    """Dotted key -> value, from the files and options of a command line, as `train` reads them.

    Values of the model's section have the types that YAML gives them. Raises ValueError for an unreadable file, an
    unknown key, or a value of another type.
    """
    return read_options(options, _kinds(), _rule_of)[0]


def resolve(given: dict[str, Any], gpus: int | None = None) -> Settings:
    """The settings from values by dotted key; otherwise as ``read``."""
    sections: dict[str, Any] = {}
    for name in _SECTIONS:
        keys = {item.name for item in dataclasses.fields(_SECTIONS[name])}
        sections[name] = _SECTIONS[name](**{k: given[f"{name}.{k}"] for k in keys if f"{name}.{k}" in given})
        check_rules(name, sections[name])
    section = {key.partition(".")[2]: value for key, value in given.items() if key.startswith("model.")}
    is_auto = section.get("tensor_model_parallel_size") == AUTO
    for name in sorted(section.keys() & MODEL_RULES.keys()):
        if not (is_auto and name == "tensor_model_parallel_size"):
            check(f"model.{name}", section[name], MODEL_RULES[name])
    if is_auto:
        names = ("num_attention_heads", "num_query_groups", "ffn_hidden_size")
        size = tensor_ranks(gpus or 1, *(section.get(name) for name in names))
        section = {"sequence_parallel": size > 1, **section, "tensor_model_parallel_size": size}
    train = sections["train"]
    model = _model(section, given, train.seq_length)
    _check_together(sections, model, given.get("model.fp8_guard"))
    gpus = least_ranks(model) if gpus is None else gpus
    settings = Settings(model, train, sections["optimizer"], gpus, _notes(section, model))
    check_layout(settings)
    return settings


def check_layout(settings: Settings) -> None:
    """Raises ValueError if sizes do not divide among the ranks, or the batch among their microbatches."""
    train, model, gpus = settings.train, settings.model, settings.gpus
    for relation in RELATIONS:
        if all(hasattr(model, name) for name in relation.names):
            check_relation(model, relation, "model.")
    if gpus < 1:
        raise ValueError(f"--gpus={gpus} must be at least 1: how many the whole run has.")
    if gpus % model.model_ranks:
        raise ValueError(
            f"--gpus={gpus} must be a multiple of the {model.model_ranks} ranks that hold one model (tensor"
            f" {model.tensor_model_parallel_size} x pipeline {model.pipeline_model_parallel_size} x context"
            f" {model.context_parallel_size}): change one of them."
        )
    if gpus % model.expert_ranks:
        raise ValueError(
            f"--gpus={gpus} must be a multiple of the {model.expert_ranks} ranks that hold all experts once"
            f" (model.expert_model_parallel_size={model.expert_model_parallel_size} x expert tensor parallel"
            f" {model.expert_tp} x pipeline {model.pipeline_model_parallel_size}): change one of them."
        )
    if train.global_batch_size % (train.micro_batch_size * settings.data_parallel):
        raise ValueError(
            f"train.global_batch_size={train.global_batch_size} must be a multiple of train.micro_batch_size="
            f"{train.micro_batch_size} x {settings.data_parallel} data-parallel ranks (--gpus={gpus}): change"
            " one of them."
        )
    if train.seq_length % (model.context_parallel_size * model.token_share):
        raise ValueError(
            f"train.seq_length={train.seq_length} is shared by {model.context_parallel_size} context-parallel and, with"
            f" sequence_parallel, {model.tensor_model_parallel_size} tensor-parallel ranks: make it a multiple."
        )


def _check_together(sections: dict[str, Any], model: Model, guard: Any) -> None:
    """Raises ValueError if sections are inconsistent, as train does."""
    train, optimizer, checkpoint, telemetry = (
        sections[name] for name in ("train", "optimizer", "checkpoint", "telemetry")
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # train shows the warning
        shorten_warmup(train, optimizer)
    check_decay(train, optimizer)
    check_telemetry(telemetry)
    check_rewinds(train, checkpoint, telemetry, guard)


def known_keys() -> list[str]:
    """All dotted keys of a run's config."""
    return list(_kinds())


@functools.cache
def _kinds() -> dict[str, Any]:
    kinds: dict[str, Any] = {f"model.{name}": Any for name in sorted(known_fields())}
    for name, section in _SECTIONS.items():
        kinds |= {f"{name}.{key}": kind for key, kind in get_type_hints(section).items()}
    top = {"run_dir": str, "resume": str, "dry_run": bool, "debug": bool}
    return {**kinds, "model.fp8_overrides": dict[str, str], **top}


def _rule_of(key: str) -> Rule | None:
    section, _, name = key.rpartition(".")
    return RULES.get(section, {}).get(name) or (MODEL_RULES.get(name) if section == "model" else None)


def _model(section: dict[str, Any], given: dict[str, Any], positions: int) -> Model:
    refuse_recipe_alone(section.get("fp8_recipe"), fp8_given="fp8" in section)
    for name in ("num_layers", "hidden_size", "num_attention_heads"):
        if not section.get(name):
            problem = (
                f"={format_value(section[name])} must be at least 1" if name in section else " is missing"
            )
            raise ValueError(f"model.{name}{problem}: give it, or a config such as --config tiny_gpt_cpu.")
    for name, usual in UNKNOWN_SHAPES.items():
        if section.get(name, usual) != usual:
            raise ValueError(
                f"model.{name}={format_value(section[name])}: no estimate is known for it. Leave it"
                f" {format_value(usual)} to have one of the rest."
            )
    read = {field.name for field in dataclasses.fields(Model)} - {"positions", "fp8_overrides", "fp8_options"}
    values = {name: section[name] for name in read & section.keys()}
    section_overrides = section.get("fp8_overrides")
    overrides = {} if section_overrides is None else section_overrides
    check_overrides(overrides, "model.fp8_overrides")
    options: dict[str, Any] = {
        name: section[name] for name in ("fp8_margin", "fp8_amax_history_len", "fp8_pow2_scales",
                                         "fp8_quantizer_factory", "fp8_amax_compute_algo", "fp8_interval",
                                         "fp8_stochastic_rounding", "fp8_amax_epsilon", "fp4_quantizer_factory",
                                         *map("fp4_{}".format, FP4_OPTIONS))
        if name in section
    }  # fmt: skip
    model = Model(**values, positions=positions, fp8_overrides=overrides, fp8_options=options)
    if model.fp8 and model.fp4:
        raise ValueError(f"model.fp8={model.fp8!r} and model.fp4={model.fp4!r}: set one of them to null.")
    if model.fp4_param and not model.fp4:
        raise ValueError(
            f"model.fp4_param=True needs FP4 training, and model.fp4 is {model.fp4!r}. Set model.fp4=e2m1, or drop it."
        )
    if overrides and quantizes(model):
        whole = dataclasses.replace(model, expert_model_parallel_size=1)  # experts of all ranks
        sites = [p.site for chunk in whole.chunks() for p in chunk_parameters(whole, chunk) if p.site]
        check_overrides_match(overrides, [*sites, "output_layer"], "model.fp8_overrides")
    if model.fp8_param and not model.fp8:
        raise ValueError(
            f"model.fp8_param=True needs FP8 training, and model.fp8 is {model.fp8!r}. Set model.fp8=hybrid or e4m3, or"
            " drop it."
        )
    if section.get("vocab_size") is None:
        if given.get("data.tokenizer") not in (None, "bytes"):
            raise ValueError(
                "model.vocab_size is the tokenizer's, which is not read here: give --model.vocab_size=N."
            )
        model = dataclasses.replace(model, vocab_size=_BYTES_VOCABULARY)
    return model


def _notes(section: dict[str, Any], model: Model) -> tuple[str, ...]:
    """What was read and is not in the figures, or only roughly."""
    experts, get = bool(model.num_moe_experts), section.get
    healing, parts = get("fp8_high_precision_healing"), get("fp8_high_precision_healing_parts")
    apart = any("local_experts." in key for key in model.fp8_overrides)
    found = {
        "fp8_size_filter: not read; sites that it leaves in BF16 are counted as FP8": get("fp8_size_filter"),
        "phases in BF16: the figures are of iterations in FP8": get("fp8_high_precision_warmup")
        or (healing and not parts),
        f"healing: {', '.join(map(str, parts or ()))} in BF16 in the last {100 * (healing or 0):g} % of iterations;"
        " the figures are of those before": healing and parts,
        "fp8_backend=transformer_engine: what its layers save is unknown; the figures are for this package's layers": (
            model.fp8_backend == "transformer_engine"
        ),
        "attention_dropout: scores are written out, and what is kept of them is about right only": (
            model.attention_dropout
        ),
        f"attention_backend={get('attention_backend')}: the scores that it saves are not in the figures": (
            get("attention_backend") in ("unfused", "local")
        ),
        "experts: all experts are assumed to get the same number of tokens": experts,
        "overrides that differ between experts: the figures are those of the rank with the first experts": (
            apart and model.expert_model_parallel_size > 1
        ),
        "moe_token_dispatcher_type: what it sends is not known; these are the bytes of 'alltoall'": (
            experts and get("moe_token_dispatcher_type", "allgather") != "alltoall"
        ),
        "moe_expert_capacity_factor: not read; the estimate drops no tokens and pads no expert": (
            experts and get("moe_expert_capacity_factor") is not None
        ),
        "experts that tensor parallelism cuts: what their ranks send was never counted in a run": (
            experts and model.expert_tp > 1
        ),
    }
    return tuple(note for note, applies in found.items() if applies)


MODEL_RULES: dict[str, Rule] = {
    **FIELD_RULES,
    **OWN_RULES,
    **RULES["model"],
    # Fields that Megatron-Core checks itself.
    **dict.fromkeys(
        (
            "gated_linear_unit", "add_bias_linear", "add_qkv_bias", "qk_layernorm", "bias_activation_fusion", "fp16",
            "sequence_parallel", "moe_shared_expert_gate", "distribute_saved_activations", "multi_latent_attention",
            "moe_router_pre_softmax", "moe_router_enable_expert_bias", "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split",
        ),
        FLAG,
    ),
    "bf16": optional(FLAG),
    "activation_func": one_of("gelu", "silu", "relu", "squared_relu"),
    "params_dtype": optional(one_of("bfloat16", "float16", "float32")),
    "recompute_granularity": optional(one_of("full", "selective")),
    "recompute_method": optional(one_of("uniform", "block")),
    "recompute_modules": optional(list_of(text())),
    "moe_router_score_function": one_of("softmax", "sigmoid"),
}  # fmt: skip
"""The rules of `train`: what it refuses has no estimate."""

UNKNOWN_SHAPES: dict[str, Any] = {
    "pipeline_model_parallel_layout": None,
    "attention_output_gate": False,
    "softmax_type": "vanilla",
    "moe_latent_size": None,
    "heterogeneous_block_specs": False,
    "experimental_attention_variant": None,
}
"""Fields that change shapes or layouts in unsupported ways, and their only accepted values."""
