"""Models made ready for inference: the training forward's bytes, any number of tokens, memory that is really gone."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks.support.compare import assert_same_bytes
from megatron_fp8.fp8_utils import prepare_model_for_fp8_inference
from megatron_fp8.inference import model_bytes, prepare_for_inference, storage_bytes
from megatron_fp8.inference.calibration import calibrate
from megatron_fp8.nn import Fp8Config, Fp8Linear, convert_to_fp8, fp8_autocast, fp8_step
from megatron_fp8.params.fp8_parameter import Fp8Parameter
from megatron_fp8.params.frozen_parameter import frozen_parameter
from megatron_fp8.state.precision_schedule import PrecisionSchedule
from tests.support.inference_models import HIDDEN, IN, OUT, RECIPES, activations, converted


@pytest.mark.parametrize(
    ("recipe", "dtype"), [*((recipe, torch.bfloat16) for recipe in RECIPES), ("mxfp8", torch.float32)]
)
def test_outputs_are_the_training_forwards_bytes(recipe, dtype):
    model, x = converted(recipe, dtype), activations(3, 21, dtype=dtype)
    model.train()
    trained = model(x).detach()
    assert prepare_for_inference(model) is model
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    with torch.inference_mode():
        assert_same_bytes(model(x), trained)


@pytest.mark.parametrize("recipe", RECIPES)
def test_any_number_of_tokens_padded_or_not(recipe):
    plain, padded = (prepare_for_inference(converted(recipe), pad_tokens=n) for n in (1, 32))
    seen = []
    padded[0].register_forward_hook(lambda module, args, y: seen.append(y.shape))
    for shape in [(1,), (7,), (2, 8), (1, 33), (4, 1, 5), ()]:
        x = activations(*shape)
        assert_same_bytes(padded(x), plain(x))
        assert seen[-1] == (*shape, HIDDEN), "the hooks did not cut the padding off"


@pytest.mark.parametrize("iteration", [0, 3], ids=["warm-up", "healing"])
def test_phases_of_the_training_do_not_follow_into_inference(iteration):
    """A run that ends with healing ends in high precision; what is prepared afterwards runs FP8 all the same."""
    plain, phased = prepare_for_inference(converted()), converted()
    state = phased[0].fp8_site.state
    state.phases, state.iteration = PrecisionSchedule(0.25, 0.25, 4), iteration
    assert state.phase != "fp8"
    prepare_for_inference(phased)
    assert_same_bytes(phased(activations(5)), plain(activations(5)))


def test_compiled_it_runs_outside_the_graph():
    """Dynamo fails in a frame that is given such a weight before the layer that holds it."""
    model = converted("tensorwise")
    prepare_for_inference(model)
    x = activations(5)
    torch._dynamo.reset()
    with torch.no_grad():
        assert_same_bytes(torch.compile(model, backend="eager")(x), model(x))
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match="weight that lives as FP8"):
            torch.compile(model, backend="eager", fullgraph=True)(x)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("recipe", "static", "alone"),
    [
        ("tensorwise", False, False),
        ("tensorwise", True, True),
        ("delayed", False, True),
        ("rowwise", False, True),
        ("rowwise", True, True),
        ("blockwise", False, True),
        ("mxfp8", False, True),
    ],
)
def test_whose_tokens_do_not_depend_on_their_company(recipe, static, alone):
    """What makes decoding with a cache exact: a token alone gets the bytes it gets among others."""
    model, x = converted(recipe), activations(40)
    prepare_for_inference(model, calibration=calibrate(model, [x]) if static else None)
    together = model(x)
    one_by_one = torch.cat([model(token) for token in x.split(1)])
    if alone:
        assert_same_bytes(one_by_one, together)
    else:
        assert not torch.equal(one_by_one, together)


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_take_half_of_bfloat16_and_scales(recipe):
    model = converted(recipe)
    values, bias = IN * HIDDEN + HIDDEN * OUT, HIDDEN
    old = [weakref.ref(model[i].weight) for i in (0, 2)]
    storages = [weakref.ref(model[i].weight.untyped_storage()) for i in (0, 2)]
    assert model_bytes(model) == 2 * (values + bias)
    prepare_for_inference(model)
    gc.collect()
    assert [ref() for ref in old] == [None, None], "somebody still holds the high-precision weight"
    assert [ref() for ref in storages] == [None, None]
    scales = {
        "delayed": 2 * 4,
        "tensorwise": 2 * 4,
        "rowwise": (HIDDEN + OUT) * 4,
        "blockwise": (2 * 2 + 2 * 2) * 4,
        "mxfp8": HIDDEN * 5 + OUT * 7,
    }[recipe]
    assert model_bytes(model) == values + scales + 2 * bias
    report = model.fp8_inference
    assert report.total_after == model_bytes(model) and report.total_before == 2 * (values + bias)
    # Nothing else in the process holds the weight's size in any form: not the site's cache either.
    held = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.numel() == IN * HIDDEN]
    assert storage_bytes(held) <= IN * HIDDEN, "a second set of codes is kept"


def test_weights_go_one_after_the_other(monkeypatch):
    """At no time do all of them exist in both precisions."""
    model, alive = converted("mxfp8"), []
    old = weakref.ref(model[0].weight)

    def quantize(weight, quantizer):
        alive.append(old() is not None)
        return frozen_parameter(weight, quantizer)

    monkeypatch.setattr("megatron_fp8.inference.prepare.frozen_parameter", quantize)
    prepare_for_inference(model)
    assert alive == [True, False]


def test_weights_alone_in_fp8():
    """W8A16: activations stay in high precision, weights still take one byte a value."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(IN, OUT)).bfloat16()
    model = convert_to_fp8(copy.deepcopy(plain), config=Fp8Config("mxfp8", quantize_activations=False))
    x = activations(9)
    trained = model(x).detach()
    prepare_for_inference(model)
    assert_same_bytes(model(x), trained)
    assert "activations in high precision" in str(model.fp8_inference)
    assert_same_bytes(model(x), nn.functional.linear(x, model[0].weight.dequantize(), model[0].bias))
    assert model.fp8_inference.total_after < 0.55 * model.fp8_inference.total_before


