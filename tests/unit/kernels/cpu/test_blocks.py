"""One pass from a matrix to the codes of its blocks: the specification's bytes."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest
import torch

from megatron_fp8.backends import emulated, specified
from megatron_fp8.kernels.cpu import blocks, loops
from megatron_fp8.numerics.cast import cast
from megatron_fp8.numerics.formats import E4M3, E5M2, FloatFormat
from megatron_fp8.numerics.rule import BLOCK_1X32, BLOCK_1X128, BLOCK_128X128, ROW, TENSOR, Granularity, Rule

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


def matrix(shape: tuple[int, int], dtype: torch.dtype, what: str) -> torch.Tensor:
    """Numbers of many sizes, so that codes of all kinds come out."""
    generator = torch.Generator().manual_seed(shape[0])
    x = torch.randn(shape, generator=generator)
    if what == "wide":
        x *= torch.exp2(torch.randint(-30, 8, shape, generator=generator).float())
    if what == "bits":
        x = torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int32).view(torch.float32)
    if what == "special":
        x.view(-1)[5], x.view(-1)[37], x[-1, -1] = torch.nan, -torch.inf, -torch.nan
    if what == "zeros":
        x[:, : shape[1] // 2] = 0
        x[: shape[0] // 2] *= -0.0
    if what == "tiny":
        x *= 2.0**-130
    return x.to(dtype)


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
    monkeypatch.setattr(loops, "reason", lambda: "not wanted")
    for shape, x, done in found:
        expected = specified.quantize(x, rule, direction)
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


def test_it_is_one_call(monkeypatch: pytest.MonkeyPatch):
    """Both directions; a silent return to passes of their own would give the same bytes."""
    calls = []
    quantize = blocks.quantize
    monkeypatch.setattr(blocks, "quantize", lambda *a: calls.append(len(a[2])) or quantize(*a))
    x = matrix((256, 256), torch.bfloat16, "normal")
    for rule, direction in itertools.product(RULES[:4], ["both", "columnwise"]):
        emulated.quantize(x, rule, direction)
    if loops.reason() is None:
        assert calls == [2, 1, 1, 1, 2, 1, 2, 1]


def test_threads_do_not_matter():
    x = matrix((700, 512), torch.bfloat16, "wide")
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(emulated.quantize(x, RULES[0], "both").tensor.rowwise.codes)
    finally:
        torch.set_num_threads(before)
    assert same(*found)


@pytest.mark.skipif(loops.reason() is not None, reason="no C compiler")
@pytest.mark.parametrize("cut", [(1, 0), (0, 1), (1, 32)], ids=str)
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_each_bfloat16_number_under_scales(fmt: FloatFormat, cut: tuple[int, int]):
    """That does not saturate: normal codes, each width of subnormal ones, and zeros."""
    every = torch.arange(1 << 16, dtype=torch.int32, device="cpu").to(torch.int16).view(torch.bfloat16)
    powers = [2.0**exponent for exponent in (-100, -37, -3, 0, 1, 8, 9, 60, 100)]
    for value in (*powers, 1.1, 0.3, 7.7e-9, 3e33):
        rule = Rule(fmt, TENSOR, "pow2" if value in powers else "fp32")
        scale = torch.tensor(value)
        x = every.where(every.abs().float() * scale <= fmt.max, 0).view(256, 256)
        blocks_of = {(1, 0): 256, (0, 1): 256, (1, 32): 256 * 8}[cut]
        (codes,) = blocks.cast(x, rule, [cut], [scale.expand(blocks_of).contiguous()], True)
        assert same(codes, cast(x, scale, fmt)), value


@pytest.mark.parametrize("threads", ["python's", "openmp's"])
def test_threads_with_small_stacks(threads, tmp_path):
    """256 KB: what is kept of a tile is larger. In a process of its own, which would end."""
    lines = [
        "import threading, torch",
        "from megatron_fp8.kernels.cpu import blocks",
        "from megatron_fp8.numerics.formats import E4M3",
        "from megatron_fp8.numerics.rule import TENSOR, Rule",
        "rule, x = Rule(E4M3, TENSOR, 'pow2'), torch.randn(1280, 256)",
        "call = lambda: blocks.quantize(x, rule, [(1, 1), (1, 1)])",
    ]
    if threads == "openmp's":
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
