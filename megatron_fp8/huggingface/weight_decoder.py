"""Reads quantized weights of a directory: checks of config.json, scales' names, values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch

from ..numerics import nvfp4
from ..numerics.formats import E2M1, E4M3
from ..numerics.rule import BLOCK_1X32, BLOCK_128X128, ROW, TENSOR, Granularity
from ..numerics.subnormals import keep_subnormals
from ..tensor import QuantizedSide
from .directory import Tensors
from .formats import BLOCK, sibling


def check_readable(config: dict[str, Any]) -> None:
    """Raises ValueError if config.json has a quantization that is not one of the formats."""
    quantization = config.get("quantization_config") or config.get("compression_config")
    if not quantization:
        return
    method, form = quantization.get("quant_method"), quantization.get("format")
    if method == "fp8":
        block = quantization.get("weight_block_size")
        if block not in (None, [BLOCK, BLOCK], (BLOCK, BLOCK)):
            raise ValueError(f"config.json has weight_block_size={block}: only [128, 128] can be imported.")
        return
    if method == "modelopt" and quantization.get("quant_algo") in _ALGORITHMS:
        return
    groups = list((quantization.get("config_groups") or {}).values())
    forms = {group.get("format") or form for group in groups} or {form}
    if method == "compressed-tensors" and forms <= {"float-quantized", "naive-quantized", *_GROUPED}:
        for name in ("transform_config", "sparsity_config"):
            if quantization.get(name):
                raise ValueError(
                    f"config.json has a {name} in quantization_config: weights that mean something only after a"
                    " transform, or are stored sparsely, cannot be imported."
                )
        for group in groups:
            _check_numbers(group.get("weights") or {}, group.get("format") or form)
        return
    named = f"quant_algo={quantization.get('quant_algo')!r}" if method == "modelopt" else f"format={form!r}"
    raise ValueError(
        f"config.json has quantization_config quant_method={method!r}, {named}: 'compressed-tensors' with"
        " 'float-quantized', 'mxfp8-quantized' or 'nvfp4-pack-quantized', 'modelopt' with"
        f" {', '.join(_ALGORITHMS)}, and 'fp8' can be imported."
    )


def _check_numbers(weights: dict[str, Any], form: str) -> None:
    """Raises ValueError unless compressed-tensors' `weights` are numbers that can be imported."""
    kind = weights.get("type"), weights.get("num_bits"), weights.get("symmetric", True)
    strategy, size = weights.get("strategy"), weights.get("group_size")
    if form in _GROUPED:
        bits, *wanted = _GROUPED[form]
        known, words = (
            [strategy, size] == wanted,
            f"{bits}-bit floats, strategy {wanted[0]}, in groups of {wanted[1]}",
        )
    else:
        block = weights.get("block_structure")
        blocks = block in ([BLOCK, BLOCK], f"{BLOCK}x{BLOCK}")
        bits, known = 8, strategy in ("tensor", "channel") or (strategy == "block" and blocks)
        words = "8-bit floats per tensor, per channel or per block of [128, 128]"
    if kind != ("float", bits, True) or not known:
        raise ValueError(
            f"config.json has weights of {weights} in quantization_config: symmetric {words} can be imported."
        )


_GROUPED = {"mxfp8-quantized": (8, "group", 32), "nvfp4-pack-quantized": (4, "tensor_group", 16)}
_ALGORITHMS = ("FP8", "MXFP8", "NVFP4", "W4A16_NVFP4")  # modelopt's


def dropped_scale_notes(config: Mapping[str, Any], names: Set[str]) -> list[str]:
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
        notes.append(
            f"scales of outputs and of an FP8 cache are left out ({outputs[0]}): exports have"
            " a cache's with --calibration and --kv-cache"
        )
    return notes


def _count(names: Set[str], last: Sequence[str]) -> list[str]:
    """Count and first of the names that end in one of these; nothing if none does."""
    found = sorted(name for name in names if name.rpartition(".")[2] in last)
    return [f"{len(found)} tensor(s), such as {found[0]}"] if found else []


def scale_name(weight: str, names: Set[str]) -> str | None:
    """The name of a weight's scale, if present; a bias beside it has none. Raises ValueError if there are two."""
    if not weight.endswith(".weight"):
        return None
    siblings = [sibling(weight, last) for last in _WEIGHTS]
    present = [name for name in siblings if name in names]
    if len(present) > 1:
        raise ValueError(
            f"{weight} has two scales, {' and '.join(present)}: remove the one that is not meant."
        )
    return present[0] if present else None


def is_scale(name: str) -> bool:
    """Whether a tensor belongs to a quantized linear: a scale of its weight, inputs, or outputs in an FP8 cache."""
    return name.rpartition(".")[2] in (*_WEIGHTS, *_TENSORS, *_INPUTS, *_OUTPUTS)


def is_of_cache(name: str) -> bool:
    """Whether a tensor is a scale of an FP8 key/value cache; it is unrelated to weights."""
    module, _, last = name.rpartition(".")
    return module.endswith(".self_attn") and last in _CACHE


_WEIGHTS = ("weight_scale", "weight_scale_inv")
_TENSORS = ("weight_global_scale", "weight_scale_2")  # NVFP4's: a divisor, a factor
_INPUTS = (
    "input_scale",
    "input_global_scale",
    "activation_scale",
    "act_scale",
)  # the last two: Devstral, AutoFP8
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


