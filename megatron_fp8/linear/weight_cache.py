"""The weight of one GEMM site: quantised once for as long as nobody can have written it, and made again in backward.

Optimizers that write through flat buffers leave no trace in a tensor's version; whoever steps tells the state, whose
``weight_generation`` covers those.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..params.fp8_parameter import Fp8Parameter
from ..quantizer import Casts
from ..state.fp8_state import Fp8State
from ..tensor import Float8Tensor, Operand, Sides

_DELAYED, _EVALUATED = 1, 2
"""Flags of a forward's stamp. Rejected: an argument more of the backward's operator, which graphs that torch.compile has
kept on the disk since an earlier version of this package would not give."""


def was_training(stamp: torch.Tensor) -> bool:
    """Whether the forward that made this stamp was one of training."""
    return not int(stamp[1]) & _EVALUATED


@dataclass(frozen=True)
class _Kept:
    """A quantised weight, of what memory in which state it is, and the delayed scale that was used, if one was."""

    version: tuple[Any, ...]
    recorded: bool
    scale: torch.Tensor | None
    quantized: Float8Tensor

    def serves(self, version: tuple[Any, ...], record: bool) -> bool:
        """Whether it is this weight's, as it is now, and was recorded if that is asked: evaluation records no amax."""
        return self.version == version and (self.recorded or not record)


class WeightCache:
    """Quantises a site's weight, and keeps what that gave.

    Args:
        casts: the role's.
        state: of the model: which iteration it is, and whether weights may be kept.
    """

    def __init__(self, casts: Casts, state: Fp8State):
        self._casts, self._state = casts, state
        self._kept: _Kept | None = None
        self._observed = -1  # the iteration in which the weight was recorded without a cast

    @property
    def kept(self) -> Float8Tensor | None:
        """The quantised weight that is held now."""
        return None if self._kept is None else self._kept.quantized

    def quantized(self, weight: torch.Tensor, *, fresh: bool, record: bool) -> Sides:
        """The weight [N, K], and [K, N] columnwise: each quantised, or as it is where the plan has high precision.

        It is quantised once an iteration if the state ``keeps_weights``, else at each call.

        Args:
            fresh: quantise again whatever is kept (Megatron's is_first_microbatch).

        A weight that lives as FP8 is used as it is; its amax counts once an iteration, as if it had been cast here.
        """
        if isinstance(weight, Fp8Parameter):
            assert self._casts.rowwise is not None, (
                "a weight that the plan keeps in high precision was made FP8"
            )
            if record and self._first_this_iteration():
                weight.record()
                if (observer := self._state.observer) is not None:
                    observer.stored(weight.quantizer.slot.name, weight)
            return Sides(weight.quantized.rowwise, weight.quantized.columnwise)
        if self._casts.rowwise is self._casts.columnwise is None:
            return Sides(weight, weight.t())
        version, kept = self._version(weight, self._state.weight_generation), self._kept
        fresh = fresh or not self._state.keeps_weights
        fresh = fresh or weight.is_inference()  # has no version: nobody would notice that it was written
        if fresh or kept is None or not kept.serves(version, record):
            with torch.inference_mode(False), torch.no_grad():  # codes that a later backward can save
                column = self._casts.columnwise
                scale = None if column is None else column.delayed_scale()
                quantized = self._casts(weight, "both", record=record)
            self._kept = kept = _Kept(version, record, scale, quantized)
        made = kept.quantized
        return Sides(made.rowwise or weight, weight.t() if made.columnwise is None else made.columnwise)

    def observe(self, weight: torch.Tensor) -> None:
        """Record the weight's amax, once an iteration, without a cast."""
        if self._first_this_iteration():
            self._casts.observe(weight)

    def stamp(self, device: torch.device, *, training: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """What backward needs to know of a forward that has just quantised the weight, as tensors that a graph can save.

        (int64 [2] on the CPU: the weight_generation, and flags: a delayed scale was used, it was in evaluation; float32
        []: that scale, or 1.)
        """
        scale = None if self._kept is None else self._kept.scale
        stamp = torch.tensor(
            [self._state.weight_generation, _DELAYED * (scale is not None) + _EVALUATED * (not training)],
            dtype=torch.int64,
            device="cpu",
        )
        used = torch.ones((), dtype=torch.float32, device=device) if scale is None else scale.clone()
        return stamp, used

    def columnwise(self, weight: torch.Tensor, stamp: torch.Tensor, scale: torch.Tensor) -> Operand:
        """dgrad's operand [K, N] of the weight [N, K] that compiled code hands back in its backward.

        It is what forward made of the weight, if that is still here. Else it is made again, with the same bits:
        ``fp8_step`` or another forward came in between, or offloading brought the weight back as another tensor.

        Args:
            stamp, scale: the forward's.
        """
        quantizer = self._casts.columnwise
        if quantizer is None:
            return weight.t()
        weight_generation, flags = stamp.tolist()
        kept = self._kept
        if kept is not None and kept.serves(self._version(weight, weight_generation), False):
            side = kept.quantized.columnwise
        else:
            side = quantizer.again(weight, "columnwise", scale if flags & _DELAYED else None).columnwise
        assert side is not None
        return side

    def forget(self) -> None:
        """Drop what is kept: another weight took this one's place, or the next call will quantise anyway."""
        self._kept = None

    def _first_this_iteration(self) -> bool:
        first, self._observed = self._observed != self._state.iteration, self._state.iteration
        return first

    def _version(self, weight: torch.Tensor, weight_generation: int) -> tuple[Any, ...]:
        """The weight's memory, how it lies there, and what is known of writes to it.

        The storage is named by a weak reference, and not by its address, which freed memory gives to another. Codes made
        in the capture of a CUDA graph exist at its replay only, so they are another version.
        """
        captured = self._state.capturing or (weight.is_cuda and torch.cuda.is_current_stream_capturing())
        version = 0 if weight.is_inference() else weight._version
        lies = (weight.dtype, weight.shape, weight.stride(), weight.storage_offset())
        return weight_generation, StorageWeakRef(weight.untyped_storage()), lies, version, captured
