"""The config's `model` section: the fields of `TransformerConfig`, and options of GPTModel."""

from __future__ import annotations

import dataclasses
import re
import traceback
import types
import typing
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core.activations import squared_relu
from megatron.core.transformer.enums import CudaGraphScope

from ...mcore.config.fields import FIELD_RULES
from ...mcore.config.fp8_checks import DEFAULTS, LATENT_FIELDS, check_fields
from ...mcore.config.rules import Rule, check, one_of, optional
from ...mcore.config.transformer_config import MLATransformerConfig, TransformerConfig
from .field_rules import POSITION_RULES
from .ranks import AUTO, tensor_ranks

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
ACTIVATIONS = {"gelu": F.gelu, "silu": F.silu, "relu": F.relu, "squared_relu": squared_relu}

# Fields with objects, which only a program can set.
_NOT_IN_A_FILE = frozenset(
    {
        "timers", "finalize_model_grads_func", "grad_scale_func", "no_sync_func", "grad_sync_func",
        "param_sync_func", "_cpu_offloading_context", "init_method", "output_layer_init_method",
        "embedding_init_method", "quant_recipe",
    }
)  # fmt: skip
_DTYPE = Literal["bfloat16", "float16", "float32"]
_TYPES: dict[str, Any] = {
    "bf16": typing.Optional[bool],  # noqa: UP045 (a typing form, built at run time)
    "params_dtype": typing.Optional[_DTYPE],  # noqa: UP045
    "pipeline_dtype": typing.Optional[_DTYPE],  # noqa: UP045
    "autocast_dtype": typing.Optional[_DTYPE],  # noqa: UP045
    "activation_func": Literal["gelu", "silu", "relu", "squared_relu"],
    "tensor_model_parallel_size": int | Literal["auto"],
    "pipeline_model_parallel_layout": typing.Optional[str],  # noqa: UP045
    "q_lora_rank": typing.Optional[int],  # noqa: UP045 (queries without a latent; Megatron-Core says int)
    "cuda_graph_scope": str,
    "cross_entropy_fusion_impl": Literal["native", "te", "liger"],
    # TransformerConfig checks these in more detail than their types can.
    "fp8": typing.Optional[str],  # noqa: UP045
    "fp8_recipe": typing.Optional[str],  # noqa: UP045
    "fp4": typing.Optional[str],  # noqa: UP045
    "fp4_recipe": str,
    "fp8_amax_compute_algo": str,
}
# `train` uses BF16 (and FP8 over it) unless fp16 is set, see resolve_precision; other defaults are Megatron-Core's.
_DEFAULTS: dict[str, Any] = {
    "num_layers": 0,
    "hidden_size": 0,
    "num_attention_heads": 0,
    "bf16": None,
    "params_dtype": None,
    "activation_func": "gelu",
    "fp8_recipe": None,
    "cuda_graph_scope": "full",
    "transformer_impl": "local",
}

NAMES: dict[str, Rule] = {
    "activation_func": one_of(*ACTIVATIONS),
    **dict.fromkeys(("params_dtype", "pipeline_dtype", "autocast_dtype"), optional(one_of(*DTYPES))),
    "cuda_graph_scope": Rule(
        f"'full', or names of {', '.join(CudaGraphScope.__members__)}, with commas",
        lambda v: v == "full" or set(str(v).split(",")) <= set(CudaGraphScope.__members__),
    ),
    "pipeline_model_parallel_layout": Rule(  # a stranger's checkpoint could ask Megatron-Core for any memory
        "a layout that repeats nothing more than 1,000 times",
        lambda v: not v or all(int(n[:5]) <= 1000 for n in re.findall(r"\*0*([0-9]+)", v)),
    ),
}
"""Names in a run's config for objects in a TransformerConfig."""


@dataclasses.dataclass
class GPTOptions:
    """The model's options outside its TransformerConfig."""

    vocab_size: int | None = None
    """Size of the vocabulary; None: the tokenizer's. It is padded: see make_vocab_size_divisible_by."""
    make_vocab_size_divisible_by: int = 128
    """Pads the vocabulary to a multiple of this times the tensor parallel size."""
    padded_vocab_size: int | None = None
    """Rows of the vocabulary; None: as make_vocab_size_divisible_by says."""
    position_embedding_type: Literal["rope", "learned_absolute", "none"] = "rope"
    """Positions: rotary, a learned vector each, or none."""
    rotary_percent: float = 1.0
    """Part of each head's channels with rotary positions, above 0 and at most 1."""
    rotary_base: int = 10000
    """Base of the rotary frequencies; larger for longer sequences."""
    rope_scaling: bool = False
    """Llama-3.1's scaling of low rotary frequencies."""
    rope_scaling_factor: float = 8.0
    """By how much rope_scaling stretches the longest wavelengths."""
    share_embeddings_and_output_weights: bool = False
    """Tie the output layer to the embedding."""


