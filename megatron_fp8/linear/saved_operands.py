"""Operands saved for backward, eager and compiled; a guard against second derivatives.

Hooks on saved tensors (torch.autograd.graph.saved_tensors_hooks: offloading, recomputation, compression, a user's own)
run between forward and backward. Autograd does not check what they return. Codes may return with other strides. With
another shape C would read out of bounds; with another dtype it would read wrong values. So shapes, dtypes and devices
are checked.

A compiler has to know shape, strides and dtype of everything that an operator will return, before there is a tensor. So
each backend declares the saved input's memory layout in advance, as a string constant of the graph: the emulated one
writes codes in the input's order and returns a transposed view, the native one writes them as tensor cores read them.
The tokens of each expert are unknown too, so all experts' codes are packed into one tensor and their scales into
another. Each expert starts a new block, so the buffers have one spare block per expert. The unused end is never read.
Rejected: a tensor for each expert. Its size would be an unbacked symbol, and each graph would begin with a host sync to
read all sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch._C._functorch import is_batchedtensor, is_legacy_batchedtensor

from ..numerics import nvfp4
from ..numerics.rule import Granularity, Rule
from ..params.fp8_parameter import Fp8Parameter
from ..tensor import Operand, QuantizedSide
from .weight_cache import Stamp

Facts = tuple[torch.Size, torch.dtype, torch.device] | None
"""Shape, dtype and device that a restored tensor must have; None for None."""


class StampedWeight(NamedTuple):
    """A weight [N, K] with its forward's stamp, from which ``columnwise_of`` makes dgrad's operand in backward."""

    weight: torch.Tensor
    stamp: Stamp


Saved = Operand | StampedWeight | None


def save(ctx: Any, operands: Sequence[Saved]) -> None:
    """Saves the operands' tensors by ``ctx.save_for_backward``; ``restore`` checks them and returns the operands."""
    tensors: list[torch.Tensor | None] = []
    ctx.saved_as = []  # each operand's attributes other than tensors
    for operand in operands:
        if isinstance(operand, QuantizedSide):
            side = operand
            tensors += side.codes, side.scale_inv, side.tensor_amax
            names = "granularity", "pow2", "finite", "tiled", "padding", "hadamard"
            ctx.saved_as.append({name: getattr(side, name) for name in names})
        elif isinstance(operand, StampedWeight) and isinstance(operand.weight, Fp8Parameter):
            ctx.saved_as.append(operand)  # a hook would see the dequantized weight
        elif isinstance(operand, StampedWeight):
            tensors += operand.weight, operand.stamp.scale
            ctx.saved_as.append(operand.stamp._replace(scale=None))
        else:
            tensors.append(operand)
            ctx.saved_as.append(None)
    ctx.saved_facts = [None if x is None else (x.shape, x.dtype, x.device) for x in tensors]
    ctx.save_for_backward(*tensors)


def restore(ctx: Any, name: str) -> list[Any]:
    """Returns the operands of ``save``. Raises ValueError, which names the layer, unless each tensor has the saved shape,
    dtype and device. Values and strides are not checked."""
    tensors = ctx.saved_tensors
    for x, wanted in zip(tensors, ctx.saved_facts, strict=True):
        found = None if x is None else (x.shape, x.dtype, x.device)
        if found != wanted:
            raise ValueError(
                f"{name}: {_describe(wanted)} was saved for backward, and {_describe(found)} came back: an unpack hook"
                " of torch.autograd.graph.saved_tensors_hooks has to give back the same shape and dtype on the same"
                " device"
            )
    operands: list[Saved] = []
    following = iter(tensors)
    for saved_as in ctx.saved_as:
        if saved_as is None:
            operands.append(next(following))
        elif isinstance(saved_as, StampedWeight):
            operands.append(saved_as)
        elif isinstance(saved_as, Stamp):
            weight, scale = next(following), next(following)
            operands.append(StampedWeight(weight, saved_as._replace(scale=scale)))
        else:
            codes, scale_inv, amax = next(following), next(following), next(following)
            operands.append(QuantizedSide(codes, scale_inv, tensor_amax=amax, **saved_as))
    return operands


def _describe(facts: Facts) -> str:
    if facts is None:
        return "nothing"
    shape, dtype, device = facts
    return f"{str(dtype).removeprefix('torch.')} {list(shape)} on {device}"


