"""Calibration: exact ranges and percentiles, files that are whole or refused, static scales and first histories."""

from __future__ import annotations

import hashlib
import json
import os

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save
from torch import nn

from benchmarks.support.compare import assert_same_bytes
from megatron_fp8.inference import prepare_for_inference
from megatron_fp8.inference.calibration import RECORD, TENSORS, MagnitudeCounts, calibrate, load_calibration
from megatron_fp8.kernels.cast_dispatch import cast
from megatron_fp8.nn import Fp8Linear, convert_to_fp8, fp8_step
from megatron_fp8.numerics.formats import E4M3
from megatron_fp8.numerics.scaling import compute_scale
from megatron_fp8.recipe import DelayedScaling
from tests.support.inference_models import HIDDEN, IN, OUT, activations, converted


def batches(count: int = 3) -> list[torch.Tensor]:
    return [activations(2, 16, seed=seed) * (seed + 1) for seed in range(count)]


@pytest.mark.parametrize("percent", [1e-9, 1, 50, 99, 99.9, 99.99, 100])
def test_percentiles_are_those_of_all_values(percent):
    seen, parts = MagnitudeCounts(), [x.reshape(-1) for x in batches()]
    for part in parts:
        seen.add(part)
    values = np.sort(torch.cat(parts).abs().float().numpy())
    index = max(int(np.ceil(len(values) * percent / 100)) - 1, 0)
    assert seen.percentile(percent) == values[index]
    assert seen.above(float(values[index])) == np.mean(values > values[index])


def test_values_that_are_not_finite_are_counted_and_enter_nothing():
    seen = MagnitudeCounts()
    seen.add(torch.tensor([1.0, -3.0, torch.nan, torch.inf, -torch.inf, 0.0]))
    seen.add(torch.tensor([torch.nan]))
    seen.add(torch.empty(0, 4))
    assert (seen.amaxes, seen.nonfinite, int(seen.counts.sum())) == ([3.0, 0.0, 0.0], 4, 3)
    assert (
        seen.percentile(100) == 3.0
        and MagnitudeCounts().percentile(50) == 0.0
        and MagnitudeCounts().above(1.0) == 0.0
    )


def test_float32_maxima_are_exact_beyond_bfloat16():
    seen, top = MagnitudeCounts(), torch.finfo(torch.float32).max
    seen.add(torch.tensor([top, 1.0000001]))
    assert seen.amaxes == [top] and seen.percentile(100) == torch.finfo(torch.bfloat16).max
    assert seen.percentile(50) == 1.0


def test_what_a_model_is_fed_is_measured_in_high_precision():
    model = converted()
    plain = nn.Sequential(nn.Linear(IN, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, OUT, bias=False)).bfloat16()
    plain.load_state_dict(model.state_dict())
    model.train()
    found = calibrate(model, batches())
    assert model.training and not model[0]._forward_pre_hooks
    with torch.no_grad():
        hidden = [plain[1](plain[0](x)) for x in batches()]
    for name, inputs in {"0": batches(), "2": hidden}.items():
        expected = torch.stack([x.float().abs().amax() for x in inputs])
        assert_same_bytes(found.ranges[f"{name}.input"].amaxes, expected)
        assert found.ranges[f"{name}.input"].amax == expected.max()
        weight = model.get_submodule(name).weight
        assert found.ranges[f"{name}.weight"].amax == weight.abs().max() and weight.requires_grad
    assert found.facts == {"method": "max", "batches": 3}
    assert found.ranges["2.input"].shape == (OUT, HIDDEN)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_static_codes_are_the_cast_with_the_calibrated_scale(recipe):
    model = converted(recipe)
    calibration = calibrate(model, batches(), percentile=99)
    prepare_for_inference(model, calibration=calibration)
    amax = torch.tensor(calibration.ranges["0.input"].amax)
    scale = compute_scale(amax, E4M3, pow2=recipe == "rowwise")
    x = activations(11, seed=9) * 4
    quantized = model[0].fp8_site.quantizers["input"](x, "rowwise", record=False).rowwise
    assert_same_bytes(quantized.codes, cast(x, scale, E4M3))
    saturated = (quantized.codes.float().abs() == 448).float().mean()
    assert 0.01 < saturated < 0.9  # larger activations than were seen saturate, and do not wrap or become NaN
    assert_same_bytes(quantized.expanded_scale_inv().expand(11, IN)[:, 0], (1 / scale).expand(11))
    exact = torch.nn.functional.linear(
        quantized.dequantize(torch.float32), model[0].weight.dequantize(torch.float32), model[0].bias.float()
    )
    torch.testing.assert_close(model[0](x).float(), exact, rtol=1e-2, atol=1e-2)


