"""Quantized weights in exports: tensor names, scales, config.json entries.

    name            scale per      tensors in place of `weight`           quant_method
    fp8-tensor      tensor         weight_scale float32 [1]               compressed-tensors, format float-quantized
    fp8-channel     output row     weight_scale float32 [N, 1]            compressed-tensors, format float-quantized
    fp8-block       128x128        weight_scale_inv float32               fp8, weight_block_size [128, 128]
                                   [N / 128, K / 128]                     (DeepSeek-V3's)
    mxfp8           1x32           weight_scale uint8, E8M0 [N, K / 32]   compressed-tensors, format mxfp8-quantized
    nvfp4           16x16, tensor  weight_packed uint8 [N, K / 2],        compressed-tensors, format
                                   weight_scale E4M3 [N, K / 16],         nvfp4-pack-quantized
                                   weight_global_scale float32 [1]
    mxfp8-modelopt  1x32           as mxfp8                               modelopt, quant_algo MXFP8
    nvfp4-modelopt  16x16, tensor  weight uint8 [N, K / 2],               modelopt, quant_algo W4A16_NVFP4; or NVFP4
                                   weight_scale E4M3 [N, K / 16],         with static input scales
                                   weight_scale_2 float32 []

The codes are `weight`, E4M3 [N, K], where no other name is given. In FP8 weight = code * scale: this package's
scale_inv, whatever the file calls it. In NVFP4 weight = code * weight_scale / weight_global_scale = code *
weight_scale * weight_scale_2; each 16x16 block's scale is written for each of its 16 rows, since readers have 1x16
blocks. Codes and scales follow docs/numerics.md and equal those of training: `quantize(weight, recipe, 'weight')`.

Per tensor, and for NVFP4's second scale, projections of one GEMM (query, key and value; gate and up) share the scale
of the fused matrix, as in training. An inference engine that fuses them takes one scale; with three it would have to
requantize two of them. The output head and the embedding stay in high precision.

Blocks must be whole. Readers disagree on partial blocks (transformers divides the rows evenly among the
scales), and vLLM requires each part of a fused matrix to end on a block.

Sources: compressed-tensors 0.20 (quantization/lifecycle/initialize.py, compressors/nvfp4, compressors/mxfp8: names,
shapes; its presets NVFP4A16, NVFP4 and MXFP8: config.json), vLLM (compressed_tensors_w8a8_fp8.py, fp8.py,
CompressedTensorsW4A4Fp4, CompressedTensorsW8A8Mxfp8, ModelOptNvFp4LinearMethod, ModelOptMxFp8LinearMethod), modelopt
0.47 (NVFP4QTensor, convert_hf_quant_config_format), DeepSeek-V3's config.json.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from ..fp8_utils import get_fp8_recipe, quantizes, recipe_setting
from ..numerics import nvfp4
from ..numerics.formats import E4M3
from ..numerics.rule import Rule
from ..numerics.scaling import compute_scale, compute_scale_inv
from ..quantizer import quantize
from ..recipe import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
    recipe_name,
)
from ..tensor import QuantizedSide
from . import QUANTIZED_FORMATS

BLOCK = 128


@dataclass(frozen=True)
class WeightFormat:
    """A format of quantized weights.

    Attributes:
        name: its name on the command line.
        recipe: quantizes the weights, unless the run's recipe applies.
        method: quant_method of config.json.
        strategy: compressed-tensors' name for the granularity; None for the other methods.
        codes, scale: last parts of the tensors' names.
        tensor_scale: last part of the names of NVFP4's second scales.
        input_scale: last part of the names of static input scales; None: the format has none.
        algorithms: modelopt's quant_algo, without and with static input scales.
    """

    name: str
    recipe: Recipe
    method: str
    strategy: str | None = None
    codes: str = "weight"
    scale: str = "weight_scale"
    tensor_scale: str | None = None
    input_scale: str | None = None
    algorithms: tuple[str, str] | None = None

    @property
    def in_blocks(self) -> bool:
        """Whether it is DeepSeek's form, whose imported scales are stored."""
        return self.method == "fp8"

    @property
    def per_gemm(self) -> bool:
        """Whether the parts of a GEMM share a scale."""
        return self.strategy == "tensor" or self.tensor_scale is not None


