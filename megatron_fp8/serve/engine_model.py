"""A directory as an inference engine computes it, in Megatron-Core's names.

Weights are decoded as the engine loads them: codes of a linear that it does not quantize are plain values without a
scale. Memory: four bytes for each value of the layers' linears.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..huggingface.architectures import EMBEDDING, gemms
from ..huggingface.checkpoint_reader import Source
from ..huggingface.config import architecture_of, hf_config, model_section
from ..huggingface.directory import CONFIG, Tensors, read_json
from ..huggingface.import_plan import ImportPlan
from ..huggingface.importer import check_entries
from ..huggingface.weight_decoder import check_readable, fp4_weights, scale_name
from ..kernels.lazy_tensor import materialize
from ..mcore.checkpoint.live_weights import LiveWeights
from ..mcore.layers.norm import Norm
from ..mcore.runtime import state_of, unwrap
from ..numerics.formats import E2M1, FloatFormat
from .engine_rules import (
    computes_in_bf16,
    fused_names,
    input_rule,
    kv_cache_format,
    module_of,
    norm_rounds_twice,
    quantized_linears,
    router_dtype,
)
from .engine_site import STATIC, InputCast, input_cast


class UnreadableDirectory(ValueError):
    """The directory cannot be loaded, or its model is none that training's weights fit."""


class EngineTensors(Tensors):
    """A directory's tensors as an engine loads them.

    Args:
        dtype: to which it rounds float32 scales of FP8 weights; None: to none.

    Attributes:
        values: weights whose codes it takes for values, since it does not quantize their linears.

    Raises ValueError as Tensors does.
    """

    def __init__(self, folder: Path, dtype: torch.dtype | None) -> None:
        super().__init__(folder)
        self._scale_dtype = dtype
        self.values: set[str] = set()

    def names(self) -> Set[str]:
        """Names of all tensors that the engine reads."""
        stored = super().names()
        return stored - {scale for name in self.values if (scale := scale_name(name, stored)) is not None}

    def dtype(self, name: str) -> torch.dtype | str:
        """As Tensors.dtype, after the engine's conversion."""
        return torch.bfloat16 if name in self.values else super().dtype(name)

    def __getitem__(self, name: str) -> torch.Tensor:
        found = super().__getitem__(name)
        if self._scale_dtype is not None and name.endswith(".weight_scale") and found.dtype == torch.float32:
            return found.to(self._scale_dtype).float()
        return found.to(torch.bfloat16) if name in self.values else found

    def read_as(self, in_engine: Mapping[str, bool]) -> None:
        """Sets ``values``. ``in_engine``: linear -> whether the engine quantizes it.

        Raises ValueError if the engine could not load a weight.
        """
        stored = super().names()
        for linear, is_quantized in in_engine.items():
            weight = f"{linear}.weight"
            has_scale = scale_name(weight, stored) is not None
            if is_quantized and not has_scale:
                raise ValueError(f"the engine quantizes {linear}, and the directory has no scale of it.")
            if has_scale and not is_quantized:
                if super().dtype(weight) == E2M1.dtype:
                    raise ValueError(
                        f"the engine does not quantize {linear}, and its codes are two in a byte."
                    )
                self.values.add(weight)


@dataclass(frozen=True)
class KvCache:
    """A quantized KV cache.

    Attributes:
        scales: each layer's, of keys and of values.
        in_bf16: scales and decoded values are in keys' dtype, as compressed-tensors has them; else float32.
    """

    fmt: FloatFormat
    scales: Sequence[tuple[float, float]]
    in_bf16: bool = False


@dataclass(frozen=True)
class EngineModel:
    """What an engine computes with.

    Attributes:
        vocab_size: rows of its logits.
        changes: fields of the model section that differ from training's.
        lacks: training's tensors that the engine's model does not have, by checkpoint name.
        weights: site -> [N, K]: float32 if decoded from codes, else as stored.
        others: every other tensor, by its checkpoint name.
        casts: site -> the cast of its input; None: high precision.
        cache: None: in the model's dtype.
        router_dtype: of router logits, as `moe_router_dtype`.
        norm_rounds_twice: of engine_rules.
    """

    vocab_size: int
    changes: Mapping[str, Any]
    lacks: tuple[str, ...]
    weights: Mapping[str, torch.Tensor]
    others: Mapping[str, torch.Tensor]
    casts: Mapping[str, InputCast | None]
    cache: KvCache | None
    router_dtype: str | None
    norm_rounds_twice: bool

    def weight(self, site: str) -> torch.Tensor:
        """The weight of a site, [N, K]; of a tied output layer the embedding."""
        if site in self.weights:
            return self.weights[site]
        return self.others.get(f"{site}.weight", self.others[EMBEDDING.megatron])


