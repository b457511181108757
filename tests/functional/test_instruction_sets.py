"""The C kernels compiled for other processors than this one, or for parts of it: drawn calls, and what they have to give.

Programs without Python make the calls (tests/support/kernel_calls), so that Arm's run under an emulator, and each buffer
ends at a page that nobody may touch, as does the memory that the kernels ask for.
"""

from __future__ import annotations

import platform
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_fp8.kernels.cpu import emulation, skinny_gemm
from tests.support.kernel_calls import casts, elementwise, fp4, products
from tests.support.kernel_calls.tape import GUARDED, SANITISED, Call, compile_for, faults

ARM_COMPILER = "aarch64-linux-gnu-gcc"
EMULATOR = ("qemu-aarch64", "-cpu", "max", "-L", "/usr/aarch64-linux-gnu")
X86 = {"haswell": "avx2 fma bmi2", "cascadelake": "avx512_vnni", "cooperlake": "avx512_bf16", "native": ""}
"""What GCC calls processors -> what this one needs to run their code: AVX2; AVX512 without BF16; with it; itself."""
MOST = 300
"""Rows and columns."""


def passes(count: int, seed: int) -> list[Call]:
    """Calls of what touches every element, of each kind in turn."""
    draw = np.random.default_rng(seed)
    kinds = (*elementwise.KINDS, casts.cast_each_call, casts.cast_each_call, fp4.cast_call, fp4.decode_call)
    calls = [kinds[i % len(kinds)](draw, MOST) for i in range(count)]
    for call in calls:
        call.front = bool(draw.integers(2))
    return calls


def multiplied(count: int, seed: int, having: Sequence[int], few: bool) -> list[Call]:
    """Products by each inner loop in turn; few: those with few rows too."""
    draw = np.random.default_rng(seed)
    kinds = products.KINDS if few else (products.gemm_call, products.gemm_each_call)
    calls = [products.loops_call(sum(having))]
    for i in range(count if having else 0):
        calls.append(kinds[i % len(kinds)](draw, MOST, having[i // len(kinds) % len(having)]))
        calls[-1].front = bool(draw.integers(2))
    if emulation.AVX512 in having:
        calls += [fp4.few_rows_call(draw, MOST) for _ in range(count // 10)]
    return calls


def drawn(program: Sequence[str | Path], count: int, having: Sequence[int], few: bool) -> None:
    """Makes so many calls of each sort, 300 in a process."""
    for seed in range(0, count, 300):
        some = min(300, count - seed)
        for calls in (passes(some, seed), multiplied(some, seed, having, few)):
            found = faults(program, calls)
            assert not found, f"seed {seed}, {len(found)} faults:\n" + "\n".join(found[:3])


def needs_arm() -> None:
    for name in (ARM_COMPILER, EMULATOR[0]):
        if shutil.which(name) is None:
            pytest.skip(
                f"{name} is not installed (Debian: gcc-aarch64-linux-gnu, libc6-dev-arm64-cross, qemu-user)"
            )


def has(flags: str) -> bool:
    """Whether this processor has all of these instructions, by Linux's names."""
    info = Path("/proc/cpuinfo")
    return not flags or (info.exists() and set(flags.split()) <= set(info.read_text().split()))


def loops_of(build: str) -> tuple[tuple[int, ...], bool]:
    """(inner loops of a build on this machine; whether there are those for few rows)"""
    if build == "native":
        return emulation.inner_loops(), bool(skinny_gemm.inner_loops())
    return ((emulation.AVX512,) if build == "cooperlake" else ()) + (
        emulation.FLOAT32,
    ), build != "cooperlake"


def test_calls_for_other_processors_are_drawn():
    """A call that cannot be told fails here, and not first where its instructions are."""
    calls = multiplied(60, 0, (emulation.AVX512, emulation.AMX, emulation.FLOAT32), True)
    assert {call.name for call in calls} == {"has_gemm", "gemm", "gemm_each", "few_rows", "few_rows_fp4"}
    assert all(call.packed() for call in calls)


def test_a_few_calls_on_arm(tmp_path):
    """Without vector code, which takes the compiler eight times as long; test-long has it."""
    needs_arm()
    program = compile_for(ARM_COMPILER, f"-O0 -march=armv8-a {GUARDED}", tmp_path / "arm")
    drawn([*EMULATOR, program], 60, (emulation.FLOAT32,), True)


def test_a_few_calls_between_guards(tmp_path):
    program = compile_for("cc", f"-O0 -march=native {GUARDED}", tmp_path / "here")
    drawn([program], 60, *loops_of("native"))


@pytest.mark.long
def test_products_in_float32_have_the_same_bits_here_and_on_arm(monkeypatch, tmp_path):
    needs_arm()
    if not has(X86["haswell"]) or platform.machine() != "x86_64":
        pytest.skip("this processor has no inner loop in float32")
    given: list[torch.Tensor] = []
    near = products._near

    def kept(out, *expected):
        given.append(torch.frombuffer(out, dtype=expected[-1]))
        return near(out, *expected)

    monkeypatch.setattr(products, "_near", kept)
    found = []
    for before, compiler, march in ((EMULATOR, ARM_COMPILER, "armv8-a"), ((), "cc", "native")):
        program = compile_for(compiler, f"-O3 -march={march} {GUARDED}", tmp_path / march)
        given.clear()
        assert not faults([*before, program], multiplied(300, 1, (emulation.FLOAT32,), True))
        found.append(tuple(given))
    assert len(found[0]) > 300
    for there, here in zip(*found, strict=True):
        torch.testing.assert_close(there, here, rtol=0, atol=0, equal_nan=True)


@pytest.mark.long
@pytest.mark.parametrize("march", ["armv8-a", "armv8.6-a+bf16", "armv9-a"])
def test_many_calls_on_arm(march, tmp_path):
    needs_arm()
    program = compile_for(ARM_COMPILER, f"-O3 -march={march} {GUARDED}", tmp_path / "arm")
    drawn([*EMULATOR, program], 1500, (emulation.FLOAT32,), True)


@pytest.mark.long
@pytest.mark.parametrize("how", ["-O3", f"-O1 {SANITISED}"], ids=["as users have it", "sanitised"])
@pytest.mark.parametrize("build", list(X86))
def test_many_calls_on_x86(build, how, tmp_path):
    if build != "native" and platform.machine() != "x86_64":
        pytest.skip("not an x86-64 processor")
    if not has(X86[build]):
        pytest.skip(f"this processor has not {X86[build]}")
    program = compile_for("cc", f"{how} -march={build} {GUARDED}", tmp_path / "here")
    drawn([program], 3000, *loops_of(build))
