"""Fp8Parameter: an FP8 weight in the place of a BF16 parameter.

With ``fp8_param`` a GEMM weight has no BF16 copy. Its codes are the parameter, the optimizer's float32 master is the
value, and each step the master is rounded to the parameter's nominal dtype (BF16) and cast. The numbers are those of
training that keeps a BF16 parameter and casts it every iteration; there is no copy, and half of the bytes are gathered.

``Fp8Parameter`` says it is BF16 and holds bytes:

* ``copy_``, and any other operation in place, computes in BF16 and quantises the result into the same bytes;
* ``detach`` and ``.data`` are the same storage under another name, so a write through them reaches the parameter;
* any other operation sees the dequantised matrix and gives an ordinary tensor, and so do ``clone``, ``.float()`` and
  pickling;
* GEMM sites read ``quantized``, the codes themselves, and record ``amax`` as they do: when, and as much as, a cast of a
  BF16 weight there would record. Nothing is recorded twice or left over from an update.

Per-tensor and square-block codes serve both directions, so one byte a value is kept and travels. Per-row and 1-wide
blocks need a second set of codes, made from high precision, not from the first: ``TwoWayFp8Parameter`` keeps both, two
bytes a value, and its values travel in BF16.

Rejected: ``param.data = codes`` on an ordinary float8 parameter with scales in a dictionary beside it. Every piece of
Megatron that copies, clips, shards or saves a parameter would have to know of the dictionary, and one that does not
(``param.data.copy_(master)``) would write unscaled codes without an error. Rejected too: keeping amax in the slot at the
time of the cast. The optimizer casts between two iterations, a checkpoint is loaded between two others, and a validation
runs where it likes; the slot would hold what nobody's forward pass has used.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from .. import kernels
from ..backends.base import Quantized
from ..backends.native import backend as native
from ..backends.specified import block_scales
from ..numerics import waiting
from ..numerics.rule import BLOCK_128X128, TENSOR, Granularity, Rule
from ..numerics.scaling import compute_scale_inv
from ..quantizer import Quantizer
from ..tensor import Float8Tensor, QuantizedSide
from .coded import CodedTensor


def granularities(rule: Rule) -> list[Granularity]:
    """How elements share scales, once for each set of codes; the second is the columnwise side's, not transposed."""
    given = rule.granularity
    return [given] if given.symmetric else [given, Granularity(given.cols, given.rows)]


def cast_by_kernel(quantizer: Quantizer, device: torch.device) -> bool:
    """Whether kernels round a master and cast it straight into its one set of codes (kernels/param_cast.py)."""
    return (
        type(quantizer) is Quantizer  # others cast in a way of their own
        and quantizer.backend is native
        and kernels.run_on(device)
        and quantizer.rule.granularity in (TENSOR, BLOCK_128X128)
    )


def whole_scales(quantizer: Quantizer, amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale, inverse) under which a matrix with these amaxes is cast: the history's where it has one, else its own."""
    delayed = quantizer.delayed_scale()
    if delayed is None:
        return block_scales(amax, quantizer.rule)
    return delayed, compute_scale_inv(delayed)


