"""Fp8Parameter: an FP8 weight in the place of a BF16 parameter.

With ``fp8_param`` a GEMM weight has no BF16 copy. Its codes are the parameter, the optimizer's float32 master is the
value, and each step rounds the master to the parameter's nominal dtype (BF16) and casts it. The numbers equal those of
training that keeps a BF16 parameter and casts it every iteration, without the copy, and with half of the gathered bytes.

``Fp8Parameter`` reports dtype BF16 and stores bytes:

* ``copy_``, and any other in-place operation, computes in BF16 and quantizes the result into the same bytes;
* ``detach`` and ``.data`` share the storage, so a write through them changes the parameter;
* any other operation reads the dequantized matrix and returns an ordinary tensor, and so do ``clone``, ``.float()``
  and pickling;
* GEMM sites read ``quantized``, the codes themselves, and record ``amax`` at that time, exactly as a cast of a BF16
  weight would. Nothing is recorded twice or remains from an update.

Per-tensor and square-block codes serve both directions, so one byte a value is stored and sent. Per-row and 1-wide
blocks need a second set of codes, made from high precision, not from the first set: ``TwoWayFp8Parameter`` stores
both, two bytes a value, and its values are sent in BF16. So does ``Fp4Parameter``, half a byte a value in each direction:
its codes are packed along the contraction.

Rejected: ``param.data = codes`` on an ordinary float8 parameter with scales in a separate dictionary. Every part of
Megatron that copies, clips, shards or saves a parameter would need to use the dictionary, and one that does not
(``param.data.copy_(master)``) would write unscaled codes without an error. Rejected too: recording amax in the slot
at the time of the cast. The optimizer casts between two iterations, and so may loading a checkpoint or a validation;
the slot would hold amaxes that no forward pass has used.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..numerics import host_sync, nvfp4
from ..numerics.rule import Rule
from ..quantizer import Quantizer
from ..tensor import Float8Tensor
from .fp8_tensor_base import Fp8TensorBase
from .stored_codes import StoredCodes, StoredFp4Codes, granularities


class Fp8Parameter(Fp8TensorBase):
    """A weight [rows, cols] of nominal dtype bfloat16 in FP8; made by ``fp8_parameter``.

    Assign it to a module like any parameter (it is an instance of torch.nn.Parameter). Written NaN and Inf become
    codes as in every cast, and count into the health of the iteration that uses them.

    Raises TypeError and RuntimeError as Fp8TensorBase does: a change of dtype or device in place; a collective on it.
    """

    _stored: StoredCodes
    is_gathered = False
    """Whether it is a temporary view of shards during a forward; the shards hold its values."""

    @staticmethod
    def __new__(cls, stored: StoredCodes) -> Fp8Parameter:
        device = stored.codes[0].device
        self = torch.Tensor._make_wrapper_subclass(cls, stored.shape, dtype=stored.dtype, device=device)
        self._stored = stored
        return self

    def __init__(self, stored: StoredCodes) -> None:
        super().__init__()

    @classmethod
    def of_codes(
        cls,
        quantizer: Quantizer,
        dtype: torch.dtype,
        codes: torch.Tensor,
        scale_inv: torch.Tensor,
        amax: torch.Tensor,
        nonfinite: torch.Tensor | None,
    ) -> Fp8Parameter:
        """Makes one from codes (uint8 [rows, cols]) of nominal ``dtype``, without a copy; not yet a
        torch.nn.Parameter."""
        stored = StoredCodes(quantizer, dtype, [codes])
        stored.set_scales([scale_inv], amax, nonfinite)
        return cls(stored)

    # ------------------------------------------------------------------------------------------------------ properties

    @property
    def rule(self) -> Rule:
        """Its quantization rule."""
        return self._stored.quantizer.rule

    @property
    def quantizer(self) -> Quantizer:
        """Its quantizer: rule, slot and backend of its GEMM site."""
        return self._stored.quantizer

    @property
    def quantized(self) -> Float8Tensor:
        """Its codes and scales, both directions. Views: they follow the parameter."""
        return self._stored.quantized

    @property
    def codes(self) -> list[torch.Tensor]:
        """The bytes: one uint8 [rows, cols], or two where the directions differ."""
        return self._stored.codes

    def stored_tensors(self) -> list[torch.Tensor]:
        """Returns all its permanent tensors: codes and scales."""
        return [*self._stored.codes, *self._stored.scale_invs]

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Returns its value as an ordinary tensor [rows, cols], rounded once to dtype (default: the nominal one)."""
        return self._stored.quantized.dequantize(dtype)

    @property
    def cast_amax(self) -> torch.Tensor:
        """float32 [], the largest magnitude of the values that were last cast to the codes; may be Inf."""
        return self._stored.amax

    @property
    def measured(self) -> torch.Tensor:
        """float32 [2]: the amax of the last cast, and its number of NaN and Inf."""
        amax, nonfinite = self._stored.amax, self._stored.nonfinite
        counted = amax.new_zeros(()) if nonfinite is None else nonfinite.to(amax.dtype)
        return torch.stack([amax.view([]), counted.view([])])

    def record(self) -> None:
        """Records the last cast's amax and health in the slot. Call it when a forward pass uses the weight."""
        self._stored.quantizer.record(self._stored.amax, self._stored.nonfinite)

    # ------------------------------------------------------------------------------------------- high-precision start

    def get_high_precision_init_val(self) -> torch.Tensor:
        """Returns the original weight, in the nominal dtype. (A master made from the codes would be rounded twice.)

        After ``clear_high_precision_init_val`` the dequantized value.
        """
        return self.dequantize() if self._stored.initial is None else self._stored.initial

    def clear_high_precision_init_val(self) -> None:
        """Frees the original weight, once the master has it."""
        self._stored.initial = None

    # ---------------------------------------------------------------------------------------------------------- master

    def own_piece(self, start: int, stop: int) -> None:
        """Sets the range of elements, in flat order, whose master only this rank's optimizer holds; empty if start ==
        stop.

        Without a call each rank holds the master of all.
        """
        self._stored.piece = (start, stop)

    @property
    def piece(self) -> tuple[int, int] | None:
        """(start, stop) of ``own_piece``; None without a call."""
        return self._stored.piece

    @property
    def master(self) -> torch.Tensor | None:
        """The source of the codes, if this rank has it: the optimizer's float32 master (Megatron's ``main_param``);
        before there is one, the original weight; else None."""
        master: torch.Tensor | None = getattr(self, "main_param", None)
        return self._stored.initial if master is None else master

    # --------------------------------------------------------------------------------------------- storage, and shards

    def replace_storage(self, data: torch.Tensor) -> None:
        """Moves the codes into ``data`` (uint8, equally many elements), which becomes the parameter's memory.

        Raises:
            ValueError: it is a two-way parameter, or data has another dtype or size.
        """
        (codes,) = self._stored.codes if len(self._stored.codes) == 1 else (None,)
        if codes is None:
            raise ValueError(
                "a weight with different codes in each direction travels in BF16 and has no single byte buffer"
            )
        if data.dtype != torch.uint8 or data.numel() != codes.numel():
            raise ValueError(
                f"an FP8 parameter of {codes.numel()} bytes cannot live in {data.dtype} [{data.numel()}]"
            )
        # .data: views share a version counter, and a gather into other slices of the buffer does not change this weight.
        data = data.data.view(codes.shape)
        data.copy_(codes)
        self._stored.codes = [data]
        self._stored.view()

    def set_shard(self, index: int, offset: int, codes: torch.Tensor) -> None:
        """Writes float8 codes (any shape, flat order) into set ``index`` of codes, starting at element ``offset``."""
        flat = codes.reshape(-1).view(torch.uint8)
        self._stored.codes[index].view(-1)[offset : offset + flat.numel()].copy_(flat)

    def set_scales(
        self, scale_invs: list[torch.Tensor], amax: torch.Tensor, nonfinite: torch.Tensor | None
    ) -> None:
        """Sets the scales (one tensor for each set of codes), and the amax and non-finite count of the whole matrix."""
        self._stored.set_scales(scale_invs, amax, nonfinite)

    def update_in_place(self) -> None:
        """Makes later scales, amaxes and counts overwrite the same memory, which a CUDA graph can then read."""
        self._stored.update_in_place()

    def refresh(self) -> None:
        """Rebuilds the views of the codes, after the network has written them."""
        self._stored.view()

    # --------------------------------------------------------------------------------------------------- as a tensor

    def write(self, value: torch.Tensor) -> None:
        """Rounds [rows, cols] to the nominal dtype and quantizes it into the codes. Before there is a master, it
        replaces the original weight."""
        self._stored.write(value)
        if self._stored.initial is not None:
            self._stored.initial = value.detach().to("cpu", self.dtype, copy=True)

    def alias(self) -> Fp8Parameter:
        """Returns another tensor over the same codes and scales."""
        return type(self)(self._stored)

    def copy_codes(self, source: torch.Tensor) -> bool:
        """Copies codes and scales of an FP8 parameter with the same rule: a second cast would have other scales."""
        if not (isinstance(source, Fp8Parameter) and source.rule == self.rule and source.shape == self.shape):
            return False
        if source._stored is not self._stored:
            for target, codes in zip(self.codes, source.codes, strict=True):
                target.copy_(codes)
            self._stored.take_scales(source._stored, self.device)
            if self._stored.initial is not None:
                self._stored.initial = source._stored.initial
        return True

    def move(self, device: Any) -> Fp8Parameter:
        """Returns an FP8 parameter on another device, with the same codes, scales and attributes."""
        old = self._stored
        new = type(old)(old.quantizer, old.dtype, [codes.to(device) for codes in old.codes], old.shape)
        new.initial = old.initial
        new.take_scales(old, device)
        return type(self)(new)

    def quantized_by(self, quantizer: Quantizer) -> None:
        """Sets the quantizer for later writes: that of the linear into which it was copied, with this weight's rule."""
        if quantizer.rule != self.rule:  # codes from a file may have another kind of scale
            quantizer = Quantizer(self.rule, quantizer.slot, quantizer.backend)
        self._stored.quantizer = quantizer

    def __deepcopy__(self, memo: dict[int, Any]) -> Fp8Parameter:
        old = self._stored
        new = type(old)(old.quantizer, old.dtype, [codes.clone() for codes in old.codes], old.shape)
        new.initial = None if old.initial is None else old.initial.clone()
        new.take_scales(old, self.device)
        copied = _as_parameter(type(self)(new), self.requires_grad)
        copied.__dict__.update({k: v for k, v in self.__dict__.items() if k not in ("_stored", "_is_param")})
        memo[id(self)] = copied
        return copied

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({tuple(self.shape)}, {self.rule}, nominal {self.dtype}, {self.device})"


