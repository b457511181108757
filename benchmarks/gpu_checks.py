"""The GPU's checks that need no Megatron-Core: codes to the bit, products, gradients, waiting, a captured graph.

Codes and scales must be the specified ones to the bit; products are held to bounds of their accumulation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch

from benchmarks import gpu_digests
from benchmarks.gpu_common import (
    WITH_FP4,
    Machine,
    NotRun,
    graphed,
    no_synchronisation,
    relative_error,
    supported,
)
from benchmarks.gpu_plan import BLOCKS
from megatron_fp8.backends import emulated
from megatron_fp8.backends.base import Region
from megatron_fp8.backends.native import backend as native
from megatron_fp8.backends.native import products
from megatron_fp8.backends.native.layout import Request
from megatron_fp8.backends.native.placement import tiles_of
from megatron_fp8.kernels.gemms import add_matmul_fp32
from megatron_fp8.linear.function import fp8_linear, grouped_linear
from megatron_fp8.linear.gemm_site import GemmSite
from megatron_fp8.numerics import nvfp4
from megatron_fp8.numerics.cast import RandomKey
from megatron_fp8.plan.site_plan import fp8_site
from megatron_fp8.state.fp8_state import Fp8State
from megatron_fp8.tensor import expand_scale

# Of |a| |b|: Hopper keeps about 14 bits of a partial sum with fast accumulation, more where it promotes.
GEMM_BOUND = {True: 2.0**-9, False: 2.0**-11}
CODES = [(1, 5), (70, 200), (129, 257), (1000, 4100), (4096, 4096)]
PRECOMPILED = [(36, 144, 640), (2048, 4096, 4096)]
"""Sizes of block_matmul.py's variants (gpu_variants.py)."""
GEMMS = [(1, 1, 1), (33, 17, 70), (127, 1000, 641), (1000, 513, 8), (512, 2752, 1024), PRECOMPILED[-1]]


DRAWS = Region(RandomKey(1, 2, 3, 4))
"""Random bits of what is rounded stochastically."""


def checks() -> dict[str, Callable[[Machine], str]]:
    """Every check by name."""
    found: dict[str, Callable[[Machine], str]] = {"digests": digests, "added products": added_products}
    for what, check in (("codes", codes), ("gemm", gemms), ("gradients", gradients), ("no waiting", no_waiting),
                        ("experts", experts), ("graph", cuda_graph)):  # fmt: skip
        found |= {f"{what} {name}": partial(check, name=name) for name in WITH_FP4}
    del found["graph nvfp4"]  # each replay would draw the same bits
    found |= {f"own product {name}": partial(own_products, name=name) for name in BLOCKS}
    found |= {f"mx scales {name}": partial(mx_scales, name=name) for name in ("mxfp8", "blockwise", "nvfp4")}
    return found


