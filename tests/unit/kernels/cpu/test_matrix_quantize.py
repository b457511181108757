"""One pass from a matrix to the codes of its blocks: the specification's bytes."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest
import torch

from megatron_fp8.backends import emulated, reference
from megatron_fp8.backends.base import CastRequest, RunningAmax
from megatron_fp8.kernels.cpu import emulation, matrix_quantize
from megatron_fp8.numerics.cast import cast
from megatron_fp8.numerics.formats import E4M3, E5M2, FloatFormat
from megatron_fp8.numerics.rule import BLOCK_1X32, BLOCK_1X128, BLOCK_128X128, ROW, TENSOR, Granularity, Rule
from megatron_fp8.numerics.scaling import compute_scale
from tests.support.cast_inputs import matrix
from tests.support.threads import threads

RULES = [
    Rule(fmt, granularity, scale)
    for fmt in (E4M3, E5M2)
    for granularity, scale in (
        (BLOCK_1X128, "pow2"),
        (BLOCK_128X128, "pow2"),
        (BLOCK_1X128, "fp32"),
        (BLOCK_1X32, "e8m0"),
        (Granularity(32, 64), "pow2"),
    )
]
RULES += [Rule(fmt, ROW, scale) for fmt in (E4M3, E5M2) for scale in ("pow2", "fp32")]
RULES += [Rule(E5M2, TENSOR, "fp32"), Rule(E4M3, TENSOR, "pow2", margin=1)]
RULES += [
    Rule(E4M3, BLOCK_1X128, "pow2", margin=3, epsilon=0.5),
    Rule(E4M3, BLOCK_128X128, "pow2", margin=64),
]
SHAPES = [(32, 32), (129, 257), (1, 1024), (300, 70), (256, 512)]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    integer = {1: torch.uint8, 4: torch.int32}[a.element_size()]
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.view(integer), b.view(integer))


@pytest.mark.parametrize("what", ["normal", "wide", "bits", "special", "zeros", "tiny"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_bytes_are_the_specification_s(
    rule: Rule, dtype: torch.dtype, what: str, monkeypatch: pytest.MonkeyPatch
):
    found, direction = [], "both"
    for shape in SHAPES:
        x = matrix(shape, dtype, what)
        found.append((shape, x, emulated.quantize(x, rule, direction)))
    monkeypatch.setattr(emulation, "reason", lambda: "not wanted")
    for shape, x, done in found:
        expected = reference.quantize(CastRequest(x, rule, direction))
        for a, b in zip(done.tensor.sides, expected.tensor.sides, strict=True):
            assert same(a.codes.contiguous(), b.codes.contiguous()), (shape, a, b)
            assert same(a.scale_inv.contiguous(), b.scale_inv.contiguous()), (shape, a, b)
            assert (a.granularity, a.pow2, a.finite) == (b.granularity, b.pow2, b.finite)
        assert same(done.amax, expected.amax)
        assert done.nonfinite == expected.nonfinite


def test_one_direction_makes_what_both_make():
    x = matrix((256, 200), torch.bfloat16, "wide")
    for rule in RULES[:4]:
        both = emulated.quantize(x, rule, "both").tensor
        row = emulated.quantize(x, rule, "rowwise").tensor
        column = emulated.quantize(x, rule, "columnwise").tensor
        assert row.columnwise is None and column.rowwise is None
        assert same(row.rowwise.codes, both.rowwise.codes)
        assert same(column.columnwise.codes.t(), both.columnwise.codes.t())


def test_each_of_many_is_as_alone():
    """Of all sizes, also too small for C, empty or under a scale that was there; one of them by all threads."""
    asked, alone, scale = [], [], torch.tensor(3.0)
    for i, (rule, shape) in enumerate(itertools.product(RULES, [*SHAPES, (700, 512), (3, 5), (0, 4)])):
        x = matrix(
            shape, [torch.bfloat16, torch.float32][i % 2], ["wide", "special"][i % 3 == 0 and shape[0] > 9]
        )
        given = scale if rule == Rule(E5M2, TENSOR, "fp32") and i % 2 else None
        asked.append(CastRequest(x, rule, "both", given, running()))
        alone.append(emulated.quantize(x, rule, "both", scale=given, running=running()))
    with threads(3):
        together = emulated.quantize_each(asked)
    for one, done, expected in zip(asked, together, alone, strict=True):
        for a, b in zip(done.tensor.sides, expected.tensor.sides, strict=True):
            assert same(a.codes.contiguous(), b.codes.contiguous()), (one.rule, one.x.shape)
            assert same(a.scale_inv.contiguous(), b.scale_inv.contiguous()), (one.rule, one.x.shape)
            assert (a.granularity, a.pow2, a.finite) == (b.granularity, b.pow2, b.finite)
        assert same(done.amax, expected.amax) and done.nonfinite == expected.nonfinite


def test_many_without_a_compiler(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(emulation, "reason", lambda: "not wanted")
    monkeypatch.setattr(emulation, "load_kernels", lambda: pytest.fail("C is called"))
    x = matrix((256, 256), torch.bfloat16, "normal")
    (done,) = emulated.quantize_each([CastRequest(x, RULES[0], "both", None, None)])
    assert same(
        done.tensor.rowwise.codes, reference.quantize(CastRequest(x, RULES[0], "both")).tensor.rowwise.codes
    )


def running() -> RunningAmax:
    amax, nonfinite = torch.zeros(2, dtype=torch.float32)
    return RunningAmax(amax, amax.view(torch.int32), nonfinite)


@pytest.mark.parametrize("elements", [512, 1 << 16], ids=["by torch", "by C"])
@pytest.mark.parametrize("rule", [*RULES[:2], *RULES[10:12], *RULES[14:16]], ids=str)
def test_amax_and_health_are_recorded(rule: Rule, elements: int):
    """The largest of several casts, the sum of their counts, in the very numbers that were given."""
    place, given = running(), torch.tensor(2.0)
    scales = [None, given] if rule == Rule(E5M2, TENSOR, "fp32") else [None]
    for size, special, largest in (
        (1.0, 0.5, 1.0),
        (5.0, 0.5, 5.0),
        (3.0, 0.5, 5.0),
        (2.0, torch.inf, torch.inf),
    ):
        x = torch.full((elements // 256, 256), -size, dtype=torch.bfloat16)
        x[0, 7], x[1, 3] = torch.nan, special
        for scale in scales:
            done = emulated.quantize(x, rule, "both", scale=scale, running=place)
            assert done.nonfinite == (2 if special > 1 else 1)
            assert float(place.amax) == largest
    assert float(place.nonfinite) == 5 * len(scales)


def test_threads_do_not_matter():
    x = matrix((700, 512), torch.bfloat16, "wide")
    for rule in (RULES[0], *RULES[10:12], *RULES[14:16]):
        found = []
        for count in (1, 3):
            with threads(count):
                found.append(emulated.quantize(x, rule, "both").tensor)
        for one, other in zip(found[0].sides, found[1].sides, strict=True):
            assert same(one.codes.contiguous(), other.codes.contiguous())
            assert same(one.scale_inv.contiguous(), other.scale_inv.contiguous())


@pytest.mark.skipif(emulation.reason() is not None, reason="no C compiler")
@pytest.mark.parametrize("cut", [(1, 0), (0, 1), (0, 0)], ids=str)
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_each_bfloat16_number_under_scales(fmt: FloatFormat, cut: tuple[int, int]):
    """That does not saturate: normal codes, each width of subnormal ones, and zeros. Of amaxes that were found before."""
    every = torch.arange(1 << 16, dtype=torch.int32, device="cpu").to(torch.int16).view(torch.bfloat16)
    powers = [2.0**exponent for exponent in (-100, -37, -3, 0, 1, 8, 9, 60, 100)]
    for value in (*powers, 1.1, 0.3, 7.7e-9, 3e33):
        rule = Rule(fmt, TENSOR if cut == (0, 0) else ROW, "pow2" if value in powers else "fp32")
        amax = torch.tensor(fmt.max / value, dtype=torch.float32)
        x = every.where(every.abs().float() <= amax, 0).view(256, 256)
        amaxes = amax.expand(256 if any(cut) else 1).contiguous()
        (made,) = matrix_quantize.quantize([matrix_quantize.CastInput(x, rule, [cut], amaxes=[amaxes])])
        scale = compute_scale(amax, fmt, pow2=rule.scale == "pow2")
        assert same(made.sides[0].codes, cast(x, scale, fmt)), value


@pytest.mark.parametrize("whose", ["python's", "openmp's"])
def test_threads_with_small_stacks(whose, tmp_path):
    """256 KB: what is kept of a tile is larger. In a process of its own, which would end."""
    lines = [
        "import threading, torch",
        "from megatron_fp8.kernels.cpu import matrix_quantize",
        "from megatron_fp8.numerics.formats import E4M3",
        "from megatron_fp8.numerics.rule import TENSOR, Rule",
        "rule, x = Rule(E4M3, TENSOR, 'pow2'), torch.randn(1280, 256)",
        "call = lambda: matrix_quantize.quantize([matrix_quantize.CastInput(x, rule, [(1, 1), (1, 1)])])",
    ]
    if whose == "openmp's":
        lines += ["torch.set_num_threads(2)", "call()"]
    else:
        lines += [
            "torch.set_num_threads(1)",
            "threading.stack_size(1 << 18)",
            "one = threading.Thread(target=call)",
        ]
        lines += ["one.start()", "one.join()"]
    (tmp_path / "small.py").write_text("\n".join([*lines, "print('fine')"]))
    done = subprocess.run(
        [sys.executable, str(tmp_path / "small.py")],
        env=os.environ | {"OMP_STACKSIZE": "256K"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr
