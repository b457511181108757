"""Compact moments of Adam: bytes, rounding, and an optimizer that follows the float32 one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_fp8.mcore.optimizer.adam import Adam, CompactAdam, Moment, compact_state

KINDS = {"first": True, "second": False}


def values(shape: tuple[int, ...] = (1000,)) -> torch.Tensor:
    """Of many magnitudes, as moments are."""
    generator = torch.Generator().manual_seed(0)
    size = torch.exp2(torch.randint(-8, 8, shape, generator=generator).float())
    return torch.randn(shape, generator=generator) * size


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1000,), (128,), (1,), (3, 70)], ids=str)
def test_bytes_and_error(kind: str, shape: tuple[int, ...]) -> None:
    x = values(shape) if kind == "first" else values(shape).square()
    moment = Moment(x, KINDS[kind])
    n, blocks = x.numel(), -(-x.numel() // 128)
    bytes_kept = sum(t.numel() * t.element_size() for t in moment.stored_tensors())
    assert bytes_kept == (1 if kind == "first" else 2) * n + 4 * blocks
    assert moment.shape == x.shape and moment.dtype == torch.float32
    block_max = torch.nn.functional.pad(x.abs().view(-1), (0, blocks * 128 - n)).view(-1, 128).amax(1)
    largest = block_max.repeat_interleave(128)[:n].view(shape)
    # Half a unit in the last place, or of the smallest subnormal under the block's scale (at most max / 224 and / 2^14).
    bound = (
        x.abs() * 2.0**-4 + largest / 224 * 2.0**-10 if kind == "first" else x * 2.0**-11 + largest * 2.0**-38
    )
    assert bool(((moment.dequantize() - x).abs() <= bound).all())


@pytest.mark.parametrize("kind", KINDS)
def test_casting_decoded_values_changes_nothing(kind: str) -> None:
    """What a checkpoint stores in float32 becomes the same moment again."""
    decoded = Moment(values().abs(), KINDS[kind]).dequantize()
    assert torch.equal(Moment(decoded, KINDS[kind]).dequantize(), decoded)


def test_a_second_moment_never_becomes_zero() -> None:
    x = torch.full((128,), 1e-30)
    x[0] = 1.0
    assert bool((Moment(x, False).dequantize() > 0).all())
    assert torch.equal(Moment(torch.zeros(130), False).dequantize(), torch.zeros(130))


@pytest.mark.parametrize("kind", KINDS)
def test_nan_stays_and_infects_no_other_block(kind: str) -> None:
    x = values((256,)).abs()
    expected = Moment(x, KINDS[kind]).dequantize()
    x[3], x[5] = torch.nan, torch.inf
    found = Moment(x, KINDS[kind]).dequantize()
    assert found[3].isnan() and torch.equal(found[128:], expected[128:])


def test_is_a_tensor_to_optimizers_and_checkpoints() -> None:
    moment = Moment(values(), True)
    assert type(moment.clone()) is torch.Tensor and torch.equal(moment.clone(), moment.dequantize())
    moment.detach().copy_(values() * 3)
    assert torch.equal(moment.dequantize(), Moment(values() * 3, True).dequantize())


def two_optimizers(steps: int, betas: tuple[float, float]) -> tuple[list[Any], list[torch.Tensor]]:
    """The float32 and the compact Adam on one quadratic with the same noise."""
    start = torch.randn(300, 70, generator=torch.Generator().manual_seed(0))
    weights = [start.clone().requires_grad_() for _ in range(2)]
    made = [kind([w], lr=1e-2, betas=betas) for kind, w in zip((Adam, CompactAdam), weights, strict=True)]
    for step in range(steps):
        noise = torch.randn(300, 70, generator=torch.Generator().manual_seed(100 + step))
        for weight, optimizer in zip(weights, made, strict=True):
            weight.grad = weight.detach() - 1 + noise
            optimizer.step()
    return made, [w.detach() for w in weights]


def test_follows_the_float32_optimizer() -> None:
    """Where a second moment in E4M3 would stand still after thirty steps, and lengthen the steps."""
    _, (wide, compact) = two_optimizers(100, (0.9, 0.999))
    distance = [float((w - 1).square().mean()) for w in (wide, compact)]
    assert distance[0] < 1.0
    assert distance[1] == pytest.approx(distance[0], rel=0.05)


def test_state_is_compact_and_a_loaded_one_becomes_so() -> None:
    (wide, compact), _ = two_optimizers(2, (0.9, 0.95))
    assert {type(v) for v in compact.state_dict()["state"][0].values()} == {Moment}
    compact.load_state_dict(wide.state_dict())
    compact.step()
    assert {type(v) for v in compact.state_dict()["state"][0].values()} == {Moment}
    assert compact.param_groups[0]["step"] == 3


def test_another_packages_adam_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import optimizer

    monkeypatch.setattr(optimizer, "Adam", torch.optim.AdamW, raising=False)
    with pytest.raises(ValueError, match=r"state_dtype='float32'"), compact_state():
        pass
