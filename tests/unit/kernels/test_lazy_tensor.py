"""A matrix that is computed when read: one name after another, written by whoever looks, and never wrong."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from benchmarks.support.compare import assert_same_bytes
from benchmarks.support.launched_kernels import launched
from megatron_fp8.backends.native import backend as native
from megatron_fp8.kernels.fused_quantize import Swiglu, SwigluGradient
from megatron_fp8.kernels.lazy_tensor import LazyTensor, materialize, source_of
from megatron_fp8.kernels.quantize import write_matrix
from tests.support.matrices import DEVICE, normalized
from tests.support.sites import RECIPES, randn

SHAPE = (6, 2, 40)
GAMMA = torch.linspace(0.5, 2, 40).to(DEVICE, torch.bfloat16)


def source() -> Any:
    return normalized(randn(12, 40, seed=1).to(DEVICE), GAMMA)


VALUES = write_matrix(source()).view(SHAPE)


def made() -> LazyTensor:
    return LazyTensor(source(), SHAPE)


def test_it_looks_like_the_matrix_and_names_of_it_write_nothing():
    x = made()
    assert (x.shape, x.dtype, x.device) == (VALUES.shape, VALUES.dtype, VALUES.device)
    names = [x.view(12, 40), x.reshape(-1, 40), x.view_as(x), x.detach(), x.view(2, -1, 40), x.contiguous()]
    assert (
        [n.shape[-1] for n in names] == [40] * 6
        and names[1].shape == (12, 40)
        and names[4].shape == (2, 6, 40)
    )
    for name in (x, *names):
        assert isinstance(name, LazyTensor) and source_of(name).kind == "norm", name
    assert "not written" in repr(x)
    x.sum()
    for name in (x, *names):
        assert name.source is None and "not written" not in repr(name)
    assert_same_bytes(names[1].materialize(), VALUES.view(12, 40))
    with pytest.raises(RuntimeError, match="invalid"):
        made().view(7, -1)


READERS = {
    "arithmetic": (lambda x: x + 1, lambda v: v + 1),
    "another shape": (lambda x: x.view(-1, 20), lambda v: v.view(-1, 20)),
    "transposed": (lambda x: x.view(12, 40).t(), lambda v: v.view(12, 40).t()),
    "a row": (lambda x: x[3], lambda v: v[3]),
    "another dtype": (lambda x: x.float(), lambda v: v.float()),
    "a copy": (lambda x: x.clone(), lambda v: v.clone()),
    "copied into": (lambda x: torch.empty_like(VALUES).copy_(x), lambda v: v),
    "deep copy": (copy.deepcopy, lambda v: v),
    "an argument": (lambda x: torch.cat([VALUES, x]), lambda v: torch.cat([VALUES, v])),
}


@pytest.mark.parametrize("reader", READERS)
def test_whoever_reads_meets_the_values(reader):
    read, expected = READERS[reader]
    x = made()
    found = read(x)
    assert x.source is None
    assert_same_bytes(materialize(found), expected(VALUES), reader)


def sources_by_row() -> dict[str, Any]:
    x, dy = randn(12, 80, seed=2).to(DEVICE), randn(12, 40, seed=3).to(DEVICE)
    weights = torch.linspace(0.1, 1, 12).to(DEVICE)
    return {
        "norm": source(),
        "swiglu": Swiglu(x),
        "weighted": Swiglu(x, weights),
        "gradient": SwigluGradient(dy, x),
        "weighted gradient": SwigluGradient(dy, x, weights),
    }


@pytest.mark.parametrize("kind", sources_by_row())
def test_parts_by_rows_are_computed_apart(kind):
    """As experts' tokens are: codes of each are those of its rows, and nothing is written; empty ones too."""
    counts = [5, 0, 6, 1]
    whole = sources_by_row()[kind]
    values = write_matrix(whole)
    x = LazyTensor(whole, values.shape)
    rule = RECIPES["mxfp8"].rule("input")
    with launched() as calls:
        parts = x.split(counts)
        found = [native.quantize(part, rule, "both").tensor for part in parts]
    assert calls == {f"quantize_tiles of {whole.kind}": 3} and x.source is whole
    for part, made, rows in zip(parts, found, values.split(counts), strict=True):
        assert isinstance(part, LazyTensor) and part.shape == rows.shape
        wanted = native.quantize(rows, rule, "both").tensor
        for side, other in zip(made.sides, wanted.sides, strict=True):
            assert_same_bytes(side.codes, other.codes, kind)
            assert_same_bytes(side.scale_inv, other.scale_inv, kind)
    for part, rows in zip(parts[2].split([2, 4]), values.split(counts)[2].split([2, 4]), strict=True):
        assert_same_bytes(write_matrix(part.source), rows, kind)


