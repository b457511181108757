"""What the collector makes of what passes: each tensor once an iteration, of every kind of site, and nothing kept."""

import errno
import re

import pytest
import torch

from megatron_fp8 import convert_to_fp8
from megatron_fp8.files import records
from megatron_fp8.nn import Fp8Config, fp8_autocast, fp8_step
from megatron_fp8.telemetry import Telemetry
from tests.support.sites import RECIPES, randn
from tests.support.telemetry import Piece, differences, reference

QUANTIZED = {
    "input": "quantize_activations",
    "weight": "quantize_weights",
    "grad_output": "quantize_gradients",
}
TENSORS = ("input", "weight", "grad_output", "output", "dgrad", "wgrad")


def tower(recipe="tensorwise", **config):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Linear(96, 64)).bfloat16()
    return convert_to_fp8(model, config=Fp8Config(recipe=recipe, **config), skip=[])


def step(model, *, microbatches=1, needs_grad=True):
    """An iteration; what the last layer read, gave and got, and the gradients it made."""
    seen = []
    for number in range(microbatches):
        x = randn(64, 64, seed=number).requires_grad_(needs_grad)
        middle = model[0](x)
        middle.retain_grad()
        y = model[1](middle)
        dy = randn(64, 64, seed=9 + number)
        y.backward(dy)
        seen.append((middle.detach(), y.detach(), dy, middle.grad))
    fp8_step(model)
    return seen


def rows(telemetry, site="1"):
    return {record["tensor"]: record for record in telemetry.records if record["site"] == site}


def wrong(record, *tensors):
    values = {
        name: value
        for name, value in reference([Piece(x.float().numpy()) for x in tensors]).items()
        if name in record
    }
    assert len(values) == 10
    return differences(record, values)


@pytest.mark.parametrize("recipe", RECIPES)
def test_all_microbatches_are_one_tensor(recipe):
    model = tower(RECIPES[recipe])
    with Telemetry(model) as telemetry:
        seen = step(model, microbatches=3)
    found = rows(telemetry)
    assert tuple(found) == TENSORS
    xs, ys, dys, dxs = zip(*seen, strict=True)
    for tensor, pieces in {"input": xs, "output": ys, "grad_output": dys, "dgrad": dxs}.items():
        assert not wrong(found[tensor], *pieces), tensor
    assert not wrong(found["weight"], model[1].weight.detach())


def test_a_layer_in_high_precision_shows_all_six():
    """wgrad and dgrad are those that autograd makes, to the bit."""
    model = tower()
    with Telemetry(model) as telemetry, fp8_autocast(enabled=False):
        ((x, y, dy, dx),) = step(model)
    found = rows(telemetry)
    assert tuple(found) == TENSORS and not any("mse" in record for record in found.values())
    tensors = {"input": x, "output": y, "grad_output": dy, "dgrad": dx}
    tensors |= {"weight": model[1].weight.detach(), "wgrad": model[1].weight.grad}
    assert not [name for name, tensor in tensors.items() if wrong(found[name], tensor)]


def test_a_high_precision_layer_s_dgrad_is_its_own():
    """Not the sum over all who read its input."""
    model = tower()
    with Telemetry(model, tensors=["dgrad"]) as telemetry, fp8_autocast(enabled=False):
        x = randn(64, 64, seed=1).requires_grad_()
        y = model[0](x)
        (y.sum() + (3 * x).sum()).backward()
        fp8_step(model)
    assert not wrong(rows(telemetry, "0")["dgrad"], torch.ones_like(y) @ model[0].weight.detach())


@pytest.mark.parametrize("role", ["input", "weight", "grad_output"])
def test_an_operand_that_stays_unquantized_has_its_values(role):
    model = tower(**{QUANTIZED[role]: False})
    with Telemetry(model) as telemetry:
        ((x, _, dy, _),) = step(model)
    tensor = {"input": x, "weight": model[1].weight.detach(), "grad_output": dy}[role]
    found = rows(telemetry)[role]
    assert not wrong(found, tensor) and "mse" not in found


def test_without_dgrad_the_gradient_counts_all_the_same():
    model = tower(quantize_gradients=False)
    with Telemetry(model, tensors=["grad_output", "dgrad"]) as telemetry:
        step(model, needs_grad=False)
    first = rows(telemetry, "0")
    assert list(first) == ["grad_output"] and first["grad_output"]["l1_norm"] > 0


def test_what_is_cast_twice_has_two_rows():
    model = tower(overrides={"1:wgrad": "mxfp8"})
    with Telemetry(model) as telemetry:
        step(model)
    found = rows(telemetry)
    assert tuple(found) == (*TENSORS, "input.wgrad", "grad_output.wgrad")
    for role in ("input", "grad_output"):
        one, other = found[role], found[f"{role}.wgrad"]
        assert one["l1_norm"] == other["l1_norm"] and one["mse"] != other["mse"]