def read_engine_model(
    source: Source, directory: Path, engine: str, padded_vocab_size: int, kv_cache_dtype: str = "auto"
) -> EngineModel:
    """Reads all of a directory.

    Args:
        source: the run's checkpoint.
        padded_vocab_size: rows of the embedding in the model that will compute it.

    Raises UnreadableDirectory: the engine could not load it, or Megatron-Core cannot compute it.
    """
    try:
        return _read(source, directory, engine, padded_vocab_size, kv_cache_dtype)
    except ValueError as error:
        raise UnreadableDirectory(str(error)) from error


def _read(
    source: Source, directory: Path, engine: str, padded_vocab_size: int, kv_cache_dtype: str
) -> EngineModel:
    config = read_json(directory / CONFIG)
    check_readable(config)
    section, changes = _sections(source, config)
    section["padded_vocab_size"] = padded_vocab_size
    quantization = config.get("quantization_config") or {}
    dtype = source.dtype if computes_in_bf16(engine, quantization) else None
    tensors = EngineTensors(directory, dtype)
    with tensors:
        tensors.view_fp4(fp4_weights(tensors))
        listed = check_entries(directory, config, section, tensors)
        sites = gemms(listed)
        linears = [part for parts in sites.values() for part in parts]
        in_engine = quantized_linears(engine, quantization, linears)
        tensors.read_as(in_engine)
        plan = ImportPlan(tensors, listed, section, not config.get("rope_interleave", True))
        weights: dict[str, torch.Tensor] = {}
        others: dict[str, torch.Tensor] = {}
        for entry in listed:
            if entry.copy or entry.megatron.startswith("mtp."):
                continue
            made = plan.make(entry.megatron)
            if entry.site is None:
                others[entry.megatron] = made
            else:  # a gated MLP's halves are two entries of one site
                made = made if dtype is None else made.to(dtype)
                before = weights.get(entry.site)
                weights[entry.site] = made if before is None else torch.cat([before, made])
        return EngineModel(
            config["vocab_size"],
            changes,
            tuple(source.weights() - {entry.megatron for entry in listed}),
            weights,
            others,
            _casts(engine, quantization, sites, in_engine, tensors),
            _cache(source, kv_cache_format(quantization, kv_cache_dtype), tensors, in_bf16=dtype is not None),
            router_dtype(engine, architecture_of(config).name),
            norm_rounds_twice(engine),
        )


