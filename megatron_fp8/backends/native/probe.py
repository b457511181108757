"""FP8 products of this GPU and torch, tried once against float64; those a recipe lacks.

The scaled products of torch depend on the GPU, on torch's CUDA libraries and on its version. Tables of versions are soon
wrong: rowwise scales had no float32 result, 128x128 blocks gave wrong numbers without padding, blocks need one GPU
generation. So each kind of product is run once, on a small matrix of an awkward shape, and compared with the float64
product of the same codes. One that raises, or is wrong, is refused, with the error as the reason. Results are cached for
the process.

One device is refused by name: AMD's MI300X has FP8 units for other formats (FNUZ: 0x80 is NaN, E4M3 ends at 240), which
would give other numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import product

import torch

from ... import kernels
from ...kernels.cast_dispatch import decode
from ...numerics.formats import E2M1, E4M3, E5M2, FloatFormat
from ...numerics.rule import (
    BLOCK_1X16,
    BLOCK_1X32,
    BLOCK_1X128,
    BLOCK_128X128,
    ROW,
    TENSOR,
    Granularity,
    Rule,
)
from ...recipe import GEMM_OPERANDS, Products, Recipe, products_of
from ...tensor import QuantizedSide
from .layout import Mode, Operand, ProductPlan, Refusal, Request, plan

Run = Callable[[ProductPlan, QuantizedSide, QuantizedSide, torch.Tensor | None], torch.Tensor]

_GRANULARITY: dict[Mode, tuple[Granularity, Granularity]] = {
    Mode.TENSOR: (TENSOR, TENSOR),
    Mode.ROW: (ROW, ROW),
    Mode.BLOCK: (BLOCK_1X128, BLOCK_128X128),
    Mode.BLOCK_1D: (BLOCK_1X128, BLOCK_1X128),
    Mode.MX: (BLOCK_1X32, BLOCK_1X32),
    Mode.FP4: (BLOCK_1X16, BLOCK_1X16),
}
# Five K blocks (not a multiple of four), N in two 128-blocks of which one is partial, M a multiple of four only.
_M, _N, _K = 36, 144, 640
_TOLERANCE = 0.01
NOT_A_GPU = "it needs an NVIDIA GPU of compute capability 8.9 or newer (RTX 40, H100, B200)"


def device_reason(device: torch.device) -> str | None:
    """Why the native backend cannot run on the device with any recipe; None if it can."""
    if device.type != "cuda":
        return NOT_A_GPU
    if vars(torch.version).get("hip"):
        return architecture_reason(torch.cuda.get_device_properties(device).gcnArchName)
    capability = torch.cuda.get_device_capability(device)
    return capability_reason(torch.cuda.get_device_name(device), capability) or kernels.refusal(device)


def capability_reason(name: str, capability: tuple[int, int]) -> str | None:
    """Why it cannot run on an NVIDIA GPU of that name and compute capability; None if it can."""
    if capability >= (8, 9):
        return None
    return f"{name} has compute capability {capability[0]}.{capability[1]}, FP8 units begin with 8.9"


def architecture_reason(architecture: str) -> str:
    """Why it cannot run on an AMD GPU of that architecture."""
    if architecture.startswith("gfx94"):
        return (
            f"{architecture} (MI300) multiplies FNUZ formats, whose E4M3 ends at 240 and whose 0x80 is NaN: the same"
            " codes would be other numbers"
        )
    return f"it is written for NVIDIA GPUs, this one is AMD's {architecture}"


@lru_cache(maxsize=64)
def refusals(device: torch.device, run: Run) -> Callable[[Request], str | None]:
    """A function for a device: request -> why torch does not support it there; None if it does. The same object for the
    same arguments."""

    @lru_cache(maxsize=256)
    def refusal(request: Request) -> str | None:
        return _try(request, device, run)

    return refusal


@torch.no_grad()
def _try(request: Request, device: torch.device, run: Run) -> str | None:
    m = _M + 12 * request.turned[0]  # transposed, a multiple of 16
    a, b = sample(request, m, _N, _K, device)
    bias = (
        torch.linspace(-3, 3, _N, device=device, dtype=torch.float32).to(request.out)
        if request.bias
        else None
    )
    bias_dtype = None if bias is None else bias.dtype
    others = {True: None, False: "not asked for"}
    wanted = plan.__wrapped__(
        Operand.of(a), Operand.of(b), request.out, bias_dtype, False, lambda other: others[other == request]
    )
    assert wanted.request == request, "what alone is not refused is planned"
    try:
        found = run(wanted, a, b, bias)[:m, :_N].double()
    except torch.OutOfMemoryError:
        raise  # of this GPU now, and not of the product
    except kernels.refusals() as error:
        return str(error).strip().partition("\n")[0]
    values_a, values_b = (_values(side) for side in (a, b))
    exact = values_a @ values_b.t()
    if bias is not None:
        exact = exact + bias.double()
    size = values_a.abs() @ values_b.abs().t() + exact.abs()
    error_found = float(((found - exact).abs() / size).nan_to_num(nan=torch.inf).max())
    if error_found > _TOLERANCE:
        return f"it is computed wrongly (off by {error_found:.1e} of the terms' sum)"
    return None


def _values(side: QuantizedSide) -> torch.Tensor:
    if side.tensor_amax is not None:
        return side.dequantize(torch.float32).double()
    return decode(side.codes, torch.float64) * side.expanded_scale_inv().to(torch.float64)


def sample(
    request: Request, m: int, n: int, k: int, device: torch.device
) -> tuple[QuantizedSide, QuantizedSide]:
    """Two sides of random finite codes and unequal scales for a request, the same on every device."""
    generator = torch.Generator().manual_seed(0)
    if request.mode is Mode.FP4:
        first, second = (
            _fp4_sample(rows, k, amax, generator, device) for rows, amax in ((m, 3.0), (n, 700.0))
        )
        return first, second
    sides = []
    for rows, dtype, granularity, turned in zip(
        (m, n), (request.a, request.b), _GRANULARITY[request.mode], request.turned, strict=True
    ):
        codes = torch.randn(rows, k, generator=generator, dtype=torch.float32, device="cpu").to(dtype)
        codes = codes.view(torch.uint8).t().contiguous().t().view(dtype) if turned else codes
        grid = tuple(
            1 if size == 0 else -(-extent // size)
            for extent, size in ((rows, granularity.rows), (k, granularity.cols))
        )
        exponent = torch.randint(122, 133, grid, generator=generator, dtype=torch.uint8, device="cpu")
        if request.mode is Mode.MX:
            scale = exponent.view(torch.float8_e8m0fnu)
        else:
            scale = (exponent.float() - 127).exp2() * 1.25
        if granularity.is_tensor:
            scale = scale.reshape(())
        sides.append(QuantizedSide(codes.to(device), scale.to(device), granularity, request.mode is Mode.MX))
    return sides[0], sides[1]


def _fp4_sample(
    rows: int, k: int, amax: float, generator: torch.Generator, device: torch.device
) -> QuantizedSide:
    """All codes, and scales from 2^-3 to 448, in NVFP4."""
    codes = torch.randint(0, 256, (rows, k // 2), generator=generator, dtype=torch.uint8, device="cpu")
    scale = torch.randint(32, 127, (rows, k // 16), generator=generator, dtype=torch.uint8, device="cpu")
    return QuantizedSide(
        codes.to(device).view(E2M1.dtype),
        scale.to(device).view(torch.float8_e4m3fn),
        BLOCK_1X16,
        False,
        True,
        tensor_amax=torch.full((), amax, dtype=torch.float32, device=device),
    )


# ------------------------------------------------------------------------------------------- what a recipe needs

# Results and biases that a linear layer asks for.
_RESULTS = [(torch.float32, None)] + [
    (dtype, bias) for dtype in (torch.bfloat16, torch.float16) for bias in (None, dtype)
]


def missing_product(recipe: Recipe | Products, refusal: Refusal) -> str | None:
    """The first of the recipe's products that a device does not support, with the reasons; None: it supports all.

    Args:
        refusal: why the device does not support a request.
    """
    for which, (first, second) in gemms_of(recipe).items():
        for out, bias in _RESULTS:
            try:
                plan_for(first, second, out, bias, refusal)
            except ValueError as error:
                return f"{which}: {error}"
    return None


def kernel_gemms(recipe: Recipe | Products, refusal: Refusal) -> list[str]:
    """The GEMMs of this package's own kernel, because torch has no such product on the device."""
    return [which for which, request in requests(recipe, refusal).items() if request.triton]