def test_evaluation_and_other_iterations_are_not_measured():
    model = tower()
    with Telemetry(model, every=2) as telemetry:
        step(model)
        assert telemetry.records == []
        model.eval()(randn(64, 64, seed=5))
        model.train()
        ((x, *_),) = step(model)
    assert {record["iteration"] for record in telemetry.records} == {2}
    assert not wrong(rows(telemetry)["input"], x)


def test_autocast_s_recipe_is_the_site_s_own_row():
    model = tower()
    with Telemetry(model) as telemetry, fp8_autocast(recipe="mxfp8"):
        step(model)
    scale = rows(telemetry)["input"]["scale_inv_min"]
    assert {record["site"] for record in telemetry.records} == {"0", "1"} and scale == 2 ** round(
        torch.tensor(scale).log2().item()
    )


def test_what_if_is_asked_beside_the_run():
    """Tensorwise asked of itself has the same figures; delayed knows the amaxes of all iterations."""
    model = tower()
    with Telemetry(model, what_if=["tensorwise", "delayed"], every=2) as telemetry:
        step(model)
        step(model)
    for tensor in TENSORS[:3]:
        record = rows(telemetry)[tensor]
        for name in ("mse", "underflows%", "scale_inv_max"):
            assert record[f"fp8_current_scaling_{name}"] == record[name]
            # The same data twice: a delayed scale is this iteration's own.
            assert record[f"fp8_delayed_scaling_{name}"] == pytest.approx(record[name], rel=1e-6)


def test_nothing_is_saved_for_backward():
    def saved(every):
        model, total = tower(), []

        def pack(x):
            total.append(x.numel() * x.element_size())
            return x

        with Telemetry(model, every=every), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            step(model)
            with fp8_autocast(enabled=False):
                step(model)
        return sum(total)

    assert saved(1) == saved(0) > 0


def test_iterations_between_run_not_one_operation_more():
    def operations(every):
        model = tower()
        with Telemetry(model, every=every):
            step(model)
            with torch.autograd.profiler.profile() as seen:
                step(model)
        return [event.name for event in seen.function_events if event.name.startswith("aten::")]

    off = operations(0)
    assert operations(100) == off and len(operations(1)) > len(off) > 30


def test_what_compiled_code_hides_is_said_once_by_name():
    model = tower()
    compiled = torch.compile(model[1], backend="eager")
    with Telemetry(model) as telemetry, pytest.warns(UserWarning, match="telemetry: iteration") as warned:
        for _ in range(2):
            middle = model[0](randn(64, 64, seed=1))
            with fp8_autocast(enabled=False):
                compiled(middle).sum().backward()
            fp8_step(model)
    (said,) = [str(w.message) for w in warned if "telemetry" in str(w.message)]
    assert "iteration 1 has no figures of 1: " in said and "torch.compile" in said
    assert {record["site"] for record in telemetry.records} == {"0"}


def test_a_weight_gradient_that_goes_into_main_grad_is_said_once_by_name():
    model = tower()
    model[1].weight.grad_added_to_main_grad = True
    with Telemetry(model) as telemetry, fp8_autocast(enabled=False), pytest.warns(UserWarning) as warned:
        step(model)
        step(model)
    (said,) = [str(w.message) for w in warned if "telemetry" in str(w.message)]
    assert said.startswith("telemetry: there is no wgrad of 1: ")
    assert "wgrad" in rows(telemetry, "0") and "wgrad" not in rows(telemetry, "1")


def test_where_all_is_seen_nothing_is_said(recwarn):
    model = tower()
    with Telemetry(model), fp8_autocast(enabled=False):
        step(model)
    with Telemetry(model, tensors=["dgrad"]):
        step(model, needs_grad=False)
    assert not [w for w in recwarn if "telemetry" in str(w.message)]


def test_what_a_full_disk_left_out_is_said_in_one_line(tmp_path, monkeypatch):
    """By name, for both files, when they are closed; the training goes on meanwhile."""

    def full(file, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    model = tower()
    telemetry = Telemetry(model, folder=tmp_path)
    with monkeypatch.context() as patch, pytest.warns(UserWarning) as warned:
        patch.setattr(records.os, "write", full)
        step(model)
        telemetry.close()
    assert len(warned) == 3 and telemetry.records  # two files cannot be written, and what they lack
    assert re.fullmatch(
        r"records are lost: '.*telemetry.jsonl' lacks its last \d+ bytes, '.*tfevents.*' lacks its last \d+ bytes\..*",
        str(warned[-1].message),
    )


def test_refusals():
    model = tower()
    with pytest.raises(ValueError, match="matches no GEMM site"):
        Telemetry(model, sites=["fc1"])
    with pytest.raises(ValueError, match="sees no FP8 site"):
        Telemetry(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="meta device"):
        Telemetry(tower().to("meta"))
    with Telemetry(model), pytest.raises(ValueError, match="already has telemetry"):
        Telemetry(model)
    Telemetry(model).close()  # the first one let go
