"""Nothing depends on torch's default dtype or default device, which belong to the user's script.

Every tensor that the package makes names both; what is computed has the bits it has under torch's own defaults.
"""

from __future__ import annotations

import ast
import contextlib
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.support.compare import assert_same_bytes
from megatron_fp8 import quantize
from megatron_fp8.inference.calibration import calibrate
from megatron_fp8.kernels.cpu import emulation as cpu
from megatron_fp8.kernels.fused_quantize import RmsNorm, Swiglu, row_rstd, swiglu_weight_grad
from megatron_fp8.kernels.quantize import Record, measure, quantize_blocks, quantize_rows, quantize_tensor
from megatron_fp8.nn import Fp8Linear, convert_to_fp8, fp8_matmul, fp8_state_dict, fp8_step
from megatron_fp8.numerics.formats import E4M3
from megatron_fp8.params.fp8_parameter import fp8_parameter
from megatron_fp8.params.shards import quantize_shards
from megatron_fp8.recipe import DelayedScaling
from megatron_fp8.state.loss_scaler import unscale_
from tests.support.fp8_weights import quantizer_of
from tests.support.sites import RECIPES

PACKAGE = Path(__file__).parents[2] / "megatron_fp8"
FACTORIES = {
    *("arange", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand", "randint"),
    *("randn", "randperm", "scalar_tensor", "tensor", "zeros"),
}
DEFAULTS = ["bfloat16", "float64", "meta"]
F32 = {"dtype": torch.float32, "device": "cpu"}


def nameless(source: str, file: str = "") -> list[str]:
    """Calls of torch's factories that leave the dtype or the device to the defaults."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if ast.unparse(node.func.value) == "torch" and node.func.attr in FACTORIES:
            missing = {"dtype", "device"} - {keyword.arg for keyword in node.keywords}
            if missing:
                found.append(f"{file}:{node.lineno}: {ast.unparse(node)} leaves out {sorted(missing)}")
    return found


def test_every_tensor_that_is_made_names_its_dtype_and_its_device():
    assert nameless("torch.empty(3, dtype=torch.int8)") == [
        ":1: torch.empty(3, dtype=torch.int8) leaves out ['device']"
    ]
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 100
    found = [each for file in files for each in nameless(file.read_text(), str(file.relative_to(PACKAGE)))]
    assert not found, "\n".join(found)


@contextlib.contextmanager
def default(name: str) -> Iterator[None]:
    """Another default dtype, or another default device."""
    before = torch.get_default_dtype()
    try:
        if name == "meta":
            with torch.device("meta"):
                yield
        else:
            torch.set_default_dtype(getattr(torch, name))
            yield
    finally:
        torch.set_default_dtype(before)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, **F32).to(dtype)


@cache
def by_torchs_own_defaults(
    make: Callable[..., list[torch.Tensor]], engine: str, *case: Any
) -> list[torch.Tensor]:
    """Made once for all other defaults; nobody writes to it."""
    return make(*case)


def assert_independent(name: str, make: Callable[..., list[torch.Tensor]], engine: str, *case: Any) -> None:
    """The same dtypes, devices and bytes with and without another default."""
    expected = by_torchs_own_defaults(make, engine, *case)
    with default(name):
        found = make(*case)
    assert len(found) == len(expected) > 0
    for index, (mine, wanted) in enumerate(zip(found, expected, strict=True)):
        assert (mine.dtype, mine.device) == (wanted.dtype, wanted.device), index
        assert_same_bytes(mine, wanted, f"{name}, result {index}")


@pytest.fixture(params=["compiled", "torch"])
def engine(request, monkeypatch):
    """With the compiled kernels, also for small matrices, and without them."""
    monkeypatch.setattr(cpu, "MIN_ELEMENTS", 1)
    monkeypatch.setattr(cpu, "MIN_PRODUCT", 1)
    if request.param == "torch":
        monkeypatch.setattr(cpu, "usable", lambda *_: False)
    return request.param


def train(recipe: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Two iterations of two linears, with a weight quantized once for two microbatches, and an evaluation."""
    model = torch.nn.Sequential(*(torch.nn.Linear(160, 160, dtype=dtype, device="cpu") for _ in range(2)))
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_(randn(*parameter.shape, seed=index) * 0.1)
    convert_to_fp8(model, RECIPES[recipe], skip=())
    found = []
    for iteration in range(2):
        for microbatch in range(2):
            x = randn(96, 160, seed=10 * iteration + microbatch, dtype=dtype).requires_grad_()
            y = model(x)
            y.square().sum(dtype=torch.float32).backward()
            found += [y.detach(), x.grad]
        found += [parameter.grad.clone() for parameter in model.parameters()]
        unscale_([parameter.grad for parameter in model.parameters() if dtype != torch.float16], 2.0)
        fp8_step(model)
        model.zero_grad()
    with torch.no_grad():
        found.append(model.eval()(randn(5, 160, dtype=dtype)))
    return found + list(fp8_state_dict(model).values())


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", DEFAULTS)
def test_the_linear_trains_to_the_same_bits(name, recipe, engine):
    dtype = (torch.bfloat16, torch.float32, torch.float16)[list(RECIPES).index(recipe) % 3]
    assert_independent(name, train, engine, recipe, dtype)


def pieces() -> list[torch.Tensor]:
    """Of everything that makes tensors outside of training."""
    found = []
    for recipe in RECIPES.values():
        for shape in ((0, 32), (96, 160)):
            q = quantize(randn(*shape), recipe, "weight", direction="both")
            found += [q.rowwise.codes, q.columnwise.codes, q.dequantize()]
        found.append(fp8_matmul(randn(32, 64), randn(64, 32), recipe))
    delayed = DelayedScaling(amax_history_len=4)
    parameter = fp8_parameter(randn(64, 96), quantizer_of(delayed))
    quantize_shards([parameter], [randn(64 * 96, seed=1, dtype=torch.float32)], [0], None)
    found += [parameter.codes[0], parameter.dequantize()]
    linear = Fp8Linear(96, 64, bias=False, recipe=delayed, dtype=torch.bfloat16, device="cpu")
    with torch.no_grad():
        linear.weight.copy_(randn(64, 96))
    calibration = calibrate(linear, [randn(32, 96)])
    with tempfile.TemporaryDirectory() as folder:
        calibration.save(Path(folder))
    return [*found, *(r.amaxes for r in calibration.ranges.values())]


@pytest.mark.parametrize("name", DEFAULTS)
def test_the_pieces_give_the_same_bits(name, engine):
    assert_independent(name, pieces, engine)


def kernels() -> list[torch.Tensor]:
    """Everything that the GPU's kernels give; interpreted where there is no GPU."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x, gated = randn(33, 130).to(device), randn(33, 260).to(device)
    record = Record.new(device)
    sources = [x, RmsNorm(x, row_rstd(x, 1e-5), x[0]), Swiglu(gated)]
    found = [row_rstd(x, 1e-5), swiglu_weight_grad(x, gated)]
    for source in sources:
        rows, cols = measure(source, rows=True, cols=True, record=record)
        for sides in (
            quantize_tensor(source, E4M3, amax=record.amax, record=record),
            quantize_rows(source, E4M3, rows, cols),
            quantize_blocks(source, E4M3, block=128, kind="pow2", record=record),
            quantize_blocks(source, E4M3, block=128, kind="fp32", square=True, record=record),
            quantize_blocks(source, E4M3, block=32, kind="e8m0", record=record),
        ):
            for side in (sides.rowwise, sides.columnwise):
                found += [side.codes, side.scale_inv.contiguous()]
    return [*found, record.amax, record.nonfinite]


@pytest.mark.parametrize("name", DEFAULTS)
def test_the_gpu_kernels_give_the_same_bits(name):
    assert_independent(name, kernels, "Triton")
