"""What calls of a linear that come again are bound to.

A linear decides much that is the same for each call of one kind: which casts, which sides, which products, which operand
is kept for backward. On a GPU that is fast the host's decisions take longer than the work. So a call whose kind comes
again is noted as the ordinary way runs (noted.py): which casts it made of which matrix, which products of which codes. If
those are all that it did, they become a ``Program``: casts that are bound to a shape (kernels/bound.py) and products
that were found once (backends/native/direct.py), in a row, with nothing between them. A program exists for forwards of a
kind, and for backwards of a kind that follow those.

What a program may do is decided twice. The kind has all that the ordinary way reads of its arguments: shape, strides,
dtype, alignment, device and type of each tensor, and which gradients are wanted. What can change beside them (``Held``,
and ``ready``) is looked at in each call: arenas that moved, scales that came, quantizers that were replaced, hooks of
kernels, the current device. Where anything is other, the ordinary way runs, which knows all rules; nothing here does.

Rejected: forwards with fewer checks, written by hand for the common case. Two places would have to agree on every rule.
Rejected: programs across linears; what stands between two of them is the model's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ..backends.native.bound import Bound
from ..backends.native.direct import Product
from ..quantizer import Casts
from ..state.fp8_state import Fp8State
from .kinds import Kinds
from .weight_cache import CachedWeight, WeightCache


class Multiply(NamedTuple):
    """A product of a program: places of both operands' codes, after which their scales lie, and whether it has a bias."""

    product: Product
    a: int
    b: int
    biased: bool


class Program:
    """Casts of one matrix, then products.

    Its values stand in a row, and are known by their places: codes and scale_inv of each side that is given, of each side
    that is cast, then the products.

    Args:
        state: whose counters count.
        casts: of the matrix.
        products: in order.
    """

    def __init__(self, state: Fp8State, casts: Sequence[Bound], products: Sequence[Multiply]):
        self._state = state
        self._casts = [bound.cast for bound in casts]
        self._products = tuple(products)

    def ready(self) -> int | None:
        """The stream to run on; None: it cannot run from here (BoundCast.ready)."""
        stream: int | None = None
        for cast in self._casts:
            if (stream := cast.ready()) is None:
                return None
        return stream

    def __call__(
        self, matrix: torch.Tensor, given: Iterable[torch.Tensor], bias: torch.Tensor | None, stream: int
    ) -> list[torch.Tensor]:
        """All values."""
        counts = self._state.counts
        counts.casts += len(self._casts)
        counts.fp8_gemms += len(self._products)
        values = [*given]
        pointer = matrix.data_ptr()
        for cast in self._casts:
            values += cast(pointer, stream)
        for product, a, b, biased in self._products:
            y = product(values[a], values[a + 1], values[b], values[b + 1], bias if biased else None)
            values.append(y)
        return values


class Held:
    """What programs were made by, and what can change beside a call's arguments.

    Args:
        roles: the casts that were used.
    """

    def __init__(self, *roles: Casts):
        self._roles = [(casts, casts.rowwise, casts.columnwise) for casts in roles]
        slots = {quantizer.slot for casts in roles for quantizer in casts.quantizers}
        self._slots = [(slot, slot.warm) for slot in slots]
        self._arenas = [(arena, arena.rows, arena.scale) for arena in {slot.arena for slot in slots}]

    def still(self) -> bool:
        """Whether all of it is as it was."""
        # Loops: all() of a generator would take longer than what it looks at.
        for casts, row, column in self._roles:
            if casts.rowwise is not row or casts.columnwise is not column:
                return False
        for slot, warm in self._slots:
            if slot.warm is not warm:
                return False
        for arena, rows, scale in self._arenas:
            moved = arena.rows is not rows or arena.scale is not scale
            if moved or arena.observer is not None:
                return False
        return True