def mx_gemms(recipe: Recipe | Products, refusal: Refusal) -> list[str]:
    """The GEMMs of 128-wide blocks that run as the MX product: each scale serves four blocks of 32, with the same
    numbers."""
    found = requests(recipe, refusal).items()
    mx = [which for which, request in found if request.mode is Mode.MX]
    return [which for which in mx if BLOCK_1X32 not in {rule.granularity for rule in gemms_of(recipe)[which]}]


@lru_cache(maxsize=256)
def runs_as_mx(rule: Rule, refusal: Refusal) -> bool:
    """Whether operands of 128-wide blocks quantized by the rule are multiplied by the MX product."""
    if not _typical(rule).fits_mx:
        return False
    other = replace(rule, fmt=E4M3, granularity=BLOCK_1X128)
    return plan_for(rule, other, torch.bfloat16, None, refusal).request.mode is Mode.MX


@lru_cache(maxsize=64)
def reads_transposed(fmt: FloatFormat, refusal: Refusal) -> bool:
    """Whether dgrad and wgrad of operands with one scale, one of this format, read codes that lie transposed."""
    first = (E4M3, E5M2) if fmt == E4M3 else (E5M2,)
    return all(
        None in (refusal(request), refusal(replace(request, by="torch v1")))
        for a, (out, _), turned in product(first, _RESULTS, ((False, True), (True, True)))
        for request in [Request(Mode.TENSOR, a.dtype, E4M3.dtype, out, turned=turned)]
    )


def requests(recipe: Recipe | Products, refusal: Refusal) -> dict[str, Request]:
    """Each GEMM's request for a 16-bit result, by the recipe."""
    gemms = gemms_of(recipe).items()
    return {gemm: plan_for(a, b, torch.bfloat16, None, refusal).request for gemm, (a, b) in gemms}


def gemms_of(recipe: Recipe | Products) -> dict[str, tuple[Rule, Rule]]:
    """The rules of both operands of every FP8 GEMM."""
    products = products_of(recipe).items()
    return {which: (a, b) for which, (a, b) in products if a is not None and b is not None}


def rules_of(recipe: Recipe | Products, role: str) -> list[Rule]:
    """The role's rules, each once."""
    products = products_of(recipe)
    rules = [products[gemm][roles.index(role)] for gemm, roles in GEMM_OPERANDS.items() if role in roles]
    return [rule for rule in dict.fromkeys(rules) if rule is not None]


def plan_for(a: Rule, b: Rule, out: torch.dtype, bias: torch.dtype | None, refusal: Refusal) -> ProductPlan:
    return plan(_typical(a), _typical(b), out, bias, False, refusal)


def _typical(rule: Rule) -> Operand:
    """An operand of typical size, quantized by the rule."""
    e8m0, pow2 = rule.scale == "e8m0", rule.pow2
    return Operand(128, 128, rule.fmt.dtype, rule.granularity, e8m0, pow2)
