"""Inference weights: one byte per value, half a byte for NVFP4, for fprop only.

Training needs a weight's codes for both directions of its GEMMs; with 1-wide blocks that takes two bytes per
value. Inference reads the rowwise side only. ``inference_weight`` quantizes it once, with the quantizer of
its GEMM site, so the codes equal those of the training forward. The high-precision weight is then freed.

The result is an Fp8Parameter: a GEMM site uses its codes directly, and everything else (state dicts, copies,
exports) sees the dequantized matrix. Rejected: storing the quantized matrix in the site's weight cache and an
empty tensor in the module. State dicts, deep copies and ``.to(device)`` would then see the empty tensor.

transformers' save_pretrained writes tensor memory, and an FP8 parameter's memory differs from its nominal dtype.
So it gets dequantized weights, as exports and state dicts do; ``megatron-fp8 export`` writes FP8 files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import MethodType
from typing import Any

import torch

from ..numerics import nvfp4
from ..params.fp8_parameter import Fp8Parameter
from ..params.stored_codes import StoredCodes
from ..quantizer import Quantizer
from ..tensor import Float8Tensor, QuantizedSide


class _StoredRows(StoredCodes):
    """Rowwise codes only, for rules whose columnwise codes differ, and for NVFP4, whose codes share bytes."""

    def view(self) -> None:
        rule = self.quantizer.rule
        (codes,), (scale_inv,) = self.codes, self.scale_invs
        side = QuantizedSide(
            codes.view(rule.fmt.dtype),
            scale_inv,
            rule.granularity,
            rule.pow2,
            self.nonfinite is None,
            padding=codes.shape[1] * rule.fmt.codes_per_byte - self.shape[1],
            tensor_amax=self.amax if rule.scale == "e4m3" else None,
        )
        self.quantized = Float8Tensor(side, None, self.dtype)

    def write(self, x: torch.Tensor) -> None:
        done = self.quantizer.quantize(x.to(self.dtype), "rowwise")
        side = done.tensor.rowwise
        assert side is not None
        self.codes[0].copy_(side.codes.view(torch.uint8))
        self.set_scales([side.scale_inv], done.amax, done.nonfinite)


class RowwiseFp8Parameter(Fp8Parameter):
    """An FP8 weight with rowwise codes only, for y = x @ w^T. A gradient through it requantizes the dequantized
    values."""


def inference_weight(weight: torch.Tensor, quantizer: Quantizer) -> Any:
    """The frozen FP8 parameter of a weight [N, K] for y = x @ weight^T: one byte per value, and scales.

    An FP8 parameter keeps its codes (rowwise only, if the directions differ). Attributes set on the weight
    are copied; ``requires_grad`` is False.

    Args:
        quantizer: the site's for the role 'weight'; a warm delayed scale is used as in training.
    """
    if isinstance(weight, Fp8Parameter):
        return _from_fp8(weight)
    value = weight.detach()
    rule, (rows, cols) = quantizer.rule, value.shape
    packs = rule.fmt.codes_per_byte > 1
    kind = StoredCodes if rule.granularity.symmetric and not packs else _StoredRows
    width = nvfp4.padded(cols) // 2 if packs else cols
    codes = torch.empty((rows, width), dtype=torch.uint8, device=value.device)
    stored = kind(quantizer, value.dtype, [codes], value.shape)
    stored.write(value)
    return _as_parameter(stored, weight)


def _from_fp8(weight: Fp8Parameter) -> Any:
    one_set = len(weight.codes) == 1
    if one_set or isinstance(weight, RowwiseFp8Parameter):
        weight.clear_high_precision_init_val()
        return weight.requires_grad_(False)
    old = weight._stored
    stored = _StoredRows(old.quantizer, old.dtype, old.codes[:1], old.shape)
    stored.set_scales(old.scale_invs[:1], old.amax, old.nonfinite)
    return _as_parameter(stored, weight)


def _as_parameter(stored: StoredCodes, weight: torch.Tensor) -> Any:
    kind = RowwiseFp8Parameter if isinstance(stored, _StoredRows) else Fp8Parameter
    parameter = torch.nn.Parameter(kind(stored), requires_grad=False)
    parameter.__dict__.update({k: v for k, v in vars(weight).items() if k not in ("_stored", "_is_param")})
    return parameter


def save_in_high_precision(model: torch.nn.Module) -> None:
    """Make ``model.save_pretrained``, if present, write dequantized weights."""
    if hasattr(type(model), "save_pretrained"):
        model.save_pretrained = MethodType(_save_pretrained, model)  # type: ignore[assignment]


def _save_pretrained(
    model: Any, save_directory: Any, *args: Any, state_dict: Any = None, **options: Any
) -> Any:
    dequantized: dict[int, torch.Tensor] = {}  # shared weights stay shared
    plain = {}
    for name, tensor in (model.state_dict() if state_dict is None else state_dict).items():
        if isinstance(tensor, Fp8Parameter):
            key = tensor.codes[0].data_ptr()
            if key not in dequantized:
                layer = model.get_submodule(name.rpartition(".")[0])
                dequantized[key] = layer.laid_out(tensor.dequantize()).contiguous()
            tensor = dequantized[key]
        plain[name] = tensor
    return type(model).save_pretrained(model, save_directory, *args, state_dict=plain, **options)


def tensors_of(module: Any) -> Iterator[torch.Tensor]:
    """All parameters and buffers of a module; for an FP8 weight its codes and scales."""
    for tensor in [*module.parameters(), *module.buffers()]:
        yield from tensor.stored_tensors() if isinstance(tensor, Fp8Parameter) else [tensor]


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages of ``tensors``. A storage with several tensors or views counts once, in full."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def model_bytes(module: Any) -> int:
    """Bytes of all parameters and buffers of a module."""
    return storage_bytes(tensors_of(module))
