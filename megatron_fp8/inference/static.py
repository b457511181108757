"""Static activation scales: known before the token comes, from calibration.

A dynamic scale needs the amax of the activations: a pass over them, and, where the whole tensor has one scale, every
token's result depends on all others in the batch. A static scale is a number. What lies above the calibrated amax
saturates.

With per-tensor recipes it replaces the tensor's scale. With per-row scales ('rowwise': weights per channel) the
rows of activations all get the same one, in the shape that the GEMM of that recipe takes. Blocks of 128 or 32 values have
their scales from their own values, and no calibration replaces those.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch

from ..backends.base import Quantized, Running
from ..linear.site import GemmSite
from ..numerics.rule import ROW, TENSOR, Direction, Rule
from ..quantizer import Quantizer
from ..state.arena import Slot
from ..tensor import Float8Tensor


class StaticQuantizer(Quantizer):
    """A quantizer whose scale, float32 [], never changes: code = x * scale."""

    def __init__(self, rule: Rule, slot: Slot, backend: ModuleType, scale: torch.Tensor):
        super().__init__(rule, slot, backend)
        self.scale = scale
        self._cast = replace(rule, granularity=TENSOR, delayed=False)

    @property
    def computes(self) -> bool:
        """Never: casts that record as they go take their scale from the arena."""
        return False

    def way(self) -> tuple[Rule, torch.Tensor | None]:
        """One scale for the whole tensor, whatever the rule says."""
        return self._cast, self.scale

    def quantize(
        self, x: torch.Tensor, direction: Direction, *, running: Running | None = None, **_: Any
    ) -> Quantized:
        """x [rows, cols] with the static scale, rowwise: the forward pass needs no other direction."""
        assert direction == "rowwise", "static scales are for inference, which has no backward"
        done: Quantized = self.backend.quantize(x, self._cast, direction, scale=self.scale, running=running)
        self.slot.arena.counts.casts += 1
        side = done.tensor.rowwise
        assert side is not None
        if self.rule.granularity == ROW:
            # [] -> [tokens, 1]
            side = replace(side, granularity=ROW, scale_inv=side.scale_inv.expand(x.shape[0], 1).contiguous())
        return replace(done, tensor=Float8Tensor(side, None, x.dtype))


@dataclass(frozen=True)
class StaticScale:
    """The static scale of a linear's input, float32 []; calling it gives the scale to a site, on the site's device."""

    scale: torch.Tensor

    def __call__(self, site: GemmSite) -> None:
        """Give the site's input the scale."""
        casts = site.casts["input"]
        quantizer = casts.rowwise
        if quantizer is not None:
            scale = self.scale.to(quantizer.slot.arena.device)
            casts.rowwise = StaticQuantizer(quantizer.rule, quantizer.slot, quantizer.backend, scale)


def why_not_static(rule: Rule) -> str | None:
    """Why activations quantised by this rule cannot have a static scale; None if they can."""
    if rule.granularity in (TENSOR, ROW):
        return None
    return (
        f"its activations have a scale for every {rule.granularity} block, made from the block itself:"
        " choose tensorwise, delayed or rowwise (weights per channel), or dynamic activations"
    )
