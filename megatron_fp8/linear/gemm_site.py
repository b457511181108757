"""A GEMM site at run time: its quantizers, three GEMMs, and the gradient's buffer.

Compiled code identifies a site by a handle, a number in a tensor.

wgrad adds to Megatron-Core's gradient buffer, main_grad, where a weight has one. Megatron-Core zeroes all buffers before
an iteration. Then the first GEMM that contributes to a buffer can write its result in place of adding it: 4 bytes a
weight are moved, not 16 (write the product, read both, write the sum). ``Buffers are zeros`` is known by a mark:
DistributedDataParallel's zeroing sets it (mcore/params.py), its backward hook, which runs after each backward of the
parameter, removes it, and so does a replay of a CUDA graph. It holds for one buffer, for eager execution or for one
capture: a captured write would be replayed for later microbatches too. Within a backward Megatron-Core's own flag,
grad_added_to_main_grad, says that a fused GEMM has contributed. Without a mark results are added.
"""

from __future__ import annotations

import itertools
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import torch

from ..backends import BACKENDS
from ..backends.base import RESULTS, Region
from ..kernels.gemms import add_matmul_fp32, matmul_batch_invariant, matmul_high_precision
from ..numerics.cast import RandomKey
from ..plan.autocast_state import WatchedForwards
from ..plan.cast_spec import READERS, CastSpec
from ..plan.site_plan import SitePlan
from ..quantizer import Casts, Quantizer
from ..state.arena import Group
from ..state.fp8_state import Fp8State
from ..state.observer_protocol import ProductEvent
from ..tensor import Operand, QuantizedSide
from .saved_operands import SideLayout
from .weight_cache import WeightCache


