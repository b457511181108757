"""A GEMM site at run time: quantizers of the plan's entry, and three GEMMs.

Compiled code knows a site by a handle, a number in a tensor. A site names the random stream of each backward that rounds
stochastically.
"""

from __future__ import annotations

import itertools
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from ..backends import BACKENDS
from ..backends.base import RESULTS, Region
from ..kernels.gemms import add_matmul_fp32, matmul_high_precision
from ..numerics.cast import RandomKey
from ..plan.autocast_state import WatchedForwards
from ..plan.cast_spec import READERS, CastSpec
from ..plan.site_plan import SitePlan
from ..quantizer import Casts, Quantizer
from ..state.arena import Group
from ..state.fp8_state import Fp8State
from ..state.observer_protocol import SeenProduct
from ..tensor import Operand, QuantizedSide
from .saved_operands import SideLayout
from .weight_cache import WeightCache


class GemmSite:
    """Quantizes a linear layer's operands and multiplies them, as its plan says.

    Args:
        plan: the site's entry.
        state: the model's FP8 state.
        group: the amax reduction group of its slots (None: this process alone).
        seed: of stochastic rounding.
        stream: distinguishes data-parallel ranks, whose tokens differ, in stochastic rounding.
        casts: what quantizes each role, where another site's quantizers are to serve; None: quantizers of its own.

    Attributes:
        casts: role -> its quantizers.
        backend: what they and the GEMMs run on; None if nothing is in FP8.
        weights: quantizes the weight and keeps it.
        gradients: names the random bits by which grad_output is rounded.
        watched_forwards: says whether a call runs as one operator; a recomputation does as its forward did.
        traced: what compiled code knows the site by.
        notes: what the report says of how the site ran.
        has_run: whether a forward came here.
    """

    @torch.inference_mode(False)  # slots and handle must be writable and savable in training later
    def __init__(
        self,
        plan: SitePlan,
        state: Fp8State,
        group: Group,
        *,
        seed: int = 0,
        stream: int = 0,
        casts: Mapping[str, Casts] | None = None,
    ):
        self.plan, self.state = plan, state
        self.notes: set[str] = set()
        self.backend: ModuleType | None = None if plan.backend is None else BACKENDS[plan.backend]
        self.casts = {role: self._casts(role, group) for role in READERS} if casts is None else dict(casts)
        kept = self.casts["input"].columnwise
        layout = "" if kept is None else str(SideLayout.of(kept.rule, kept.backend.turns_codes(kept.rule)))
        self.traced = register(self, layout)
        self.weights = WeightCache(self.casts["weight"], state)
        self.seed, self.stream = seed, stream
        stochastic = any(quantizer.rule.stochastic for quantizer in self.casts["grad_output"].quantizers)
        self.gradients = GradientStream(plan.name, state, stochastic=stochastic, seed=seed, rank=stream)
        self.watched_forwards = WatchedForwards(state)
        self.has_run = False
        self._stand_in: GemmSite | None = None

    def _casts(self, role: str, group: Group) -> Casts:
        """What quantizes a role: one quantizer where one serves both GEMMs that read it. ``group``: of its slots."""
        one, other = (self.plan.operands[gemm][role] for gemm in READERS[role])
        name = f"{self.plan.name}.{role}"
        row = self._quantizer(one, name, group)
        if one == other:
            return Casts(row, row)
        return Casts(
            row, self._quantizer(other, name if row is None else f"{name}.{READERS[role][1]}", group)
        )

    def _quantizer(self, cast: CastSpec | None, name: str, group: Group) -> Quantizer | None:
        if cast is None:
            return None
        assert self.backend is not None
        slot = self.state.arena(group).add(cast.delayed, cast.rule.fmt)
        slot.name = name
        return Quantizer(cast.rule, slot, self.backend)

    @property
    def acting(self) -> GemmSite:
        """The site that calls of this layer run: itself, but for experiments (``replaced_by``)."""
        return self if self._stand_in is None else self._stand_in

    @contextmanager
    def replaced_by(self, stand_in: GemmSite) -> Iterator[None]:
        """Inside, calls of this layer run another site, in any thread and in recomputations too."""
        before, self._stand_in = self._stand_in, stand_in
        try:
            yield
        finally:
            self._stand_in = before

    @property
    def quantizers(self) -> dict[str, Quantizer | None]:
        """By role; what a role is cast by a second time, for its second GEMM, as 'role.gemm'."""
        found: dict[str, Quantizer | None] = {}
        for role, casts in self.casts.items():
            found[role] = casts.columnwise if casts.rowwise is None else casts.rowwise
            if casts.twice:
                found[f"{role}.{READERS[role][1]}"] = casts.columnwise
        return found

    @property
    def is_fp8(self) -> bool:
        """Whether any GEMM of this site runs in FP8, as planned."""
        return self.plan.precision == "fp8"

    @property
    def has_histories(self) -> bool:
        """Whether scales of some operand are delayed."""
        return any(q.slot.delayed is not None for casts in self.casts.values() for q in casts.quantizers)

    def computes(self, role: str) -> bool:
        """Whether this operand is only ever quantized, by kernels that can compute it: all its GEMMs are FP8."""
        in_fp8 = all(self.plan.gemms[gemm] == "fp8" for gemm in READERS[role])
        return in_fp8 and all(quantizer.computes for quantizer in self.casts[role].quantizers)

    def multiply(
        self,
        gemm: str,
        a: Operand,
        b: Operand,
        out_dtype: torch.dtype,
        bias: torch.Tensor | None = None,
        *,
        record: bool = True,
    ) -> torch.Tensor:
        """a [M, K] @ b [N, K]^T (+ bias [N]) = [M, N] as the plan has it for 'fprop', 'dgrad' or 'wgrad'; counted.

        ``record`` False: a forward of evaluation, or again in a recomputation.
        """
        if self.plan.gemms[gemm] == "fp8":
            assert isinstance(a, QuantizedSide) and isinstance(b, QuantizedSide)
            assert self.backend is not None
            self.state.counter.here.fp8_gemms += 1
            fast = gemm == "fprop"  # tensor cores may keep partial sums at their own precision
            y: torch.Tensor = self.backend.gemm(a, b, out_dtype=out_dtype, bias=bias, fast_accumulation=fast)
        else:
            self.state.counter.here.hp_gemms += 1
            y = matmul_high_precision(*in_high_precision(a, b), out_dtype, bias)
        if (observer := self.state.observer) is not None:
            observer.product(SeenProduct(self.plan.name, gemm, a, b, y, record))
        return y

    def wgrad_dtype(self, wanted: torch.dtype) -> torch.dtype:
        """What wgrad's product is asked for, where its float32 sums are handed on in the wanted dtype: that itself of a
        scaled product, which rounds once; float32 of 16-bit GEMMs, whose partial sums torch may round."""
        scaled = self.plan.gemms["wgrad"] == "fp8" and getattr(self.backend, "rounds_once", False)
        return wanted if scaled and wanted in RESULTS else torch.float32

    def accumulate(
        self, gemm: str, a: Operand, b: Operand, into: torch.Tensor, *, record: bool = True
    ) -> None:
        """Add to ``into`` [M, N], float32, what ``multiply`` gives: in the product where it is this package's own, in C
        or by Triton, or in high precision on a GPU; torch's scaled products cannot, nor can one that is observed."""
        in_fp8 = self.plan.gemms[gemm] == "fp8" and self.state.observer is None
        if in_fp8 and self._accumulates(a, b, into):
            self.state.counter.here.fp8_gemms += 1
            return
        if self.plan.gemms[gemm] == "fp8" or self.state.observer is not None:
            into.add_(self.multiply(gemm, a, b, torch.float32, record=record))
            return
        self.state.counter.here.hp_gemms += 1
        add_matmul_fp32(into, *in_high_precision(a, b))

    def _accumulates(self, a: Operand, b: Operand, into: torch.Tensor) -> bool:
        """Whether the backend has added the product."""
        accumulate = getattr(self.backend, "accumulate", None)
        return accumulate is not None and accumulate(a, b, into)