# ------------------------------------------------------------------------------------------------ second derivatives

_NO_SECOND = (
    "no second derivative: gradients of FP8 layers, and of what stores FP8, have none. For a loss that contains gradients"
    " (create_graph=True) switch FP8 off around the forward"
)
_NO_BATCHES = (
    "gradients of FP8 layers cannot be batched (is_grads_batched, jacobian with vectorize=True): call backward for"
    " each"
)


def first_derivative_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates an autograd function's backward, inside staticmethod: differentiating it raises RuntimeError, and so do
    batched gradients.

    torch's ``once_differentiable`` is not enough: it raises only if the incoming gradient itself requires a gradient. The
    gradient of a sum is a constant, but backward multiplies it by weights: a gradient penalty would silently lack that
    part. A second derivative by some inputs (``hessian``) would be zeros, since its graph misses the error.
    """

    @functools.wraps(backward)
    def guarded(ctx: Any, *grads: torch.Tensor) -> Any:
        if torch.compiler.is_compiling():
            return backward(ctx, *grads)
        for grad in grads:
            if is_batchedtensor(grad) or is_legacy_batchedtensor(grad):
                raise RuntimeError(_NO_BATCHES)
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        with torch.no_grad():
            found = backward(ctx, *grads)
        outputs = [
            None if x is None else x.detach() for x in (found if isinstance(found, tuple) else (found,))
        ]
        sources = [*_leaves_behind(ctx), *(grad for grad in grads if grad.requires_grad)]
        refuse: Any = torch._C._functions.DelayedError(_NO_SECOND.encode(), len(outputs) + len(sources))
        return refuse(*outputs, *sources)[: len(outputs)]

    return guarded


def _leaves_behind(node: Any) -> list[torch.Tensor]:
    """The leaf tensors, of any shape, that a function's inputs depend on."""
    leaves, met, ahead = [], {node}, [node]
    while ahead:
        for function, _ in ahead.pop().next_functions:
            if function is None or function in met:
                continue
            met.add(function)
            ahead.append(function)
            if hasattr(function, "variable"):  # what accumulates a leaf's gradient
                leaves.append(function.variable)
    return leaves


# --------------------------------------------------------------------------------------------- layouts in compiled code


class Layout(NamedTuple):
    """Shape, strides and dtype of a tensor that does not exist yet."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def extent(self) -> int:
        """Number of elements of memory that it spans."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * step for size, step in zip(self.shape, self.strides, strict=True))

    def empty(self, device: torch.device) -> torch.Tensor:
        """An uninitialised tensor of this layout."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)

    def convert(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself if it has this layout, else a copy with it."""
        assert tensor.shape == self.shape, (tensor.shape, self.shape)
        as_it_should = all(
            size == 1 or a == b for size, a, b in zip(self.shape, tensor.stride(), self.strides, strict=True)
        )
        return tensor if as_it_should else self.empty(tensor.device).copy_(tensor)


