"""Digests of codes and scales: made on a CPU by the emulated backend, kept with the code, compared on any GPU.

    python -m benchmarks.gpu_digests            compare the kernels with the kept digests (exit status 1 if any differs)
    python -m benchmarks.gpu_digests --write    make them anew: only when what a code or scale must be has changed

With a GPU the compiled kernels are compared; without one the emulated backend is, which shows that the digests are still
its own. Where something differs the case is made again on the CPU, and the first difference's coordinate is printed.

Inputs come from integers alone (Philox words taken as float bits), so that no library's random normals, exponentials or
vector width can change them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_fp8.backends import emulated
from megatron_fp8.backends.base import CastResult
from megatron_fp8.backends.native import backend as native
from megatron_fp8.numerics.cast import RandomKey, philox_bits
from megatron_fp8.numerics.formats import E4M3, E5M2, FloatFormat
from megatron_fp8.recipe import BLOCK_1X32, BLOCK_1X128, BLOCK_128X128, ROW, TENSOR, DelayedScaling, Rule
from megatron_fp8.state.amax_history import AmaxRingBuffer
from megatron_fp8.state.arena import Arena
from megatron_fp8.tensor import Float8Tensor, QuantizedSide

KEPT = Path(__file__).parent / "data" / "gpu_digests.json"
Outputs = dict[str, torch.Tensor]
"""What a case gives, by name ('rowwise.codes', 'amax', ...), on any device."""


@dataclass(frozen=True)
class Functions:
    """One implementation of all that cases call.

    quantize: as emulated.quantize. transpose: codes [rows, cols] -> [cols, rows]. normed: as quantize, of the norm
    (x * rstd) * weight rounded to x's dtype, with x, rstd [rows] and weight [cols] first. updated: outputs of the delayed
    update of the case's slots after its iterations.
    """

    quantize: Callable[..., CastResult]
    transpose: Callable[[torch.Tensor], torch.Tensor]
    normed: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Rule], CastResult]
    updated: Callable[[list[torch.Tensor], DelayedScaling], Outputs]


@dataclass(frozen=True)
class Case:
    """A name, what is called, and whether it is too large for kernels that are interpreted."""

    name: str
    outputs: Callable[[Functions, torch.device], Outputs]
    large: bool = False


# ---------------------------------------------------------------------------------------------------------- inputs


def matrix(seed: int, rows: int, cols: int, dtype: torch.dtype, special: bool) -> torch.Tensor:
    """Numbers over 24 octaves, zeros of both signs, subnormals; NaN and both Inf if special. CPU, [rows, cols]."""
    index = torch.arange(rows * cols).view(rows, cols)
    word, choice = philox_bits(index, RandomKey(seed)), philox_bits(index, RandomKey(seed, 1)) % 1024
    exponent = 115 + (word >> 23) % 24
    bits = (word & 0x807FFFFF) | (exponent << 23)
    bits = torch.where(choice < 40, word & 0x80000000, bits)
    bits = torch.where(choice == 40, word & 0x807FFFFF, bits)
    if special:
        for value, pattern in ((41, 0x7F800000), (42, 0xFF800000), (43, 0xFFC00000)):
            bits = torch.where(choice == value, pattern, bits)
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32).to(dtype)


def every_16_bits(dtype: torch.dtype) -> torch.Tensor:
    """All bfloat16 or float16 numbers, [256, 256]."""
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype).view(256, 256)


def any_bits(seed: int) -> torch.Tensor:
    """float32 of random bits, [256, 256]: NaN of every payload, Inf, subnormals."""
    word = philox_bits(torch.arange(65536), RandomKey(seed)).view(256, 256)
    return torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32).view(torch.float32)


# ----------------------------------------------------------------------------------------------------------- cases

RULES: dict[str, Callable[[FloatFormat], Rule]] = {
    "tensorwise": lambda fmt: Rule(fmt, TENSOR),
    "tensorwise-pow2": lambda fmt: Rule(fmt, TENSOR, "pow2", margin=1),
    "rowwise": lambda fmt: Rule(fmt, ROW, "pow2"),
    "blockwise": lambda fmt: Rule(fmt, BLOCK_1X128, "pow2"),
    "blockwise-fp32": lambda fmt: Rule(fmt, BLOCK_1X128, "fp32", epsilon=2.0**-10),
    "blockwise-weight": lambda fmt: Rule(fmt, BLOCK_128X128, "pow2"),
    "blockwise-weight-fp32": lambda fmt: Rule(fmt, BLOCK_128X128, "fp32"),
    "mxfp8": lambda fmt: Rule(fmt, BLOCK_1X32, "e8m0"),
}
SHAPES = [
    (1, 7, torch.float16, True),
    (200, 129, torch.bfloat16, True),
    (160, 256, torch.float32, False),
    (1040, 2064, torch.bfloat16, False),
]


def cases() -> list[Case]:
    """Every kernel of which bits are promised, over formats, dtypes, odd and even sizes."""
    found: list[Case] = []
    for fmt in (E4M3, E5M2):
        for seed, (rows, cols, dtype, special) in enumerate(SHAPES):
            x = matrix(seed, rows, cols, dtype, special)
            size, large = f"{fmt.name}/{rows}x{cols}-{str(dtype).removeprefix('torch.')}", rows > 1000
            found += [Case(f"{name}/{size}", _quantized(x, rule(fmt)), large) for name, rule in RULES.items()]
            scale = torch.tensor([3.0, 0.3, 2.0**-7, 0.7])[seed]
            found.append(
                Case(f"delayed/{size}", _quantized(x, Rule(fmt, TENSOR, delayed=True), scale), large)
            )
        every = {
            "bfloat16": every_16_bits(torch.bfloat16),
            "float16": every_16_bits(torch.float16),
            "float32": any_bits(9),
        }
        for dtype_name, x in every.items():
            for power in (0, -120, 100):
                rule, scale = Rule(fmt, TENSOR, delayed=True), torch.tensor(1.5).ldexp(torch.tensor(power))
                found.append(Case(f"every-{dtype_name}/{fmt.name}/2^{power}", _quantized(x, rule, scale)))
        found.append(Case(f"norm/{fmt.name}", _normed(Rule(fmt, BLOCK_1X128, "pow2"))))
    found.append(Case("transpose", _transposed))
    for recipe in (DelayedScaling(amax_history_len=16, margin=1), DelayedScaling(amax_history_len=1)):
        found.append(Case(f"update/{recipe.amax_history_len}", _updated(recipe)))
    return found


def _quantized(
    x: torch.Tensor, rule: Rule, scale: torch.Tensor | None = None
) -> Callable[[Functions, torch.device], Outputs]:
    def outputs(functions: Functions, device: torch.device) -> Outputs:
        on_device = None if scale is None else scale.to(device)
        both = functions.quantize(x.to(device), rule, "both", scale=on_device)
        return named(both)

    return outputs


def _normed(rule: Rule) -> Callable[[Functions, torch.device], Outputs]:
    """A norm whose statistic is given: a sum's order is no part of what is promised."""

    def outputs(functions: Functions, device: torch.device) -> Outputs:
        x = matrix(20, 70, 200, torch.bfloat16, False)
        rstd, weight = (matrix(21, 1, n, torch.float32, False).abs()[0] for n in (70, 200))
        weight = weight.to(torch.bfloat16)
        return named(functions.normed(x.to(device), rstd.to(device), weight.to(device), rule))

    return outputs


