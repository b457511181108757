"""Measures one FP8 state's tensors in some iterations, and sums over ranks.

A piece of a tensor is measured where the observer is told of it, inside forward or backward: what is kept are two short
vectors a tensor (statistics.py), and no tensor. In iterations that are not measured it returns at once.

What is measured, and of which events it is made:

    input, grad_output   casts; where no GEMM of the site quantises them, the operands of its products
    weight               once an iteration: its cast, its operand, or the masters of one that lives as FP8 (stored.py)
    output, dgrad, wgrad the products, on this rank alone: the terms of a sum over tensor-parallel ranks are 'partial'
    all of them          of a site in high precision: its operands, its result, and what autograd shows (autograd.py)

A tensor that is cast twice, with two rules for two GEMMs, has a second row, 'input.wgrad', for the second codes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..kernels.codes import in_memory
from ..linear.site import GemmSite
from ..params.fp8_parameter import Fp8Parameter
from ..plan.operands import READERS
from ..state.fp8_state import Fp8State
from ..state.observer import SeenCast, SeenLinear, SeenProduct
from ..tensor import Float8Tensor, Operand
from .autograd import show_gradients
from .histories import Histories
from .names import TENSORS
from .parts import Agreed
from .settings import TelemetrySettings
from .statistics import Layout, Measured, finish, measure
from .stored import held
from .unseen import Unseen
from .what_if import what_if

Row = tuple[str, str]
"""(site, tensor)."""
Records = list[dict[str, Any]]
PRODUCTS = {"fprop": "output", "dgrad": "dgrad", "wgrad": "wgrad"}
_PARTIAL = {("row", "output"), ("column", "dgrad")}


class _Asked(NamedTuple):
    """What is measured of a row, and where its sums and extremes stand among those of all rows. Behind its extremes is a
    place for whether it is partial."""

    layout: Layout
    sums: slice
    extremes: slice


@dataclass(frozen=True)
class _Table:
    """All rows of an iteration, in an order that all ranks have; none if it is not measured."""

    rows: Mapping[Row, _Asked]
    sums: int
    extremes: int

    def empty(self, device: torch.device) -> Measured:
        """What was measured of nothing, of all rows."""
        return Measured(
            torch.zeros(self.sums, dtype=torch.float64, device=device),
            torch.full((self.extremes,), -math.inf, dtype=torch.float64, device=device),
        )


class Collector:
    """Watches one state.

    Args:
        state: the model's.
        sites: name -> what gives this rank's site, as it is now.
        agreed: what ranks have told each other of the sites.
        settings: what to measure, when.
        group: the ranks whose figures are added up; None: this process alone.
        deliver: told of a measured iteration's number (from 1) and its records, at its end, on every rank.
    """

    def __init__(
        self,
        state: Fp8State,
        sites: Mapping[str, Callable[[], GemmSite]],
        agreed: Agreed,
        settings: TelemetrySettings,
        group: Any,
        deliver: Callable[[int, Records], None],
    ):
        self.state, self.settings, self.agreed = state, settings, agreed
        self._sites, self._group, self._deliver = sites, group, deliver
        self._tables: dict[tuple[bool, ...], _Table] = {}
        self._iteration, self._table = -1, _Table({}, 0, 0)
        self._found: Measured | None = None  # of all rows
        self._weights: set[Row] = set()  # that were measured
        self._partial: set[Row] = set()
        self._had_dgrad: set[str] = set()
        self._fused: set[str] = set()  # sites whose wgrad went into main_grad at once
        self._unseen = Unseen()
        self._histories = Histories(state) if "fp8_delayed_scaling" in settings.what_if else None

    # ------------------------------------------------------------------------------------------------------ what passes

    def wants(self, iteration: int) -> bool:
        """Whether anything is measured in this iteration, counted from 0."""
        if iteration != self._iteration:
            self._iteration, self._table = iteration, self._table_of(iteration + 1)
            self._clear()
        return bool(self._table.rows)

    def cast(self, seen: SeenCast) -> None:
        """A piece of an operand, and its codes."""
        if seen.recorded:
            self._operand(_row_of(seen.slot), lambda: seen.x, {"": seen.done.tensor}, shard=seen.shard)

    def stored(self, slot: str, weight: torch.Tensor) -> None:
        """A weight that lives as FP8: the values that it was cast from."""
        row = _row_of(slot)
        if row not in self._table.rows or row in self._weights:
            return
        assert isinstance(weight, Fp8Parameter)
        self._weights.add(row)
        wanted = self._table.rows[row].layout.directions.get("", "rowwise")
        values, codes, whole = held(weight, columnwise=wanted != "rowwise")
        if values.numel() and (not whole or self.agreed.mine[row[0]].weight):
            self._measure(row, values, {} if codes is None else {"": codes})

    def product(self, seen: SeenProduct) -> None:
        """A product, and those of its operands that no GEMM of the site quantises."""
        if not seen.recorded:
            return
        site, tensor = _site_of(seen.site), PRODUCTS[seen.gemm]
        counts = self.agreed.mine.get(site)
        if counts is not None and (counts.kind, tensor) in _PARTIAL:
            self._partial.add((site, tensor))
        if seen.gemm == "fprop":
            self._plain(site, "input", seen.a)
            self._plain(site, "weight", seen.b)
        elif seen.gemm == "dgrad":
            self._had_dgrad.add(site)
            self._plain(site, "grad_output", seen.a)
        elif site not in self._had_dgrad:  # else dgrad's operand was the same gradient
            self._plain(site, "grad_output", seen.a, turned=True)
        self._measure((site, tensor), seen.y)

    def high_precision(self, seen: SeenLinear) -> None:
        """A site that runs in the model's own dtype: what it reads and gives, and, when its backward comes, the rest."""
        site, x, weight, y = _site_of(seen.site), seen.x, seen.weight, seen.y
        counts = self.agreed.mine.get(site)
        if counts is None:
            return
        if seen.recorded:
            self._operand((site, "input"), lambda: x, shard=seen.shard)
            self._operand((site, "weight"), lambda: weight)
            if (counts.kind, "output") in _PARTIAL:
                self._partial.add((site, "output"))
            self._measure((site, "output"), y)
        if y.requires_grad:
            iteration = self.state.iteration
            y.register_hook(partial(self._late, iteration, (site, "grad_output"), True))
            # Megatron-Core has summed a column's dgrad over ranks here, unless each of them keeps its shard.
            counted = counts.kind != "column" or seen.shard or counts.tokens
            dgrad = partial(self._late, iteration, (site, "dgrad"), counted)
            wgrad = partial(self._wgrad, iteration, (site, "wgrad"), weight)
            show_gradients(y, [(x, dgrad), (weight, wgrad)])

    def ended(self, iteration: int) -> None:
        """Add up all ranks' figures, and deliver the records. Collective over the group in measured iterations."""
        if self._histories is not None:
            self._histories.update()
        if self.wants(iteration):
            records = self._records(iteration + 1)
            # The first rank knows what all have measured; what was fused each knows of its own.
            asked = self._table.rows if self.agreed.rank == 0 else ()
            self._unseen.look(iteration + 1, asked, records, self._fused)
            self._deliver(iteration + 1, records)
        self._clear()

    # ------------------------------------------------------------------------------------------------------- what is kept

    def _clear(self) -> None:
        self._found, self._weights, self._partial, self._had_dgrad = None, set(), set(), set()

    def _table_of(self, iteration: int) -> _Table:
        """What is measured of this iteration, counted from 1."""
        due = tuple(selection.measures(iteration) for selection in self.settings.selections)
        if due not in self._tables:
            rows: dict[Row, _Asked] = {}
            sums = extremes = 0
            for site in self.agreed.sites if any(due) else ():
                for tensor in ROWS:
                    names = self.settings.names(site, tensor.partition(".")[0], iteration)
                    if not names:
                        continue
                    layout = Layout.of(names)
                    first = sums, extremes
                    sums, extremes = sums + len(layout.sums), extremes + len(layout.extremes)
                    rows[site, tensor] = _Asked(layout, slice(first[0], sums), slice(first[1], extremes))
                    extremes += 1
            self._tables[due] = _Table(rows, sums, extremes)
        return self._tables[due]

    def _plain(self, site: str, role: str, operand: Operand, *, turned: bool = False) -> None:
        """An operand of a product, where no GEMM of its site quantises it."""
        known = self._sites.get(site)
        if isinstance(operand, torch.Tensor) and known is not None and not known().casts[role].quantizers:
            self._operand((site, role), lambda: operand.t() if turned else operand)

    def _operand(
        self,
        row: Row,
        x: Callable[[], torch.Tensor],
        codes: Mapping[str, Float8Tensor] | None = None,
        *,
        shard: bool = False,
    ) -> None:
        """A piece of 'input', 'weight' or 'grad_output', if this rank counts it; a weight once an iteration."""
        counts = self.agreed.mine.get(row[0])
        role = row[1].partition(".")[0]
        if row not in self._table.rows or counts is None or row in self._weights:
            return
        if counts.counts(role, shard=shard):
            self._weights |= {row} if role == "weight" else set()
            self._measure(row, x(), codes)

    def _measure(self, row: Row, x: torch.Tensor, codes: Mapping[str, Float8Tensor] | None = None) -> None:
        """Add the figures of a piece to those of its row."""
        asked = self._table.rows.get(row)
        if asked is None or row[0] not in self.agreed.mine:
            return
        with torch.no_grad():
            x = in_memory(x)
            x = x.reshape(-1, x.shape[-1])
            found = measure(x, asked.layout, {**(codes or {}), **self._what_ifs(row, x, codes, asked.layout)})
            all_rows = self._all_rows()
            all_rows.sums[asked.sums] += found.sums.to(self.state.device)
            extremes = all_rows.extremes[asked.extremes]
            torch.maximum(extremes, found.extremes.to(self.state.device), out=extremes)

    def _all_rows(self) -> Measured:
        """What was measured of all rows so far."""
        if self._found is None:
            self._found = self._table.empty(self.state.device)
        return self._found

    def _what_ifs(
        self, row: Row, x: torch.Tensor, codes: Mapping[str, Float8Tensor] | None, layout: Layout
    ) -> dict[str, Float8Tensor]:
        """The codes that other recipes would have made of a piece."""
        role = row[1].partition(".")[0]
        own = (codes or {}).get("")
        fmt = None if own is None else next(side.fmt for side in own.sides if side is not None)
        found = {}
        for prefix, direction in layout.directions.items():
            if not prefix or role not in READERS:
                continue
            scale = None
            if prefix == "fp8_delayed_scaling":
                scale = None if self._histories is None else self._histories.scale(".".join(row))
            found[prefix] = what_if(x, prefix, role, fmt=fmt, direction=direction, scale=scale)
        return found

    def _late(self, iteration: int, row: Row, counted: bool, gradient: torch.Tensor) -> None:
        """A gradient that autograd shows, of a forward in this iteration."""
        if iteration != self.state.iteration:
            return
        if row[1] == "grad_output":
            self._operand(row, lambda: gradient)
        elif counted:
            self._measure(row, gradient)

    def _wgrad(self, iteration: int, row: Row, weight: torch.Tensor, gradient: torch.Tensor) -> None:
        """As ``_late``, unless the product went into main_grad at once: then the gradient is a dummy."""
        if not getattr(weight, "grad_added_to_main_grad", False):
            self._late(iteration, row, True, gradient)
        elif row in self._table.rows:
            self._fused.add(row[0])

    # --------------------------------------------------------------------------------------------------------- the end

    def _records(self, iteration: int) -> Records:
        """The records of a measured iteration, of all ranks' sites: one SUM and one MAX over the group."""
        all_rows = self._all_rows()
        for row in self._partial & self._table.rows.keys():
            all_rows.extremes[self._table.rows[row].extremes.stop] = 1
        if self._group is not None and dist.get_world_size(self._group) > 1:
            dist.all_reduce(all_rows.sums, op=dist.ReduceOp.SUM, group=self._group)
            dist.all_reduce(all_rows.extremes, op=dist.ReduceOp.MAX, group=self._group)
        total, most = all_rows.sums.tolist(), all_rows.extremes.tolist()
        records: Records = []
        for (site, tensor), (layout, sums, extremes) in self._table.rows.items():
            of_row = total[sums]
            if of_row[0]:  # how many elements there are
                record: dict[str, Any] = {"iteration": iteration, "site": site, "tensor": tensor}
                if most[extremes.stop] > 0:
                    record["partial"] = True
                records.append(record | finish(layout, of_row, most[extremes]))
        return records


ROWS = (*TENSORS, *(f"{role}.{readers[1]}" for role, readers in READERS.items()))
"""The tensors of a site, and the second codes of those that are cast twice."""


def _site_of(name: str) -> str:
    """A site's own name: without '@' and what fp8_autocast puts behind it."""
    return name.partition("@")[0]


def _row_of(slot: str) -> Row:
    """The row of a slot, SITE.ROLE or SITE.ROLE.GEMM."""
    site, _, last = slot.rpartition(".")
    if last in READERS:
        return _site_of(site), last
    site, _, role = site.rpartition(".")
    return _site_of(site), f"{role}.{last}"