def test_shared_storage_counts_once():
    x = torch.zeros(100)
    assert storage_bytes([x, x[10:20], x.view(10, 10)]) == 400


@pytest.mark.parametrize("other", ["mxfp8", "rowwise", "bf16"])
def test_one_weight_by_two_rules_has_codes_of_both(other):
    """Overrides name linears, and those may share a weight."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False, dtype=torch.bfloat16) for _ in range(2)))
    model[1].weight = model[0].weight
    with torch.no_grad():
        model[0].weight[0] *= 100
    convert_to_fp8(model, config=Fp8Config(overrides={"1": other})).eval()
    x = torch.randn(32, 64).bfloat16()
    with torch.no_grad():
        before = model(x)
        assert_same_bytes(prepare_for_inference(model)(x), before)


def test_tied_weights_stay_tied():
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)).bfloat16()
    model[1].weight = model[0].weight
    prepare_for_inference(convert_to_fp8(model, "mxfp8"))
    assert model[0].weight is model[1].weight and isinstance(model[0].weight, Fp8Parameter)
    assert model_bytes(model) == 64 * 64 + 64 * 2


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8"])
def test_copies_and_state_dicts_see_the_weights(recipe):
    model = converted(recipe)
    high_precision = model[0].weight.detach().clone()
    names = list(model.state_dict())
    prepare_for_inference(model)
    assert list(model.state_dict()) == names == [name for name, _ in model.named_parameters()]
    value = model.state_dict()["0.weight"].dequantize()
    assert 0 < (value - high_precision).abs().max() < 0.07 * high_precision.abs().max()
    copied = copy.deepcopy(model[0].weight)
    assert_same_bytes(copied.codes[0], model[0].weight.codes[0])
    assert copied.codes[0].data_ptr() != model[0].weight.codes[0].data_ptr()
    assert_same_bytes(copied.quantized.rowwise.dequantize(), model[0].weight.quantized.rowwise.dequantize())
    assert len(model[0].weight.stored_tensors()) == 2  # one set of codes, one of scales


def test_a_write_into_a_prepared_weight_quantizes_again():
    model = prepare_for_inference(converted("mxfp8"))
    weight, value = model[0].weight, torch.randn(HIDDEN, IN).bfloat16()
    weight.copy_(value)
    error = (weight.dequantize() - value).float().norm() / value.float().norm()
    assert 0.01 < error < 0.04


def test_megatrons_name_prepares_any_model_once():
    model = prepare_model_for_fp8_inference(converted("blockwise"))
    weight = model[0].weight
    assert isinstance(weight, Fp8Parameter)
    assert prepare_model_for_fp8_inference(model)[0].weight is weight


def test_the_report_says_what_runs():
    model = convert_to_fp8(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)).bfloat16(), "rowwise")
    text = str(prepare_for_inference(model).fp8_inference)
    assert "rowwise: weights e4m3 per row, activations dynamic, one scale per row" in text
    assert "1 linears in FP8: 8,320 -> 4,480 bytes" in text


class Reader(nn.Module):
    """As Mamba's dt_proj: its code multiplies by a linear's weight and never calls that linear."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.called, self.read = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.called(x), self.read.weight)


@pytest.mark.parametrize("how", ["in FP8", "in high precision", "copied since", "compiled"])
def test_weights_that_other_code_reads_stay_as_they_are(how):
    model, x = convert_to_fp8(Reader()), torch.randn(5, 64)
    if how == "in FP8":
        model(x)
    elif how == "in high precision":
        with fp8_autocast(enabled=False):
            model(x)
    elif how == "compiled":
        torch.compile(model, backend="aot_eager")(x)
    elif how == "copied since":
        model(x)
        model = copy.deepcopy(model)
    expected = copy.deepcopy(model)(x).detach()
    report = prepare_for_inference(model).fp8_inference
    assert_same_bytes(model(x), expected)
    assert isinstance(model.called.weight, Fp8Parameter) and type(model.read.weight) is nn.Parameter
    assert report.ran and report.not_called == report.high_precision == ["read"]
    assert [site.name for site in report.sites] == ["called"]
    assert "1 linears in FP8" in str(report) and "may read the weights: read" in str(report)


