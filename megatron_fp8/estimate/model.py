"""The model of an estimate: sizes, parallel layout, layers of stages, plans of sites."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from types import SimpleNamespace
from typing import Any

from ..fp8_utils import get_fp8_recipe, is_first_last_bf16_layer, quantizes
from ..plan.resolve import SiteRequest, cast_specs, named_recipes
from ..plan.settings import DEFAULT_RECIPE
from ..plan.site_plan import SitePlan, bf16_site, planned_site
from ..recipe import Recipe
from ..train.config.ranks import dense_ranks, expert_ranks, expert_tensor_ranks


@dataclass(frozen=True)
class Layer:
    """A transformer layer.

    Attributes:
        name: prefix of its parameter and site names, with a global number.
        number: its global number, from 0; None for a multi-token prediction layer, which plans know by name
            only.
        experts: whether its MLP is a mixture of experts.
    """

    name: str
    number: int | None
    experts: bool

    @property
    def projection(self) -> str:
        """The site of a multi-token prediction layer's projection, before its transformer layer."""
        return f"{self.name.removesuffix('transformer_layer.')}eh_proj"


@dataclass(frozen=True)
class Chunk:
    """One model chunk of a pipeline stage's rank.

    Attributes:
        stage, part: pipeline stage and virtual stage.
        layers: its layers.
        first, last: whether it has the embedding, and the output layer.
        predicting: multi-token prediction layers, in the last chunk.
    """

    stage: int
    part: int
    layers: tuple[Layer, ...]
    first: bool
    last: bool
    predicting: tuple[Layer, ...] = ()

    @property
    def embeds(self) -> bool:
        """Whether it has a token embedding. Multi-token prediction embeds tokens again."""
        return self.first or bool(self.predicting)

    @property
    def every(self) -> tuple[Layer, ...]:
        """Its layers, multi-token prediction last."""
        return self.layers + self.predicting


