"""Modules of experts in FP8: the bits of linears called one after the other, names, copies, contexts, inference."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from benchmarks.support.compare import assert_all_same_bytes, assert_same_bytes
from megatron_fp8.nn import (
    Fp8Config,
    convert_from_fp8,
    convert_to_fp8,
    fp8_autocast,
    fp8_state_dict,
    fp8_step,
    load_fp8_state_dict,
)
from megatron_fp8.nn.experts import Fp8Experts
from tests.support.experts import EXPERTS, HIDDEN, WIDTH, Linears, hidden, layer, routing
from tests.support.host_syncs import waits

STACKS = {"gate_up": "gate_up_proj", "down": "down_proj"}


def converted(kind: str = "mixtral", recipe: Any = "tensorwise", **fields: Any) -> Any:
    """Only the experts, so that the input's gradient is theirs."""
    return convert_to_fp8(layer(kind).experts, config=Fp8Config(recipe=recipe, **fields))


def run(experts: nn.Module, step: int = 0, without: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, the input's gradient) of one iteration."""
    x = hidden(seed=step)
    y = experts(x, *routing(without=without, seed=10 + step))
    (y.float().square().sum() / 7).backward()
    fp8_step(experts)
    assert x.grad is not None
    return y.detach(), x.grad


@pytest.mark.parametrize(
    ("kind", "recipe"),
    [("mixtral", "rowwise"), ("mixtral", "mxfp8"), ("gpt_oss", "delayed"), ("gpt_oss", "blockwise")],
)
def test_bits_of_linears_called_one_by_one(kind: str, recipe: str) -> None:
    """Three iterations, an expert without tokens in the second."""
    linears = convert_to_fp8(Linears(layer(kind).experts), recipe, skip="experts")
    experts = converted(kind, recipe)
    for step, without in enumerate((None, 1, None)):
        assert_all_same_bytes(run(experts, step, without), run(linears, step, without), f"step {step}")
        for of, stack in STACKS.items():
            assert_same_bytes(getattr(experts, stack).grad, linears.gradient(of), f"{stack}, step {step}")
        if kind == "gpt_oss":
            assert experts.down_proj_bias.grad.abs().sum() > 0
        experts.zero_grad()
        linears.zero_grad()


def test_llama4_gives_every_expert_every_token() -> None:
    x = hidden(EXPERTS * 9)
    plain = layer("llama4").experts
    experts, linears = converted("llama4", "mxfp8"), convert_to_fp8(Linears(plain), "mxfp8", skip="experts")
    parts = []
    for e, part in enumerate(x.split(9)):
        gate, up = linears.gate_up[e](part).chunk(2, dim=-1)
        parts.append(linears.down[e](up * plain.act_fn(gate)))
    assert_same_bytes(experts(x), torch.cat(parts))
    assert (experts(x) - plain(x)).float().norm() < 0.1 * plain(x).float().norm()


def test_an_expert_without_tokens_keeps_its_scales() -> None:
    experts = converted(recipe="delayed")
    run(experts, 0)
    before = fp8_state_dict(experts)
    run(experts, 1, without=2)
    after = fp8_state_dict(experts)
    kept = {name for name, value in before.items() if torch.equal(value, after[name])}
    for role in ("input", "grad_output"):
        assert {f"2.{of}.{role}.scale" for of in STACKS} <= kept
        assert not {f"1.{of}.{role}.amax_history" for of in STACKS} & kept
    assert len([name for name in after if name.endswith("weight.scale")]) == 2 * EXPERTS, (
        "one an expert and stack"
    )


@pytest.mark.filterwarnings("ignore:.* was replaced since")
@pytest.mark.parametrize("loaded", [True, False], ids=["load_state_dict", "in place"])
def test_replaced_stacks_are_scaled_by_themselves_in_evaluation(loaded: bool) -> None:
    """Delayed scaling knows the weights of before: 8 times as large they would saturate."""
    experts, fresh = converted(recipe="delayed"), converted(recipe="delayed")
    run(experts)
    for e in range(EXPERTS):  # what a stack is given is not what it was trained on, either
        experts.fp8_linears()[2 * e + 1].fp8_site.casts["input"].rowwise.slot.warm = False
    state = {name: 8 * value for name, value in experts.state_dict().items()}
    if loaded:
        experts.load_state_dict(state)
    else:
        with torch.no_grad():
            for stack in STACKS.values():
                getattr(experts, stack).copy_(state[stack])
    fresh.load_state_dict(state)
    y, expected = (module.eval()(hidden(), *routing()).detach() for module in (experts, fresh))
    assert (y - expected).float().norm() < (0 if loaded else 0.1) * expected.float().norm() + 1e-6


# ----------------------------------------------------------------------------------------------------------------- names


def test_report_names_each_expert_and_what_stays() -> None:
    model = convert_to_fp8(layer(), "mxfp8")
    sites = [f"experts.{e}.{of}" for e in range(EXPERTS) for of in STACKS]
    assert model.fp8_report.converted == ["proj", *sites]
    assert model.fp8_report.weights_in_fp8 == pytest.approx(
        1, abs=0.01
    ) and "100 % of the linears' FLOPs" in str(model.fp8_report)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in layer().named_parameters()]
    again = convert_to_fp8(model)
    assert again.fp8_report.converted == ["proj", *sites] and "already" in str(again.fp8_report)
    assert again.fp8_report.weights_in_fp8 == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize(
    "key, sites",
    [
        ("experts", [f"{e}.{of}" for e in range(EXPERTS) for of in STACKS]),
        ("down_proj", [f"{e}.down" for e in range(EXPERTS)]),
        ("experts.gate_up_proj", [f"{e}.gate_up" for e in range(EXPERTS)]),
        ("experts.1.*", ["1.gate_up", "1.down"]),
        ("*.3.down", ["3.down"]),
    ],
)
def test_overrides_by_name(key: str, sites: list[str]) -> None:
    model = convert_to_fp8(layer(), config=Fp8Config(overrides={key: "bf16"}))
    report = model.fp8_report
    assert set(report.skipped) == {f"experts.{site}" for site in sites} and key in str(report)
    y, dx = _through(model)
    assert torch.isfinite(y).all() and torch.isfinite(dx).all()
    counts = fp8_step(model)
    # with none in FP8 the module stays what it was
    in_high = 0 if len(sites) == 2 * EXPERTS else 3 * len(sites)
    assert (counts.fp8_gemms, counts.hp_gemms) == (3 * (9 - len(sites)), in_high)