def _transposed(functions: Functions, device: torch.device) -> Outputs:
    words = philox_bits(torch.arange(300 * 257), RandomKey(30)).view(300, 257)
    codes = (words & 0xFF).to(torch.uint8)
    return {"codes": functions.transpose(codes.to(device))}


def _updated(recipe: DelayedScaling) -> Callable[[Functions, torch.device], Outputs]:
    def outputs(functions: Functions, device: torch.device) -> Outputs:
        running = [matrix(40 + i, 1, 37, torch.float32, False).abs()[0] for i in range(20)]
        for i, row in enumerate(running):
            row[i] = torch.inf
        return functions.updated([row.to(device) for row in running], recipe)

    return outputs


def named(quantized: CastResult) -> Outputs:
    """Codes and scales of the sides that are there, amax and count."""
    out = {
        "amax": quantized.amax,
        "nonfinite": torch.zeros(())
        if quantized.nonfinite is None
        else quantized.nonfinite.to(torch.float32),
    }
    for name in ("rowwise", "columnwise"):
        side = getattr(quantized.tensor, name)
        if side is not None:
            out |= {f"{name}.codes": side.codes, f"{name}.scale_inv": side.scale_inv}
    return out


# --------------------------------------------------------------------------------------------------- implementations


def emulated_functions() -> Functions:
    """torch operations, on the CPU or any other device."""

    def normed(x: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor, rule: Rule) -> CastResult:
        y = (x * rstd[:, None]).mul_(weight.to(torch.float32)).to(x.dtype)
        return emulated.quantize(y, rule, "both")

    def updated(running: list[torch.Tensor], recipe: DelayedScaling) -> Outputs:
        arena = Arena(None, running[0].device)
        for _ in running[0]:
            arena.add(recipe, E4M3)
        for iteration, row in enumerate(running):
            arena.rows[0, : row.numel()] = row
            arena.update(iteration)
        return {"scale": arena.scale, "history": arena.history(recipe, E4M3)[1].t()}

    return Functions(emulated.quantize, lambda codes: codes.t().contiguous(), normed, updated)


