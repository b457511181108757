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

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from ..fp8_utils import get_fp8_recipe
from ..numerics.rule import BLOCK_128X128, ROW, TENSOR, Granularity, Rule
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
        found[_sibling(name, chosen.scale)] = (scale.reshape(1) if scale.dim() == 0 else scale).clone()
    return found


def _rowwise(weight: torch.Tensor, recipe: Recipe) -> QuantizedSide:
    side = quantize(weight, recipe, "weight").rowwise
    assert side is not None and side.codes.dtype == CODES, "weights are E4M3 in every recipe"
    return side


def _sibling(name: str, last: str) -> str:
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


# -------------------------------------------------------------------------------------------------------------- reading


def check_readable(config: dict[str, Any]) -> None:
    """Raises ValueError if config.json has a quantization that is not one of the FP8 formats."""
    quantization = config.get("quantization_config") or config.get("compression_config")
    if not quantization:
        return
    method, form = quantization.get("quant_method"), quantization.get("format")
    if method == "fp8":
        block = quantization.get("weight_block_size")
        if block not in (None, [BLOCK, BLOCK], (BLOCK, BLOCK)):
            raise ValueError(f"config.json has weight_block_size={block}: only [128, 128] can be imported.")
        return
    groups = list((quantization.get("config_groups") or {}).values())
    forms = {group.get("format") or form for group in groups} or {form}
    if method == "compressed-tensors" and forms <= {"float-quantized", "naive-quantized"}:
        for name in ("transform_config", "sparsity_config"):
            if quantization.get(name):
                raise ValueError(
                    f"config.json has a {name} in quantization_config: weights that mean something only after a"
                    " transform, or are stored sparsely, cannot be imported."
                )
        for group in groups:
            weights = group.get("weights") or {}
            kind = weights.get("type"), weights.get("num_bits"), weights.get("symmetric", True)
            strategy, block = weights.get("strategy"), weights.get("block_structure")
            blocks = block in ([BLOCK, BLOCK], f"{BLOCK}x{BLOCK}")
            known = strategy in ("tensor", "channel") or (strategy == "block" and blocks)
            if kind != ("float", 8, True) or not known:
                raise ValueError(
                    f"config.json has weights of {weights} in quantization_config: symmetric 8-bit floats per tensor, "
                    "per channel or per block of [128, 128] can be imported."
                )
        return
    raise ValueError(
        f"config.json has quantization_config quant_method={method!r}, format={form!r}: 'compressed-tensors' with "
        "'float-quantized', and 'fp8' can be imported."
    )


def left_out(config: Mapping[str, Any], names: Set[str]) -> list[str]:
    """Notes on scales of inputs, outputs and caches, which an import drops."""
    scheme = (config.get("quantization_config") or {}).get("activation_scheme")
    inputs = _count(names, _INPUTS)
    inputs += [f"activation_scheme={scheme!r}"] if scheme not in (None, "dynamic") else []
    notes = []
    if inputs:
        notes.append(
            f"scales of inputs are left out ({'; '.join(inputs)}): exports declare dynamic input scales,"
            " unless --calibration gives static ones"
        )
    if outputs := _count(names, _OUTPUTS):
        notes.append(f"scales of outputs and of an FP8 cache are left out ({outputs[0]}): exports have none")
    return notes


def _count(names: Set[str], last: Sequence[str]) -> list[str]:
    """Count and first of the names that end in one of these; nothing if none does."""
    found = sorted(name for name in names if name.rpartition(".")[2] in last)
    return [f"{len(found)} tensor(s), such as {found[0]}"] if found else []


def scale_name(weight: str, names: Set[str]) -> str | None:
    """The name of a weight's scale, if present. Raises ValueError if there are two."""
    siblings = [_sibling(weight, last) for last in _WEIGHTS]
    present = [name for name in siblings if name in names]
    if len(present) > 1:
        raise ValueError(
            f"{weight} has two scales, {' and '.join(present)}: remove the one that is not meant."
        )
    return present[0] if present else None


def is_companion(name: str) -> bool:
    """Whether a tensor belongs to a quantized linear: a scale of its weight, inputs, or outputs in an FP8 cache."""
    return name.rpartition(".")[2] in (*_WEIGHTS, *_INPUTS, *_OUTPUTS)


def is_of_cache(name: str) -> bool:
    """Whether a tensor is a scale of an FP8 key/value cache; it is unrelated to weights."""
    module, _, last = name.rpartition(".")
    return module.endswith(".self_attn") and last in _CACHE


_WEIGHTS = ("weight_scale", "weight_scale_inv")
_INPUTS = ("input_scale", "activation_scale", "act_scale")  # the second: Devstral; the third: AutoFP8
_CACHE = ("q_scale", "k_scale", "v_scale", "kv_scale")
_OUTPUTS = ("output_scale", *_CACHE)

# E4M3's smallest magnitude is 2^-9: its product with this is float32's smallest normal number.
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny * 2.0**9


def check_scale(name: str, scale: torch.Tensor) -> None:
    """Raises ValueError naming a weight if its scale, of any shape, has a value that no quantizer writes.

    From _SMALLEST_SCALE on, products with codes are normal numbers, so codes can be recomputed from them.
    """
    if not scale.is_floating_point():
        raise ValueError(
            f"{name} has scales of {scale.dtype}: floats that multiply the codes can be imported."
        )
    values = scale.float()
    if len(odd := values[~(values.isfinite() & (values >= _SMALLEST_SCALE))]):
        raise ValueError(
            f"{name} is damaged: a scale of it is {float(odd[0]):.3g}, and scales are finite and at least"
            f" {_SMALLEST_SCALE:.2g}. Download the file again, or quantize the model anew."
        )


def decode(name: str, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """code * scale in float32 [N, K].

    Raises ValueError naming the tensor: the scale's shape fits no format, or `check_scale` rejects it.
    """
    check_scale(name, scale)
    rows, cols = codes.shape
    granularity: Granularity
    if scale.numel() == 1:
        granularity, scale = TENSOR, scale.reshape(())
    elif scale.numel() == rows and scale.shape[0] == rows:
        granularity, scale = ROW, scale.reshape(rows, 1)
    elif list(scale.shape) == [-(-rows // BLOCK), -(-cols // BLOCK)]:
        granularity = BLOCK_128X128
    else:
        raise ValueError(
            f"{name} is {list(codes.shape)} with scales {list(scale.shape)}: one, one per row, or one per 128x128 block "
            "can be imported."
        )
    return QuantizedSide(codes, scale.float(), granularity, pow2=False).dequantize(torch.float32)