class BoundForward:
    """A forward of one kind.

    Args:
        state: of the model.
        program: of the input, given the weight's sides.
        held: what it relies on.
        weights: the site's.
        weight_facts: what products were found by, of each side of the weight that there is.
        y: shape of the result.
        saved: places of what backward is to be given.
        told: what else it is told, the same for all of a kind.

    Attributes:
        backwards: the kinds of backwards that follow.
    """

    def __init__(
        self,
        state: Fp8State,
        program: Program,
        held: Held,
        weights: WeightCache,
        weight_facts: tuple[Any, ...],
        y: torch.Size,
        saved: tuple[int, ...],
        told: Any,
    ):
        self._program, self._held, self._weights, self._weight_facts = program, held, weights, weight_facts
        self._y, self._saved, self.told = y, saved, told
        self._state, self._keeps_columnwise = state, state.keeps_columnwise
        self._cast: Bound | None = None
        self.backwards = Kinds()

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, fresh: bool, record: bool
    ) -> tuple[torch.Tensor, list[torch.Tensor]] | None:
        """y, and what backward is to be given; None: the ordinary way is to be gone."""
        if not self.still() or (stream := self._program.ready()) is None:
            return None
        sides = self._sides(weight, fresh, record)
        if sides is None:
            return None
        values = self._program(x, sides, bias, stream)
        y = values[-1]
        if y.shape != self._y:
            y = torch.ops.aten._unsafe_view.default(y, self._y)
        return y, [values[place] for place in self._saved]

    def still(self) -> bool:
        """Whether what it relies on is as it was."""
        return self._state.keeps_columnwise is self._keeps_columnwise and self._held.still()

    def _sides(self, weight: torch.Tensor, fresh: bool, record: bool) -> Sequence[torch.Tensor] | None:
        """Codes and scale_inv of the weight's sides, kept or cast now; None: they are not such as the products take, or
        no cast is bound yet."""
        weights = self._weights
        kept = weights.serving(weight, fresh=fresh, record=record)
        if kept is not None:
            return kept.tensors if kept.facts == self._weight_facts else None
        if (cast := self._cast) is None:
            self._cast = cast = self._bound(weight, record)
        if cast is None or (stream := cast.cast.ready()) is None:
            return None
        counts, column = self._state.counts, weights.casts.columnwise
        counts.casts += 1
        if not self._state.keeps_weights:
            weights.forget()
            found: list[torch.Tensor] = cast.cast(weight.data_ptr(), stream)
            return found
        scale = None if column is None else column.delayed_scale()
        made: list[torch.Tensor] = cast.cast(weight.data_ptr(), stream)
        sides = partial(cast.tensor, made, weight.dtype)
        weights.keep(weight, CachedWeight(weights.version(weight), record, scale, sides, self._weight_facts))
        return made

    def _bound(self, weight: torch.Tensor, record: bool) -> Bound | None:
        """The weight's cast, if it is bound by now and makes such sides."""
        weights = self._weights
        quantizer = weights.casts.shared
        if quantizer is None:
            return None
        bound = quantizer.bound(weight, weights.direction, record=record, for_product=True)
        if bound is None or bound.row + bound.column != len(self._weight_facts):
            return None
        granularity, pow2, _, tiled = bound.facts
        return (
            bound if all(facts[-3:] == (pow2, tiled, granularity) for facts in self._weight_facts) else None
        )


class BoundBackward:
    """A backward of one kind.

    Args:
        program: of grad_output, given what forward has saved.
        held: what it relies on.
        dx, dw: places of the products that are these, or None.
        added: dw is added to the weight's main_grad.
        shape: of dx.
    """

    def __init__(
        self, program: Program, held: Held, dx: int | None, dw: int | None, added: bool, shape: torch.Size
    ):
        self._program, self._held, self.dx, self.dw, self.added = program, held, dx, dw, added
        self._shape = shape

    def __call__(
        self, dy: torch.Tensor, saved: Iterable[torch.Tensor]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None] | None:
        """dx, and wgrad's product; None: the ordinary way is to be gone."""
        if not self._held.still() or (stream := self._program.ready()) is None:
            return None
        values = self._program(dy, saved, None, stream)
        dx = None if self.dx is None else values[self.dx]
        if dx is not None and dx.shape != self._shape:
            dx = dx.view(self._shape)
        return dx, None if self.dw is None else values[self.dw]

    def still(self) -> bool:
        """Whether what it relies on is as it was."""
        return self._held.still()