def test_of_a_model_that_has_not_run_nothing_is_known_and_that_is_said():
    model = convert_to_fp8(Reader())
    report = prepare_for_inference(model).fp8_inference
    assert not report.ran and report.not_called == [] and len(report.sites) == 2
    assert "is not known, since the model has not run since its conversion: run a batch first" in str(report)
    assert "not known" not in str(prepare_for_inference(converted()).fp8_inference)


def test_a_linear_that_stayed_and_is_called_later_runs_as_in_training():
    model, x = convert_to_fp8(Reader()), torch.randn(5, 64)
    model(x)
    expected = copy.deepcopy(model).read(x).detach()
    prepare_for_inference(model)
    assert_same_bytes(model.read(x), expected)


def test_linears_that_were_made_one_by_one_have_run_too():
    model, x = Reader(), torch.randn(5, 64)
    for linear in (model.called, model.read):
        Fp8Linear.from_linear(linear)
    model(x)
    fp8_step(model)  # unites them
    assert prepare_for_inference(model).fp8_inference.not_called == ["read"]


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8"])  # one weight's codes, and rowwise codes alone
def test_training_a_prepared_model_is_answered_in_our_words(recipe):
    model = prepare_for_inference(converted(recipe))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.eval()
    with pytest.warns(
        UserWarning, match="made FP8 codes by prepare_for_inference, and no gradient trains those"
    ) as said:
        model.train()
        model.train()
    assert len(said) == 1
    model(activations(3)).detach()  # what is frozen may run in any mode
    model.requires_grad_(True)
    with pytest.raises(RuntimeError, match="0: weights were made FP8 codes by prepare_for_inference"):
        model(activations(3))
    model.requires_grad_(False)
    x = activations(3).requires_grad_()
    model(x).float().sum().backward()  # adapters around it
    assert x.grad is not None and x.grad.abs().sum() > 0


def test_transformer_engines_linears_are_not_ours_to_prepare():
    from megatron_fp8.mcore.te.context import TeSite

    class Linear(nn.Linear):
        fp8_site = TeSite(SimpleNamespace(precision="fp8", backend="transformer_engine"), None)

    with pytest.raises(ValueError, match="linears are Transformer Engine's"):
        prepare_for_inference(Linear(4, 4))


def test_no_linear_is_looked_for_among_the_others(monkeypatch):
    """Of 100,000 that took minutes."""
    model = convert_to_fp8(nn.Sequential(*(nn.Linear(16, 16) for _ in range(20))), skip=["3"])
    for number in (0, 5):
        model[number](torch.ones(1, 16))
    compared = []
    monkeypatch.setattr(Fp8Linear, "__eq__", lambda one, other: compared.append(1) or one is other)
    report = prepare_for_inference(model).fp8_inference
    assert len(report.not_called) == 17 and len(report.sites) == 2
    assert len(compared) <= 20


@pytest.mark.parametrize(
    ("build", "arguments", "message"),
    [
        (lambda: nn.Linear(4, 4), {}, "no FP8 linear"),
        (converted, {"pad_tokens": 0}, "pad_tokens=0"),
        (
            lambda: converted("mxfp8"),
            {"calibration": "own"},
            "static activation scales do not exist for recipe 'mxfp8'",
        ),
        (lambda: converted("blockwise"), {"calibration": "own"}, "1x128"),
        (converted, {"calibration": "other"}, "nothing of 0"),
    ],
)
def test_refusals_change_nothing(build, arguments, message):
    model = build()
    if "calibration" in arguments:
        other = (
            converted() if arguments["calibration"] == "own" else convert_to_fp8(nn.Linear(IN, 32).bfloat16())
        )
        arguments = {"calibration": calibrate(other, [activations(4)])}
    with pytest.raises(ValueError, match=message):
        prepare_for_inference(model, **arguments)
    assert model.training and not any(isinstance(p, Fp8Parameter) for p in model.parameters())


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8"])
def test_a_prepared_model_moves_with_its_codes_and_scales(recipe):
    """To where no values are; no GPU has been tried."""
    model = prepare_for_inference(converted(recipe)).to("meta")
    weights = [module.weight for module in model.modules() if isinstance(module, Fp8Linear)]
    assert weights and all(isinstance(weight, Fp8Parameter) for weight in weights)
    for weight in weights:
        held = [weight, *weight.codes, *weight._stored.scale_invs]
        assert {tensor.device.type for tensor in held} == {"meta"}