def _sections(source: Source, config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The model section of config.json, and its fields that differ from training's."""
    theirs = model_section(config)
    positions = config.get("max_position_embeddings") or 0
    ours = model_section(
        hf_config(source.section, config["vocab_size"], positions, config["architectures"][0])
    )
    changes = {name: value for name, value in theirs.items() if ours.get(name) != value}
    if source.section.get("moe_expert_capacity_factor") is not None:  # engines drop no token
        changes |= {"moe_expert_capacity_factor": None, "moe_pad_expert_input_to_capacity": False}
    return theirs, changes


def _casts(
    engine: str,
    quantization: Mapping[str, Any],
    sites: Mapping[str, tuple[str, ...]],
    in_engine: Mapping[str, bool],
    tensors: Tensors,
) -> dict[str, InputCast | None]:
    rule = input_rule(engine, quantization)
    if rule is None:
        return dict.fromkeys(sites)
    in_bf16 = computes_in_bf16(engine, quantization)
    fused, groups = fused_names(engine, in_engine), dict[str, list[str]]()
    static = rule == STATIC or rule.startswith(E2M1.name)

    def group_of(linear: str) -> str:
        """Key of the linears whose largest static scale the engine takes: of a fused linear, and of a layer's experts."""
        module = linear if engine == "transformers" else module_of(engine, linear, fused)
        is_down = module.endswith(".experts") and linear.endswith((".down_proj", ".w2"))
        return f"{module}.down" if is_down else module

    for linear, is_quantized in in_engine.items():
        if is_quantized:
            groups.setdefault(group_of(linear), []).append(linear)
    found: dict[str, InputCast | None] = {}
    for site, parts in sites.items():
        if len({in_engine[part] for part in parts}) > 1:
            raise ValueError(f"the engine quantizes some of {', '.join(parts)}, which are one GEMM here.")
        scales = [_input_scale(linear, tensors) for linear in groups.get(group_of(parts[0]), ()) if static]
        found[site] = input_cast(rule, scales, in_bf16) if in_engine[parts[0]] else None
    return found


def _input_scale(linear: str, tensors: Tensors) -> torch.Tensor:
    """A static scale as a factor of the codes, float32."""
    names = tensors.names()
    factor, divisor = f"{linear}.input_scale", f"{linear}.input_global_scale"
    if factor not in names and divisor not in names:
        raise ValueError(f"config.json has static input scales, and there is none of {linear}.")
    found = tensors[factor].float() if factor in names else 1 / tensors[divisor].float()
    if not bool((found.isfinite() & (found > 0)).all()):
        raise ValueError(f"{linear} has an input scale that is no finite number above 0.")
    return found


def _cache(
    source: Source, fmt: FloatFormat | None, tensors: Tensors, *, in_bf16: bool = False
) -> KvCache | None:
    if fmt is None:
        return None
    if source.section.get("multi_latent_attention"):
        raise ValueError(
            "a quantized cache of latent attention has no emulation here: give --kv-cache-dtype=bfloat16."
        )
    names = tensors.names()

    def scale(layer: int, letter: str) -> float | None:
        attention = f"model.layers.{layer}.self_attn"
        for name in (f"{attention}.{letter}_scale", f"{attention}.{letter}_proj.{letter}_scale"):
            if name in names:
                found = tensors[name].float()
                if found.numel() != 1 or not bool((found.isfinite() & (found > 0)).all()):
                    raise ValueError(f"{name} is not one finite number above 0.")
                return float(found)
        return None

    scales = []
    for layer in range(source.section["num_layers"]):
        keys, values = scale(layer, "k"), scale(layer, "v")
        if (keys is None) != (values is None):
            raise ValueError(f"layer {layer} has a scale of keys or of values alone.")
        scales.append((keys or 1.0, values or 1.0))  # 1: engines' default
    return KvCache(fmt, scales, in_bf16)


# ------------------------------------------------------------------------------------------------------ in a live model


@torch.no_grad()
def load_others(model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes tensors into a model of one rank, by their checkpoint names. Casts them to its dtypes."""
    weights = LiveWeights([model])
    for piece in weights.pieces():
        if piece.name in tensors:
            weights.read(piece).copy_(tensors[piece.name].reshape(piece.shape))
    state_of(unwrap(model).config).weight_generation += 1  # cached codes are stale


@contextmanager
def engine_rounding(model: Any, norm_rounds_twice: bool) -> Iterator[None]:
    """Context in which values between the linears are rounded where an engine rounds them.

    RMSNorms round before they multiply by their weight, if ``norm_rounds_twice``. An expert's output is multiplied by its
    router's weight; Megatron-Core multiplies the input of its second linear.
    """
    modules = list(unwrap(model).modules())
    hooks = [
        each.register_forward_hook(_round_twice)
        for each in modules
        if norm_rounds_twice and isinstance(each, Norm)
    ]
    for expert in (expert for each in modules for expert in getattr(each, "local_experts", ())):
        weights: list[torch.Tensor] = []
        hooks.append(expert.register_forward_pre_hook(partial(_take_weights, weights)))
        hooks.append(expert.register_forward_hook(partial(_weight_output, weights)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _round_twice(norm: Norm, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
    x = materialize(args[0])
    wide = x.float()
    normed = wide * (wide.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    return normed.to(x.dtype) * norm.weight


def _take_weights(weights: list[torch.Tensor], expert: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    tokens, of_router = args  # [tokens, hidden], [tokens]
    weights.append(of_router)
    return (tokens,)


def _weight_output(
    weights: list[torch.Tensor], expert: Any, args: Any, output: tuple[Any, ...]
) -> tuple[Any, ...]:
    y, *rest = output
    return ((y * weights.pop()[:, None]).to(y.dtype), *rest)


@contextmanager
def quantize_cache(model: Any, cache: KvCache) -> Iterator[None]:
    """Context in which attention reads keys, rotated, and values as the cache returns them."""
    layers = unwrap(model).decoder.layers
    hooks = [
        layer.self_attention.core_attention.register_forward_pre_hook(partial(_through_cache, cache, scales))
        for layer, scales in zip(layers, cache.scales, strict=True)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _through_cache(
    cache: KvCache, scales: tuple[float, float], module: Any, args: tuple[Any, ...]
) -> tuple[Any, ...]:
    query, key, value, *rest = args
    return (query, *(_rounded(x, cache, s) for x, s in zip((key, value), scales, strict=True)), *rest)


def _rounded(x: torch.Tensor, cache: KvCache, scale: float) -> torch.Tensor:
    """x, of any shape, cast with a scale and back. NaN stays, Inf saturates."""
    fmt, dtype = cache.fmt, x.dtype if cache.in_bf16 else torch.float32
    factor = torch.tensor(scale, dtype=dtype, device=x.device)
    codes = (x.to(dtype) / factor).clamp(-fmt.max, fmt.max).to(fmt.dtype)
    return (codes.to(dtype) * factor).to(x.dtype)
