"""A row's bits in a batch of any size, at any place of it, are those of the row alone."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.support.compare import assert_same_bytes
from megatron_fp8.backends import emulated
from megatron_fp8.inference import make_batch_invariant, prepare_for_inference
from megatron_fp8.inference.batch_invariant_operators import BatchInvariantMode
from megatron_fp8.inference.calibration import calibrate
from megatron_fp8.kernels.cpu import emulation
from megatron_fp8.nn import Fp8Config, convert_to_fp8
from megatron_fp8.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)

ROWS = 33
RECIPES = {
    "delayed": DelayedScaling(),
    "tensorwise": Float8CurrentScaling(),
    "rowwise": Float8RowwiseScaling(),
    "blockwise": Float8BlockScaling(),
    "blockwise, float32 scales": Float8BlockScaling(use_f32_scales=True),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
}


def model_of(recipe: Any, dtype: torch.dtype, hidden: int = 240, **fields: Any) -> nn.Sequential:
    """Norms, linears in FP8 (one in high precision) and pointwise functions, of widths that are no whole vectors."""
    torch.manual_seed(0)
    parts = [
        nn.RMSNorm(112), nn.Linear(112, hidden), nn.SiLU(), nn.LayerNorm(hidden), nn.Linear(hidden, 77, bias=False),
        nn.GELU(approximate="tanh"), nn.Linear(77, 50), nn.Softmax(-1),
    ]  # fmt: skip
    return convert_to_fp8(nn.Sequential(*parts).to(dtype), config=Fp8Config(recipe, skip=["6"], **fields))


def tokens(dtype: torch.dtype, rows: int = ROWS) -> torch.Tensor:
    """[rows, 112]: rows of 0, of far larger and far smaller numbers, and one with a NaN among them."""
    x = torch.randn(rows, 112, generator=torch.Generator().manual_seed(1))
    if dtype != torch.float16:
        x[3], x[7], x[11], x[15, 4] = x[3] * 1e30, x[7] * 1e-30, 0, torch.nan
    return x.to(dtype)


def assert_invariant(model: Any, x: torch.Tensor) -> None:
    """Compares rows of a whole batch's result with those of smaller batches, in which they stand elsewhere."""
    generator = torch.Generator().manual_seed(2)
    with torch.inference_mode():
        whole = model(x)
        assert_same_bytes(model(x.view(3, 11, -1)).flatten(0, 1), whole)
        for size in (1, 1, 1, 2, 7, 16, 17, ROWS):
            chosen = torch.randperm(ROWS, generator=generator)[:size]
            assert_same_bytes(model(x[chosen]), whole[chosen])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_rows_do_not_depend_on_their_batch(recipe: str, dtype: torch.dtype) -> None:
    model = model_of(RECIPES[recipe], dtype)
    x = tokens(dtype)
    calibration = calibrate(model, [x[16:]]) if recipe == "nvfp4" else None
    model(x)
    prepare_for_inference(model, calibration=calibration, batch_invariant=True)
    assert_invariant(model, x)


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8"])
def test_the_smallest_products_too(recipe: str) -> None:
    """Of few numbers torch makes the usual product, until a batch is large."""
    model = prepare_for_inference(model_of(RECIPES[recipe], torch.float32, hidden=128), batch_invariant=True)
    assert_invariant(model, tokens(torch.float32))