_COMPRESSED = "compressed-tensors"
FORMATS = {
    form.name: form
    for form in (
        WeightFormat("fp8-tensor", Float8CurrentScaling(), _COMPRESSED, "tensor", input_scale="input_scale"),
        WeightFormat("fp8-channel", Float8RowwiseScaling(), _COMPRESSED, "channel", input_scale="input_scale"),
        WeightFormat("fp8-block", Float8BlockScaling(), "fp8", scale="weight_scale_inv"),
        WeightFormat("mxfp8", MXFP8BlockScaling(), _COMPRESSED, "group"),
        WeightFormat(
            "nvfp4", NVFP4BlockScaling(), _COMPRESSED, "tensor_group",
            codes="weight_packed", tensor_scale="weight_global_scale", input_scale="input_global_scale",
        ),
        WeightFormat(
            "nvfp4-modelopt", NVFP4BlockScaling(), "modelopt",
            tensor_scale="weight_scale_2", input_scale="input_scale", algorithms=("W4A16_NVFP4", "NVFP4"),
        ),
        WeightFormat("mxfp8-modelopt", MXFP8BlockScaling(), "modelopt", algorithms=("MXFP8", "MXFP8")),
    )
}  # fmt: skip
assert tuple(FORMATS) == QUANTIZED_FORMATS


def weight_recipe(chosen: WeightFormat, section: Mapping[str, Any]) -> Recipe:
    """The run's recipe if it has the format's type (for its margin, epsilon, powers of two), else the format's."""
    config = SimpleNamespace(**{"fp8": None, "fp8_margin": 0, **section})
    if not quantizes(config) or section.get(recipe_setting(config)) != recipe_name(chosen.recipe):
        return chosen.recipe
    return get_fp8_recipe(config)


# -------------------------------------------------------------------------------------------------------------- tensors


def encode(
    weights: Mapping[str, torch.Tensor],
    chosen: WeightFormat,
    recipe: Recipe,
    lost: Mapping[str, str] | None = None,
) -> dict[str, torch.Tensor]:
    """Codes and scales by name for the weights [N, K] of one GEMM, given by name (`....weight`).

    Args:
        lost: weights imported in blocks whose scales were not stored -> reason.

    Raises ValueError naming the tensor: it has NaN or Inf, or does not consist of whole blocks.
    """
    for name, weight in weights.items():
        _check(name, weight, chosen, recipe, (lost or {}).get(name))
    found: dict[str, torch.Tensor] = {}
    for group in [list(weights)] if chosen.per_gemm else [[name] for name in weights]:
        side = quantize(torch.cat([weights[name] for name in group]), recipe, "weight").rowwise
        assert side is not None
        rows = [len(weights[name]) for name in group]
        parts = {last: _divide(tensor, rows) for last, tensor in _stored_tensors(side, chosen).items()}
        for index, name in enumerate(group):
            found |= {sibling(name, last): tensors[index] for last, tensors in parts.items()}
    return found


def _check(name: str, weight: torch.Tensor, chosen: WeightFormat, recipe: Recipe, lost: str | None) -> None:
    """Raises ValueError unless a weight is finite and consists of whole blocks."""
    if not bool(weight.isfinite().all()):
        raise ValueError(f"{name} holds NaN or Inf: a scale would hide it. Export an earlier checkpoint.")
    rule = recipe.rule("weight")
    assert rule is not None
    block = rule.granularity
    if weight.shape[0] % (block.rows or 1) or weight.shape[1] % (block.cols or 1):
        sizes = "which are no multiples of" if block.symmetric else "whose columns are no multiple of"
        new = f"its original scales were not stored ({lost}), and new ones need" if lost else "it needs"
        raise ValueError(
            f"{name} is {list(weight.shape)}, {sizes} {block.cols}: for --format={chosen.name} {new} whole {block}"
            " blocks. Use --format=fp8-channel, or leave the layer out with --ignore."
        )