def _model_fields() -> list[tuple[str, Any, dataclasses.Field]]:
    hints = typing.get_type_hints(MLATransformerConfig)
    of_gpt = {field.name for field in dataclasses.fields(GPTOptions)}  # rotary positions are declared once
    result = []
    latent = [field for field in dataclasses.fields(MLATransformerConfig) if field.name in LATENT_FIELDS]
    for field in (*dataclasses.fields(TransformerConfig), *latent):
        if field.name in _NOT_IN_A_FILE or field.name in of_gpt:
            continue
        default = _DEFAULTS.get(field.name, field.default)
        if field.default_factory is not dataclasses.MISSING:
            own = dataclasses.field(default_factory=field.default_factory)
        else:
            own = dataclasses.field(default=default)
        kind = _TYPES.get(field.name, hints[field.name])
        rule = FIELD_RULES.get(field.name)
        if rule and rule.holds(None):  # even if Megatron-Core's annotation excludes None
            kind = typing.Optional[kind]  # noqa: UP045
        result.append((field.name, kind, own))
    return result


ModelSection: Any = dataclasses.make_dataclass("ModelSection", _model_fields(), bases=(GPTOptions,))
ModelSection.__doc__ = (
    "The model: every TransformerConfig field, and how GPTModel embeds tokens and positions."
)


def resolve_tensor_parallel(section: Any, ranks: int, *, sequence_given: bool) -> None:
    """Replace a tensor parallel size of 'auto' by one that fits the ranks, and set sequence parallelism unless given."""
    if section.tensor_model_parallel_size != AUTO:
        return
    groups = section.num_query_groups or section.num_attention_heads
    sizes = (section.num_attention_heads, groups, section.ffn_hidden_size)
    section.tensor_model_parallel_size = tensor_ranks(ranks, *sizes)
    if not sequence_given:
        section.sequence_parallel = section.tensor_model_parallel_size > 1


def resolve_precision(section: Any) -> None:
    """Fill in `bf16` and `params_dtype` where they are None: BF16 unless fp16 is set, parameters of the model's dtype.

    Raises ValueError if the given values contradict each other.
    """
    if section.bf16 is None:
        section.bf16 = not section.fp16
    if section.fp16 and section.bf16:
        raise ValueError("model.fp16=true and model.bf16=true: give one of them.")
    dtype, chosen = ("float16", "fp16=true") if section.fp16 else ("bfloat16", "bf16=true")
    masters, otherwise = (
        ", their float32 masters are the optimizer's",
        " or, for float32, give model.bf16=false alone",
    )
    if not (section.fp16 or section.bf16):
        dtype, chosen, masters, otherwise = "float32", "bf16=false", "", " or give model.bf16=true"
    if section.params_dtype is None:
        section.params_dtype = dtype
    if section.params_dtype != dtype:
        raise ValueError(
            f"model.params_dtype={section.params_dtype!r} with model.{chosen}: the parameters are {dtype}{masters}."
            f" Leave params_dtype out,{otherwise}."
        )


def transformer_config(section: Any) -> TransformerConfig:
    """The `TransformerConfig` of a model section.

    Raises ValueError if a value is out of range, or if Megatron-Core refuses the combination.
    """
    for name in ("num_layers", "hidden_size", "num_attention_heads"):
        if getattr(section, name) == 0:
            raise ValueError(
                f"model.{name}={getattr(section, name)} must be at least 1: give it, or a config file such "
                "as --config tiny_gpt_cpu."
            )
    resolve_precision(section)
    for name, rule in NAMES.items():
        check(f"model.{name}", getattr(section, name), rule)
    is_latent = bool(section.multi_latent_attention)
    fields = _set_fields(section)
    # Even if it is None: the run config decides whether a recipe may be set without it.
    fields["fp8"] = section.fp8
    fields.setdefault("pipeline_dtype", DTYPES[section.params_dtype])
    if section.virtual_pipeline_model_parallel_size and section.pipeline_model_parallel_size == 2:
        # The only correct setting: each of two stages is the other's next and previous one (mcore/config/fp8_checks.py).
        fields.update(overlap_p2p_comm=True, batch_p2p_comm=False)
    positions = {name: getattr(section, name) for name in POSITION_RULES}
    settings = types.SimpleNamespace(**{**DEFAULTS, **positions, **fields})
    check_fields(settings, "model.")
    if not settings.perform_initialization:
        raise ValueError("model.perform_initialization=False leaves weights undefined: leave it out.")
    check_positions(section, settings)
    kind = MLATransformerConfig if is_latent else TransformerConfig
    arguments = fields if is_latent else {name: fields[name] for name in fields if name not in LATENT_FIELDS}
    try:
        return kind(**arguments)
    except ValueError:
        raise
    except Exception as error:  # Megatron-Core raises various errors (assertion, division by 0, ...)
        raise ValueError(f"the model section does not fit together: {failure_text(error)}") from error