def random(machine: Machine, *shape: int, seed: int) -> torch.Tensor:
    """bfloat16 normal numbers whose rows differ in size; the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.exp2(torch.randint(-4, 5, (shape[0], 1), generator=generator).float())
    return (torch.randn(shape, generator=generator) * rows).to(torch.bfloat16).to(machine.device)


def digests(machine: Machine) -> str:
    """Codes and scales for fixed seeds against digests made on a CPU and kept with the code."""
    lines, verdict = gpu_digests.compared()
    assert not lines, "\n".join([verdict, *lines[:12]])
    return verdict


def codes(machine: Machine, name: str) -> str:
    """Codes, scales, amax and health on the device against the CPU's, both directions, odd sizes, NaN and Inf, and every
    BF16 number: amaxes are found by an instruction for two of them, which no CPU has."""
    chosen, count = supported(machine, name), 0
    matrices = {}
    for sizes in CODES[:3] if machine.dry else CODES:
        x = random(machine, *sizes, seed=3)
        x[0, 0], x[-1, -1] = torch.nan, -torch.inf
        matrices[str(sizes)] = x
    for what, special in (("every number", True), ("every finite number", False)):
        x = every_number(machine, special)
        matrices |= {what: x, f"{what}, turned": x.t().contiguous()}
    for shape, x in matrices.items():
        for role in ("input", "weight", "grad_output"):
            found = machine.backend.quantize(x, chosen.rule(role), "both", region=DRAWS)
            expected = emulated.quantize(x.cpu(), chosen.rule(role), "both", region=DRAWS)
            for side in ("rowwise", "columnwise"):
                mine, theirs = getattr(found.tensor, side), getattr(expected.tensor, side)
                for what in ("codes", "scale_inv"):
                    same_bytes(getattr(mine, what), getattr(theirs, what), f"{role} {shape} {side} {what}")
                    count += getattr(mine, what).numel()
            same_bytes(found.amax, expected.amax, f"{role} {shape} amax")
            assert float(found.nonfinite or 0) == float(expected.nonfinite or 0), (
                f"{role} {shape}: non-finite count"
            )
            if machine.backend is native:
                count += filled_up(x, chosen.rule(role), expected.tensor.columnwise, f"{role} {shape}")
    return f"{count:,} codes and scales, all equal"


def filled_up(x: torch.Tensor, rule: Any, expected: Any, what: str) -> int:
    """Columnwise codes of a cast for a product: the expected ones, and zeros behind the last row. How many zeros."""
    side = native.quantize(x, rule, "both", region=DRAWS, for_product=True).tensor.columnwise
    assert side is not None
    same_bytes(side.plain().codes, expected.codes, f"{what} codes for a product")
    if side.tensor_amax is not None:  # the transform fills the padding
        return 0
    zeros = side.codes[:, x.shape[0] :].view(torch.uint8)
    same_bytes(zeros, torch.zeros_like(zeros), f"{what} behind the last row")
    return zeros.numel()


def every_number(machine: Machine, special: bool) -> torch.Tensor:
    """bfloat16 [256, 256] of all 65,536 patterns, a row's of one sign and nearly one exponent; 1 for NaN and Inf if not
    special."""
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256)
    return (x if special else torch.where(x.isfinite(), x, 1.0)).to(machine.device)


def same_bytes(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """AssertionError naming the first element that differs."""
    view = torch.int32 if found.element_size() == 4 else torch.uint8
    assert found.shape == expected.shape, (
        f"{what}: shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
    )
    mine, theirs = (t.detach().cpu().contiguous().view(view) for t in (found, expected))
    differ = (mine != theirs).nonzero()
    if len(differ):
        at = tuple(differ[0].tolist())
        raise AssertionError(
            f"{what}: {len(differ)} differ, first at {at}: {mine[at]:#x}, expected {theirs[at]:#x}"
        )


def gemms(machine: Machine, name: str, sizes: Sequence[tuple[int, int, int]] = GEMMS) -> str:
    """All three GEMMs against float64, sizes aligned and odd, results in three dtypes, with and without bias."""
    chosen, worst = supported(machine, name), {True: 0.0, False: 0.0}
    sizes = [(33, 17, 70), (64, 48, 200)] if machine.dry else sizes
    for m, n, k in sizes:
        tensors = {"input": (m, k), "weight": (n, k), "grad_output": (m, n)}
        sides = {
            role: machine.backend.quantize(
                random(machine, *shape, seed=5), chosen.rule(role), "both", region=DRAWS
            ).tensor
            for role, shape in tensors.items()
        }
        pairs = {
            "fprop": (sides["input"].rowwise, sides["weight"].rowwise),
            "dgrad": (sides["grad_output"].rowwise, sides["weight"].columnwise),
            "wgrad": (sides["grad_output"].columnwise, sides["input"].columnwise),
        }
        for which, (a, b) in pairs.items():
            exact, size = product64(a, b)
            turned = replace(b, codes=b.codes.view(torch.uint8).t().contiguous().t().view(b.codes.dtype))
            first, second = (machine.backend.gemm(a, side, out_dtype=torch.float32) for side in (b, turned))
            what = f"{which} {m} x {n} x {k} of codes in the other order"
            if a.granularity.is_tensor:  # where a product reads them so, its sums may be in another order
                assert float(((second - exact).abs() / size.clamp(min=1e-30)).max()) <= GEMM_BOUND[False], (
                    what
                )
            else:
                same_bytes(second, first, what)
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                bias = torch.randn(b.codes.shape[0], device=machine.device).to(dtype)
                for added in (None, bias):
                    fast = which == "fprop"
                    found = machine.backend.gemm(a, b, out_dtype=dtype, bias=added, fast_accumulation=fast)
                    wanted = exact if added is None else exact + added.double()
                    unit = torch.finfo(dtype).eps
                    overflow = dtype == torch.float16 and bool((wanted.abs() > 65000).any())
                    error = (found.double() - wanted).abs() - unit * wanted.abs()
                    off = 0.0 if overflow else float((error / size.clamp(min=1e-30)).max())
                    assert off <= GEMM_BOUND[fast], f"{which} {m} x {n} x {k} {dtype}: {off:.1e} of |a| |b|"
                    worst[fast] = max(worst[fast], off)
    parts = [f"off by at most {worst[True]:.1e} (fprop), {worst[False]:.1e} (others) of |a| |b|"]
    if machine.backend is native:
        requests = native.requests(chosen, products.refusals(machine.device, native.multiply))
        parts += [f"{which} of {request}" for which, request in requests.items()]
    return "; ".join(parts)


def own_products(machine: Machine, name: str) -> str:
    """``gemms`` and ``experts`` by this package's kernel, which other GPUs run where torch has no such product."""
    if machine.dry:
        raise NotRun("needs a GPU")

    def torch_has_none(request: Request) -> str | None:
        return None if request.triton else "it is another's"

    with mock.patch.object(products, "refusals", lambda *_: torch_has_none):
        return f"{gemms(machine, name, PRECOMPILED)}; {experts(machine, name)}"


