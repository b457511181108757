"""FP8 weight formats of exports: tensor names, scales, config.json entries.

    name         scale per    scale beside `weight`          quant_method
    fp8-tensor   tensor       weight_scale float32 [1]       compressed-tensors, format float-quantized
    fp8-channel  output row   weight_scale float32 [N, 1]    compressed-tensors, format float-quantized
    fp8-block    128x128      weight_scale_inv float32       fp8, weight_block_size [128, 128] (DeepSeek-V3's)
                              [N / 128, K / 128]

In all formats weight = code * scale: this package's scale_inv, whatever the file calls it. Codes and scales
follow docs/numerics.md and equal those of training: `quantize(weight, recipe, 'weight')`.

Per tensor, projections of one GEMM (query, key and value; gate and up) share the scale of the fused matrix,
as in training. An inference engine that fuses them takes one scale; with three it would have to requantize
two of them. The output head and the embedding stay in high precision.

Blocks must be whole. Readers disagree on partial blocks (transformers divides the rows evenly among the
scales), and vLLM requires each part of a fused matrix to end on a block.

Sources: compressed-tensors 0.20 (quantization/lifecycle/initialize.py: names, shapes), vLLM
(compressed_tensors_w8a8_fp8.py, fp8.py), DeepSeek-V3's config.json.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from ..fp8_utils import get_fp8_recipe
from ..numerics.rule import Rule
from ..quantizer import quantize
from ..recipe import Float8BlockScaling, Float8CurrentScaling, Float8RowwiseScaling, Recipe, recipe_name
from ..tensor import QuantizedSide
from . import FP8_FORMATS

BLOCK = 128
CODES = torch.float8_e4m3fn


@dataclass(frozen=True)
class WeightFormat:
    """An FP8 weight format.

    Attributes:
        name: its name on the command line.
        recipe: quantizes the weights, unless the run's recipe applies.
        scale: last part of the scales' names.
        strategy: compressed-tensors' name for the granularity; None: DeepSeek's form.
    """

    name: str
    recipe: Recipe
    scale: str
    strategy: str | None

    @property
    def in_blocks(self) -> bool:
        """Whether each 128x128 block has a scale."""
        return self.strategy is None


FORMATS = {
    name: WeightFormat(name, recipe, scale, strategy)
    for name, (recipe, scale, strategy) in zip(
        FP8_FORMATS,
        (
            (Float8CurrentScaling(), "weight_scale", "tensor"),
            (Float8RowwiseScaling(), "weight_scale", "channel"),
            (Float8BlockScaling(), "weight_scale_inv", None),
        ),
        strict=True,
    )
}


def weight_recipe(chosen: WeightFormat, section: Mapping[str, Any]) -> Recipe:
    """The run's recipe if it has the format's type (for its margin, epsilon, powers of two), else the format's."""
    if not section.get("fp8") or section.get("fp8_recipe") != recipe_name(chosen.recipe):
        return chosen.recipe
    return get_fp8_recipe(SimpleNamespace(**{"fp8_margin": 0, **section}))


# -------------------------------------------------------------------------------------------------------------- writing


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
        if not bool(weight.isfinite().all()):
            raise ValueError(f"{name} holds NaN or Inf: a scale would hide it. Export an earlier checkpoint.")
        if chosen.name == "fp8-block" and (weight.shape[0] % BLOCK or weight.shape[1] % BLOCK):
            why = (lost or {}).get(name)
            new = f"its original scales were not stored ({why}), and new ones need" if why else "it needs"
            raise ValueError(
                f"{name} is {list(weight.shape)}, which are no multiples of {BLOCK}: for --format=fp8-block {new} whole"
                " 128x128 blocks. Use --format=fp8-channel, or leave the layer out with --ignore."
            )
    shared = recipe.rule("weight")
    assert shared is not None
    found: dict[str, torch.Tensor] = {}
    if shared.granularity.is_tensor:
        side = _rowwise(torch.cat(list(weights.values())), recipe)  # [sum of N, K], one scale
        sides = [(codes, side.scale_inv) for codes in side.codes.split([len(w) for w in weights.values()])]
    else:
        sides = [(side.codes, side.scale_inv) for side in (_rowwise(w, recipe) for w in weights.values())]
    for name, (codes, scale) in zip(weights, sides, strict=True):
        found[name] = codes
        found[sibling(name, chosen.scale)] = (scale.reshape(1) if scale.dim() == 0 else scale).clone()
    return found


def _rowwise(weight: torch.Tensor, recipe: Recipe) -> QuantizedSide:
    side = quantize(weight, recipe, "weight").rowwise
    assert side is not None and side.codes.dtype == CODES, "weights are E4M3 in every recipe"
    return side


def sibling(name: str, last: str) -> str:
    """The name of the tensor with another last part."""
    return f"{name.rpartition('.')[0]}.{last}"


def quantization_config(chosen: WeightFormat, ignore: Iterable[str], static_inputs: bool) -> dict[str, Any]:
    """config.json's `quantization_config`.

    Args:
        ignore: names of linears that stay in high precision.
        static_inputs: every quantized weight has an input_scale.
    """
    ignore = list(ignore)
    if chosen.strategy is None:
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            # transformers and newer vLLM read the first key, older vLLM the second
            "modules_to_not_convert": ignore,
            "ignored_layers": ignore,
        }
    per_tensor = static_inputs or chosen.strategy == "tensor"
    number = {"num_bits": 8, "type": "float", "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": ignore,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**number, "strategy": chosen.strategy, "dynamic": False},
                "input_activations": {
                    **number,
                    "strategy": "tensor" if per_tensor else "token",
                    "dynamic": not static_inputs,
                },
                "output_activations": None,
            }
        },
    }


def with_what_it_says(
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