class GemmSite:
    """The quantizers and GEMMs of one linear, as its plan says.

    Args:
        plan: the site's entry.
        state: the model's FP8 state.
        group: the amax reduction group of its slots (None: this process alone).
        seed: of stochastic rounding.
        stream: distinguishes data-parallel ranks, whose tokens differ, in stochastic rounding.
        of: another site, whose quantizers, seed and stream this one shares; None: it makes its own.

    Attributes:
        casts: role -> its quantizers.
        backend: what they and the GEMMs run on; None if nothing is in FP8.
        weights: quantizes the weight and caches it.
        stochastic: whether grad_output is rounded stochastically.
        watched_forwards: decides whether a call runs as one operator. A recomputation runs as its forward did.
        handle: int64 [] on the CPU, the site's number in compiled code.
        saved_layout: memory layout of the saved input's codes and scales (a SideLayout as text); empty without FP8.
        layer: returns the site's layer, or None if it was deleted.
        notes: notes for the report.
        has_run: whether a forward has run.
        heals: whether the whole site runs in high precision in a healing phase.
        healed: the site that replaces this one in a healing phase of some GEMMs; None: this one stays.
        uncast: role -> quantizers with delayed scales that only record, because no GEMM reads their casts now.
        batch_invariant: in fprop a row's bits do not depend on other rows (inference on CPUs).
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
        of: GemmSite | None = None,
    ):
        self.plan, self.state = plan, state
        self.notes: set[str] = set()
        self.backend: ModuleType | None = None if plan.backend is None else BACKENDS[plan.backend]
        self.casts = {role: self._casts(role, group, of) for role in READERS}
        kept = self.casts["input"].columnwise
        layout = "" if kept is None else str(SideLayout.of(kept.rule, kept.backend.turns_codes(kept.rule)))
        self.saved_layout, number = layout, next(_numbers)
        self.handle = torch.tensor(number, dtype=torch.int64, device="cpu")
        _sites[number] = self
        self.layer: Callable[[], Any] = lambda: None
        self._weight_id: int | None = None
        self.weights = WeightCache(self.casts["weight"], state)
        self.seed: int = seed if of is None else of.seed
        self.stream: int = stream if of is None else of.stream
        self.stochastic = any(q.rule.stochastic for q in self.casts["grad_output"].quantizers)
        self._begun: object = None
        self._backwards = 0  # stochastic ones since the iteration began
        self.watched_forwards = WatchedForwards(state)
        self.has_run = False
        self._replacement: GemmSite | None = None
        self.heals = True
        self.healed: GemmSite | None = None
        self.uncast: Mapping[str, Sequence[Quantizer]] = {}
        self.batch_invariant = False

    def heal(self, plan: SitePlan) -> None:
        """Sets the site's plan in a healing phase (``healing_plan``)."""
        self.heals = plan.precision != "fp8"
        self.healed = None if self.heals or plan is self.plan else HealedSite(self, plan)

    def _casts(self, role: str, group: Group, of: GemmSite | None) -> Casts:
        """The role's quantizers, one if both GEMMs that read it use the same cast. ``group``: reduces their amaxes."""
        one, other = (self.plan.operands[gemm][role] for gemm in READERS[role])
        if of is not None:
            shared = of.casts[role]
            return Casts(shared.rowwise if one else None, shared.columnwise if other else None)
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
    def active_site(self) -> GemmSite:
        """The site that this layer's calls use: itself, except in experiments (``replaced_by``) and in a healing phase
        of some of its GEMMs."""
        if self._replacement is not None:
            return self._replacement
        return self if self.healed is None or self.state.phase != "healing" else self.healed

    @contextmanager
    def replaced_by(self, replacement: GemmSite) -> Iterator[None]:
        """Inside, calls of this layer use another site, in any thread and in recomputations too."""
        before, self._replacement = self._replacement, replacement
        try:
            yield
        finally:
            self._replacement = before

    @property
    def quantizers(self) -> dict[str, Quantizer | None]:
        """Quantizers by role; the second one of a role that is cast for each GEMM is 'role.gemm'."""
        found: dict[str, Quantizer | None] = {}
        for role, casts in self.casts.items():
            found[role] = casts.columnwise if casts.rowwise is None else casts.rowwise
            if len(casts.quantizers) == 2:
                found[f"{role}.{READERS[role][1]}"] = casts.columnwise
        return found

    @property
    def is_fp8(self) -> bool:
        """Whether the plan has any GEMM in FP8."""
        return self.plan.precision == "fp8"

    @property
    def has_histories(self) -> bool:
        """Whether any operand has delayed scales."""
        return any(q.slot.delayed is not None for casts in self.casts.values() for q in casts.quantizers)

    def computes(self, role: str) -> bool:
        """Whether all GEMMs that read this operand are FP8 and its quantizers' kernels can compute a LazyTensor."""
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
        """Returns a [M, K] @ b [N, K]^T (+ bias [N]), [M, N], in the plan's precision for this GEMM. Counts it.

        Args:
            gemm: 'fprop', 'dgrad' or 'wgrad'.
            record: passed to the observer; False in an evaluation and in a recomputed forward.
        """
        if self.plan.gemms[gemm] == "fp8":
            assert isinstance(a, QuantizedSide) and isinstance(b, QuantizedSide)
            assert self.backend is not None
            self.state.counter.current.fp8_gemms += 1
            fast = gemm in self.state.fast_gemms
            options = {"batch_invariant": True} if self.batch_invariant else {"fast_accumulation": fast}
            y: torch.Tensor = self.backend.gemm(a, b, out_dtype=out_dtype, bias=bias, **options)
        else:
            self.state.counter.current.hp_gemms += 1
            matmul = matmul_batch_invariant if self.batch_invariant else matmul_high_precision
            y = matmul(*in_high_precision(a, b), out_dtype, bias)
        if (observer := self.state.observer) is not None:
            observer.product(ProductEvent(self.plan.name, gemm, a, b, y, record))
        return y

    def wgrad_dtype(self, wanted: torch.dtype) -> torch.dtype:
        """Result dtype of wgrad's GEMM for a gradient of the wanted dtype. A scaled GEMM rounds its float32 sum once,
        so it is the wanted one. In other GEMMs torch may round partial sums to 16 bits, so it is float32."""
        return wanted if self._rounds_once and wanted in RESULTS else torch.float32

    @property
    def _rounds_once(self) -> bool:
        """Whether wgrad's GEMM is a scaled one."""
        return self.plan.gemms["wgrad"] == "fp8" and getattr(self.backend, "rounds_once", False)

    def may_overwrite(self, weight: torch.Tensor, *, by_fp8: bool = False) -> bool:
        """Whether wgrad's GEMM may write the weight's main_grad [N, K] in place of adding to it, with the same numbers.

        ``by_fp8``: only if it is a scaled GEMM in FP8.
        """
        buffer: torch.Tensor = weight.main_grad  # type: ignore[attr-defined]
        if self.state.observer is not None or (by_fp8 and not self._rounds_once):
            return False
        return self.wgrad_dtype(buffer.dtype) == buffer.dtype and is_zeros(
            weight, captured=self.state.capturing
        )

    def accumulate(
        self,
        gemm: str,
        a: Operand,
        b: Operand,
        into: torch.Tensor,
        *,
        record: bool = True,
        zeros: bool = False,
    ) -> None:
        """Adds the result of ``multiply`` to ``into`` [M, N]. This package's GEMMs (C, Triton) and high-precision ones on
        a GPU add it directly; torch's scaled GEMMs and observed ones cannot. ``zeros``: ``into`` is zeros, and may be
        overwritten, which every GEMM on a GPU can."""
        in_fp8 = self.plan.gemms[gemm] == "fp8" and self.state.observer is None
        if in_fp8 and self._accumulates(a, b, into, zeros=zeros):
            self.state.counter.current.fp8_gemms += 1
            return
        if self.plan.gemms[gemm] == "fp8" or self.state.observer is not None:
            into.add_(self.multiply(gemm, a, b, torch.float32, record=record))
            return
        self.state.counter.current.hp_gemms += 1
        add_matmul_fp32(into, *in_high_precision(a, b), zeros=zeros)

    def _accumulates(self, a: Operand, b: Operand, into: torch.Tensor, *, zeros: bool) -> bool:
        """Lets the backend add the product. Returns whether it did."""
        accumulate = getattr(self.backend, "accumulate", None)
        return accumulate is not None and accumulate(a, b, into, zeros=zeros)

    def next_region(self, row_offset: int, col_offset: int, total_cols: int) -> Region:
        """Position and random stream of the next backward's grad_output in a matrix with ``total_cols`` columns.

        The iteration is part of the stream's name, so that a resumed run draws the same bits.

        Raises RuntimeError in the capture of a CUDA graph, which would draw the same bits at each replay.
        """
        if self.state.capturing and self.stochastic:
            raise RuntimeError(
                f"{self.plan.name} rounds gradients stochastically, by bits that the host names in each iteration: a CUDA"
                " graph would repeat them. Switch stochastic rounding off, or train without the graph"
            )
        begun = self.state.begun
        self._backwards = self._backwards + 1 if begun is self._begun else 0
        self._begun = begun
        stream = (self.stream << 16) + self._backwards
        key = RandomKey(self.seed, zlib.crc32(self.plan.name.encode()), self.state.iteration, stream)
        return Region(key, row_offset, col_offset, total_cols)

    def store_weight_id(self, weight: torch.Tensor) -> None:
        """Stores the identity of the weight [N, K] that a compiled forward used."""
        self._weight_id = id(weight) if hasattr(weight, "main_grad") else None

    def parameter(self, weight: torch.Tensor) -> torch.Tensor:
        """The layer's parameter [N, K], which has the main_grad, for a weight [N, K] that may be an offloaded copy."""
        layer = self.layer()
        if layer is None or self._weight_id is None:
            return weight
        own: Any = layer._parameters.get("weight")
        own = getattr(layer, "tied_weight", None) if own is None else own
        return own if id(own) == self._weight_id else weight


