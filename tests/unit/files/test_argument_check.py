"""What is handed to functions of this package and is no model, no optimizer of it, or no tensor."""

import numpy
import pytest
import torch
from torch import nn

from megatron_fp8 import (
    Fp8Config,
    Fp8Linear,
    Fp8Trainer,
    convert_from_fp8,
    convert_to_fp8,
    diagnose,
    fp8_autocast,
    fp8_matmul,
    fp8_step,
    quantize,
    register_fp8_step,
)
from megatron_fp8.inference import prepare_for_inference
from megatron_fp8.inference.calibration import calibrate
from megatron_fp8.nn.state_dict import fp8_state_dict, load_fp8_state_dict
from megatron_fp8.recipe import MXFP8BlockScaling


def made():
    return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


TAKE_A_MODEL = {
    "convert_to_fp8": convert_to_fp8,
    "convert_from_fp8": convert_from_fp8,
    "fp8_step": fp8_step,
    "register_fp8_step": lambda model: register_fp8_step(sgd(made()), model),
    "Fp8Trainer": lambda model: Fp8Trainer(model, sgd(made()), lambda model, x: model(x).sum()),
    "fp8_state_dict": fp8_state_dict,
    "load_fp8_state_dict": lambda model: load_fp8_state_dict(model, {}),
    "prepare_for_inference": prepare_for_inference,
    "calibrate": lambda model: calibrate(model, []),
    "diagnose": lambda model: diagnose(model, lambda model, x: model(x).sum(), [1, 2, 3, 4]),
}
NO_MODELS = {
    "a path": (lambda: "runs/x", r"'runs/x': load it first"),
    "None": (lambda: None, "this is None"),
    "a class": (lambda: nn.Linear, "call it, which makes a model"),
    "an optimizer": (lambda: sgd(made()), "this is SGD: are model and optimizer exchanged"),
    "weights": (lambda: made().state_dict(), "this is OrderedDict"),
}


@pytest.mark.parametrize(
    ("function", "kind"),
    [*((each, "a path") for each in TAKE_A_MODEL), *(("fp8_step", kind) for kind in NO_MODELS)],
)
def test_what_is_no_model_is_refused_by_name(function, kind):
    make, said = NO_MODELS[kind]
    with pytest.raises(ValueError, match=f"a model is needed, .*{said}"):
        TAKE_A_MODEL[function](make())


def test_exchanged_arguments_and_an_optimizer_of_another_model():
    model = convert_to_fp8(made())
    with pytest.raises(ValueError, match="are model and optimizer exchanged"):
        register_fp8_step(model, sgd(model))
    for use in (register_fp8_step, lambda other, model: Fp8Trainer(model, other, lambda model, x: x)):
        with pytest.raises(
            ValueError, match="SGD has no parameter of this Sequential: it is another model's"
        ):
            use(sgd(made()), model)
    part = torch.optim.SGD([model[1].weight], lr=0.1)  # of some of the parameters, as LoRA's is
    register_fp8_step(part, model).remove()


def test_an_optimizer_that_steps_copies_is_taken():
    """DeepSpeed's and Megatron-Core's keep float32 masters, which are no parameters of the model."""

    class Masters:
        def __init__(self, model):
            self.optimizer = torch.optim.SGD([p.detach().clone() for p in model.parameters()], lr=0.1)

    model = convert_to_fp8(made())
    register_fp8_step(Masters(model), model)


@pytest.mark.parametrize("value", [None, numpy.zeros((2, 32))])
def test_a_linear_refuses_what_is_no_tensor_as_torchs_does(value):
    plain, fp8 = nn.Linear(32, 32), Fp8Linear(32, 32)
    with pytest.raises(TypeError):
        plain(value)
    for layer in (fp8, fp8.eval(), convert_to_fp8(made())):
        with pytest.raises(TypeError, match=r"a torch\.Tensor is needed, and this is"):
            layer(value)
    with fp8_autocast(enabled=False), pytest.raises(TypeError, match=r"a torch\.Tensor is needed"):
        fp8(value)
    for product in (lambda: fp8_matmul(value, torch.ones(2, 2)), lambda: fp8_matmul(torch.ones(2, 2), value)):
        with pytest.raises(TypeError, match=r"fp8_matmul: a torch\.Tensor is needed"):
            product()
    with pytest.raises(TypeError, match=r"quantize: a torch\.Tensor is needed"):
        quantize(value, MXFP8BlockScaling(), "input")


@pytest.mark.parametrize("recipe", ["mxfp8", MXFP8BlockScaling])
def test_quantize_takes_an_instance_of_a_recipe(recipe):
    with pytest.raises(ValueError, match="is not a recipe: use one of DelayedScaling"):
        quantize(torch.ones(32, 32), recipe, "input")


def test_skip_that_is_a_number():
    with pytest.raises(ValueError, match="skip: 3 is neither a glob"):
        Fp8Config(skip=3)


def test_a_missing_compiler_is_said_once_with_its_cost(monkeypatch, capsys):
    monkeypatch.setattr("megatron_fp8.files.terminal._printed", set())
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    convert_to_fp8(made())
    assert "C compiler" not in capsys.readouterr().err
    monkeypatch.setenv("CC", "/no/such/cc")
    for _ in range(2):
        convert_to_fp8(made())
    said = capsys.readouterr().err
    assert said.count("no C compiler: /no/such/cc is not there; install one or set CC") == 1
    assert "a training step takes about twice as long" in said
