"""Peaks of this GPU, products and quantization by themselves: the sections of the GPU benchmark that run kernels.

Their runs are captured as CUDA graphs, so that what is timed is the GPU's work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from benchmarks import gpu_contenders as contenders
from benchmarks.common import Timing
from benchmarks.gpu_common import Clock, Machine, graphed, ratio, relative_error

TOKENS = 8192


@dataclass
class Bench:
    """A section's run: the machine, its clock, rows of the table, told as they are measured, and what was wrong."""

    machine: Machine
    clock: Clock
    repetitions: int
    rows: list[dict[str, Any]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def time(
        self,
        section: str,
        case: str,
        runs: dict[str, Callable[[], Any]],
        *,
        rate: Callable[[str, float], str] = lambda name, seconds: "",
        baseline: tuple[str, ...] = ("bf16",),
        repetitions: int | None = None,
    ) -> dict[str, Timing]:
        """Time all runs in turn and add a row for each, compared with the faster of the baselines."""
        times = self.clock.interleave(runs, repetitions or self.repetitions)
        best = min((times[name] for name in baseline if name in times), key=lambda t: t.median, default=None)
        for name, timing in times.items():
            row = {
                "section": section,
                "case": case,
                "contender": name,
                "median_s": timing.median,
                "spread": timing.spread,
                "speedup": None if best is None else ratio(timing, best),
                "rate": rate(name, timing.median),
                "seconds": timing.seconds,
            }
            self.rows.append(row)
            self.machine.tell(row=row)
        return times

    def skip(self, section: str, case: str, contender: str, why: str) -> None:
        """A cell that was not measured."""
        row = {"section": section, "case": case, "contender": contender, "median_s": None, "rate": why}
        self.rows.append(row)
        self.machine.tell(row=row)

    def tell_more(self, more: Mapping[str, Mapping[str, Any]]) -> None:
        """Add to the rows that were measured last, by contender, and tell them again."""
        for row in self.rows[-len(more) :]:
            row |= more[row["contender"]]
            self.machine.tell(row=row)

    def gate(self, what: str, error: float, bound: float) -> bool:
        """Whether a result is right enough to be timed; a wrong one fails the run."""
        if error <= bound:
            return True
        self.wrong.append(f"{what}: off by {error:.1e}, at most {bound:.0e} is right")
        return False


def random(machine: Machine, *shape: int, seed: int) -> torch.Tensor:
    """Normal bfloat16 numbers."""
    generator = torch.Generator(machine.device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=machine.device, dtype=torch.bfloat16)


def roofline(bench: Bench) -> None:
    """What this GPU does today: a copy, a BF16 product, and a bare scaled product.

    Their rows' ``peak`` is bytes, or operations, a second.
    """
    machine = bench.machine
    size = 256 if machine.dry else TOKENS
    x = random(machine, size, size, seed=0)
    y = torch.empty_like(x)
    copied = 2 * x.numel() * x.element_size()
    times = bench.time("roofline", f"{size} x {size} copy", {"copy": graphed(machine, partial(y.copy_, x))})
    peak = copied / times["copy"].median
    bench.tell_more({"copy": {"peak": peak, "rate": f"{peak / 1e9:.0f} GB/s"}})
    y.copy_(x)
    products = {"bf16": graphed(machine, lambda: x @ y.t())}
    if not machine.dry:
        codes, one = x.to(torch.float8_e4m3fn), torch.ones(1, device=machine.device)
        products["bare scaled_mm"] = graphed(machine, partial(bare, codes, codes, one, one))
    flops = 2 * size**3
    times = bench.time("roofline", f"{size} cubed product", products, rate=partial(teraflops, flops))
    bench.tell_more({name: {"peak": flops / timing.median} for name, timing in times.items()})


def teraflops(flops: int, name: str, seconds: float) -> str:
    """The rate, as tables have it."""
    return f"{flops / seconds / 1e12:.0f} TFLOPS"


def bare(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor) -> torch.Tensor:
    """torch's own product of codes a [M, K] and b [N, K], one scale each."""
    return torch._scaled_mm(
        a, b.t(), scale_a.view(1), scale_b.view(1), out_dtype=torch.bfloat16, use_fast_accum=True
    )


def bound_of(name: str) -> float:
    """Of the relative error of codes and of a product of two: FP4's step is larger."""
    return 0.2 if name == "nvfp4" else 0.06


def gemm(bench: Bench) -> None:
    """Products of codes made before, by recipe, against BF16 and a bare scaled_mm of the same codes."""
    machine = bench.machine
    shapes = [(64, 96, 128)] if machine.dry else [(8192, 6144, 4096), (8192, 28672, 4096), (8192, 8192, 8192)]
    for m, n, k in shapes:
        case = f"{m} x {n} x {k}"
        x, w = random(machine, m, k, seed=1), random(machine, n, k, seed=2)
        exact = x.double() @ w.double().t() if machine.dry else x @ w.t()
        runs: dict[str, Callable[[], Any]] = {"bf16": graphed(machine, partial(torch.matmul, x, w.t()))}
        for name, recipe in contenders.WITH_FP4.items():
            reason = machine.backend.supports(machine.device, recipe)
            if reason is not None:
                bench.skip("gemm", case, name, reason)
                continue
            a = machine.backend.quantize(x, recipe.rule("input"), "rowwise").tensor.rowwise
            b = machine.backend.quantize(w, recipe.rule("weight"), "rowwise").tensor.rowwise
            for label, fast in ((name, True), (f"{name}, slow", False)):
                if not fast and name not in ("tensorwise", "rowwise"):
                    continue

                def run(a: Any = a, b: Any = b, fast: bool = fast) -> torch.Tensor:
                    return machine.backend.gemm(a, b, out_dtype=torch.bfloat16, fast_accumulation=fast)

                if bench.gate(f"gemm {case} {label}", relative_error(run(), exact), bound_of(name)):
                    runs[label] = graphed(machine, run)
            if name == "tensorwise" and not machine.dry:
                product = partial(bare, a.codes, b.codes, a.scale_inv, b.scale_inv)
                runs["bare scaled_mm"] = graphed(machine, product)
        bench.time("gemm", case, runs, rate=partial(teraflops, 2 * m * n * k))
        machine.empty()


def quantize(bench: Bench) -> None:
    """Both directions of an operand, in GB/s of what is read (twice where a scale needs the amax first) and written."""
    machine = bench.machine
    for rows, cols in [(64, 128)] if machine.dry else [(8192, 4096), (8192, 14336)]:
        case = f"{rows} x {cols}"
        x = random(machine, rows, cols, seed=1)
        y = torch.empty_like(x)
        runs: dict[str, Callable[[], Any]] = {"copy": graphed(machine, partial(y.copy_, x))}
        bytes_each = {"copy": 4.0}
        for name, recipe in contenders.WITH_FP4.items():
            for role in ("input", "weight") if name == "blockwise" else ("input",):
                rule = recipe.rule(role)
                scale = torch.full((), 3.0, device=machine.device) if name == "delayed" else None
                label = name if role == "input" else f"{name} {role}"

                def run(x: Any = x, rule: Any = rule, scale: Any = scale) -> Any:
                    return machine.backend.quantize(x, rule, "both", scale=scale)

                found = run().tensor
                error = max(
                    relative_error(side, x)
                    for side in (found.dequantize(), found.columnwise.dequantize().t())
                )
                if bench.gate(f"quantise {case} {label}", error, bound_of(name)):
                    runs[label] = graphed(machine, run)
                    read = 4.0 if name in ("tensorwise", "rowwise", "nvfp4") else 2.0
                    bytes_each[label] = read + (9 / 8 if name == "nvfp4" else 2.0)
        times = bench.time("quantise", case, runs, baseline=())
        copied = bytes_each["copy"] / times["copy"].median
        more = {}
        for label, timing in times.items():
            speed = bytes_each[label] / timing.median
            rate = f"{x.numel() * speed / 1e9:.0f} GB/s, {speed / copied:.0%} of the copy's"
            more[label] = {"rate": rate}
        bench.tell_more(more)
        machine.empty()