class HealedSite(GemmSite):
    """A site in a healing phase of some of its GEMMs: its quantizers, histories and random bits, with another plan."""

    def __init__(self, site: GemmSite, plan: SitePlan):
        super().__init__(plan, site.state, None, of=site)
        self.notes, self.heals = site.notes, False
        owner = weakref.ref(site)  # a cycle would keep its memory
        self.layer = lambda: None if (found := owner()) is None else found.layer()
        self.weights.before = site.weights
        self.uncast = {
            role: [
                quantizer
                for quantizer in site.casts[role].quantizers
                if quantizer.slot.delayed is not None and quantizer not in self.casts[role].quantizers
            ]
            for role in READERS
        }


def in_high_precision(a: Operand, b: Operand) -> tuple[torch.Tensor, torch.Tensor]:
    """Both operands in high precision: a quantized one is decoded to the other's dtype."""
    dtype = next((o.dtype for o in (a, b) if isinstance(o, torch.Tensor)), torch.bfloat16)
    first, second = (o if isinstance(o, torch.Tensor) else o.dequantize(dtype) for o in (a, b))
    return first, second


_sites: weakref.WeakValueDictionary[int, GemmSite] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def site_by_handle(handle: torch.Tensor) -> GemmSite:
    """The site with this handle, int64 []. RuntimeError if the site was deleted."""
    site = _sites.get(int(handle))
    if site is None:
        raise RuntimeError("the FP8 layer whose compiled code runs is gone: compile the model that is there")
    return site