def test_who_looks_at_a_part_writes_the_whole_once():
    """A part is a view of it: what is written there is seen everywhere, as of ordinary tensors."""
    x = made().view(12, 40)
    first, second = x.split([5, 7])
    with launched() as calls:
        second.mul_(2)
        assert first.source is None and x.source is None
        assert_same_bytes(
            torch.cat([first, second]), torch.cat([VALUES.view(12, 40)[:5], VALUES.view(12, 40)[5:] * 2])
        )
        first.zero_()
        assert not x[:5].any() and x[5:].any()
    assert calls == {"write_values of norm": 1}, calls
    for columns in (made().view(12, 40).split([8, 32], 1), made().split([2, 4])):
        assert not any(isinstance(part, LazyTensor) for part in columns), (
            "columns, and rows of rows, are written"
        )
    with pytest.raises(RuntimeError, match="sum"):
        made().view(12, 40).split([5, 8])


def test_it_is_computed_once_and_writes_in_place_arrive():
    x = made()
    other = x.view(12, 40)
    with launched() as calls:
        x.add_(1)
        other.mul_(2)
    assert calls == {"write_values of norm": 1}, calls
    assert_same_bytes(x.materialize(), (VALUES + 1) * 2)
    with launched() as calls:
        native.quantize(x.view(12, 40), RECIPES["mxfp8"].rule("input"), "both")
    assert calls == {"quantize_tiles": 1}, "what was written is read"


def test_inputs_must_not_change_before_it_is_read():
    """It would be another matrix, in silence; once written it is its own."""
    x, gamma = randn(12, 40, seed=1).to(DEVICE), GAMMA.clone()
    for changed in (x, gamma):
        late, written_before = (LazyTensor(normalized(x, gamma), (12, 40)) for _ in range(2))
        written_before.sum()
        changed.mul_(2)
        assert written_before.isfinite().all()
        for read in (source_of, materialize, lambda y: y + 1):
            with pytest.raises(RuntimeError, match=r"norm was left to be computed .* changed in place"):
                read(late)
    with torch.inference_mode():
        y = LazyTensor(normalized(randn(12, 40, seed=1).to(DEVICE), GAMMA), (12, 40))
        assert_same_bytes(y.materialize(), VALUES.view(12, 40))


def test_it_is_pickled_as_its_values():
    file = io.BytesIO()
    torch.save(made(), file)
    file.seek(0)
    assert_same_bytes(torch.load(file, weights_only=True), VALUES)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return made()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        _Norm.met = grads[0]
        return materialize(grads[0])


class _Reader(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        _Reader.met = x
        return torch.ones((), device=DEVICE)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return made()


class _Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def test_autograd_splits_it_by_rows():
    """Parts reach their readers unwritten, and their gradients come together."""

    class Read(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, part: torch.Tensor, number: int) -> torch.Tensor:
            assert isinstance(part, LazyTensor) and part.source is not None
            ctx.shape, ctx.number = part.shape, number
            return torch.ones((), device=DEVICE)

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
            return torch.full(ctx.shape, float(ctx.number), device=DEVICE, dtype=VALUES.dtype), None

    x = torch.zeros(SHAPE, device=DEVICE, requires_grad=True)
    parts = _Norm.apply(x.bfloat16()).view(12, 40).split([5, 7])
    sum(Read.apply(part, e + 1) for e, part in enumerate(parts)).backward()
    assert x.grad.view(12, 40)[:, 0].tolist() == [1.0] * 5 + [2.0] * 7


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
def test_autograd_hands_it_on_unwritten(recomputed):
    """Forward as an input, backward as a gradient; through views, functions that return their input, recomputation."""

    def read(y: torch.Tensor) -> torch.Tensor:
        return _Reader.apply(_Same.apply(y.view(12, 40)).view(SHAPE))

    x = torch.zeros(SHAPE, device=DEVICE, requires_grad=True)
    y = _Norm.apply(x.bfloat16())
    loss = checkpoint(read, y, use_reentrant=True) if recomputed else read(y)
    loss.backward()
    for met in (_Reader.met, _Norm.met):
        assert isinstance(met, LazyTensor) and met.shape == VALUES.shape
    assert _Reader.met.source is not None
    assert_same_bytes(x.grad.bfloat16(), VALUES)
    # Used twice, its gradients are added up, which reads them.
    x.grad = None
    y = _Norm.apply(x.bfloat16())
    (read(y) + y.sum()).backward()
    assert_same_bytes(x.grad.bfloat16(), (VALUES + 1))
