"""Launches of Triton kernels: on the device where the tensors are, which need not be the current one."""

import ast
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from megatron_fp8 import kernels

PACKAGE = Path(kernels.__file__).parents[1]


def functions(tree):
    """Outermost functions and methods, without what is inside them."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield node
        else:
            yield from functions(node)


def launches(tree):
    """Calls ``kernel[grid](...)`` of what a file with kernels in it has: all of the package's, wherever they are."""
    return [
        call for call in ast.walk(tree) if isinstance(call, ast.Call) and isinstance(call.func, ast.Subscript)
    ]


def test_every_launch_is_on_its_tensors_device():
    """In the whole package; and kernels are nowhere but in kernels/."""
    bare, found = [], 0
    for file in sorted(PACKAGE.rglob("*.py")):
        text = file.read_text()
        if file.parent.name != "kernels":
            assert "triton.jit" not in text and "import triton" not in text, file
            continue
        tree = ast.parse(text)
        found += sum(
            ast.unparse(call.func) == "launch" for call in ast.walk(tree) if isinstance(call, ast.Call)
        )
        if file.name == "launch_cache.py":  # which sees to the device itself: test_launch_cache.py
            continue
        inside = {id(call): f for f in functions(tree) for call in launches(f)}
        for call in launches(tree):
            function = inside.get(id(call))
            found += 1
            if function is None or "on_its_device" not in map(ast.unparse, function.decorator_list):
                bare.append((file.name, call.lineno))
    assert bare == [] and found >= 12


def test_matrices_of_any_height_fit_the_grid(monkeypatch):
    """All programs lie on the first axis: the others end at 65,535, which is 4 million rows."""
    pytest.importorskip("triton")
    from megatron_fp8.kernels import gemm_layouts, param_cast, quantize
    from megatron_fp8.numerics.formats import E4M3

    grids = []

    class Kernel:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *args, **kwargs: None

    for module, names in (
        (quantize, ("find_amaxes", "cast_tensor", "cast_rows", "quantize_tiles", "write_values")),
        (param_cast, ("_piece_amax", "_piece_cast")),
        (gemm_layouts, ("_transpose", "_tile_scales")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, Kernel())
    rows = 1 << 23
    x, one = torch.empty(rows, 130, dtype=torch.bfloat16, device="meta"), torch.ones(())
    quantize.measure(x, rows=True)
    quantize.quantize_tensor(x, E4M3, scale=one)
    quantize.quantize_rows(x, E4M3, torch.empty(rows, device="meta"), None)
    quantize.quantize_blocks(x, E4M3, block=32, kind="e8m0")
    quantize.quantize_blocks(x, E4M3, block=32, kind="e8m0", tiled=True)
    gemm_layouts.tile_scales(torch.empty(rows, 5, device="meta"), rows, 130 * 32, width=1024)
    quantize.write_matrix(quantize.StoredMatrix(x))
    gemm_layouts.transpose(torch.empty(rows, 130, dtype=torch.float8_e4m3fn, device="meta"))
    master = torch.empty(rows * 130, device="meta")
    param_cast.piece_amax(master, 0, (rows, 130), torch.bfloat16, one, one)
    param_cast.piece_cast(master, 0, (rows, 130), torch.bfloat16, one, master.to(torch.uint8), E4M3)
    assert len(grids) == 10 and all(len(grid) == 1 and grid[0] >= 2 * 65536 for grid in grids)
    assert not [f.name for f in (PACKAGE / "kernels").glob("*.py") if "program_id(1)" in f.read_text()]


def test_the_device_is_the_first_arguments(monkeypatch):
    pytest.importorskip("triton")
    from megatron_fp8.kernels.quantize import quantize_tensor
    from megatron_fp8.kernels.tiles import StoredMatrix
    from megatron_fp8.numerics.formats import E4M3

    entered = []
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: entered.append(tensor) or nullcontext())
    monkeypatch.setattr("megatron_fp8.kernels.quantize.cast_tensor", {(1,): lambda **arguments: None})
    x = torch.ones(4, 8)
    for first in (x, StoredMatrix(x)):
        quantize_tensor(first, E4M3, scale=torch.ones(()))
    assert all(tensor.data_ptr() == x.data_ptr() for tensor in entered) and len(entered) == 2
