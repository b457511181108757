"""Conversion in place: what is kept, what is skipped and said, and the way back."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from benchmarks.support.compare import assert_all_same_bytes, assert_same_bytes
from megatron_fp8.files import terminal
from megatron_fp8.inference import prepare_for_inference
from megatron_fp8.inference.calibration import calibrate
from megatron_fp8.nn import (
    DEFAULT_SKIP,
    Fp8Config,
    Fp8Linear,
    convert_from_fp8,
    convert_to_fp8,
    enable_fp8_all_gather,
    fp8_autocast,
    fp8_step,
)


class Net(nn.Module):
    """A tiny language model: an embedding, two blocks, a final norm and a head tied to the embedding."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.embed = nn.Embedding(32, 64, dtype=dtype)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 96, dtype=dtype), nn.GELU(), nn.Linear(96, 64, dtype=dtype))
            for _ in range(2)
        )
        self.final_norm = nn.LayerNorm(64, dtype=dtype)
        self.lm_head = nn.Linear(64, 32, bias=False, dtype=dtype)
        self.lm_head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.lm_head(self.final_norm(x))


TOKENS = torch.arange(48).view(3, 16) % 32
CONVERTED = ["blocks.0.0", "blocks.0.2", "blocks.1.0", "blocks.1.2"]


def make(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(1)
    return Net(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_place_nothing_but_the_class_changes(dtype):
    model, twin = make(dtype), make(dtype)
    before = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    modules = {name: id(m) for name, m in model.named_modules()}
    called = []
    model.blocks[0][0].register_forward_hook(lambda *_: called.append("forward"))
    model.blocks[0][0].weight.register_hook(lambda _: called.append("gradient"))

    assert convert_to_fp8(model) is model
    assert {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)} == before
    assert {name: id(m) for name, m in model.named_modules()} == modules
    assert model.lm_head.weight is model.embed.weight and type(model.lm_head) is nn.Linear
    assert list(model.state_dict()) == list(twin.state_dict())
    assert all(p.dtype == dtype for p in model.parameters())
    twin.load_state_dict(model.state_dict(), strict=True)
    model.load_state_dict(twin.state_dict(), strict=True)

    out = model(TOKENS)
    out.float().square().mean().backward()
    assert called == ["forward", "gradient"] and out.dtype == dtype
    reference = twin(TOKENS)
    error = (out.float() - reference.float()).norm() / reference.float().norm()
    assert 1e-4 < error < 0.06
    assert fp8_step(model).fp8_gemms == 12


def test_report_says_what_and_why(capsys):
    model = convert_to_fp8(make(), "mxfp8")
    printed = capsys.readouterr().out
    report = model.fp8_report
    assert report.converted == CONVERTED
    assert report.skipped == {
        "embed": "skip '*embed*'",
        "final_norm": "skip '*final*norm*'",
        "lm_head": "skip 'lm_head'",
    }
    assert str(report) in printed and "blocks.0-1.0 (2)" in printed and "mxfp8, emulated" in printed
    assert "4 of 7 modules with parameters run in FP8" in printed
    assert report.as_dict()[1]["shape"] == [96, 64]


@pytest.mark.parametrize(
    ("skip", "left"),
    [
        ("blocks.0.*", ["blocks.1.0", "blocks.1.2", "lm_head"]),
        ("blocks.0", ["blocks.1.0", "blocks.1.2", "lm_head"]),
        (["blocks.?.2", "lm_head"], ["blocks.0.0", "blocks.1.0"]),
        ((*DEFAULT_SKIP, "0"), ["blocks.1.2"]),
        (lambda name, module: module.out_features == 96, ["blocks.0.2", "blocks.1.2", "lm_head"]),
        ((), [*CONVERTED, "lm_head"]),
    ],
)
def test_skip_by_glob_part_container_and_function(skip, left):
    model = convert_to_fp8(make(), skip=skip)
    assert [n for n, m in model.named_modules() if isinstance(m, Fp8Linear)] == left
    assert model.lm_head.weight is model.embed.weight
    model(TOKENS).sum().backward()


def test_tied_head_of_any_name_is_left_by_default():
    model = make()
    model.decoder = model.lm_head
    del model.lm_head
    model.lm_head = model.decoder  # named_modules finds it as decoder or lm_head, whichever comes first
    convert_to_fp8(model)
    assert type(model.decoder) is nn.Linear
    tied = nn.Sequential(nn.Embedding(32, 64), nn.Linear(64, 64), nn.Linear(64, 32))
    tied[2].weight = tied[0].weight
    assert convert_to_fp8(tied).fp8_report.skipped["2"] == "tied to an embedding"


def test_a_pattern_that_matches_nothing_is_an_error_and_changes_nothing():
    model = make()
    with pytest.raises(
        ValueError, match=r"skip='layers\.\*' matches no module of Net; its modules are embed, blocks"
    ):
        convert_to_fp8(model, skip=["layers.*"])
    assert not any(isinstance(m, Fp8Linear) for m in model.modules()) and not hasattr(model, "fp8_report")


class Gated(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).sigmoid() * x


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        (Gated(64, 64), "Gated is a subclass of nn.Linear, which may compute something else"),
        (nn.LazyLinear(64), "has no shape yet: run a batch through the model, then convert"),
        (nn.Linear(64, 10), "10 features: below 16 FP8 would multiply padding"),
        (nn.Linear(15, 64), "15 features: below 16 FP8 would multiply padding"),
        (nn.Linear(64, 64, dtype=torch.float64), "torch.float64 weights cannot be quantized"),
        (nn.Linear(64, 64).to(torch.float8_e4m3fn), "torch.float8_e4m3fn weights cannot be quantized"),
        (nn.Conv1d(64, 64, 1), "not a linear"),
    ],
)
def test_what_cannot_or_should_not_be_converted_gets_a_row(odd, reason):
    model = convert_to_fp8(nn.ModuleDict({"fine": nn.Linear(64, 64), "odd": odd}))
    assert model.fp8_report.skipped == {"odd": reason} and model.fp8_report.converted == ["fine"]
    with pytest.raises(ValueError, match=r"nothing to convert|no linear of ModuleDict"):
        convert_to_fp8(nn.ModuleDict({"odd": odd}))