def fp4_weights(tensors: Tensors) -> dict[str, str]:
    """Weights' names -> names of the tensors with their NVFP4 codes, uint8 [N, K / 2].

    Raises ValueError if a weight has codes and values.
    """
    found, names = {}, tensors.names()
    for scale in [name for name in names if name.endswith(_TENSORS)]:
        packed, weight = sibling(scale, "weight_packed"), sibling(scale, "weight")
        if packed in names and weight in names:
            raise ValueError(f"{weight} is there and {packed} too: remove the one that is not meant.")
        codes = packed if packed in names else weight
        if codes in names and tensors.dtype(codes) == torch.uint8 and len(tensors.shape(codes)) == 2:
            found[weight] = codes
    return found


def read_weight(name: str, tensors: Tensors) -> torch.Tensor:
    """A quantized weight [N, K] in float32: code * scale, and NVFP4's code * scale * tensor scale.

    Raises ValueError naming the tensor: a scale is missing or its shape fits no format, or `check_scale` rejects it.
    """
    scale = scale_name(name, tensors.names())
    assert scale is not None, name
    codes = tensors[name]
    if codes.dtype != E2M1.dtype:
        if seconds := _second_scales(name, tensors):
            raise ValueError(f"{name} is {codes.dtype} with {seconds[0]}: NVFP4 weights alone have one.")
        return decode(name, codes, tensors[scale])
    return decode_fp4(name, codes, tensors[scale], read_factor(name, tensors))


def _second_scales(name: str, tensors: Tensors) -> list[str]:
    return [key for key in (sibling(name, last) for last in _TENSORS) if key in tensors.names()]


def read_factor(name: str, tensors: Tensors) -> torch.Tensor:
    """NVFP4's second scale of a weight as a factor, float32 []. Raises ValueError: there is not one, or it is damaged."""
    seconds = _second_scales(name, tensors)
    if len(seconds) != 1:
        have = " and ".join(seconds) or f"neither {' nor '.join(_TENSORS)}"
        raise ValueError(f"{name} is NVFP4 with {have}: one float32 scale a tensor is needed.")
    return _factor(name, seconds[0], tensors[seconds[0]])


@keep_subnormals
def _factor(name: str, key: str, scale: torch.Tensor) -> torch.Tensor:
    """NVFP4's second scale as a factor, float32 []."""
    value = scale.float().reshape(-1)
    if scale.dtype != torch.float32 or len(value) != 1 or not 0 < float(value) < torch.inf:
        raise ValueError(
            f"{name} is damaged: {key} is {scale.dtype} {list(scale.shape)}, and it has to be one finite float32 above 0"
            f"{f' and not {float(value):.3g}' if len(value) == 1 else ''}."
        )
    return (1 / value if key.endswith("weight_global_scale") else value).reshape(())


@keep_subnormals
def decode_fp4(name: str, codes: torch.Tensor, scale: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """NVFP4's code * scale * factor in float32 [N, K], multiplied from the left as this package dequantizes.

    Args:
        codes: float4_e2m1fn_x2 [N, K / 2].
        scale: float8_e4m3fn [N, K / 16].
        factor: float32 [].

    Raises ValueError naming the tensor: scales of another dtype or shape, or below 0 or NaN.
    """
    rows, cols = codes.shape[0], 2 * codes.shape[1]
    if scale.dtype != E4M3.dtype or cols % nvfp4.BLOCK or list(scale.shape) != [rows, cols // nvfp4.BLOCK]:
        raise ValueError(
            f"{name} is NVFP4 {[rows, cols]} with scales {scale.dtype} {list(scale.shape)}: float8_e4m3fn, one for each"
            " 16 columns, can be imported."
        )
    values = scale.float()
    if len(odd := values[~(values.isfinite() & (values >= 0))]):
        raise ValueError(
            f"{name} is damaged: a block's scale is {float(odd[0]):.3g}, and scales are finite and at least 0."
        )
    blocks = nvfp4.values(codes).unflatten(1, (-1, nvfp4.BLOCK))
    return blocks.mul_(values[..., None]).mul_(factor).flatten(1)


def decode(name: str, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """code * scale in float32 [N, K], of the tensors that ``fp8_side`` takes."""
    return fp8_side(name, codes, scale).dequantize(torch.float32)


def fp8_side(name: str, codes: torch.Tensor, scale: torch.Tensor) -> QuantizedSide:
    """An FP8 weight [N, K] as GEMMs take it.

    Args:
        codes: float8_e4m3fn [N, K].
        scale: floats, or uint8, MX's exponents [N, K / 32].

    Raises ValueError naming the tensor: the scale's shape fits no format, or `check_scale` rejects it.
    """
    rows, cols = codes.shape
    if scale.dtype == torch.uint8 and list(scale.shape) == [rows, -(-cols // BLOCK_1X32.cols)]:
        if bool((scale == 255).any()):
            raise ValueError(f"{name} is damaged: a scale of it is 255, which is NaN in E8M0.")
        return QuantizedSide(codes, scale.view(torch.float8_e8m0fnu), BLOCK_1X32, pow2=True)
    check_scale(name, scale)
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
    return QuantizedSide(codes, scale.float(), granularity, pow2=False)