class _Stored:
    """Codes, scales and what the last cast saw; shared by a parameter and its detached aliases."""

    def __init__(self, quantizer: Quantizer, dtype: torch.dtype, codes: list[torch.Tensor]):
        self.quantizer, self.dtype, self.codes = quantizer, dtype, codes
        self.initial: torch.Tensor | None = None
        self.piece: tuple[int, int] | None = None

    def set_scales(
        self, scale_invs: list[torch.Tensor], amax: torch.Tensor, nonfinite: torch.Tensor | None
    ) -> None:
        """Set the scales of the codes; ``scale_invs`` are oriented as the codes, [rows, cols]."""
        self.scale_invs, self.amax, self.nonfinite = scale_invs, amax, nonfinite
        self.view()

    def view(self) -> None:
        """The quantised matrix over the codes as they lie now; the columnwise side is a transposed view."""
        rule = self.quantizer.rule
        sides = [
            QuantizedSide(
                codes.view(rule.fmt.dtype), scale_inv, g, rule.scale != "fp32", self.nonfinite is None
            )
            for codes, scale_inv, g in zip(self.codes, self.scale_invs, granularities(rule), strict=True)
        ]
        if len(sides) == 1:
            columnwise = sides[0].transposed()
        else:
            turned = sides[1]  # [rows, cols] with columnwise scales; the side itself is [cols, rows]
            columnwise = QuantizedSide(
                turned.codes.t(), turned.scale_inv.t(), rule.granularity, turned.pow2, turned.finite
            )
        self.quantized = Float8Tensor(sides[0], columnwise, self.dtype)

    def take_scales(self, other: _Stored, device: Any) -> None:
        """Take over scales, amax and health of another parameter, after its codes were copied here."""
        nonfinite = None if other.nonfinite is None else other.nonfinite.to(device)
        self.set_scales(
            [s.to(device, copy=True) for s in other.scale_invs], other.amax.to(device, copy=True), nonfinite
        )

    def write(self, x: torch.Tensor) -> None:
        """Quantise a matrix into the codes."""
        if cast_by_kernel(self.quantizer, x.device):
            self._write_by_kernel(x)
            return
        done: Quantized = self.quantizer.quantize(x.to(self.dtype), "both")
        row, column = done.tensor.rowwise, done.tensor.columnwise
        assert row is not None and column is not None
        fresh, scale_invs = [row.codes], [row.scale_inv]
        if len(self.codes) == 2:
            fresh.append(column.codes.t())
            scale_invs.append(column.scale_inv.t())
        for codes, new in zip(self.codes, fresh, strict=True):
            codes.copy_(new.view(torch.uint8))
        self.set_scales(scale_invs, done.amax, done.nonfinite)

    def _write_by_kernel(self, x: torch.Tensor) -> None:
        """Two reads of the matrix, no rounded copy, and codes written once, where they stay."""
        from ..kernels.param_cast import piece_amax, piece_cast  # loads Triton

        quantizer, shape, device = self.quantizer, (x.shape[0], x.shape[1]), x.device
        side = quantizer.rule.granularity.rows
        blocks = [-(-size // side) for size in shape] if side else []
        amax, nonfinite = (
            torch.zeros(blocks, device=device, dtype=torch.float32),
            torch.zeros([], device=device, dtype=torch.float32),
        )
        flat = x.to(torch.float32).contiguous().view(-1)  # [rows * cols]
        piece_amax(flat, 0, shape, self.dtype, amax, nonfinite)
        scale, scale_inv = whole_scales(quantizer, amax)
        piece_cast(flat, 0, shape, self.dtype, scale, self.codes[0].view(-1), quantizer.rule.fmt)
        quantizer.slot.arena.counts.casts += 1
        self.set_scales([scale_inv], amax.amax() if amax.numel() else torch.zeros_like(nonfinite), nonfinite)

    def tensors(self) -> Iterator[torch.Tensor]:
        """All memory of the parameter that stays: codes and scales."""
        yield from self.codes
        yield from self.scale_invs


class Fp8Parameter(CodedTensor):
    """A weight [rows, cols] of nominal dtype bfloat16 in FP8; made by ``fp8_parameter``.

    Assign it to a module as any parameter (it is an instance of torch.nn.Parameter). NaN and Inf that are written become
    codes as in every cast, and count into the health of the iteration that uses them.

    Raises TypeError and RuntimeError as CodedTensor does: a change of dtype or device in place; a collective on it.
    """

    _stored: _Stored
    is_gathered = False
    """Whether it is a view of shards for the length of a forward, and its values are elsewhere."""

    @staticmethod
    def __new__(cls, stored: _Stored) -> Fp8Parameter:
        codes = stored.codes[0]
        self = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=stored.dtype, device=codes.device)
        self._stored = stored
        return self

    def __init__(self, stored: _Stored) -> None:
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
        """Of codes (uint8 [rows, cols]) that exist, of nominal ``dtype``; not a copy, and no torch.nn.Parameter yet."""
        stored = _Stored(quantizer, dtype, [codes])
        stored.set_scales([scale_inv], amax, nonfinite)
        return cls(stored)

    # ------------------------------------------------------------------------------------------------------ what it is

    @property
    def rule(self) -> Rule:
        """How it is quantised."""
        return self._stored.quantizer.rule

    @property
    def quantizer(self) -> Quantizer:
        """What quantises it: rule, slot and backend of its GEMM site."""
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
        """Every tensor it keeps for good: codes and scales."""
        return list(self._stored.tensors())

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Its value as an ordinary tensor [rows, cols], rounded once to dtype (default: the nominal one)."""
        return self._stored.quantized.dequantize(dtype)

    @property
    def cast_amax(self) -> torch.Tensor:
        """float32 [], the largest magnitude of the values that the codes were last cast from; may be Inf."""
        return self._stored.amax

    @property
    def measured(self) -> torch.Tensor:
        """float32 [2]: the amax of what was cast last, and how many NaN and Inf it had."""
        amax, nonfinite = self._stored.amax, self._stored.nonfinite
        counted = amax.new_zeros(()) if nonfinite is None else nonfinite.to(amax.dtype)
        return torch.stack([amax.view([]), counted.view([])])

    def record(self) -> None:
        """Put the last cast's amax and health into the slot: a forward pass uses the weight now."""
        self._stored.quantizer.record(self._stored.amax, self._stored.nonfinite)

    # ------------------------------------------------------------------------------------------- high-precision start

    def get_high_precision_init_val(self) -> torch.Tensor:
        """What it was made from, in the nominal dtype. (A master that starts from the codes would be rounded twice.)

        After ``clear_high_precision_init_val`` the dequantised value.
        """
        return self.dequantize() if self._stored.initial is None else self._stored.initial

    def clear_high_precision_init_val(self) -> None:
        """Let go of it: the master holds it now."""
        self._stored.initial = None

    # ----------------------------------------------------------------------------------------------------- its master

    def own_piece(self, start: int, stop: int) -> None:
        """Set the elements, in flat order, whose master this rank's optimizer holds, and no other rank's; none if they
        are equal. Without a call each rank holds the master of all."""
        self._stored.piece = (start, stop)

    @property
    def piece(self) -> tuple[int, int] | None:
        """(start, stop) of ``own_piece``; None without a call."""
        return self._stored.piece

    @property
    def master(self) -> torch.Tensor | None:
        """What the codes are cast from, if this rank has it: the optimizer's float32 master (Megatron's ``main_param``);
        before there is one, what the parameter was made from; else None."""
        master: torch.Tensor | None = getattr(self, "main_param", None)
        return self._stored.initial if master is None else master

    # --------------------------------------------------------------------------------------------- storage, and shards

    def replace_storage(self, data: torch.Tensor) -> None:
        """Move the codes into ``data`` (uint8, as many elements), which is the parameter's memory from then on.

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
        # .data: views share one version, and a gather into another's slice of the buffer is no change of this weight.
        data = data.data.view(codes.shape)
        data.copy_(codes)
        self._stored.codes = [data]
        self._stored.view()

    def set_shard(self, index: int, offset: int, codes: torch.Tensor) -> None:
        """Write float8 codes (any shape, flat order) from element ``offset`` on into set ``index`` of codes."""
        flat = codes.reshape(-1).view(torch.uint8)
        self._stored.codes[index].view(-1)[offset : offset + flat.numel()].copy_(flat)

    def set_scales(
        self, scale_invs: list[torch.Tensor], amax: torch.Tensor, nonfinite: torch.Tensor | None
    ) -> None:
        """New scales (one tensor for each set of codes), and what the cast of the whole matrix saw."""
        self._stored.set_scales(scale_invs, amax, nonfinite)

    def refresh(self) -> None:
        """Make what derives from the codes again, after they came over the network."""
        self._stored.view()

    # --------------------------------------------------------------------------------------------------- as a tensor

    def write(self, value: torch.Tensor) -> None:
        """Round to the nominal dtype and quantise [rows, cols] into the codes."""
        self._stored.write(value)

    def alias(self) -> Fp8Parameter:
        """Another tensor over the same codes and scales."""
        return type(self)(self._stored)

    def copy_codes(self, source: torch.Tensor) -> bool:
        """Take codes and scales of an FP8 parameter that is quantised alike: a second cast would have other scales."""
        if not (isinstance(source, Fp8Parameter) and source.rule == self.rule and source.shape == self.shape):
            return False
        if source._stored is not self._stored:
            for mine, theirs in zip(self.codes, source.codes, strict=True):
                mine.copy_(theirs)
            self._stored.take_scales(source._stored, self.device)
        return True

    def move(self, device: Any) -> Fp8Parameter:
        """An FP8 parameter on another device, with the same codes, scales and attributes."""
        old = self._stored
        new = type(old)(old.quantizer, old.dtype, [codes.to(device) for codes in old.codes])
        new.initial = old.initial
        new.take_scales(old, device)
        return type(self)(new)

    def quantised_by(self, quantizer: Quantizer) -> None:
        """From now on another quantizer of the same rule casts what is written: that of the linear it was copied into."""
        assert quantizer.rule == self.rule, (quantizer.rule, self.rule)
        self._stored.quantizer = quantizer

    def __deepcopy__(self, memo: dict[int, Any]) -> Fp8Parameter:
        old = self._stored
        new = type(old)(old.quantizer, old.dtype, [codes.clone() for codes in old.codes])
        new.initial = None if old.initial is None else old.initial.clone()
        new.take_scales(old, self.device)
        copied = _as_parameter(type(self)(new), self.requires_grad)
        copied.__dict__.update({k: v for k, v in self.__dict__.items() if k not in ("_stored", "_is_param")})
        memo[id(self)] = copied
        return copied

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({tuple(self.shape)}, {self.rule}, nominal {self.dtype}, {self.device})"


class TwoWayFp8Parameter(Fp8Parameter):
    """An FP8 parameter whose directions have codes of their own (per row, 1x32): two bytes a value; travels in BF16."""


def fp8_parameter(weight: torch.Tensor, quantizer: Quantizer) -> Fp8Parameter:
    """The FP8 parameter of a weight [rows, cols]: quantised now, its value kept until the master has it.

    Attributes that were set on the weight (tensor parallelism's and others) and requires_grad are taken over.

    Raises:
        ValueError: the rule rounds stochastically: the same master would give other codes each time it is cast.
    """
    if quantizer.rule.stochastic:
        raise ValueError(
            "an FP8 parameter cannot be rounded stochastically: give the weight a rule with stochastic=False"
        )
    value = weight.detach()
    sets = len(granularities(quantizer.rule))
    codes = [torch.empty(value.shape, dtype=torch.uint8, device=value.device) for _ in range(sets)]
    stored = _Stored(quantizer, value.dtype, codes)
    stored.write(value)
    stored.initial = value.cpu()
    made = _as_parameter((Fp8Parameter if sets == 1 else TwoWayFp8Parameter)(stored), weight.requires_grad)
    made.__dict__.update(weight.__dict__)
    return made


def _as_parameter(tensor: Fp8Parameter, requires_grad: bool) -> Any:
    return torch.nn.Parameter(tensor, requires_grad)


def broadcast(parameter: Fp8Parameter, source: int, group: Any) -> None:
    """Give every rank of the group the source rank's value, its high-precision start included. Collective."""
    stored, device = parameter._stored, parameter.device
    if stored.initial is not None:
        value = stored.initial.to(device)
        dist.broadcast(value, src=source, group=group)
        stored.initial = value.cpu()
        stored.write(value)
        return
    for tensor in parameter.stored_tensors():
        wire = tensor.reshape(-1).view(torch.uint8)  # a scale of no dimension has no view as bytes
        dist.broadcast(wire, src=source, group=group)
        tensor.copy_(wire.view(tensor.dtype).view(tensor.shape))
    count = torch.zeros([], device=device, dtype=torch.float32)
    if stored.nonfinite is not None:
        count += stored.nonfinite
    for number in (stored.amax, count):
        dist.broadcast(number, src=source, group=group)
    # Products do not look for NaN where there is no count; on a GPU it is kept unread, since reading it would wait.
    stored.nonfinite = count if waiting.looking_waits(device) or count else None
    parameter.refresh()