def kernel_functions() -> Functions:
    """The Triton kernels, compiled (or interpreted, if Triton was told so before it was imported)."""
    from megatron_fp8.kernels import delayed_update, fused_quantize, gemm_layouts, quantize

    def normed(x: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor, rule: Rule) -> CastResult:
        source = fused_quantize.RmsNorm(x, rstd, weight)
        record = quantize.Record.new(x.device)
        sides = quantize.quantize_blocks(source, rule.fmt, block=rule.granularity.cols, record=record)
        rowwise, columnwise = (
            QuantizedSide(side.codes, side.scale_inv, rule.granularity, True)
            for side in (sides.rowwise, sides.columnwise)
            if side is not None
        )
        tensor = Float8Tensor(rowwise, columnwise, x.dtype)
        return CastResult(tensor, record.amax, record.nonfinite)

    def updated(running: list[torch.Tensor], recipe: DelayedScaling) -> Outputs:
        slots, device = running[0].numel(), running[0].device
        scale, rings = (
            torch.ones(slots, device=device),
            AmaxRingBuffer(slots, recipe.amax_history_len, device),
        )
        for row in running:
            delayed_update.update_delayed(
                row,
                scale,
                torch.arange(slots, device=device),
                rings.head,
                rings.rows,
                rings.maxima,
                torch.full_like(scale, E4M3.max),
                length=rings.length,
                margin=recipe.margin,
            )
        return {"scale": scale, "history": rings.unrolled().t()}

    return Functions(native.quantize, gemm_layouts.transpose, normed, updated)


# -------------------------------------------------------------------------------------------------------- comparison


def run(functions: Functions, device: torch.device, *, large: bool = True) -> dict[str, dict[str, str]]:
    """Digests of every output of every case, by case and output."""
    return {
        case.name: {name: digest(t) for name, t in case.outputs(functions, device).items()}
        for case in cases()
        if large or not case.large
    }


def digest(t: torch.Tensor) -> str:
    """The first 16 digits of the sha256 of shape, and elements' bits in row-major order."""
    shape = ",".join(map(str, t.shape))
    return hashlib.sha256(shape.encode() + b":" + as_integers(t).numpy().tobytes()).hexdigest()[:16]


def as_integers(t: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor, on the CPU, contiguous."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[t.element_size()]
    return torch.empty(t.shape, dtype=t.dtype).copy_(t.detach()).view(integer)


def compare(
    found: Mapping[str, Mapping[str, str]],
    expected: Mapping[str, Mapping[str, str]],
    functions: Functions,
    device: torch.device,
) -> list[str]:
    """A line for every case that differs: which output, the first element that does, and both its bits.

    Args:
        found: what ``run`` gave for functions on device; expected: what is kept.
    """
    lines, by_name = [], {case.name: case for case in cases()}
    for name in found:
        if name not in expected:
            lines.append(f"{name}: no digest is kept for it; make them anew with --write")
        elif found[name] != expected[name]:
            lines.append(_difference(by_name[name], functions, device))
    return lines


def _difference(case: Case, functions: Functions, device: torch.device) -> str:
    mine = case.outputs(functions, device)
    theirs = case.outputs(emulated_functions(), torch.device("cpu"))
    for name, expected in theirs.items():
        if name not in mine or mine[name].shape != expected.shape:
            shape = tuple(mine[name].shape) if name in mine else "nothing"
            return f"{case.name} {name}: {shape}, expected shape {tuple(expected.shape)}"
        a, b = as_integers(mine[name]), as_integers(expected)
        if not torch.equal(a, b):
            where = (a != b).nonzero()
            first = tuple(where[0].tolist())
            width = 8 * a.element_size()
            bits = [f"0x{int(t[first]) & ((1 << width) - 1):0{width // 4}x}" for t in (a, b)]
            return (
                f"{case.name} {name}: {len(where)} of {a.numel()} elements differ, first at {first}:"
                f" {bits[0]}, expected {bits[1]}"
            )
    return (
        f"{case.name}: differs from the kept digest, but not from the emulated backend here: the digests are"
        " not of this version of the code"
    )


def kept() -> dict[str, Any]:
    """The digests that are kept with the code."""
    return dict(json.loads(KEPT.read_text()))


def main() -> int:
    """Compare or write; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--write", action="store_true", help="make the digests anew, with the emulated backend"
    )
    cpu = torch.device("cpu")
    if parser.parse_args().write:
        KEPT.write_text(json.dumps(run(emulated_functions(), cpu), indent=1) + "\n")
        print(f"wrote {KEPT}")
        return 0
    lines, verdict = compared()
    print("\n".join([*lines[:20], verdict]))
    return 1 if lines else 0


def compared() -> tuple[list[str], str]:
    """(a line for every case that differs, the verdict): of the kernels where there is a GPU, else of the emulated."""
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    functions = kernel_functions() if gpu else emulated_functions()
    found = run(functions, device)
    lines = compare(found, kept(), functions, device)
    what = f"kernels on {torch.cuda.get_device_name()}" if gpu else "the emulated backend (no GPU here)"
    if lines:
        return lines, f"{len(lines)} of {len(found)} cases of {what} differ from the kept digests"
    return lines, f"{len(found)} cases of {what} equal the kept digests"


if __name__ == "__main__":
    sys.exit(main())