def mx_scales(machine: Machine, name: str) -> str:
    """Scales as the MX product reads them, by the cast and by the kernel, against the CPU's; blocks of 128 are multiplied
    by them where torch has no other product for those."""
    chosen, count = WITH_FP4[name], 0  # casts need no product
    for shape in CODES[:3] if machine.dry else CODES:
        x = random(machine, *shape, seed=3)
        for role in ("input", "weight"):
            rule = chosen.rule(role)
            casts = [machine.backend.quantize(x, rule, "both").tensor]
            if machine.backend is native:
                casts.append(native.quantize(x, rule, "both", for_product=True).tensor)
            for side in (side for cast in casts for side in cast.sides):
                plain = side.plain()
                there = replace(plain, codes=plain.codes.cpu(), scale_inv=plain.scale_inv.cpu())
                same_bytes(
                    tiles_of(side if side.tiled else plain),
                    tiles_of(there),
                    f"{role} {shape} scales in tiles",
                )
                count += there.scale_inv.numel()
    if name != "blockwise" or machine.backend is not native:
        return f"{count:,} scales in tiles, all equal"
    by = native.mx_gemms(chosen, native.refusals(machine.device, native.multiply))
    if torch.cuda.get_device_capability(machine.device)[0] == 10:
        assert by == ["fprop", "dgrad", "wgrad"], f"of three products of blocks {by} run as MX's"
    return f"{count:,} scales in tiles, all equal; products of blocks that run as MX's: {', '.join(by) or 'none'}"


def added_products(machine: Machine) -> str:
    """A wgrad in high precision, which its product adds to a float32 buffer, against float64."""
    n, m, k = (33, 70, 48) if machine.dry else (2752, 1000, 1024)
    dy, x = random(machine, m, n, seed=1), random(machine, m, k, seed=2)
    into = torch.randn(n, k, device=machine.device)
    exact = into.double() + dy.double().t() @ x.double()
    add_matmul_fp32(into, dy.t(), x.t())
    error = relative_error(into, exact)
    assert error < 1e-5, f"off by {error:.1e} (RMS)"
    return f"off by {error:.1e} (RMS)"