@dataclass(frozen=True)
class Model:
    """Megatron-Core's size-related fields, with its names and defaults.

    Fields that are typed Any are filled in where they are None. ``fp8_options`` are the recipe's and do not affect
    sizes; ``positions``: rows of a learned position table.

    Raises ValueError if the layers cannot be split as requested.
    """

    num_layers: int = 0
    hidden_size: int = 0
    num_attention_heads: int = 0
    num_query_groups: Any = None
    kv_channels: Any = None
    ffn_hidden_size: Any = None
    gated_linear_unit: bool = False
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    normalization: str = "LayerNorm"
    activation_func: str = "gelu"
    bias_activation_fusion: bool = False
    activation_func_fp8_input_store: bool = False
    position_embedding_type: str = "rope"
    share_embeddings_and_output_weights: bool = False
    positions: int = 0
    vocab_size: int | None = None
    make_vocab_size_divisible_by: int = 128
    padded_vocab_size: int | None = None
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    bf16: bool | None = None
    fp16: bool = False
    params_dtype: str | None = None
    fp8: str | None = None
    fp8_recipe: str | None = None
    fp4: str | None = None
    fp4_recipe: str = "nvfp4"
    fp4_param: bool = False
    fp8_param: bool = False
    fp8_wgrad: bool = True
    fp8_keep_columnwise: bool = True
    fp8_output_layer: bool = False
    fp8_backend: str | None = None
    fp8_overrides: Mapping[str, Any] = field(default_factory=dict)
    fp8_options: Mapping[str, Any] = field(default_factory=dict)
    first_last_layers_bf16: bool = False
    num_layers_at_start_in_bf16: int = 1
    num_layers_at_end_in_bf16: int = 1
    tensor_model_parallel_size: int = 1
    sequence_parallel: bool = False
    context_parallel_size: int = 1
    cp_comm_type: str | None = None
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    pipeline_model_parallel_layout: None = None
    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    microbatch_group_size_per_vp_stage: int | None = None
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    recompute_modules: list[str] | None = None
    distribute_saved_activations: bool = False
    num_moe_experts: int | None = None
    moe_ffn_hidden_size: Any = None
    moe_shared_expert_intermediate_size: int | None = None
    moe_shared_expert_gate: bool = False
    moe_layer_freq: int | list[int] = 1
    moe_router_topk: int = 2
    moe_grouped_gemm: bool = False
    moe_fp8_dispatch: bool = False
    moe_router_dtype: str | None = None
    moe_router_score_function: str = "softmax"
    moe_router_pre_softmax: bool = False
    moe_router_num_groups: int | None = None
    moe_router_group_topk: int | None = None
    moe_router_enable_expert_bias: bool = False
    moe_router_load_balancing_type: str | list[str] = "aux_loss"
    moe_aux_loss_coeff: float | list[float] = 0.0
    moe_z_loss_coeff: float | None = None
    multi_latent_attention: bool = False
    q_lora_rank: int | None = 512
    kv_lora_rank: int = 512
    qk_head_dim: int = 128
    qk_pos_emb_head_dim: int = 64
    v_head_dim: int = 128
    mtp_num_layers: int | None = None

    def __post_init__(self) -> None:
        heads, groups = self.num_attention_heads, self.num_query_groups
        bf16 = not self.fp16 if self.bf16 is None else self.bf16
        # Fields that depend on the layout stay None: replace() may change the layout.
        filled = {
            "num_query_groups": groups or heads,
            "kv_channels": self.kv_channels or self.hidden_size // heads,
            "ffn_hidden_size": self.ffn_hidden_size or 4 * self.hidden_size,
            "bf16": bf16,
            "params_dtype": self.params_dtype
            or ("float16" if self.fp16 else "bfloat16" if bf16 else "float32"),
            "fp8_recipe": self.fp8_recipe or DEFAULT_RECIPE,
        }
        if self.num_moe_experts:
            filled["moe_ffn_hidden_size"] = self.moe_ffn_hidden_size or filled["ffn_hidden_size"]
        for name, value in filled.items():
            object.__setattr__(self, name, value)
        if self.num_query_groups % self.tensor_model_parallel_size:
            raise ValueError(
                f"model.num_query_groups={self.num_query_groups} with model.tensor_model_parallel_size="
                f"{self.tensor_model_parallel_size}: no estimate is known where ranks share a group. Make the first a"
                " multiple of the second."
            )
        if isinstance(self.moe_layer_freq, list) and len(self.moe_layer_freq) != self.num_layers:
            raise ValueError(
                f"model.moe_layer_freq has {len(self.moe_layer_freq)} entries for model.num_layers={self.num_layers}:"
                " give one for each layer."
            )
        self.chunks()

    @property
    def vocabulary(self) -> int:
        """Vocabulary size without padding."""
        return self.vocab_size or 0

    @property
    def padded_vocabulary(self) -> int:
        """Rows of the embedding over all ranks."""
        if self.padded_vocab_size is not None:
            return self.padded_vocab_size
        multiple = self.make_vocab_size_divisible_by * self.tensor_model_parallel_size
        return -(-self.vocabulary // multiple) * multiple

    @property
    def gate(self) -> int:
        """Number of projections in an MLP's first linear (2 if gated)."""
        return 2 if self.gated_linear_unit else 1

    @property
    def model_ranks(self) -> int:
        """Ranks of one copy of the dense model, context-parallel ranks included."""
        return dense_ranks(self)

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel ranks of an expert."""
        return expert_tensor_ranks(self)

    @property
    def expert_ranks(self) -> int:
        """Ranks of one copy of all experts; 1 without experts."""
        return expert_ranks(self)

    @property
    def local_experts(self) -> int:
        """Experts of a layer on one rank."""
        return (self.num_moe_experts or 0) // self.expert_model_parallel_size

    @property
    def activation_bytes(self) -> int:
        """Bytes of one value between layers."""
        return 2 if self.bf16 or self.fp16 else 4 if self.params_dtype == "float32" else 2

    @property
    def token_share(self) -> int:
        """Ranks that split a tensor-parallel group's tokens between linears (sequence parallelism)."""
        return self.tensor_model_parallel_size if self.sequence_parallel else 1

    @property
    def heads(self) -> int:
        """Query heads on one rank."""
        return self.num_attention_heads // self.tensor_model_parallel_size

    @property
    def context_exchange(self) -> str | None:
        """What context-parallel ranks exchange: 'all_gather', 'p2p' or 'a2a'; None for one rank."""
        return None if self.context_parallel_size == 1 else self.cp_comm_type or "all_gather"

    @property
    def key_width(self) -> int:
        """Channels of a query or key head; in latent attention the sum of rotary and other channels."""
        if not self.multi_latent_attention:
            return self.kv_channels
        return self.qk_head_dim + self.qk_pos_emb_head_dim

    @property
    def value_width(self) -> int:
        """Channels of a value head."""
        return self.v_head_dim if self.multi_latent_attention else self.kv_channels

    @property
    def predictions(self) -> int:
        """Tokens predicted at each position: the next, plus those of multi-token prediction."""
        return 1 + (self.mtp_num_layers or 0)

    @property
    def balancing_losses(self) -> tuple[str, ...]:
        """Auxiliary load-balancing losses with a coefficient."""
        kinds, coefficients = self.moe_router_load_balancing_type, self.moe_aux_loss_coeff
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if not isinstance(coefficients, list):
            coefficients = [coefficients] * len(kinds)
        known = ("aux_loss", "seq_aux_loss", "global_aux_loss")
        pairs = zip(kinds, coefficients, strict=False)
        return tuple(kind for kind, coefficient in pairs if coefficient and kind in known)

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The decoder's layers, in order."""
        return tuple(
            Layer(f"decoder.layers.{number}.", number, self._has_experts(number))
            for number in range(self.num_layers)
        )

    @property
    def predicting(self) -> tuple[Layer, ...]:
        """The multi-token prediction layers, in order; each has the type of the decoder's last layer."""
        return tuple(
            Layer(f"mtp.layers.{depth}.transformer_layer.", None, self._has_experts(self.num_layers - 1))
            for depth in range(self.mtp_num_layers or 0)
        )

    @cached_property
    def recomputed(self) -> frozenset[str]:
        """Modules that are recomputed in backward. Raises ValueError for one without an estimate."""
        if self.recompute_granularity != "selective":
            return frozenset()
        modules = frozenset(self.recompute_modules or ["core_attn"])
        for module in modules - set(RECOMPUTED):
            raise ValueError(
                f"model.recompute_modules: no estimate is known for {module!r}; it is for {', '.join(RECOMPUTED)}."
            )
        return modules

    @cached_property
    def parameters_by_chunk(self) -> dict[Chunk, Any]:
        """The results of parameter_counts.chunk_parameters: with many experts they take most of an estimate's time."""
        return {}

    @cached_property
    def plans(self) -> Plans:
        """The plans of its sites."""
        return Plans(self)

    def _has_experts(self, layer: int) -> bool:
        if not self.num_moe_experts:
            return False
        frequency = self.moe_layer_freq
        return layer % frequency == 0 if isinstance(frequency, int) else bool(frequency[layer])

    def chunks(self) -> list[Chunk]:
        """All chunks of one pipeline, in execution order."""
        stages, parts = self.pipeline_model_parallel_size, self.virtual_pipeline_model_parallel_size or 1
        if stages == 1:
            return [Chunk(0, 0, self.layers, True, True, self.predicting)]
        counts = [count // parts for count in self._layers_of_stages(stages, parts)]
        found, at, layers = [], 0, self.layers
        for part in range(parts):
            for stage in range(stages):
                first, last = (part, stage) == (0, 0), (part, stage) == (parts - 1, stages - 1)
                count = counts[stage]
                count -= first and self.account_for_embedding_in_pipeline_split
                count -= last and self.account_for_loss_in_pipeline_split
                predicting = self.predicting if last else ()
                found.append(Chunk(stage, part, layers[at : at + count], first, last, predicting))
                at += count
        return found

    def _layers_of_stages(self, stages: int, parts: int) -> list[int]:
        """Layers of each stage; the embedding and the loss are included if they count as layers."""
        total = (
            self.num_layers
            + self.account_for_embedding_in_pipeline_split
            + self.account_for_loss_in_pipeline_split
        )
        ends = [self.num_layers_in_first_pipeline_stage, self.num_layers_in_last_pipeline_stage]
        left = stages - sum(end is not None for end in ends)
        rest = total - sum(end or 0 for end in ends)
        if rest < 0 or (left == 0 and rest) or (left and rest % left):
            raise ValueError(
                f"model.num_layers={self.num_layers} cannot be split over model.pipeline_model_parallel_size={stages}:"
                f" after those of the first and last stage {rest} layers are left for {left} stages. Change one of them."
            )
        middle = rest // left if left else 0
        counts = [middle] * stages
        for index, end in ((0, ends[0]), (-1, ends[1])):
            if end is not None:
                counts[index] = end
        if any(count % parts for count in counts):
            raise ValueError(
                f"stages of {', '.join(map(str, counts))} layers cannot be split into"
                f" model.virtual_pipeline_model_parallel_size={parts} equal parts: change one of them."
            )
        return counts


RECOMPUTED = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe_act", "moe", "shared_experts")
"""Supported recompute_modules; the last three are for experts."""

_DEFAULTS = {
    "fp8_margin": 0,
    "fp8_interval": 1,
    "fp8_amax_history_len": 1,
    "fp8_amax_compute_algo": "most_recent",
    "fp8_quantizer_factory": None,
}
"""Megatron-Core's defaults of options that do not affect sizes."""


def recipe_of(model: Model) -> Callable[[str | None], Recipe]:
    """A function: recipe name -> recipe with the model's options; None -> the model's recipe."""
    return recipes_by_name(
        {
            **model.fp8_options,
            "fp8": model.fp8,
            "fp8_recipe": model.fp8_recipe,
            "fp4": model.fp4,
            "fp4_recipe": model.fp4_recipe,
        }
    )


def recipes_by_name(options: Mapping[str, Any]) -> Callable[[str | None], Recipe]:
    """As ``recipe_of``, from fields of the model section by name."""
    fields = SimpleNamespace(**{**_DEFAULTS, **options})
    return cache(lambda name: get_fp8_recipe(fields, name))


OUTPUT = "output_layer"
"""The site of the output projection, outside the layers."""


class Plans:
    """The plans of a model's sites, by name."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._request: SiteRequest | None = None
        if quantizes(model):
            recipe = recipe_of(model)
            self._request = SiteRequest(
                recipe(None),
                named_recipes(model.fp8_overrides, recipe),
                reason="fp8 recipe of the config",
                overrides=model.fp8_overrides,
                fp8_wgrad=model.fp8_wgrad,
                prefix="fp8_",
                dtype="BF16",
            )
        self._known: dict[str, SitePlan] = {}
        self._alike: dict[tuple[str, bool], SitePlan] = {}  # (name without its layer, layer stays in BF16)

    def of(self, name: str) -> SitePlan:
        """The plan of a site. Raises ValueError if both operands of a GEMM would be E5M2."""
        if name not in self._known:
            layer = re.match(r"decoder\.layers\.(\d+)\.", name)
            self._known[name] = self._of(name, None if layer is None else int(layer[1]))
        return self._known[name]

    def _of(self, name: str, layer: int | None) -> SitePlan:
        if name == OUTPUT and not self._model.fp8_output_layer:
            return bf16_site(name, None, "fp8_output_layer is off")
        in_bf16 = layer is not None and is_first_last_bf16_layer(self._model, layer)
        if self._model.fp8_overrides:  # they may name layers
            return self._make(name, layer, in_bf16)
        key = name.replace(f".layers.{layer}.", ".", 1), in_bf16
        if key not in self._alike:
            self._alike[key] = self._make(name, layer, in_bf16)
        return self._alike[key].of(name, layer)

    def _make(self, name: str, layer: int | None, in_bf16: bool) -> SitePlan:
        if self._request is None:
            return bf16_site(name, layer, "fp8 is off")
        specs = cast_specs(self._request, name, "first_last_layers_bf16" if in_bf16 else None)
        if specs.none_in_fp8:
            return bf16_site(name, layer, "; ".join(specs.reasons))
        return planned_site(name, layer, "emulated", "; ".join(specs.reasons), specs)