def test_a_percentile_gives_finer_steps_and_says_what_saturates():
    whole, most = (calibrate(converted(), batches(), percentile=p).ranges["0.input"] for p in (None, 99))
    assert most.amax < 0.5 * whole.amax and most.statistics["max"] == whole.amax
    assert 0 < most.statistics["saturating"] <= 0.01 and whole.statistics["saturating"] == 0


def test_files_give_back_what_was_saved(tmp_path):
    calibration = calibrate(converted(), batches(), percentile=99.9)
    calibration.facts["iteration"] = 7
    again = load_calibration(calibration.save(tmp_path / "new" / "calibration"))
    assert again.facts == calibration.facts and list(again.ranges) == list(calibration.ranges)
    for name, found in calibration.ranges.items():
        other = again.ranges[name]
        assert_same_bytes(other.amaxes, found.amaxes)
        assert (other.amax, other.shape, other.statistics) == (found.amax, found.shape, found.statistics)
    assert_same_bytes(again.input_scale_inv("0"), calibration.input_scale_inv("0"))
    # Anybody's reader: plain safetensors, and an input scale is amax / 448.

    tensors = load_file(tmp_path / "new" / "calibration" / TENSORS)
    assert tensors["0.input.amaxes"].shape == (3,) and tensors["0.input.amax"].shape == ()
    torch.testing.assert_close(again.input_scale_inv("0"), tensors["0.input.amax"] / 448)