def test_an_override_of_one_gemm_and_a_wrong_name() -> None:
    model = convert_to_fp8(layer(), config=Fp8Config(overrides={"experts:wgrad": "bf16"}))
    _through(model)
    counts = fp8_step(model)
    assert (counts.fp8_gemms, counts.hp_gemms) == (3 + 2 * 8, 8)
    with pytest.raises(ValueError, match=r"'experts\.7' matches no GEMM site"):
        convert_to_fp8(layer(), config=Fp8Config(overrides={"experts.7": "bf16"}))


def _through(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    x = hidden()
    y = model(x, *routing())
    y.float().square().sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


def narrow(experts: Any) -> None:
    experts.down_proj = nn.Parameter(torch.zeros(EXPERTS, HIDDEN, 8))


def replaced(experts: Any) -> None:
    experts.forward = lambda *args: None


def distributed(experts: Any) -> None:
    experts._is_expert_parallel = True


def codes(experts: Any) -> None:
    experts.down_proj = nn.Parameter(experts.down_proj.detach().to(torch.float8_e4m3fn), requires_grad=False)


def parametrised(experts: Any) -> None:
    torch.nn.utils.parametrize.register_parametrization(experts, "down_proj", nn.Identity())


class Other(MixtralExperts):
    def forward(self, *args: Any) -> Any:
        return args[0]


def subclass(experts: Any) -> None:
    experts.__class__ = Other


@pytest.mark.parametrize(
    "change, why",
    [
        (narrow, "8 features: below 16"),
        (replaced, "its forward was replaced on the instance"),
        (distributed, "distributed over ranks by transformers"),
        (codes, "float8_e4m3fn weights cannot be quantized"),
        (parametrised, "is parametrised"),
        (
            subclass,
            "of experts whose forward is not known here: gate_up_proj [4, 160, 48], down_proj [4, 48, 80]",
        ),
    ],
)
def test_what_stays_says_why(change: Any, why: str) -> None:
    model = layer()
    change(model.experts)
    convert_to_fp8(model)
    assert why in model.fp8_report.skipped["experts"] and not isinstance(model.experts, Fp8Experts)


def test_skip() -> None:
    assert convert_to_fp8(layer(), skip="experts").fp8_report.skipped == {"experts": "skip 'experts'"}
    for function in (lambda name, m: "experts" in name, lambda name, m: m.out_features == 2 * WIDTH):
        assert convert_to_fp8(layer(), skip=function).fp8_report.converted == ["proj"]
    assert len(convert_to_fp8(layer(), skip=lambda name, m: m.in_features == 7).fp8_report.converted) == 9


# -------------------------------------------------------------------------------------------------- copies and contexts


def test_back_copies_and_files() -> None:
    plain = layer()
    model = convert_to_fp8(layer(), "delayed")
    state = model.state_dict()
    assert list(state) == list(plain.state_dict()) and isinstance(model.experts, MixtralExperts)
    _through(model)
    fp8_step(model)
    copied = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    load_fp8_state_dict(loaded, fp8_state_dict(model))
    for other in (copied, loaded):
        other.zero_grad()
        other.experts.down_proj.data.mul_(1)  # its own
        linear = other.experts.fp8_linears()[0]
        assert linear.around is other.experts and linear.fp8_group is not model.experts.fp8_group
    model.zero_grad()
    wanted = [*_through(model), model.experts.gate_up_proj.grad]
    for other in (copied, loaded):
        assert_all_same_bytes([*_through(other), other.experts.gate_up_proj.grad], wanted)
    convert_from_fp8(model)
    assert type(model.experts) is MixtralExperts and "fp8" not in " ".join(vars(model.experts))
    assert_same_bytes(model(hidden(), *routing()), plain(hidden(), *routing()))
    assert not list(model.experts.children())[1:], "the activation alone"


def test_switched_off_it_is_linears_in_the_models_dtype() -> None:
    model, plain = convert_to_fp8(layer(), "delayed"), layer()
    with fp8_autocast(enabled=False):
        y, _ = _through(model)
    assert_same_bytes(y, plain(hidden(), *routing()).detach())
    counts = fp8_step(model)
    assert (counts.fp8_gemms, counts.hp_gemms) == (0, 3 * 9)
    with fp8_autocast(recipe="mxfp8"):
        y, _ = _through(model)
    assert_same_bytes(y, convert_to_fp8(layer(), "mxfp8")(hidden(), *routing()).detach())


def test_torch_autocast_and_weights_in_float32() -> None:
    """As linears under autocast: BF16 goes in, and comes out of each."""
    experts = convert_to_fp8(layer(dtype=torch.float32).experts, "rowwise")
    linears = convert_to_fp8(Linears(layer(dtype=torch.float32).experts), "rowwise", skip="experts")
    with torch.autocast("cpu", torch.bfloat16):
        mine, theirs = (m(hidden(dtype=torch.float32), *routing()) for m in (experts, linears))
    mine.sum().backward()
    theirs.sum().backward()
    assert_same_bytes(mine, theirs)
    assert_same_bytes(experts.down_proj.grad, linears.gradient("down"))


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed(reentrant: bool) -> None:
    experts, again = converted(recipe="delayed"), converted(recipe="delayed")
    for step in range(2):
        wanted = run(experts, step)
        x = hidden(seed=step)
        chosen, counts = routing(seed=10 + step)
        y = checkpoint(again, x, chosen, counts, use_reentrant=reentrant)
        (y.float().square().sum() / 7).backward()
        fp8_step(again)
        assert_all_same_bytes((y.detach(), x.grad), wanted)
    assert_all_same_bytes(fp8_state_dict(again), fp8_state_dict(experts))


def test_hooks_of_one_expert_are_called() -> None:
    experts, heard = converted(recipe="blockwise"), []
    wanted = run(experts)
    experts.zero_grad()
    linear = experts.get_submodule("2.down")
    handle = linear.register_forward_hook(lambda module, args, y: heard.append(y.shape))
    assert_all_same_bytes(run(experts), wanted)
    assert heard == [(int((routing(seed=10)[0] == 2).sum()), HIDDEN)]
    handle.remove()


def test_moved_to_another_device_and_back() -> None:
    experts = converted(recipe="delayed")
    run(experts)
    before = fp8_state_dict(experts)
    experts.to("meta").to_empty(device="cpu")
    for name, value in fp8_state_dict(experts).items():
        if name.endswith("weight.amax"):
            assert value == 0 < before[name], "weights that were left behind are not the training's"
        else:
            assert_same_bytes(value, before[name], name)


def test_an_optimizer_step_without_fp8_step_is_an_error() -> None:
    model = copy.deepcopy(convert_to_fp8(layer(), skip="proj"))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    _through(model)
    optimizer.step()
    with pytest.raises(RuntimeError, match="fp8_step was not called"):
        model(hidden(), *routing())


def test_shapes_without_values() -> None:
    model = convert_to_fp8(layer().to("meta"))
    y = model(
        torch.empty(5, HIDDEN, device="meta", dtype=torch.bfloat16), *(x[:5].to("meta") for x in routing())
    )
    assert y.shape == (5, HIDDEN)


def test_compiled_in_one_graph() -> None:
    """Whatever the numbers of tokens, one expert without any too, with the bits of eager mode."""
    eager, traced = (convert_to_fp8(layer("gpt_oss"), "delayed") for _ in range(2))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(traced, fullgraph=True, backend=counter, dynamic=True)
    for step, tokens in enumerate((37, 37, 50)):
        found = []
        for call, model in ((eager, eager), (compiled, traced)):
            x = hidden(tokens, seed=step)
            y = call(x, *routing(tokens, seed=step, without=2 if step == 1 else None))
            y.float().square().sum().backward()
            counts = torch.tensor(fp8_step(model).fp8_gemms)
            found.append([y.detach(), x.grad, *(parameter.grad for parameter in model.parameters()), counts])
            model.zero_grad()
        assert_all_same_bytes(*found)
    assert counter.frame_count == 1
    torch._dynamo.reset()


def test_compiled_with_a_graph_break_where_hooks_listen() -> None:
    """They hear one expert's rows, which the host has to know."""
    model = convert_to_fp8(layer(), "blockwise")
    heard: list[int] = []
    model.experts.fp8_linears()[0].register_forward_hook(lambda _, args, y: heard.append(len(y)))
    wanted = _through(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(Exception, match=r"one is called apart"):
            torch.compile(model, backend="eager", fullgraph=True)(hidden(), *routing())
        assert_all_same_bytes(_through(torch.compile(model, backend="eager")), wanted)
    assert len(heard) == 2
    torch._dynamo.reset()


def test_a_token_for_an_expert_that_is_not_there() -> None:
    model = convert_to_fp8(layer(), "blockwise")
    chosen, counts = routing()
    for wrong in (EXPERTS, -1):
        chosen[3, 1] = wrong
        with pytest.raises(ValueError, match=rf"experts: a token is sent to expert {wrong}, and there are 4"):
            model(hidden(), chosen, counts)
    with pytest.raises(ValueError, match=r"sum to 73, and the input has 74 rows"):
        torch.compile(model, backend="eager")(hidden(), chosen, counts)
    torch._dynamo.reset()


def test_the_host_waits_once_a_layer() -> None:
    """For the numbers of tokens; in the backward, and for biases, not at all."""
    model = convert_to_fp8(layer("gpt_oss"), "blockwise")
    _through(model)
    fp8_step(model)
    with waits() as seen:
        _through(model)
    of_torch = [read for read in seen.hidden if "scale_range" not in read]
    assert [place for place in seen.places if "scale_range" not in place] == ["expert_modules.py _counts cpu"]
    assert not [read for read in of_torch if "bincount" in read or "repeat_interleave" in read], of_torch