def product64(a: Any, b: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(float64 product of the codes and scales, the product of their magnitudes)."""
    values = [values64(side) for side in (a, b)]
    return values[0] @ values[1].t(), values[0].abs() @ values[1].abs().t()


def values64(side: Any) -> torch.Tensor:
    """float64 [rows, contraction] of a side; of NVFP4 with its blocks' padding."""
    if side.tensor_amax is None:
        return emulated.values64(side)
    values = nvfp4.values(side.codes, torch.float64)
    scale = expand_scale(side.scale_inv.double(), side.granularity, values.shape)
    return values * scale * (side.tensor_amax.double() / nvfp4.LARGEST)


def gradients(machine: Machine, name: str) -> str:
    """y, dx, dw and dbias of the linear against the emulated backend's on this device, three iterations."""
    chosen = supported(machine, name)
    m, k, n = (70, 96, 136) if machine.dry else (1000, 1024, 2752)
    x, w, dy = (random(machine, *s, seed=i) for i, s in enumerate(((m, k), (n, k), (m, n))))
    bias = random(machine, 1, n, seed=9)[0]
    outcomes = []
    for backend in (machine.backend.name, "emulated"):
        state = Fp8State(machine.device)
        site = GemmSite(fp8_site("layers.0.linear", 0, chosen, backend, "check"), state, None)
        for _ in range(3):  # delayed scaling: the first without a history, the others with
            leaves = [t.clone().requires_grad_() for t in (x, w, bias)]
            y = fp8_linear(leaves[0], leaves[1], leaves[2], site)
            y.backward(dy)
            state.finish_iteration()
        outcomes.append((y.detach(), *(t.grad for t in leaves)))
    errors = [relative_error(found, wanted) for found, wanted in zip(*outcomes, strict=True)]
    assert max(errors) < 4e-3, f"y, dx, dw, dbias off by {', '.join(f'{e:.1e}' for e in errors)} (RMS)"
    assert errors[3] == 0, "dbias is the float32 sum of dy: bits"
    return f"y {errors[0]:.1e}, dx {errors[1]:.1e}, dw {errors[2]:.1e} from the emulated (RMS)"


def no_waiting(machine: Machine, name: str) -> str:
    """A linear's forward and backward never wait for the GPU, once its kinds of product were tried and weights cached."""
    chosen = supported(machine, name)
    state = Fp8State(machine.device)
    site = GemmSite(fp8_site("layers.0.linear", 0, chosen, machine.backend.name, "check"), state, None)
    x, w, dy = (random(machine, *s, seed=i) for i, s in enumerate(((64, 128), (256, 128), (64, 256))))
    for iteration in range(3):
        leaves = [t.clone().requires_grad_() for t in (x, w)]
        machine.synchronize()
        if iteration < 2:
            fp8_linear(leaves[0], leaves[1], None, site).backward(dy)
        else:
            with no_synchronisation(machine):
                fp8_linear(leaves[0], leaves[1], None, site).backward(dy)
        state.finish_iteration()
    return "no synchronisation in forward and backward"


def experts(machine: Machine, name: str) -> str:
    """A layer's experts in one call against each alone, to the bit: y, dx, and gradients added to main_grads."""
    chosen = supported(machine, name)
    tokens = (70, 0, 33) if machine.dry else (500, 0, 1300, 1, 129)
    k, n = (96, 136) if machine.dry else (1024, 2752)
    x, dy = random(machine, sum(tokens), k, seed=1), random(machine, sum(tokens), n, seed=2)
    outcomes = []
    for grouped in (True, False):
        state = Fp8State(machine.device)
        sites = [
            GemmSite(fp8_site(f"experts.{e}", None, chosen, machine.backend.name, "check"), state, None)
            for e in range(len(tokens))
        ]
        leaf = x.clone().requires_grad_()
        weights: list[Any] = [
            torch.nn.Parameter(random(machine, n, k, seed=3 + e)) for e in range(len(tokens))
        ]
        for weight in weights:
            weight.main_grad = torch.ones(n, k, dtype=torch.float32, device=machine.device)
            weight.grad_added_to_main_grad = False
        if grouped:
            y = grouped_linear(leaf, weights, tokens, sites)
        else:
            parts = zip(leaf.split(list(tokens)), weights, sites, strict=True)
            y = torch.cat([fp8_linear(part, weight, None, site) for part, weight, site in parts])
        y.backward(dy)
        outcomes.append((y.detach(), leaf.grad, torch.stack([weight.main_grad for weight in weights])))
    for what, found, wanted in zip(("y", "dx", "main_grad"), *outcomes, strict=True):
        assert torch.equal(found, wanted), f"{what}: {int((found != wanted).sum())} numbers differ"
    return f"{len(tokens)} experts in one call, and each alone: the same bits"


def cuda_graph(machine: Machine, name: str) -> str:
    """Quantize and multiply inside a captured graph: the replay gives the bits of the eager run on new numbers."""
    if machine.dry:
        raise NotRun("needs a GPU")
    chosen = supported(machine, name)
    x, w = random(machine, 256, 512, seed=1), random(machine, 384, 512, seed=2)
    out = torch.empty(256, 384, dtype=torch.bfloat16, device=machine.device)

    def forward() -> None:
        a = machine.backend.quantize(x, chosen.rule("input"), "rowwise").tensor.rowwise
        b = machine.backend.quantize(w, chosen.rule("weight"), "rowwise").tensor.rowwise
        out.copy_(machine.backend.gemm(a, b, out_dtype=torch.bfloat16, fast_accumulation=True))

    replay = graphed(machine, forward)
    x.copy_(random(machine, 256, 512, seed=7))
    forward()
    eager = out.clone()
    out.zero_()
    replay()
    same_bytes(out.view(torch.uint8), eager.view(torch.uint8), "replayed result")
    return "captured and replayed"