def _set_fields(section: Any) -> dict[str, Any]:
    """The fields of a TransformerConfig that a model section sets, in the config's form.

    Fields at Megatron-Core's default are left out. Fields at the section's own default (such as a recipe of None) are
    not, so that two names for one setting can be distinguished. None is a value like others: the field's rule decides.
    """
    fields = dataclasses.fields(TransformerConfig)
    megatrons = {field.name: field.default for field in fields if field.name not in _DEFAULTS}
    megatrons |= {name: DEFAULTS[name] for name in LATENT_FIELDS}
    own = {field.name for field in dataclasses.fields(GPTOptions)}
    unset = {name for name, default in _DEFAULTS.items() if default is None}
    # The section decides the norm, not the config's class; with latent attention rotary positions are its fields.
    given = {name: getattr(section, name) for name in _OF_ATTENTION} if section.multi_latent_attention else {}
    for field in dataclasses.fields(section):
        name, value = field.name, getattr(section, field.name)
        if name in own or (value is None and name in unset):
            continue
        if name.endswith("_dtype") and value in DTYPES:
            value = DTYPES[value]
        elif name == "activation_func":
            value = ACTIVATIONS[value]
        if name not in megatrons or value != megatrons[name]:
            given[name] = value
    return given


_OF_ATTENTION = ("normalization", "rotary_base", "rotary_percent")


def check_positions(section: Any, config: Any) -> None:
    """Raise ValueError if attention does not support the requested positions.

    Args:
        section: the model section.
        config: has the TransformerConfig's fields as attributes.
    """
    kind = section.position_embedding_type
    stages = config.pipeline_model_parallel_size
    if kind == "learned_absolute" and config.mtp_num_layers and stages > 1:
        raise ValueError(
            f"model.position_embedding_type='learned_absolute' with model.mtp_num_layers={config.mtp_num_layers} and"
            f" model.pipeline_model_parallel_size={stages}: Megatron-Core gives the last stage a table of positions of"
            " its own, which learns apart from the first one's. Take 'rope', or one stage."
        )
    if config.multi_latent_attention:
        if kind == "none":
            raise ValueError(
                "model.position_embedding_type='none' with model.multi_latent_attention=True: latent attention turns"
                " model.qk_pos_emb_head_dim channels of a head whatever it is. Leave it 'rope'."
            )
        return
    channels = config.kv_channels or config.hidden_size // config.num_attention_heads
    rotary_channels = int(channels * section.rotary_percent)
    if kind == "rope" and (rotary_channels < 2 or rotary_channels % 2):
        raise ValueError(
            f"model.rotary_percent={section.rotary_percent} of {channels} channels of a head (model.kv_channels) makes"
            f" {rotary_channels}, and rotary positions turn pairs: change one of them, or model.position_embedding_type."
        )


def failure_text(error: BaseException) -> str:
    """The message of an error of Megatron-Core, and where it was raised: its text may not name the fields."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{type(error).__name__} at `{where.line}` ({Path(where.filename).name}:{where.lineno})"
    return f"{error} ({place})" if str(error) else place


def padded_vocab_size(section: Any, tokenizer_vocab_size: int) -> int:
    """`model.vocab_size`, or the tokenizer's, rounded up to equal parts for all tensor-parallel ranks.

    Raises ValueError if the model's vocabulary is smaller than the tokenizer's.
    """
    size = tokenizer_vocab_size if section.vocab_size is None else section.vocab_size
    if size < tokenizer_vocab_size:
        raise ValueError(
            f"model.vocab_size={size} is less than the tokenizer's {tokenizer_vocab_size} ids: raise it, or "
            "leave it out."
        )
    if section.padded_vocab_size is not None:
        ranks = section.tensor_model_parallel_size
        if section.padded_vocab_size < size or section.padded_vocab_size % ranks:
            raise ValueError(
                f"model.padded_vocab_size={section.padded_vocab_size} must be at least the vocabulary's {size} and a "
                f"multiple of model.tensor_model_parallel_size={ranks}: change it, or leave it out."
            )
        return section.padded_vocab_size
    multiple = section.make_vocab_size_divisible_by * section.tensor_model_parallel_size
    return -(-size // multiple) * multiple
