"""Kernels compiled for an H100 without one: every launch of a function becomes PTX and machine code, and none runs.

Triton brings NVIDIA's assembler, so a wrong type, a spilled register or an instruction that flushes subnormals shows on
any machine. Must run in a process that does not interpret kernels (TRITON_INTERPRET=0).
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGET = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float64: "fp64",
    torch.uint8: "u8",
    torch.bool: "i1",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
}
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "maxnreg")


def compiled(function: Callable[[], Any]) -> list[dict[str, Any]]:
    """What the launches of function() became: kernel name, ptx, instructions, registers and spilled bytes a thread.

    Tensors may be on any device, meta too; arguments are specialised as at a real launch (16-byte alignment,
    multiples of 16, ones and None).
    """
    found: list[dict[str, Any]] = []
    original = triton.JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        options = {key: kwargs.pop(key) for key in OPTIONS if key in kwargs}
        values = dict(zip(self.arg_names, args, strict=False)) | kwargs
        constant = {p.name for p in self.params if p.is_constexpr}
        signature, constants, attributes = {}, {}, {}
        for i, name in enumerate(self.arg_names):
            value = values[name]
            if name in constant or value is None or (type(value) is int and value == 1):
                signature[name], constants[name] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[name] = "*" + TYPES[value.dtype]
                if value.storage_offset() * value.element_size() % 16 == 0:
                    attributes[(i,)] = [["tt.divisibility", 16]]
            else:
                signature[name] = "fp32" if isinstance(value, float) else "i32" if value < 2**31 else "i64"
                if isinstance(value, int) and value % 16 == 0:
                    attributes[(i,)] = [["tt.divisibility", 16]]
        built = triton.compile(
            ASTSource(self, signature, constants, attributes), target=TARGET, options=options
        )
        found.append(described(self.__name__, built))

    triton.JITFunction.run = run
    try:
        function()
    finally:
        triton.JITFunction.run = original
    return found


def described(name: str, built: Any) -> dict[str, Any]:
    ptx = built.asm["ptx"]
    opcodes = re.findall(r"^\s+(?:@!?%p\d+ )?([a-z][\w.:]+)[ ;]", ptx, re.M)
    counts: dict[str, int] = {}
    for opcode in opcodes:
        counts[opcode] = counts.get(opcode, 0) + 1
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(built.asm["cubin"])
        cubin.flush()
        usage = subprocess.run(
            [tool, "-res-usage", cubin.name], capture_output=True, text=True, check=True
        ).stdout
    numbers = {key: int(value) for key, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", usage)}
    return {
        "kernel": name,
        "opcodes": counts,
        "registers": numbers["REG"],
        "stack": numbers["STACK"],
        "shared": built.metadata.shared,
        "warps": built.metadata.num_warps,
    }
