"""Measures the tensors of one FP8 state in selected iterations, summed over ranks.

Each piece of a tensor is measured when the observer is called, inside forward or backward. Only two short
vectors per tensor are stored (tensor_stats.py), no tensors. Outside measured iterations the observer returns at
once.

What is measured, and by which events:

    input, grad_output   casts; operands of the GEMMs if none quantizes them
    weight               once an iteration: its cast, its operand, or the masters of an FP8 parameter
        (high_precision_tensors.py)
    output, dgrad, wgrad the products, on this rank only: terms of a sum over tensor-parallel ranks are
        'partial'
    all of them          for a site in high precision: operands, result, and gradients from autograd
        (high_precision_tensors.py)

A tensor that is cast twice, by two rules for two GEMMs, has a second row for the second codes: 'input.wgrad'.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..kernels.cast_dispatch import in_memory
from ..linear.gemm_site import GemmSite
from ..params.fp8_parameter import Fp8Parameter
from ..plan.cast_spec import READERS
from ..state.fp8_state import Fp8State
from ..state.observer_protocol import CastEvent, LinearEvent, ProductEvent
from ..tensor import Float8Tensor, Operand
from .health import MissingStats
from .high_precision_tensors import observe_gradients, weight_values
from .replica_dedup import RankAgreement
from .settings import TelemetrySettings
from .stat_registry import TENSORS
from .tensor_stats import Layout, Measurement, finish, measure
from .what_if import Histories, what_if

Row = tuple[str, str]
"""(site, tensor)."""
Records = list[dict[str, Any]]
PRODUCTS = {"fprop": "output", "dgrad": "dgrad", "wgrad": "wgrad"}
_PARTIAL = {("row", "output"), ("column", "dgrad")}


class _RowLayout(NamedTuple):
    """What to measure for a row, and the slices of its sums and extremes in the vectors of all rows. The element after
    its extremes is a flag for partial values."""

    layout: Layout
    sums: slice
    extremes: slice


@dataclass(frozen=True)
class _Table:
    """All rows of an iteration, in the same order on all ranks; empty if the iteration is not measured."""

    rows: Mapping[Row, _RowLayout]
    sums: int
    extremes: int

    def empty(self, device: torch.device) -> Measurement:
        """Initial vectors of all rows, before any measurement."""
        return Measurement(
            torch.zeros(self.sums, dtype=torch.float64, device=device),
            torch.full((self.extremes,), -math.inf, dtype=torch.float64, device=device),
        )


class Collector:
    """Observes one state.

    Args:
        state: the model's state.
        sites: name -> function that returns this rank's current site.
        agreed: the ranks' agreement on sites.
        settings: what to measure, and when.
        group: ranks whose statistics are summed; None: this process only.
        deliver: called at the end of a measured iteration, on every rank, with its number (from 1) and its
            records.
    """

    def __init__(
        self,
        state: Fp8State,
        sites: Mapping[str, Callable[[], GemmSite]],
        agreed: RankAgreement,
        settings: TelemetrySettings,
        group: Any,
        deliver: Callable[[int, Records], None],
    ):
        self.state, self.settings, self.agreed = state, settings, agreed
        self._sites, self._group, self._deliver = sites, group, deliver
        self._tables: dict[tuple[bool, ...], _Table] = {}
        self._iteration, self._table = -1, _Table({}, 0, 0)
        self._found: Measurement | None = None  # all rows
        self._weights: set[Row] = set()  # measured in this iteration
        self._partial: set[Row] = set()
        self._had_dgrad: set[str] = set()
        self._fused: set[str] = set()  # sites whose GEMM adds wgrad to main_grad
        self._missing = MissingStats()
        self._histories = Histories(state) if "fp8_delayed_scaling" in settings.what_if else None

    # ---------------------------------------------------------------------------------------------------------- events

    def wants(self, iteration: int) -> bool:
        """Whether this iteration, counted from 0, is measured."""
        if iteration != self._iteration:
            self._iteration, self._table = iteration, self._table_of(iteration + 1)
            self._clear()
        return bool(self._table.rows)

    def cast(self, seen: CastEvent) -> None:
        """A piece of an operand, with its codes."""
        if seen.recorded:
            self._operand(_row_of(seen.slot), lambda: seen.x, {"": seen.done.tensor}, shard=seen.shard)

    def stored(self, slot: str, weight: torch.Tensor) -> None:
        """An FP8 parameter: measures the values that its codes were cast from."""
        row = _row_of(slot)
        if row not in self._table.rows or row in self._weights:
            return
        assert isinstance(weight, Fp8Parameter)
        self._weights.add(row)
        columnwise = self._table.rows[row].layout.directions.get("", "rowwise")
        values, codes, whole = weight_values(weight, columnwise=columnwise != "rowwise")
        if values.numel() and (not whole or self.agreed.mine[row[0]].weight):
            self._measure(row, values, {} if codes is None else {"": codes})

    def product(self, seen: ProductEvent) -> None:
        """A product, and its operands that no GEMM of the site quantizes."""
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
        elif site not in self._had_dgrad:  # otherwise dgrad's operand was the same gradient
            self._plain(site, "grad_output", seen.a, turned=True)
        self._measure((site, tensor), seen.y)

    def high_precision(self, seen: LinearEvent) -> None:
        """A site in the model's own dtype: measures its operands and result, and its gradients during backward."""
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
            # Megatron-Core has summed the dgrad of a column-parallel linear here, except with sequence parallelism.
            counted = counts.kind != "column" or seen.shard or counts.tokens
            dgrad = partial(self._late, iteration, (site, "dgrad"), counted)
            wgrad = partial(self._wgrad, iteration, (site, "wgrad"), weight)
            observe_gradients(y, [(x, dgrad), (weight, wgrad)])

    def ended(self, iteration: int) -> None:
        """Sum the statistics over ranks, and deliver the records. Collective over the group in measured iterations."""
        if self._histories is not None:
            self._histories.update()
        if self.wants(iteration):
            records = self._records(iteration + 1)
            # The first rank reports missing statistics of all ranks; each rank reports its own fused wgrads.
            requested_rows = self._table.rows if self.agreed.rank == 0 else ()
            self._missing.check(iteration + 1, requested_rows, records, self._fused)
            self._deliver(iteration + 1, records)
        self._clear()

    # ------------------------------------------------------------------------------------------------------ accumulation

    def _clear(self) -> None:
        self._found, self._weights, self._partial, self._had_dgrad = None, set(), set(), set()

    def _table_of(self, iteration: int) -> _Table:
        """The rows to measure in this iteration, counted from 1."""
        due = tuple(selection.measures(iteration) for selection in self.settings.selections)
        if due not in self._tables:
            rows: dict[Row, _RowLayout] = {}
            sums = extremes = 0
            for site in self.agreed.sites if any(due) else ():
                for tensor in ROWS:
                    names = self.settings.names(site, tensor.partition(".")[0], iteration)
                    if not names:
                        continue
                    layout = Layout.of(names)
                    first = sums, extremes
                    sums, extremes = sums + len(layout.sums), extremes + len(layout.extremes)
                    rows[site, tensor] = _RowLayout(layout, slice(first[0], sums), slice(first[1], extremes))
                    extremes += 1
            self._tables[due] = _Table(rows, sums, extremes)
        return self._tables[due]

    def _plain(self, site: str, role: str, operand: Operand, *, turned: bool = False) -> None:
        """An operand of a product that no GEMM of its site quantizes."""
        site_of = self._sites.get(site)
        if (
            isinstance(operand, torch.Tensor)
            and site_of is not None
            and not site_of().active_site.casts[role].quantizers
        ):
            self._operand((site, role), lambda: operand.t() if turned else operand)

    def _operand(
        self,
        row: Row,
        x: Callable[[], torch.Tensor],
        codes: Mapping[str, Float8Tensor] | None = None,
        *,
        shard: bool = False,
    ) -> None:
        """Measures a piece of 'input', 'weight' or 'grad_output' if this rank counts it; a weight once an iteration."""
        counts = self.agreed.mine.get(row[0])
        role = row[1].partition(".")[0]
        if row not in self._table.rows or counts is None or row in self._weights:
            return
        if counts.counts(role, shard=shard):
            self._weights |= {row} if role == "weight" else set()
            self._measure(row, x(), codes)

    def _measure(self, row: Row, x: torch.Tensor, codes: Mapping[str, Float8Tensor] | None = None) -> None:
        """Add the statistics of a piece to its row."""
        row_layout = self._table.rows.get(row)
        if row_layout is None or row[0] not in self.agreed.mine:
            return
        with torch.no_grad():
            x = in_memory(x)
            x = x.reshape(-1, x.shape[-1])
            found = measure(
                x, row_layout.layout, {**(codes or {}), **self._what_ifs(row, x, codes, row_layout.layout)}
            )
            all_rows = self._all_rows()
            all_rows.sums[row_layout.sums] += found.sums.to(self.state.device)
            extremes = all_rows.extremes[row_layout.extremes]
            torch.maximum(extremes, found.extremes.to(self.state.device), out=extremes)

    def _all_rows(self) -> Measurement:
        """The accumulated vectors of all rows."""
        if self._found is None:
            self._found = self._table.empty(self.state.device)
        return self._found

    def _what_ifs(
        self, row: Row, x: torch.Tensor, codes: Mapping[str, Float8Tensor] | None, layout: Layout
    ) -> dict[str, Float8Tensor]:
        """The codes that other recipes would give for a piece."""
        role = row[1].partition(".")[0]
        own_codes = (codes or {}).get("")
        fmt = None if own_codes is None else next(side.fmt for side in own_codes.sides if side is not None)
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
        """A gradient from autograd, for a forward of this iteration."""
        if iteration != self.state.iteration:
            return
        if row[1] == "grad_output":
            self._operand(row, lambda: gradient)
        elif counted:
            self._measure(row, gradient)

    def _wgrad(self, iteration: int, row: Row, weight: torch.Tensor, gradient: torch.Tensor) -> None:
        """As ``_late``, unless the GEMM has added the product to main_grad: then the gradient is a dummy."""
        if not getattr(weight, "grad_added_to_main_grad", False):
            self._late(iteration, row, True, gradient)
        elif row in self._table.rows:
            self._fused.add(row[0])

    # --------------------------------------------------------------------------------------------------------- the end

    def _records(self, iteration: int) -> Records:
        """The records of a measured iteration for all ranks' sites: one SUM and one MAX all-reduce."""
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
            if of_row[0]:  # number of elements
                record: dict[str, Any] = {"iteration": iteration, "site": site, "tensor": tensor}
                if most[extremes.stop] > 0:
                    record["partial"] = True
                records.append(record | finish(layout, of_row, most[extremes]))
        return records


ROWS = (*TENSORS, *(f"{role}.{readers[1]}" for role, readers in READERS.items()))
"""The tensors of a site, and rows for the second codes of tensors that are cast twice."""


def _site_of(name: str) -> str:
    """A site's name without '@' and the recipe from fp8_autocast after it."""
    return name.partition("@")[0]


def _row_of(slot: str) -> Row:
    """The row of a slot named SITE.ROLE or SITE.ROLE.GEMM."""
    site, _, last = slot.rpartition(".")
    if last in READERS:
        return _site_of(site), last
    site, _, role = site.rpartition(".")
    return _site_of(site), f"{role}.{last}"