def _stored_tensors(side: QuantizedSide, chosen: WeightFormat) -> dict[str, torch.Tensor]:
    """Last part of the name -> tensor, for a whole GEMM."""
    codes, scale = side.codes, side.scale_inv
    if side.tensor_amax is not None:
        assert chosen.tensor_scale is not None
        return {
            chosen.codes: codes.view(torch.uint8),
            chosen.scale: scale.repeat_interleave(side.granularity.rows, 0),
            chosen.tensor_scale: _tensor_scale(side.tensor_amax, chosen),
        }
    assert codes.dtype == E4M3.dtype, "weights are E4M3 in every FP8 recipe"
    if scale.dtype == torch.float8_e8m0fnu:
        scale = scale.view(torch.uint8)
    return {chosen.codes: codes, chosen.scale: scale.reshape(1) if scale.dim() == 0 else scale}


def _divide(tensor: torch.Tensor, rows: list[int]) -> list[torch.Tensor]:
    """The parts' own rows of it; copies of a tensor that they share."""
    if len(rows) > 1 and tensor.dim() == 2:
        return list(tensor.split(rows))
    return [tensor.clone() for _ in rows]


def _tensor_scale(amax: torch.Tensor, chosen: WeightFormat) -> torch.Tensor:
    """NVFP4's second scale of a tensor with that amax, float32 []: a divisor [1], or modelopt's factor []."""
    if chosen.method == "modelopt":
        return nvfp4.tensor_scale_inv(amax)
    return nvfp4.tensor_scale(amax).reshape(1)


def static_input_scale(amax: torch.Tensor, chosen: WeightFormat) -> torch.Tensor:
    """The static scale of inputs up to amax, float32 [], as the format stores it."""
    if chosen.tensor_scale is not None:
        return _tensor_scale(amax, chosen)
    return compute_scale_inv(compute_scale(amax, E4M3)).reshape(1)


def kv_scale(
    attention: str, letter: str, scale_inv: torch.Tensor, chosen: WeightFormat
) -> dict[str, torch.Tensor]:
    """The scale of an attention's keys ('k') or values ('v') in an FP8 cache, float32 [], as the format stores it."""
    if chosen.method == "modelopt":
        return {f"{attention}.{letter}_proj.{letter}_scale": scale_inv}
    return {f"{attention}.{letter}_scale": scale_inv.reshape(1)}


def sibling(name: str, last: str) -> str:
    """The name of the tensor with another last part."""
    return f"{name.rpartition('.')[0]}.{last}"


# ---------------------------------------------------------------------------------------------------------- config.json

# compressed-tensors' strategy -> format, numbers, strategy of inputs that engines scale themselves. Its presets: NVFP4
# inputs need a static second scale, and without one only the weights are quantized (NVFP4A16).
_FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
_STRATEGIES: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "tensor": ("float-quantized", _FLOAT8, "tensor"),
    "channel": ("float-quantized", _FLOAT8, "token"),
    "group": ("mxfp8-quantized", {**_FLOAT8, "group_size": 32, "scale_dtype": "torch.uint8"}, "group"),
    "tensor_group": (
        "nvfp4-pack-quantized",
        {**_FLOAT8, "num_bits": 4, "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"},
        None,
    ),
}