# ---------------------------------------------------------------------------------------------------------- main_grad


class _Zeros(NamedTuple):
    """The mark of a parameter: its main_grad [N, K] is zeros, in eager execution or in one capture."""

    main_grad: torch.Tensor
    captured: bool


def mark_zeros(parameters: Iterable[Any], *, captured: bool = False) -> None:
    """Marks the main_grad of each parameter as zeros.

    Args:
        captured: the caller captures a CUDA graph, each replay of which starts with zeros.
    """
    for parameter in parameters:
        if (main_grad := getattr(parameter, "main_grad", None)) is not None:
            parameter.main_grad_zeros = _Zeros(main_grad, captured or _is_captured(main_grad))


def unmark_zeros(parameters: Iterable[Any]) -> None:
    """Removes the marks: something was, or may have been, added."""
    for parameter in parameters:
        parameter.main_grad_zeros = None


def is_zeros(weight: Any, *, captured: bool) -> bool:
    """Whether the weight's main_grad is known to be zeros, so that a GEMM may overwrite it."""
    mark: _Zeros | None = getattr(weight, "main_grad_zeros", None)
    if mark is None or weight.grad_added_to_main_grad:
        return False
    return mark.main_grad is weight.main_grad and mark.captured == (captured or _is_captured(mark.main_grad))


def _is_captured(main_grad: torch.Tensor) -> bool:
    return main_grad.is_cuda and torch.cuda.is_current_stream_capturing()


def main_grad_of(weight: torch.Tensor) -> torch.Tensor | None:
    """The buffer [N, K] to which the weight's gradient is added (Megatron-Core's fused wgrad); None without one.
    ValueError if it has another shape."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    main_grad: torch.Tensor | None = getattr(weight, "main_grad", None)
    if main_grad is not None and main_grad.shape != weight.shape:
        raise ValueError(
            f"a main_grad of shape {tuple(main_grad.shape)} is no sum of gradients of a weight {tuple(weight.shape)}:"
            " give it the weight's shape"
        )
    return main_grad


def dummy_wgrad(weight: Any) -> torch.Tensor:
    """The dummy gradient for autograd if dw was added to main_grad; DDP drops it."""
    weight.grad_added_to_main_grad = True
    # Not None: with overlapped reduction DDP needs its gradient hook to run and checks that a gradient exists.
    make = torch.zeros if getattr(weight, "zero_out_wgrad", False) else torch.empty
    return make(weight.shape, dtype=weight.dtype, device=weight.device)
