"""Triton kernels compiled for a GPU that is not there: every launch of a function becomes PTX and machine code.

Triton brings NVIDIA's assembler and disassembler. It has to be in a process that does not interpret kernels.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float64: "fp64",
    torch.uint8: "u8",
    torch.bool: "i1",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
}
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "maxnreg")


@dataclass(frozen=True)
class Compiled:
    """A launch: the kernel's name, its programs, which of Triton's options were named, and what was made of it."""

    name: str
    programs: int
    options: tuple[str, ...]
    ptx: str
    cubin: bytes
    shared: int
    warps: int

    @cached_property
    def resources(self) -> dict[str, int]:
        """REG, STACK and LOCAL of a thread, by cuobjdump."""
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.cubin)
            file.flush()
            command = [str(tool), "-res-usage", file.name]
            usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return {key: int(value) for key, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", usage)}


class TargetDriver:
    """What Triton asks of a driver: which GPU to compile for. Kernels choose instructions by it (fp4_math.py)."""

    def __init__(self, architecture: int):
        self.architecture = architecture

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.architecture, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compiled(function: Callable[[], Any], architecture: int = 90) -> list[Compiled]:
    """The launches of function(), compiled for an architecture (90 for an H100), in their order; none runs.

    Tensors may be on any device, meta too; arguments are specialised as at a real launch (16-byte alignment,
    multiples of 16, ones and None).
    """
    found: list[Compiled] = []
    driver.set_active(TargetDriver(architecture))

    def run(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        options = {key: kwargs.pop(key) for key in OPTIONS if key in kwargs}
        values = dict(zip(self.arg_names, args, strict=False)) | kwargs
        constant = {p.name for p in self.params if p.is_constexpr}
        signature, constants, attributes = {}, {}, {}
        for i, name in enumerate(self.arg_names):
            value = values[name]
            if name in constant or value is None or (type(value) is int and value == 1):
                signature[name], constants[name] = "constexpr", value
            elif isinstance(value, TensorDescriptor):
                signature[name] = f"tensordesc<{TYPES[value.base.dtype]}{value.block_shape}>"
            elif isinstance(value, torch.Tensor):
                signature[name] = "*" + TYPES[value.dtype]
                if value.storage_offset() * value.element_size() % 16 == 0:
                    attributes[(i,)] = [["tt.divisibility", 16]]
            else:
                signature[name] = "fp32" if isinstance(value, float) else "i32" if value < 2**31 else "i64"
                if isinstance(value, int) and value % 16 == 0:
                    attributes[(i,)] = [["tt.divisibility", 16]]
        source = ASTSource(self, signature, constants, attributes)
        built = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
        programs = 1
        for extent in grid:
            programs *= extent
        found.append(
            Compiled(
                self.__name__,
                programs,
                tuple(sorted(options)),
                built.asm["ptx"],
                built.asm["cubin"],
                built.metadata.shared,
                built.metadata.num_warps,
            )
        )

    with mock.patch.object(triton.JITFunction, "run", run):
        function()
    return found