class TwoWayFp8Parameter(Fp8Parameter):
    """An FP8 parameter with separate codes for each direction (per row, 1x32): two bytes a value; sent in BF16."""


class Fp4Parameter(TwoWayFp8Parameter):
    """An NVFP4 parameter: two codes a byte, for both directions; sent in BF16."""


def fp8_parameter(weight: torch.Tensor, quantizer: Quantizer) -> Fp8Parameter:
    """Returns the FP8 parameter of a weight [rows, cols]: quantizes it now, and keeps its value until the master has it.

    Takes over requires_grad and attributes that were set on the weight (tensor parallelism's and others).

    Raises:
        ValueError: the rule rounds stochastically: casting the same master again would give other codes.
    """
    if quantizer.rule.stochastic:
        raise ValueError(
            "an FP8 parameter cannot be rounded stochastically: give the weight a rule with stochastic=False"
        )
    value = weight.detach()
    stored, kind = _stored_as(quantizer, value)
    stored.write(value)
    stored.initial = value.cpu()
    parameter = _as_parameter(kind(stored), weight.requires_grad)
    parameter.__dict__.update(weight.__dict__)
    return parameter


def _stored_as(quantizer: Quantizer, value: torch.Tensor) -> tuple[StoredCodes, type[Fp8Parameter]]:
    """Returns memory for the codes of a matrix [rows, cols], and the class of its parameter."""

    def empty(rows: int, cols: int) -> torch.Tensor:
        return torch.empty((rows, cols), dtype=torch.uint8, device=value.device)

    rows, cols = value.shape
    if quantizer.rule.fmt.codes_per_byte > 1:
        packed = [empty(rows, nvfp4.padded_cols(cols) // 2), empty(cols, nvfp4.padded_cols(rows) // 2)]
        return StoredFp4Codes(quantizer, value.dtype, packed, value.shape), Fp4Parameter
    codes = [empty(rows, cols) for _ in granularities(quantizer.rule)]
    return StoredCodes(quantizer, value.dtype, codes), Fp8Parameter if len(codes) == 1 else TwoWayFp8Parameter


def _as_parameter(tensor: Fp8Parameter, requires_grad: bool) -> Any:
    return torch.nn.Parameter(tensor, requires_grad)


def broadcast(parameter: Fp8Parameter, source: int, group: Any) -> None:
    """Sends the source rank's value, with its original weight if present, to every rank of the group. Collective."""
    stored, device = parameter._stored, parameter.device
    if stored.initial is not None:
        value = stored.initial.to(device)
        dist.broadcast(value, src=source, group=group)
        stored.initial = value.cpu()
        stored.write(value)
        return
    for tensor in parameter.stored_tensors():
        wire = tensor.reshape(-1).view(torch.uint8)  # a 0-dimensional scale has no view as bytes
        dist.broadcast(wire, src=source, group=group)
        tensor.copy_(wire.view(tensor.dtype).view(tensor.shape))
    count = torch.zeros([], device=device, dtype=torch.float32)
    if stored.nonfinite is not None:
        count += stored.nonfinite
    for number in (stored.amax, count):
        dist.broadcast(number, src=source, group=group)
    # Products skip the NaN check if there is no count; on a GPU it is kept unread, since reading it would wait.
    stored.nonfinite = count if host_sync.read_waits(device) or count else None
    parameter.refresh()