def in_high_precision(a: Operand, b: Operand) -> tuple[torch.Tensor, torch.Tensor]:
    """Both operands of a product in high precision: what is quantized is decoded to the other's dtype."""
    dtype = next((o.dtype for o in (a, b) if isinstance(o, torch.Tensor)), torch.bfloat16)
    first, second = (o if isinstance(o, torch.Tensor) else o.dequantize(dtype) for o in (a, b))
    return first, second


_sites: weakref.WeakValueDictionary[int, GemmSite] = weakref.WeakValueDictionary()
_numbers = itertools.count()


class CompileHandle:
    """What compiled code needs of a site.

    Attributes:
        handle: int64 [] on the CPU, the site's number.
        saved_layout: memory layout of the saved input's codes and scales (a SideLayout as text); empty without FP8.
        owner: returns the site's layer, or None once that is deleted. It refers to no tensor.
    """

    def __init__(self, handle: torch.Tensor, saved_layout: str):
        self.handle, self.saved_layout = handle, saved_layout
        self.owner: Callable[[], Any] = lambda: None
        self._multiplied: int | None = None

    def multiplied_by(self, weight: torch.Tensor) -> None:
        """Remembers the weight [N, K] that a forward used."""
        self._multiplied = id(weight) if hasattr(weight, "main_grad") else None

    def parameter(self, weight: torch.Tensor) -> torch.Tensor:
        """The layer's parameter [N, K] with a main_grad, for a weight [N, K] that may be an offloaded copy of it."""
        layer = self.owner()
        if layer is None or self._multiplied is None:
            return weight
        own: Any = layer._parameters.get("weight")
        own = getattr(layer, "tied_weight", None) if own is None else own
        return own if id(own) == self._multiplied else weight