@dataclass(frozen=True)
class SideLayout:
    """Layouts of codes [K, tokens] and scales, for any K and number of tokens.

    Attributes:
        turned: codes and scales are transposed views of row-major memory.
        hadamard: as of QuantizedSide.
    """

    granularity: Granularity
    scale: str
    fmt: torch.dtype
    turned: bool
    hadamard: bool = False

    def __str__(self) -> str:
        name = str(self.fmt).removeprefix("torch.")
        transform = " hadamard" if self.hadamard else ""  # graphs cached by earlier versions have five words
        return f"{self.granularity.rows} {self.granularity.cols} {self.scale} {name} {int(self.turned)}{transform}"

    @staticmethod
    @functools.lru_cache(maxsize=256)
    def parse(text: str) -> SideLayout:
        """Parses its string."""
        rows, cols, scale, fmt, turned, *transform = text.split(" ")
        granularity = Granularity(int(rows), int(cols))
        return SideLayout(granularity, scale, getattr(torch, fmt), turned == "1", bool(transform))

    @staticmethod
    def of(rule: Rule, turned: bool) -> SideLayout:
        """The layout of a rule's sides."""
        return SideLayout(rule.granularity, rule.scale, rule.fmt.dtype, turned, rule.hadamard)

    @property
    def pads_scales(self) -> bool:
        """Whether rows of scales are padded to a multiple of four blocks, which torch's scaled product needs."""
        square = self.granularity.rows == self.granularity.cols > 0
        return square and self.scale != "e8m0" and not self.turned

    @property
    def packs(self) -> bool:
        """Whether two codes share a byte, in whole blocks (NVFP4)."""
        return self.scale == "e4m3"

    def tokens_of(self, codes: torch.Tensor) -> int:
        """How many tokens uint8 codes have room for."""
        return codes.shape[1] * (2 if self.packs else 1)

    def codes(self, rows: int, tokens: int) -> Layout:
        """[rows, tokens]; packed [rows, tokens in whole blocks / 2]."""
        if self.packs:
            tokens = -(-tokens // nvfp4.BLOCK) * (nvfp4.BLOCK // 2)
        return Layout((rows, tokens), (1, rows) if self.turned else (tokens, 1), torch.uint8)

    def scales(self, rows: int, tokens: int) -> Layout:
        """scale_inv, E8M0 as bytes; NVFP4's as one row of bytes, followed by the tensor's amax."""
        height, width = self.granularity.rows, self.granularity.cols
        if self.granularity.is_tensor:
            return Layout((), (), torch.float32)
        if width == 0:
            return Layout((rows, 1), (1, 1), torch.float32)
        down, across = -(-rows // height), -(-tokens // width)
        if self.packs:
            return Layout((down * across + _AMAX_BYTES,), (1,), torch.uint8)
        if self.scale == "e8m0":
            return Layout((down, across), (1, down) if self.turned else (across, 1), torch.uint8)
        if self.pads_scales:
            return Layout((down, across), (-(-across // 4) * 4, 1), torch.float32)
        return Layout((down, across), (1, down), torch.float32)

    @staticmethod
    def parts(side: QuantizedSide) -> tuple[torch.Tensor, torch.Tensor]:
        """(codes, scales) of a side in this layout; 8-bit floats as bytes."""
        side = side.plain()
        scales = side.scale_inv
        if side.tensor_amax is not None:
            scales = torch.cat(
                [scales.view(torch.uint8).flatten(), side.tensor_amax.view(1).view(torch.uint8)]
            )
        return side.codes.view(torch.uint8), (
            scales.view(torch.uint8) if scales.dtype == torch.float8_e8m0fnu else scales
        )

    def to_side(self, codes: torch.Tensor, scales: torch.Tensor) -> QuantizedSide:
        """Rebuilds the side, with the default ``finite``. Raises ValueError unless there is a scale for each block."""
        rows = codes.shape[0]
        wanted = self.scales(rows, self.tokens_of(codes))
        if (scales.shape, scales.dtype, codes.dtype) != (wanted.shape, wanted.dtype, torch.uint8):
            raise ValueError(
                f"codes {codes.dtype} {list(codes.shape)} and scales {scales.dtype} {list(scales.shape)} came back from"
                f" a hook for saved tensors, where torch.uint8 and {wanted.dtype} {list(wanted.shape)} were saved"
            )
        if self.packs:
            amax = scales[-_AMAX_BYTES:].clone().view(torch.float32).view([])
            of_blocks = scales[:-_AMAX_BYTES].view(rows, -1).view(torch.float8_e4m3fn)
            facts: Any = {"pow2": False, "finite": True, "tensor_amax": amax, "hadamard": self.hadamard}
            return QuantizedSide(codes.view(self.fmt), of_blocks, self.granularity, **facts)
        scales = scales.view(torch.float8_e8m0fnu) if self.scale == "e8m0" else scales
        return QuantizedSide(codes.view(self.fmt), scales, self.granularity, self.scale != "fp32")


_AMAX_BYTES = 4  # of NVFP4's amax, float32

_ALIGNED = 16
"""Alignment, in elements, of each expert's codes and scales if kernels read codes in row order."""


class SavedInput(NamedTuple):
    """The input's codes, uint8, and scales, float32 or E8M0 as uint8; experts' are one-dimensional."""

    codes: torch.Tensor
    scales: torch.Tensor


class _Place(NamedTuple):
    """Position and layout of one expert's part of a one-dimensional tensor."""

    first: int
    layout: Layout

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """A view of that part."""
        # as_strided counts from the beginning of the storage; `whole` may start later.
        return whole.as_strided(self.layout.shape, self.layout.strides, whole.storage_offset() + self.first)


class InputLayout(NamedTuple):
    """Layout of the columnwise sides of a linear's input, or of each expert's tokens: codes [features, tokens].

    Attributes:
        of: the layout of one side.
        features: number of features of a token.
    """

    of: SideLayout
    features: int

    def empty(self, tokens: int, sites: int, device: torch.device) -> SavedInput:
        """Uninitialised tensors for this many tokens of a linear, or of ``sites`` experts with any numbers of tokens.
        Unused scales are 0.

        Sizes are arithmetic of ``tokens``, which is a symbol while a compiler traces.
        """
        if sites == 1:
            size = self.features, tokens
            return SavedInput(self.of.codes(*size).empty(device), self.of.scales(*size).empty(device))
        height, width = self.of.granularity.rows, self.of.granularity.cols
        gaps = 0 if self.of.turned else sites * (_ALIGNED - 1)
        codes = tokens * self.features
        if self.of.packs:
            codes = (tokens + sites * (nvfp4.BLOCK - 1)) // 2 * self.features
        if self.of.granularity.is_tensor:
            scales = sites
        elif width == 0:
            scales = sites * self.features
        else:
            across = (tokens + sites * (width - 1)) // width
            scales = -(-self.features // height) * (across + (3 * sites if self.of.pads_scales else 0))
            scales += _AMAX_BYTES * sites if self.of.packs else 0
        return SavedInput(
            torch.empty(codes + gaps, dtype=torch.uint8, device=device),
            torch.zeros(scales + gaps, dtype=self.of.scales(1, 1).dtype, device=device),
        )

    def pack(
        self, sides: Sequence[Operand | None], tokens: Sequence[int], device: torch.device
    ) -> SavedInput:
        """Packs the sides; experts' are copied. Ignores the side of an expert without tokens."""
        if len(sides) == 1:
            assert isinstance(sides[0], QuantizedSide)
            codes, scales = self.of.parts(sides[0])
            size = codes.shape[0], self.of.tokens_of(codes)
            return SavedInput(self.of.codes(*size).convert(codes), self.of.scales(*size).convert(scales))
        packed = self.empty(sum(tokens), len(tokens), device)
        for side, count, places in zip(sides, tokens, self._places(tokens), strict=True):
            if count:
                assert isinstance(side, QuantizedSide), "an expert's tokens have codes"
                for part, place, whole in zip(self.of.parts(side), places, packed, strict=True):
                    place.of(whole).copy_(part)
        return packed

    def unpack(self, packed: SavedInput, tokens: Sequence[int]) -> list[Operand | None]:
        """Returns the sides; experts' are views, and None without tokens.

        Raises ValueError unless shapes and dtypes are those of ``empty``.
        """
        if len(tokens) == 1:
            return [self.of.to_side(*packed)]
        wanted = self.empty(sum(tokens), len(tokens), torch.device("meta"))
        for found, one in zip(packed, wanted, strict=True):
            if (found.shape, found.dtype) != (one.shape, one.dtype):
                raise ValueError(
                    f"{found.dtype} {list(found.shape)} came back from a hook for saved tensors, where {one.dtype}"
                    f" {list(one.shape)} was saved"
                )
        whole = SavedInput(packed.codes.contiguous(), packed.scales.contiguous())
        return [
            self.of.to_side(codes.of(whole.codes), scales.of(whole.scales)) if count else None
            for count, (codes, scales) in zip(tokens, self._places(tokens), strict=True)
        ]

    def _places(self, tokens: Sequence[int]) -> Iterator[tuple[_Place, _Place]]:
        """Places of each expert's codes and scales. One without tokens has room for scales too, unless scales are per
        block."""
        first = [0, 0]
        for count in tokens:
            layouts = self.of.codes(self.features, count), self.of.scales(self.features, count)
            codes, scales = (_Place(*each) for each in zip(first, layouts, strict=True))
            yield codes, scales
            ends = [place.first + place.layout.extent for place in (codes, scales)]
            first = ends if self.of.turned else [-(-end // _ALIGNED) * _ALIGNED for end in ends]
