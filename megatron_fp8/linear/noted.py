"""Records one call of a linear: its casts and its products.

``passes.py`` runs a ``NotedSite`` in place of the site: the same quantizers, the same products, written down. What was
written down becomes a program (bound.py) if it is all that there was: each product is of sides that were given or cast,
and each result is a product. What passes.py does beside that, a copy, a conversion, a cast of another matrix,
communication, leaves a result that no noted product gave, or a note that says so; then the kind stays with the ordinary
way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..backends.base import AmaxReduction, Region
from ..backends.native import backend as native
from ..backends.native.direct import facts_of
from ..numerics.rule import Direction
from ..quantizer import Casts, Quantizer
from ..tensor import Float8Tensor, Operand, QuantizedSide
from .bound import BoundBackward, BoundForward, Held, Multiply, Program
from .passes import Backward, Forward
from .site import GemmSite


class _Cast(NamedTuple):
    quantizer: Quantizer
    x: torch.Tensor
    direction: Direction
    record: bool
    for_product: bool
    done: Float8Tensor


class _Product(NamedTuple):
    a: QuantizedSide
    b: QuantizedSide
    out_dtype: torch.dtype
    bias: torch.Tensor | None
    fast: bool
    y: torch.Tensor


class Notes:
    """Of one call.

    Attributes:
        casts, products: in order.
        added: the product that was added to a main_grad.
        whole: nothing happened that notes have no word for.
    """

    def __init__(self) -> None:
        self.casts: list[_Cast] = []
        self.products: list[_Product] = []
        self.added: torch.Tensor | None = None
        self.whole = True

    def program(
        self, site: GemmSite, matrix: torch.Tensor, given: Sequence[QuantizedSide]
    ) -> tuple[Program, dict[int, int]] | None:
        """What does the same to another matrix, and the places of its values by id: of sides, and of products' results.

        None: there was more, or a cast is not bound yet, or a product is not one call.
        """
        if not self.whole or not self.casts:
            return None
        sides, casts = list(given), []
        for cast in self.casts:
            if cast.x.data_ptr() != matrix.data_ptr() or cast.x.numel() != matrix.numel():
                return None
            bound = cast.quantizer.bound(
                cast.x, cast.direction, record=cast.record, for_product=cast.for_product
            )
            if bound is None:
                return None
            casts.append(bound)
            sides += [side for side in cast.done.sides if side is not None]
        places = {id(side): 2 * number for number, side in enumerate(sides)}
        products = []
        for number, (a, b, out_dtype, bias, fast, y) in enumerate(self.products):
            product = native.product_of(a, b, out_dtype, bias, fast)
            if product is None or id(a) not in places or id(b) not in places:
                return None
            products.append(Multiply(product, places[id(a)], places[id(b)], bias is not None))
            places[id(y)] = 2 * len(sides) + number
        return Program(site.state, casts, products), places


class NotedSite(GemmSite):
    """A site, whose casts of inputs and gradients and whose products are noted.

    Args:
        site: which does the work. Its weight is cast, and kept, as ever.
    """

    def __init__(self, site: GemmSite):
        notes = Notes()
        noted: dict[Quantizer, _NotedQuantizer] = {}

        def of(quantizer: Quantizer | None) -> Quantizer | None:
            if quantizer is None:
                return None
            return noted.setdefault(quantizer, _NotedQuantizer(quantizer, notes))

        casts = {role: Casts(of(c.rowwise), of(c.columnwise)) for role, c in site.casts.items()}
        super().__init__(site.plan, site.state, None, seed=site.seed, stream=site.stream, casts=casts)
        self.weights, self.gradients, self.notes = site.weights, site.gradients, site.notes
        self.noted, self._site = notes, site

    def note_forward(self) -> None:
        """A forward came to the site."""
        self._site.note_forward()

    def multiply_codes(
        self,
        a: QuantizedSide,
        b: QuantizedSide,
        out_dtype: torch.dtype,
        bias: torch.Tensor | None,
        *,
        fast: bool,
    ) -> torch.Tensor:
        """The site's, noted."""
        y = super().multiply_codes(a, b, out_dtype, bias, fast=fast)
        self.noted.products.append(_Product(a, b, out_dtype, bias, fast, y))
        return y

    def accumulate(
        self, gemm: str, a: Operand, b: Operand, into: torch.Tensor, *, record: bool = True
    ) -> None:
        """The site's, noted: a product that was added. One that adds as it multiplies is no product of a program's."""
        before = len(self.noted.products)
        super().accumulate(gemm, a, b, into, record=record)
        if len(self.noted.products) == before:
            self.noted.whole = False
        else:
            self.noted.added = self.noted.products[-1].y

    def bind_forward(
        self, x: torch.Tensor, done: Forward, saved: Sequence[QuantizedSide], told: Any
    ) -> BoundForward | None:
        """What does to other inputs what was done to x; None: the notes are not all that happened, or not yet bound.

        Args:
            saved: what backward is to be given.
            told: what else it is told.
        """
        weight = [side for side in (done.weight.rowwise, done.weight.columnwise) if side is not None]
        given = [side for side in weight if isinstance(side, QuantizedSide)]
        found = self.noted.program(self._site, x, given)
        if found is None or len(given) != len(weight) or len(self.noted.products) != 1:
            return None
        program, places = found
        y = self.noted.products[0].y
        same = (y.data_ptr(), y.dtype, y.numel()) == (done.y.data_ptr(), done.y.dtype, done.y.numel())
        if not same or any(id(side) not in places for side in saved):
            return None
        casts = self._site.casts
        return BoundForward(
            self.state,
            program,
            Held(casts["input"], casts["weight"]),
            self.weights,
            tuple(facts_of(side) for side in given),
            done.y.shape,
            tuple(place for side in saved for place in (places[id(side)], places[id(side)] + 1)),
            told,
        )

    def bind_backward(
        self, dy: torch.Tensor, saved: Sequence[QuantizedSide], done: Backward, shape: torch.Size
    ) -> BoundBackward | None:
        """What does to other gradients what was done to dy; None: the notes are not all that happened, or not yet bound.

        Args:
            saved: what it was given.
            shape: of the input's gradient.
        """
        found = self.noted.program(self._site, dy, saved)
        if found is None:
            return None
        program, places = found
        added = self.noted.added
        dx, dw = done.dx, done.dw if added is None else added
        if any(result is not None and id(result) not in places for result in (dx, dw)):
            return None
        return BoundBackward(
            program,
            Held(self._site.casts["grad_output"]),
            None if dx is None else places[id(dx)],
            None if dw is None else places[id(dw)],
            added is not None,
            shape,
        )


class _NotedQuantizer(Quantizer):
    """A quantizer whose casts are noted.

    Args:
        quantizer: which does the work.
        notes: where they are written down.
    """

    def __init__(self, quantizer: Quantizer, notes: Notes):
        super().__init__(quantizer.rule, quantizer.slot, quantizer.backend)
        self._quantizer, self._notes = quantizer, notes

    def __call__(
        self,
        x: torch.Tensor,
        direction: Direction,
        *,
        record: bool,
        reduce_amax: AmaxReduction | None = None,
        region: Region | None = None,
        for_product: bool = False,
    ) -> Float8Tensor:
        """The quantizer's, noted."""
        options: dict[str, Any] = {"reduce_amax": reduce_amax, "region": region}
        done = self._quantizer(x, direction, record=record, for_product=for_product, **options)
        if reduce_amax is not None or region is not None:
            self._notes.whole = False
        self._notes.casts.append(_Cast(self._quantizer, x, direction, record, for_product, done))
        return done

    def observe(self, x: torch.Tensor) -> None:
        """The quantizer's; no program does it."""
        self._notes.whole = False
        self._quantizer.observe(x)
