"""A GEMM site at run time: the plan entry made into quantizers and the three GEMMs by name."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType

import torch

from ..backends import BACKENDS
from ..backends.base import Region
from ..backends.high_precision import matmul_high_precision
from ..numerics.cast import RandomKey
from ..plan.operands import READERS, Cast
from ..plan.site_plan import SitePlan
from ..plan.switch import in_recompute
from ..quantizer import Casts, Quantizer
from ..state.arena import Group
from ..state.fp8_state import Fp8State
from ..tensor import Operand, QuantizedSide
from .registry import register
from .saved_layout import SideLayout
from .weight_cache import WeightCache


class GemmSite:
    """Quantises a linear layer's operands and multiplies them, as its plan says.

    Args:
        plan: the site's entry.
        state: the model's FP8 state.
        group: the amax reduction group of its slots (None: this process alone).
        seed: of stochastic rounding.
        stream: distinguishes data-parallel ranks, whose tokens differ, in stochastic rounding.
        casts: what quantises each role, where another site's quantizers are to serve; None: quantizers of its own.

    ``weights`` quantises the weight and keeps it, ``traced`` is what compiled code knows the site by.
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
        self._backwards = (-1, 0)  # (iteration, how many backward passes it had)
        self.has_run = False  # a forward came here
        self._ways: tuple[int, set[bool]] = (-1, set())  # how the iteration's forwards were called
        self._stand_in: GemmSite | None = None

    def _casts(self, role: str, group: Group) -> Casts:
        """What quantises a role: one quantizer where one serves both GEMMs that read it. ``group``: of its slots."""
        one, other = (self.plan.operands[gemm][role] for gemm in READERS[role])
        name = f"{self.plan.name}.{role}"
        row = self._quantizer(one, name, group)
        if one == other:
            return Casts(row, row)
        return Casts(
            row, self._quantizer(other, name if row is None else f"{name}.{READERS[role][1]}", group)
        )

    def _quantizer(self, cast: Cast | None, name: str, group: Group) -> Quantizer | None:
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

    @property
    def rounds_stochastically(self) -> bool:
        """Whether grad_output is rounded by random bits."""
        return any(quantizer.rule.stochastic for quantizer in self.casts["grad_output"].quantizers)

    def computes(self, role: str) -> bool:
        """Whether this operand is only ever quantised, by kernels that can compute it: all its GEMMs are FP8."""
        in_fp8 = all(self.plan.gemms[gemm] == "fp8" for gemm in READERS[role])
        return in_fp8 and all(quantizer.computes for quantizer in self.casts[role].quantizers)

    def as_operator(self, watched: bool) -> bool:
        """Whether a call in eager mode goes as one operator: where somebody watches operations (linear.is_watched).

        A recomputation goes as the forwards of its iteration did, since what it saves has to match, and the mode that was
        on around them may be off now. Who stands in for a CUDA graph wants all steps.
        """
        if self.state.capturing:
            return False
        iteration, ways = self._ways
        if not in_recompute():
            self._ways = (
                self.state.iteration,
                {watched} | (ways if iteration == self.state.iteration else set()),
            )
        elif iteration == self.state.iteration and len(ways) == 1:
            return next(iter(ways))
        return watched

    def observe(self, x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, *, record: bool) -> None:
        """Fill delayed scaling's histories from a linear that ran in high precision: y [..., N] = x [..., K] @ weight^T.

        The amaxes of x and, once an iteration, of the weight are recorded now (``record`` False: they were already), that
        of y's gradient when it comes. No value changes. The other recipes have no history: nothing is done.
        """
        if not self.has_histories:
            return
        if record:
            self.observe_forward(x, weight)
        if y.requires_grad:
            y.register_hook(self.observe_backward)

    def observe_forward(self, x: torch.Tensor, weight: torch.Tensor) -> None:
        """Record the amaxes of x and, once an iteration, of the weight."""
        self._observe("input", x)
        self.weights.observe(weight)

    def observe_backward(self, dy: torch.Tensor) -> None:
        """Record the amax of y's gradient."""
        self._observe("grad_output", dy)

    def _observe(self, role: str, x: torch.Tensor) -> None:
        self.casts[role].observe(x.reshape(-1, x.shape[-1]))

    def next_region(self, row_offset: int, col_offset: int, total_cols: int) -> Region:
        """Place and random stream of this backward's grad_output; each backward of an iteration has its own stream."""
        if self.state.capturing and self.rounds_stochastically:
            raise RuntimeError(
                f"{self.plan.name} rounds gradients stochastically, by bits that the host names in each iteration: a CUDA"
                " graph would repeat them. Switch stochastic rounding off, or train without the graph"
            )
        iteration, count = self._backwards
        count = count + 1 if iteration == self.state.iteration else 0
        self._backwards = (self.state.iteration, count)
        key = RandomKey(
            self.seed,
            zlib.crc32(self.plan.name.encode()),
            self.state.iteration,
            (self.stream << 16) + count,
        )
        return Region(key, row_offset, col_offset, total_cols)

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
        """a [M, K] @ b [N, K]^T (+ bias [N]) as the plan has it for 'fprop', 'dgrad' or 'wgrad'; counted.

        ``record`` False: a forward of evaluation, or again in a recomputation.
        """
        y = self._multiply(gemm, a, b, out_dtype, bias)
        if (observer := self.state.observer) is not None:
            observer.product(self.plan.name, gemm, a, b, y, recorded=record)
        return y

    def _multiply(
        self, gemm: str, a: Operand, b: Operand, out_dtype: torch.dtype, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if self.plan.gemms[gemm] == "fp8":
            assert isinstance(a, QuantizedSide) and isinstance(b, QuantizedSide) and self.backend is not None
            self.state.counts.fp8_gemms += 1
            fast = gemm == "fprop"
            return self.backend.gemm(a, b, out_dtype=out_dtype, bias=bias, fast_accumulation=fast)
        self.state.counts.hp_gemms += 1
        dtype = next((o.dtype for o in (a, b) if isinstance(o, torch.Tensor)), torch.bfloat16)
        plain_a, plain_b = (o if isinstance(o, torch.Tensor) else o.dequantize(dtype) for o in (a, b))
        return matmul_high_precision(plain_a, plain_b, out_dtype, bias)