DAMAGE = {
    "no folder": ("there is no calibration in", "calibrate first"),
    "no tensors": ("calibration.safetensors is missing", "calibrate first"),
    "cut off": ("SHA-256 differs", "calibrate again"),
    "not JSON": ("is damaged", "calibrate again"),
    "a pipe": ("no ordinary file", "calibrate again"),
    "no shape": ("0.input has the shape [0, 'x']", "calibrate again"),
    "no facts": ("facts is list", "calibrate again"),
    "another format": ("version 99", "calibrate again"),
    "a tensor less": ("lacks '0.input.amax'", "calibrate again"),
    "no safetensors": ("is damaged", "calibrate again"),
    "NaN": ("0.input has amaxes that are no finite float32 magnitudes", "calibrate again"),
    "two amaxes": ("0.input has amaxes that are no finite float32 magnitudes", "calibrate again"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_files_are_refused(tmp_path, kind):
    folder = calibrate(converted(), batches()).save(tmp_path)
    record, tensors = folder / RECORD, folder / TENSORS
    content = json.loads(record.read_text())
    if kind == "no folder":
        folder = folder / "nowhere"
    elif kind == "no tensors":
        tensors.unlink()
    elif kind == "cut off":
        tensors.write_bytes(tensors.read_bytes()[:-4])
    elif kind == "not JSON":
        record.write_text("{")
    elif kind == "another format":
        record.write_text(json.dumps({**content, "version": 99}))
    elif kind == "a pipe":
        record.unlink()
        os.mkfifo(record)
    elif kind == "no shape":
        content["tensors"]["0.input"]["shape"] = [0, "x"]
        record.write_text(json.dumps(content))
    elif kind == "no facts":
        record.write_text(json.dumps({**content, "facts": [1]}))
    else:  # under a digest that agrees, as anybody can compute it
        kept = load_file(tensors)
        if kind == "a tensor less":
            del kept["0.input.amax"]
        else:
            kept["0.input.amax"] = torch.tensor([1.0, 2.0] if kind == "two amaxes" else torch.nan)
        tensors.write_bytes(b"junk" if kind == "no safetensors" else save(kept))
        digest = hashlib.sha256(tensors.read_bytes()).hexdigest()
        record.write_text(json.dumps({**content, "sha256": digest}))
    with pytest.raises(ValueError) as refused:
        load_calibration(folder)
    assert all(part in str(refused.value) for part in DAMAGE[kind])


def test_a_calibration_of_another_shape_is_refused():
    other = convert_to_fp8(nn.Sequential(nn.Linear(IN, 64), nn.GELU(), nn.Linear(64, OUT)).bfloat16())
    calibration = calibrate(other, batches())
    with pytest.raises(ValueError, match=r"0 is \[64, 160\] there and \[200, 160\] here"):
        prepare_for_inference(converted(), calibration=calibration)


@pytest.mark.parametrize("length", [1, 2, 8])
def test_histories_start_with_the_latest_batches_that_fit(length):
    model = converted(DelayedScaling(amax_history_len=length), steps=0)
    calibration = calibrate(model, batches())
    slots = {q.slot.name: q.slot for m in (model[0], model[2]) for q in m.fp8_site.quantizers.values()}
    assert not any(slot.warm for slot in slots.values())
    assert calibration.fill_history(model) == 4
    assert {name for name, slot in slots.items() if slot.warm} == set(calibration.ranges)
    for name, found in calibration.ranges.items():
        saved = slots[name].arena.saved_slot(slots[name])
        assert saved["scale"] == compute_scale(torch.tensor([found.amax]), E4M3)
        kept = min(length - 1, len(found.amaxes))
        assert_same_bytes(
            saved["amax_history"][len(saved["amax_history"]) - kept :], found.amaxes[-kept:][:kept]
        )
        assert not saved["amax_history"][: length - kept].any()
    # The scale is in force at once, and training goes on from it.
    x = activations(5)
    codes = model[0].fp8_site.quantizers["input"](x, "rowwise", record=False).rowwise.codes
    assert_same_bytes(codes, cast(x, slots["0.input"].scale, E4M3))
    model(x).float().sum().backward()
    fp8_step(model)
    assert all(slot.warm for slot in slots.values())


def in_two_parts(rank_batches: list[list[torch.Tensor]]) -> dict[str, dict[str, float]]:
    """A rank case: each rank sees its own batches."""
    import torch.distributed as dist

    found = calibrate(converted(), rank_batches[dist.get_rank()], percentile=99, group=dist.group.WORLD)
    return {name: {**r.statistics, "amaxes": r.amaxes.tolist()} for name, r in found.ranges.items()}


def test_ranks_agree_on_what_all_of_them_saw(ranks):
    a, b = batches(4)[:2], batches(4)[2:]
    first, second = ranks(2).run(in_two_parts, [a, b])
    assert first == second
    alone = calibrate(converted(), [torch.cat(pair) for pair in zip(a, b, strict=True)], percentile=99)
    for name, found in alone.ranges.items():
        if name == "0.input":
            assert first[name] == {**found.statistics, "amaxes": found.amaxes.tolist()}
        assert first[name]["max"] == found.statistics["max"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((lambda: nn.Linear(4, 4), []), "no FP8 linear"),
        ((converted, []), "no batch"),
        ((converted, batches(1), 0.0), "percentile 0.0"),
        ((converted, batches(1), 101.0), "percentile 101.0"),
    ],
)
def test_refusals(arguments, message):
    build, inputs, *percentile = arguments
    with pytest.raises(ValueError, match=message):
        calibrate(build(), inputs, percentile=percentile[0] if percentile else None)


def test_nothing_to_fill_is_an_error():
    model = converted("tensorwise")
    with pytest.raises(ValueError, match="no linear of the model uses delayed scaling"):
        calibrate(model, batches(1)).fill_history(model)


def test_linears_made_one_by_one_are_told_apart():
    """Each is called 'linear' until a model unites them: one range must not serve them all."""
    model = nn.Sequential(Fp8Linear(32, 32), nn.ReLU(), Fp8Linear(32, 32))
    calibration = calibrate(model, [100 * torch.randn(64, 32)])
    assert set(calibration.ranges) == {"0.input", "0.weight", "2.input", "2.weight"}
    prepare_for_inference(model, calibration=calibration)
    first, last = (model[i].fp8_site.quantizers["input"].scale for i in (0, 2))
    assert first < last
