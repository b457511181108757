"""Frozen weights as codes: one byte a value, half a byte for NVFP4.

Training of a weight needs its codes for both directions of its GEMMs; with 1-wide blocks that takes two bytes per
value. A frozen weight stores the rowwise side only, which fprop reads: ``frozen_parameter`` quantizes it once, with
the quantizer of its GEMM site, so the codes equal those of the training forward. The high-precision weight is then freed.

dgrad, which adapters in front of it need, reads the columnwise side. Per-tensor and square-block codes serve both
directions. Those of rows and 1-wide blocks are derived in backward (docs/numerics.md, Derived codes): the stored codes
are decoded exactly in float32 and quantized by dgrad's rule.

Rejected: storing both sides. The second one would double the memory that freezing is for.
"""

from __future__ import annotations

from typing import Any

import torch

from ..files.terminal import warn_user
from ..numerics import nvfp4
from ..quantizer import Quantizer
from ..tensor import Float8Tensor, QuantizedSide
from .fp8_parameter import Fp8Parameter
from .stored_codes import StoredCodes


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


class FrozenFp8Parameter(Fp8Parameter):
    """An FP8 weight [rows, cols] for y = x @ w^T that no gradient trains.

    ``copy_`` quantizes, as for every FP8 parameter. Any other change (PEFT's ``merge``, an in-place sum) is quantized
    too, and a warning says what it loses.
    """

    def _warn(self) -> None:
        warn_user(
            f"a weight that is frozen as {self.rule.fmt.name} codes was changed, as by merge_adapter or"
            " merge_and_unload: the sum is rounded to codes again, which loses most of a small update, and unmerging does"
            " not restore the weight. Call megatron_fp8.nn.dequantize_weights(model, torch.float32) before merging, or"
            " write the merged model with megatron_fp8.serve.save_quantized, which adds in float32"
        )

    @property
    def data(self) -> Any:
        """The same tensor outside autograd; a write to it changes this tensor."""
        return self.alias()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, Fp8Parameter):
            self._warn()
        Fp8Parameter.data.fset(self, value)  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name.rpartition("::")[2]
        if name.endswith("_") and name not in _WRITES and args and isinstance(args[0], FrozenFp8Parameter):
            args[0]._warn()
        return super().__torch_dispatch__(func, types, args, kwargs)


_WRITES = ("copy_", "detach_", "requires_grad_", "zero_", "set_")
"""In-place operations that replace the value or none of it."""


def frozen_parameter(weight: torch.Tensor, quantizer: Quantizer) -> Any:
    """The frozen FP8 parameter of a weight [N, K] for y = x @ weight^T: one byte per value, and scales.

    An FP8 parameter keeps its codes (rowwise only, if the directions differ). Attributes set on the weight
    are copied; ``requires_grad`` is False.

    Args:
        quantizer: the site's for the role 'weight'; a warm delayed scale is used as in training.
    """
    if isinstance(weight, Fp8Parameter):
        return _from_fp8(weight)
    value = weight.detach()
    stored = _empty(quantizer, value.shape, value.dtype, value.device)
    stored.write(value)
    return _as_parameter(stored, weight)


def parameter_of_codes(
    codes: torch.Tensor,
    scale_inv: torch.Tensor,
    quantizer: Quantizer,
    dtype: torch.dtype,
    shape: torch.Size,
    tensor_amax: torch.Tensor | None = None,
) -> Any:
    """The frozen FP8 parameter of codes that were quantized elsewhere, without a copy. No code is NaN.

    Args:
        codes: of the rule's format [N, K], or [N, K / 2] for NVFP4.
        scale_inv: as QuantizedSide has it, of the rule's granularity.
        dtype, shape: the nominal ones, [N, K].
        tensor_amax: NVFP4's, float32 [].
    """
    stored = _kind(quantizer)(quantizer, dtype, [codes.view(torch.uint8)], shape)
    zero = torch.zeros((), dtype=torch.float32, device=codes.device)
    stored.set_scales([scale_inv], zero if tensor_amax is None else tensor_amax, None)
    if tensor_amax is None:
        stored.amax = stored.quantized.dequantize(torch.float32).abs().amax()
    return _frozen(stored)


def _kind(quantizer: Quantizer) -> type[StoredCodes]:
    rule = quantizer.rule
    one_set = rule.granularity.symmetric and rule.fmt.codes_per_byte == 1
    return StoredCodes if one_set else _StoredRows


def _empty(quantizer: Quantizer, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> StoredCodes:
    """Memory for the codes of a weight [N, K]."""
    rows, cols = shape
    width = nvfp4.padded_cols(cols) // 2 if quantizer.rule.fmt.codes_per_byte > 1 else cols
    codes = torch.empty((rows, width), dtype=torch.uint8, device=device)
    return _kind(quantizer)(quantizer, dtype, [codes], shape)


def _from_fp8(weight: Fp8Parameter) -> Any:
    if isinstance(weight, FrozenFp8Parameter) or len(weight.codes) == 1:
        weight.clear_high_precision_init_val()
        return weight.requires_grad_(False)
    old = weight._stored
    stored = _StoredRows(old.quantizer, old.dtype, old.codes[:1], old.shape)
    stored.set_scales(old.scale_invs[:1], old.amax, old.nonfinite)
    return _as_parameter(stored, weight)


def _as_parameter(stored: StoredCodes, weight: torch.Tensor) -> Any:
    parameter = _frozen(stored)
    parameter.__dict__.update({k: v for k, v in vars(weight).items() if k not in ("_stored", "_is_param")})
    return parameter


def _frozen(stored: StoredCodes) -> Any:
    stored.update_in_place()  # a captured step then reads what a later load writes
    return torch.nn.Parameter(FrozenFp8Parameter(stored), requires_grad=False)


def columnwise_codes(weight: Fp8Parameter, quantizer: Quantizer, scale: torch.Tensor | None) -> QuantizedSide:
    """dgrad's side [K, N] of a frozen weight [N, K]: the same codes where they serve both directions, else derived ones.

    Args:
        quantizer: dgrad's of the role 'weight'.
        scale: float32 [], its delayed scale; None: current scaling.
    """
    rowwise = weight.quantized.rowwise
    assert rowwise is not None
    if quantizer.rule == weight.rule and weight.rule.granularity.symmetric:
        return rowwise.transposed()
    side = quantizer.requantize(rowwise.dequantize(torch.float32), "columnwise", scale).columnwise
    assert side is not None
    return side
