"""Launches of Triton kernels: on the device where the tensors are, which need not be the current one."""

import ast
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from megatron_fp8 import kernels

FILES = sorted(Path(kernels.__file__).parent.glob("*.py"))


def launching(file):
    """Functions that call ``kernel[grid](...)``."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef):
            calls = [call.func for call in ast.walk(node) if isinstance(call, ast.Call)]
            if any(isinstance(called, ast.Subscript) for called in calls):
                yield node


def test_every_launch_is_on_its_tensors_device():
    found = [function for file in FILES for function in launching(file)]
    assert len(found) >= 12
    bare = [f.name for f in found if "on_its_device" not in [ast.unparse(d) for d in f.decorator_list]]
    assert bare == []


def test_the_device_is_the_first_arguments(monkeypatch):
    pytest.importorskip("triton")
    from megatron_fp8.formats import E4M3
    from megatron_fp8.kernels.quantize import quantize_tensor
    from megatron_fp8.kernels.tiles import plain

    entered = []
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: entered.append(tensor) or nullcontext())
    monkeypatch.setattr("megatron_fp8.kernels.quantize.cast_tensor", {(1, 1): lambda **arguments: None})
    x = torch.ones(4, 8)
    for first in (x, plain(x)):
        quantize_tensor(first, E4M3, scale=torch.ones(()))
    assert all(tensor.data_ptr() == x.data_ptr() for tensor in entered) and len(entered) == 2
