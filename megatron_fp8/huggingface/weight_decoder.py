"""Reads quantized weights of a directory: checks of config.json, scales' names, values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch

from ..numerics.rule import BLOCK_128X128, ROW, TENSOR, Granularity
from ..tensor import QuantizedSide
from .formats import BLOCK, sibling


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
    siblings = [sibling(weight, last) for last in _WEIGHTS]
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