def register(site: GemmSite, saved_layout: str) -> CompileHandle:
    """Registers the site under a new handle, for the site's lifetime."""
    number = next(_numbers)
    _sites[number] = site
    return CompileHandle(torch.tensor(number, dtype=torch.int64, device="cpu"), saved_layout)


def site_by_handle(handle: torch.Tensor) -> GemmSite:
    """The site with this handle, int64 []. RuntimeError if the site was deleted."""
    site = _sites.get(int(handle))
    if site is None:
        raise RuntimeError("the FP8 layer whose compiled code runs is gone: compile the model that is there")
    return site


class GradientStream:
    """Names the random stream of each cast of a site's grad_output.

    Args:
        name: the site's.
        state: of the model; its iteration is part of the name, so that a resumed run draws what it would have drawn.
        stochastic: whether the bits are used at all; nobody need ask for a region where they are not.
        seed: of the run.
        rank: the data-parallel rank: ranks see other tokens, so they draw other bits.
    """

    def __init__(self, name: str, state: Fp8State, *, stochastic: bool, seed: int, rank: int):
        self._name, self._state, self.stochastic = name, state, stochastic
        self._seed, self._rank = seed, rank
        self._iteration, self._backwards = -1, 0  # backward passes of that iteration, so far

    def next_region(self, row_offset: int, col_offset: int, total_cols: int) -> Region:
        """Place and stream of the next backward's grad_output, a part of a matrix with ``total_cols`` columns.

        RuntimeError: a CUDA graph is captured, which would draw the same bits at each replay.
        """
        if self._state.capturing and self.stochastic:
            raise RuntimeError(
                f"{self._name} rounds gradients stochastically, by bits that the host names in each iteration: a CUDA"
                " graph would repeat them. Switch stochastic rounding off, or train without the graph"
            )
        iteration = self._state.iteration
        self._backwards = self._backwards + 1 if iteration == self._iteration else 0
        self._iteration = iteration
        stream = (self._rank << 16) + self._backwards
        key = RandomKey(self._seed, zlib.crc32(self._name.encode()), iteration, stream)
        return Region(key, row_offset, col_offset, total_cols)