@pytest.mark.parametrize("loop", [*emulation.inner_loops(), None])
@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "mxfp8", "nvfp4"])
def test_each_inner_loop(recipe: str, loop: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """None: without C."""
    monkeypatch.setattr(emulation, "inner_loop", lambda: loop)
    x, rules = torch.randn(ROWS, 384), [RECIPES[recipe].rule(role) for role in ("input", "weight")]
    assert rules[0] is not None and rules[1] is not None
    scale = x.abs().amax() if recipe == "nvfp4" else None
    b = emulated.quantize(torch.randn(160, 384), rules[1], "rowwise").tensor.rowwise

    def product(rows: list[int]) -> torch.Tensor:
        a = emulated.quantize(x[rows], rules[0], "rowwise", scale=scale).tensor.rowwise
        return emulated.gemm(a, b, batch_invariant=True)

    whole = product([*range(ROWS)])
    for rows in ([0], [32, 16], [*range(5, 22)]):
        assert_same_bytes(product(rows), whole[rows])


def test_weights_alone_in_fp8() -> None:
    model = model_of(RECIPES["rowwise"], torch.bfloat16, quantize_activations=False)
    assert_invariant(prepare_for_inference(model, batch_invariant=True), tokens(torch.bfloat16))


def test_attention_and_convolutions_in_high_precision() -> None:
    """A sequence's bits do not depend on how many there are; without the option they do."""
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.qkv, self.out = (
                nn.Conv1d(24, 40, 3, padding=1),
                nn.Linear(40, 120),
                nn.Linear(40, 33),
            )

        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            y = torch.nn.functional.silu(self.conv(x).transpose(1, 2))
            q, k, v = self.qkv(y).unflatten(-1, (3, 2, 20)).permute(2, 0, 3, 1, 4)
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            y = y.transpose(1, 2).flatten(2)
            scores = torch.baddbmm(torch.ones(1), y, y.mT, alpha=0.3).softmax(-1)
            return self.out(scores @ y).log_softmax(-1)

    net, x = Net().eval(), torch.randn(9, 24, 37)
    masks = torch.rand(9, 1, 37, 37) > 0.3
    masks |= torch.eye(37, dtype=torch.bool)
    with torch.no_grad():
        usual = net(x)
        assert any(not torch.equal(net(x[i : i + 1]), usual[i : i + 1]) for i in range(9)), "nothing to test"
        make_batch_invariant(net)
        for mask in (None, masks):
            whole = net(x, mask)
            for chosen in ([4], [8, 0], [1, 2, 3, 7]):
                part = net(x[chosen], None if mask is None else mask[chosen])
                assert_same_bytes(part, whole[chosen])
        assert (net(x) - usual).abs().max() < 1e-5


class Calls(TorchDispatchMode):
    """Records (operator, shape of its first tensor)."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, torch.Size]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], torch.Tensor):
            self.seen.append((func.overloadpacket.__name__, args[0].shape))
        return func(*args, **(kwargs or {}))


def test_attention_sees_one_sequence_at_a_time() -> None:
    """Which kernel torch's attention takes, and what it adds in which order, is its own affair then."""
    q = torch.randn(5, 2, 7, 16)
    with Calls() as calls, BatchInvariantMode():
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
    shapes = [shape for name, shape in calls.seen if "attention" in name]
    assert shapes == [torch.Size([1, 2, 7, 16])] * 5


@pytest.mark.parametrize("function", ["mean", "sum", "norm"])
def test_sums_over_long_rows(function: str) -> None:
    """torch divides the sum of one long row among threads, and many rows otherwise."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        x = torch.randn(ROWS, 40_000, generator=torch.Generator().manual_seed(0))
        with BatchInvariantMode():
            whole, alone = (getattr(rows, function)(dim=-1, keepdim=True) for rows in (x, x[4:5]))
    finally:
        torch.set_num_threads(threads)
    assert whole.shape == (ROWS, 1)
    assert_same_bytes(alone, whole[4:5])


def test_threads_and_errors_leave_no_mode_behind() -> None:
    model = prepare_for_inference(model_of(RECIPES["mxfp8"], torch.float32), batch_invariant=True)
    x, found = tokens(torch.float32), []
    whole = model(x)
    with pytest.raises(RuntimeError, match="112"):
        model(torch.randn(3, 5))
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    threads = [threading.Thread(target=lambda i=i: found.append((i, model(x[i : i + 1])))) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, y in found:
        assert_same_bytes(y, whole[i : i + 1])
    assert len(found) == 4


def test_the_report_says_what_scales_there_are() -> None:
    model = prepare_for_inference(model_of(RECIPES["tensorwise"], torch.bfloat16), batch_invariant=True)
    assert {site.activations for site in model.fp8_inference.sites} == {"dynamic, one scale per row"}


@pytest.mark.parametrize(
    ("recipe", "device", "words"),
    [
        (NVFP4BlockScaling(), "cpu", "nvfp4.*give calibration="),
        (Float8CurrentScaling(), "meta", "batch_invariant=True on meta"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_changes(recipe: Any, device: str, words: str) -> None:
    model = model_of(recipe, torch.bfloat16)
    if device == "meta":
        model[7].register_parameter("other", nn.Parameter(torch.empty(1, device="meta")))
    with pytest.raises(ValueError, match=words):
        prepare_for_inference(model, batch_invariant=True)
    assert model[1].weight.dtype == torch.bfloat16 and type(model[1].weight) is nn.Parameter
    assert not model._forward_pre_hooks


def test_products_with_a_vector() -> None:
    x, v = torch.randn(ROWS, 7, 240, generator=torch.Generator().manual_seed(0)), torch.randn(240)
    with torch.no_grad(), BatchInvariantMode():
        whole, alone = (torch.stack([rows.view(-1, 240) @ v]) for rows in (x, x[4:5]))
    assert_same_bytes(alone[0], whole[0, 28:35])


def test_operators_that_depend_on_the_batch_are_refused() -> None:
    """torch's fast path of encoders is one operator, with kernels that choose by the batch."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 1).eval()
    make_batch_invariant(encoder)
    x = torch.randn(9, 7, 64)
    with torch.no_grad(), pytest.raises(ValueError, match="set_fastpath_enabled"):
        encoder(x)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            assert_same_bytes(encoder(x[4:5]), encoder(x)[4:5])
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    with pytest.raises(ValueError, match=r"0 \(GRU\)"):
        make_batch_invariant(nn.Sequential(nn.GRU(8, 8)))