def test_a_forward_replaced_on_the_instance_would_go_past_fp8():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[0].forward = lambda x: x
    assert "replaced on the instance" in convert_to_fp8(model).fp8_report.skipped["0"]


def test_parametrized_linears_are_subclasses_and_left():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)), nn.Linear(64, 64))
    assert "convert first, then parametrise" in convert_to_fp8(model).fp8_report.skipped["0"]
    nn.utils.parametrizations.weight_norm(model[1])
    model[1](torch.randn(5, 64)).sum().backward()
    assert model[1].fp8_site.has_run, "parametrised after it was converted"


def test_a_shared_linear_is_converted_once():
    shared = nn.Linear(64, 64)
    model = convert_to_fp8(nn.Sequential(shared, nn.ReLU(), shared))
    assert model.fp8_report.converted == ["0"] and model[0] is model[2]


def test_converted_before_is_left_as_it_is():
    model = convert_to_fp8(make(), "mxfp8")
    group = model.blocks[0][0].fp8_group
    for recipe, skip in ((None, DEFAULT_SKIP), ("mxfp8", DEFAULT_SKIP), ("delayed", ["blocks"])):
        convert_to_fp8(model, recipe, skip=skip)
        assert model.blocks[0][0].fp8_group is group
    rows = {row.name: row for row in model.fp8_report.rows}
    assert (
        rows["blocks.0.0"].reason == "is an Fp8Linear already: left as it is"
        and rows["blocks.0.0"].runs == "mxfp8"
    )
    assert rows["lm_head"].runs == "delayed, emulated"


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"recipe": "delayed"}, "with recipe='mxfp8', and recipe='delayed' is asked for"),
        (
            {"config": Fp8Config("mxfp8", quantize_gradients=False)},
            "and not quantized=('grad_output',) is asked",
        ),
        ({"config": Fp8Config("mxfp8", overrides={"*.0": "bf16"})}, "and overrides={'*.0': 'bf16'} is asked"),
    ],
)
def test_converted_before_and_asked_for_otherwise_is_an_error(other, said):
    model = convert_to_fp8(make(), "mxfp8")
    with pytest.raises(ValueError, match=r"blocks\.0\.0 runs in FP8 already") as refused:
        convert_to_fp8(model, **other)
    assert said in str(refused.value) and "convert_from_fp8(model) first" in str(refused.value)
    assert not isinstance(model.lm_head, Fp8Linear), "nothing has changed"
    assert convert_to_fp8(convert_from_fp8(model), **other).fp8_report.converted


def test_the_way_back():
    model, twin = make(), make()
    convert_to_fp8(model)
    model(TOKENS)
    assert convert_from_fp8(model) is model
    assert not any(isinstance(m, Fp8Linear) for m in model.modules()) and not hasattr(model, "fp8_report")
    assert_same_bytes(model(TOKENS), twin(TOKENS))
    assert vars(model.blocks[0][0]).keys() == vars(twin.blocks[0][0]).keys()
    with pytest.raises(ValueError, match="Net has no FP8 linear to convert back"):
        convert_from_fp8(model)
    convert_to_fp8(model, "delayed")
    model(TOKENS)


