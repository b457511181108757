"""Static activation scales from calibration, and activations padded to the kernels' alignment.

A dynamic scale needs the amax of the activations. That takes a pass over them, and, with one scale per
tensor, results depend on the rest of the batch. A static scale is a constant. Values above the calibrated
amax saturate.

With per-tensor recipes it replaces the tensor's scale. With per-row scales ('rowwise': weights per channel)
all rows of activations get the same scale. NVFP4's second scale, the tensor's, may be static; its blocks' scales
follow from it. Blocks of 128 or 32 values scale by their own values and have no static scales.

A prompt has any number of tokens, and decoding has one. FP8 tensor cores prefer multiples of 16 rows, or 32
(recipe.py, alignment); sizes that they do not support are padded inside the backend's GEMM. Here whole
activations are padded before quantization, so that a kernel gets few different sizes. Zeros do not change an
amax or scale, and rows are independent in y = x @ w^T, so the result is the same. The emulated backend does
not benefit and is excluded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch

from ..backends.base import CastRequest
from ..linear.gemm_site import GemmSite
from ..numerics.rule import ROW, TENSOR, Rule
from ..quantizer import CastJob, Quantizer
from ..state.arena import Slot


class StaticQuantizer(Quantizer):
    """A quantizer with a constant scale, float32 []: code = x * scale. NVFP4: the constant amax of the tensor."""

    def __init__(self, rule: Rule, slot: Slot, backend: ModuleType, scale: torch.Tensor):
        super().__init__(rule, slot, backend)
        self.scale = scale
        self.computes = False  # casts that record amaxes take their scale from the arena
        self._cast = rule if rule.scale == "e4m3" else replace(rule, granularity=TENSOR, delayed=False)

    def request(self, job: CastJob) -> CastRequest:
        """The cast with the static scale, rowwise only: a forward pass needs no columnwise codes."""
        assert job.direction == "rowwise", "static scales are for inference, which has no backward"
        return super().request(job)._replace(rule=self._cast, scale=self.scale)


@dataclass(frozen=True)
class StaticScale:
    """The static scale (NVFP4: amax) of a linear's input, float32 []. A call installs it in a site, on its device."""

    scale: torch.Tensor

    def __call__(self, site: GemmSite) -> None:
        """Install the scale in the site's input quantizer."""
        casts = site.casts["input"]
        quantizer = casts.rowwise
        if quantizer is not None:
            scale = self.scale.to(quantizer.slot.arena.device)
            static = StaticQuantizer(quantizer.rule, quantizer.slot, quantizer.backend, scale)
            site.casts["input"] = casts._replace(rowwise=static)


def static_refusal(rule: Rule) -> str | None:
    """Why this rule does not support a static activation scale; None if it does."""
    if rule.granularity in (TENSOR, ROW) or rule.scale == "e4m3":
        return None
    return (
        f"its activations have a scale for every {rule.granularity} block, made from the block itself:"
        " choose tensorwise, delayed, rowwise (weights per channel) or nvfp4, or dynamic activations"
    )


def pad_tokens(x: torch.Tensor, multiple: int) -> torch.Tensor:
    """x [..., K] as [M, 1, K], with rows of zeros up to a multiple M; x itself if no padding is needed."""
    rows = x.shape[:-1].numel()
    missing = -rows % multiple
    if not missing:
        return x
    flat = x.reshape(rows, x.shape[-1])  # [tokens, K]
    return torch.cat([flat, flat.new_zeros(missing, flat.shape[1])]).unsqueeze(1)  # [M, 1, K]


class Padding:
    """Forward hooks of one linear: pad the input to a multiple of ``multiple`` tokens, then slice and reshape
    the output.

    The output may be a tensor, or a tuple that begins with it (Megatron-Core's linears).
    """

    def __init__(self, linear: Any, multiple: int):
        self.multiple = multiple
        self._shapes: list[torch.Size | None] = []
        linear.register_forward_pre_hook(self._before)
        linear.register_forward_hook(self._after, always_call=True)

    def _before(self, linear: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        padded = pad_tokens(args[0], self.multiple)
        self._shapes.append(None if padded is args[0] else args[0].shape)
        return (padded, *args[1:])

    def _after(self, linear: Any, args: tuple[Any, ...], output: Any) -> Any:
        shape = self._shapes.pop()
        if shape is None or output is None:
            return None
        if isinstance(output, tuple):
            return (_cut(output[0], shape), *output[1:])
        return _cut(output, shape)


def _cut(y: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """y [M, ..., N] without the added rows, in the leading dimensions of ``shape`` [..., K]."""
    rows = shape[:-1].numel()
    return y.reshape(-1, y.shape[-1])[:rows].reshape(*shape[:-1], y.shape[-1])
