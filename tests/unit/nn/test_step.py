"""fp8_step: once an iteration whatever happened in it; an optimizer that steps without it is found out."""

import weakref
from unittest import mock

import pytest
import torch
from torch import nn

from benchmarks.support.compare import assert_same_bytes
from megatron_fp8.inference.calibration import calibrate
from megatron_fp8.linear import operands
from megatron_fp8.nn import convert_from_fp8, convert_to_fp8, fp8_state_dict, fp8_step, register_fp8_step
from megatron_fp8.nn.trainer import Fp8Trainer
from megatron_fp8.telemetry import Telemetry
from tests.support.small_training import DELAYED, Tower, assert_same_state, batch, sgd, train


def test_hook_before_and_after_are_the_same():
    models = [convert_to_fp8(Tower(), DELAYED) for _ in range(3)]
    first, second, third = models
    train(first, sgd(first), range(4))
    optimizer = sgd(second)
    register_fp8_step(optimizer, second)
    train(second, optimizer, range(4), hook=True)
    optimizer = sgd(third)
    for step in range(4):
        third(batch(step)).square().mean().backward()
        optimizer.step()
        fp8_step(third)
        optimizer.zero_grad()
    for other in (second, third):
        assert_same_state(first, other)
    slot = first.up.fp8_site.quantizers["input"].slot
    history = slot.arena.saved_slot(slot)["amax_history"]
    assert history.tolist() == [0.0, batch(2).abs().max().item(), batch(3).abs().max().item()]
    assert slot.scale == torch.full([], 448.0) / max(batch(i).abs().max() for i in (1, 2, 3))


def test_accumulation_is_one_iteration():
    """Weights are cast in each forward: nobody knows whether they were written since the last."""
    model, whole = convert_to_fp8(Tower(), DELAYED), convert_to_fp8(Tower(), DELAYED)
    for i in range(3):
        model(batch(i)).sum().backward()
    counts = fp8_step(model)
    assert (counts.fp8_gemms, counts.casts) == (18, 3 * 6)
    whole(torch.cat([batch(i) for i in range(3)])).sum().backward()
    fp8_step(whole)
    for part in ("scale", "amax_history"):
        name = f"up.input.{part}"
        assert_same_bytes(fp8_state_dict(model)[name], fp8_state_dict(whole)[name], name)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_changes_no_bit(reentrant):
    model, plain = convert_to_fp8(Tower(0, reentrant), DELAYED), convert_to_fp8(Tower(), DELAYED)
    assert train(model, sgd(model), range(3)) == train(plain, sgd(plain), range(3))
    assert_same_state(model, plain)


def test_several_models_keep_apart():
    generator, critic = convert_to_fp8(Tower(0), DELAYED), convert_to_fp8(Tower(1), DELAYED)
    g, c = sgd(generator), sgd(critic)
    for i in range(2):
        for _ in range(2):
            critic(generator(batch(i)).detach()).sum().backward()
            fp8_step(critic)
            c.step()
        critic(generator(batch(i))).sum().backward()
        fp8_step(generator)
        g.step()
        fp8_step(critic)
    assert (generator.up.fp8_group.iteration, critic.up.fp8_group.iteration) == (2, 6)
    both = nn.ModuleList([generator, critic])
    fp8_step(both)
    assert (generator.up.fp8_group.iteration, critic.up.fp8_group.iteration) == (3, 7)


def test_codes_of_a_weight_live_only_as_long_as_backward_needs_them():
    """One or two bytes a value of every weight, which no later call would use."""
    model = convert_to_fp8(Tower(), "mxfp8")
    quantized, quantize = [], operands.cast_each

    def watched(jobs):
        found = quantize(jobs)
        quantized.extend(found)
        return found

    with mock.patch.object(operands, "cast_each", watched):
        y = model(batch(0))
    rowwise, columnwise = (
        [weakref.ref(getattr(tensor, side).codes) for tensor in quantized]
        for side in ("rowwise", "columnwise")
    )
    quantized.clear()
    assert [code() for code in rowwise] == [None] * 4 and all(code() is not None for code in columnwise)
    y.sum().backward()
    del y
    assert [code() for code in columnwise] == [None] * 4


def test_models_without_fp8_linears():
    for call in (fp8_step, fp8_state_dict, lambda m: register_fp8_step(sgd(m), m)):
        with pytest.raises(ValueError, match=r"Tower has no FP8 linear: call convert_to_fp8\(model\) first"):
            call(Tower())
    model = convert_to_fp8(Tower())
    convert_from_fp8(model)
    with pytest.raises(ValueError, match="has no FP8 linear"):
        fp8_step(model)


@pytest.mark.parametrize("group", [3, "data", -100], ids=["a number", "a name", "of other ranks"])
def test_what_is_no_process_group_is_refused_by_whoever_takes_one(group):
    """torch.distributed.new_group gives -100 to the ranks that are not in the new group."""
    model = convert_to_fp8(Tower())
    with pytest.raises(ValueError, match=f"group={group!r} must be a process group of torch.distributed"):
        fp8_step(model, group=group)
    for call in (
        lambda: register_fp8_step(sgd(model), model, group=group),
        lambda: Fp8Trainer(model, sgd(model), lambda m, x: m(x).sum(), group=group),
        lambda: Telemetry(model, every=1, group=group),
        lambda: calibrate(model, [batch(0)], group=group),
    ):
        with pytest.raises(ValueError, match="must be a process group"):
            call()