def quantization_config(
    chosen: WeightFormat, ignore: Iterable[str], static_inputs: bool, kv_cache: bool = False
) -> dict[str, Any]:
    """config.json's `quantization_config`.

    Args:
        ignore: names of linears that stay in high precision.
        static_inputs: every quantized weight has an input scale.
        kv_cache: keys and values have scales. DeepSeek's form has no entry for that: engines are asked by an option.
    """
    ignore = list(ignore)
    if chosen.in_blocks:
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            # transformers and newer vLLM read the first key, older vLLM the second
            "modules_to_not_convert": ignore,
            "ignored_layers": ignore,
        }
    if chosen.algorithms is not None:
        number = {"dynamic": False, "num_bits": 8, "type": "float", "group_size": _group_size(chosen)}
        inputs: dict[str, Any] = {"input_activations": {**number, "dynamic": True}}
        if chosen.tensor_scale is not None:
            number["num_bits"] = 4
            inputs = {"input_activations": number} if static_inputs else {}
        return {
            "config_groups": {"group_0": {**inputs, "weights": number, "targets": ["Linear"]}},
            "ignore": ignore,
            "quant_algo": chosen.algorithms[static_inputs],
            **({"kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}} if kv_cache else {}),
            "producer": _PRODUCER,
            "quant_method": "modelopt",
        }
    assert chosen.strategy is not None
    form, number, dynamic = _STRATEGIES[chosen.strategy]
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": [*ignore, *filter(None, map(_as_vllm_asks, ignore))],
        "kv_cache_scheme": {**_FLOAT8, "strategy": "tensor", "dynamic": False} if kv_cache else None,
        "global_compression_ratio": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**number, "strategy": chosen.strategy, "dynamic": False},
                "input_activations": _inputs(number, dynamic, static_inputs),
                "output_activations": None,
            }
        },
    }


_MIXTRAL = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def _as_vllm_asks(name: str) -> str | None:
    """The name by which vLLM looks up an ignored expert of Mixtral's in compressed-tensors; None for other linears."""
    before, _, last = name.rpartition(".")
    return f"{before}.{_MIXTRAL[last]}" if ".experts." in name and last in _MIXTRAL else None


def _inputs(number: dict[str, Any], dynamic: str | None, static_inputs: bool) -> dict[str, Any] | None:
    """compressed-tensors' `input_activations`."""
    if dynamic is None:  # static second scales; engines compute the blocks' scales
        local = {"strategy": "tensor_group", "dynamic": "local", "observer": "static_minmax"}
        return {**number, **local} if static_inputs else None
    return {**number, "strategy": "tensor" if static_inputs else dynamic, "dynamic": not static_inputs}


_PRODUCER = {"name": "megatron_fp8"}


def _group_size(chosen: WeightFormat) -> int:
    """Values along K that share one of modelopt's scales."""
    return 32 if chosen.tensor_scale is None else nvfp4.BLOCK


def hf_quant_config(
    chosen: WeightFormat, ignore: Iterable[str], static_inputs: bool, kv_cache: bool = False
) -> dict[str, Any]:
    """modelopt's hf_quant_config.json, which older engines read in place of config.json's entry."""
    assert chosen.algorithms is not None
    return {
        "producer": _PRODUCER,
        "quantization": {
            "quant_algo": chosen.algorithms[static_inputs],
            "kv_cache_quant_algo": "FP8" if kv_cache else None,
            "group_size": _group_size(chosen),
            "exclude_modules": list(ignore),
        },
    }


def with_source_settings(
    ours: dict[str, Any], theirs: Mapping[str, Any], anew: Rule | None
) -> tuple[dict[str, Any], list[str]]:
    """DeepSeek's form of `quantization_config`, with the scale settings of a similar directory, and notes on
    its other settings.

    Args:
        anew: recipe of weights whose scales are not from that directory; None: there are none.
    """
    if theirs.get("quant_method") != "fp8":
        return ours, []
    has, notes = "quantization_config of --like has", []
    for name, value in theirs.items():
        if name in ("activation_scheme", "fmt") and value != ours[name]:
            notes.append(f"{has} {name}={value!r}, and the export {name}={ours[name]!r}")
        elif name not in (*ours, _SCALES):
            notes.append(f"{has} {name}={value!r}, which the export has not")
    if (kind := theirs.get(_SCALES)) is None:
        return ours, notes
    if kind == "ue8m0" and anew is not None and anew.scale == "fp32":
        notes.append(
            f"{has} {_SCALES}={kind!r}, which the export has not: new scales are no powers of two here"
        )
        return ours, notes
    return {**ours, _SCALES: kind}, notes


_SCALES = "scale_fmt"  # format of an engine's input scales