@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
def test_conv1d_is_a_linear_with_its_weight_transposed(recipe):
    """GPT-2's layer: the bits of the nn.Linear with the same numbers, under Conv1D's parameter, shape and key."""
    Conv1D = pytest.importorskip("transformers.pytorch_utils").Conv1D
    torch.manual_seed(0)
    theirs, linear = nn.Sequential(Conv1D(80, 48)), nn.Sequential(nn.Linear(48, 80))
    with torch.no_grad():
        linear[0].weight.copy_(theirs[0].weight.t())
        linear[0].bias.copy_(theirs[0].bias.normal_())
    before = dict(theirs.state_dict())
    weight = theirs[0].weight
    for model in (theirs, linear):
        convert_to_fp8(model, recipe)
    assert theirs.fp8_report.rows[0].shape == (80, 48) and theirs.fp8_report.flops_in_fp8 == 1
    assert theirs[0].weight is weight and theirs.state_dict().keys() == before.keys()
    assert isinstance(theirs[0], Conv1D) and not isinstance(theirs[0], nn.Linear)  # adapters ask
    for _ in range(2):
        x, other = (torch.randn(3, 7, 48).requires_grad_() for _ in range(2))
        other.data.copy_(x.data)
        for microbatch in range(2):
            mine, its = theirs(x), linear(other)
            assert_same_bytes(mine, its, f"output {microbatch}")
            mine.square().mean().backward()
            its.square().mean().backward()
        assert_same_bytes(x.grad, other.grad, "input's gradient")
        assert_same_bytes(weight.grad, linear[0].weight.grad.t().contiguous(), "weight's gradient")
        counts = fp8_step(theirs)
        assert counts == fp8_step(linear) and counts.casts == 6  # the weight in each forward
    twin = pickle.loads(pickle.dumps(theirs))
    assert_same_bytes(copy.deepcopy(theirs)(x), theirs(x))
    if recipe != "delayed":  # a pickle has no histories
        assert_same_bytes(twin(x), theirs(x))
    convert_from_fp8(theirs)
    assert type(theirs[0]) is Conv1D
    assert_all_same_bytes(before, theirs.state_dict())


def test_a_weight_that_is_no_ordinary_tensor_is_left():
    """Quantized by torchao its dtype is still float32, and FP8 would fail in the first forward."""
    torchao = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig(), filter_fn=lambda module, name: name == "0")
    assert (
        convert_to_fp8(model).fp8_report.skipped["0"]
        == "its weight is a Int8Tensor, which is no ordinary tensor"
    )
    model(torch.randn(16, 64))


def test_conv1d_elsewhere():
    """High precision is Conv1D's own; inference has codes of the transposed weight; calibration knows its shape."""
    Conv1D = pytest.importorskip("transformers.pytorch_utils").Conv1D
    torch.manual_seed(0)
    model = nn.Sequential(Conv1D(80, 48))
    x = torch.randn(5, 48)
    plain = model(x)
    convert_to_fp8(model)
    with fp8_autocast(enabled=False):
        assert_same_bytes(model(x), plain)
    fp8 = model(x)
    assert calibrate(model, [x]).ranges["0.weight"].shape == (80, 48)
    assert_same_bytes(prepare_for_inference(model)(x), fp8.detach())
    assert model.fp8_inference.sites[0].bytes_after < model.fp8_inference.sites[0].bytes_before / 2
    with pytest.raises(ValueError, match="no weight of this model can be gathered"):
        enable_fp8_all_gather(convert_to_fp8(nn.Sequential(Conv1D(80, 48))))


def test_bad_arguments():
    with pytest.raises(ValueError, match="fp8 recipe 'fp4' is unknown"):
        convert_to_fp8(make(), "fp4")
    with pytest.raises(ValueError, match="both given"):
        convert_to_fp8(make(), "mxfp8", config=Fp8Config())
    with pytest.raises(ValueError, match="skip is given twice"):
        convert_to_fp8(make(), config=Fp8Config(skip="blocks.*"), skip="embed")
    with pytest.raises(ValueError, match=r"skip: 3 is neither a glob"):
        convert_to_fp8(make(), skip=[3])
    with pytest.raises(ValueError, match=r"^backend 'native' cannot run on cpu: .*use backend='auto'"):
        convert_to_fp8(make(), config=Fp8Config(backend="native"))
    with pytest.raises(ValueError, match="'cuda11' is not in this release"):
        convert_to_fp8(make(), config=Fp8Config(backend="cuda11"))


def test_fallback_warn_says_so_once_and_keeps_the_model(capsys, monkeypatch):
    monkeypatch.setattr(terminal, "_printed", set())
    model = make()
    with pytest.raises(ValueError, match="no linear of Net would run in FP8"):
        convert_to_fp8(model, config=Fp8Config(backend="native", fallback="warn"))
    words = "megatron_fp8: blocks.0.0 runs in high precision: fallback: backend 'native' cannot run"
    assert capsys.readouterr().err.count(words) == 1
