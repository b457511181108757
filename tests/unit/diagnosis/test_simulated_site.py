"""A site's stand-in: the same bits where all is quantized, high precision where nothing is, and rounding."""

import pytest
import torch

from megatron_fp8 import convert_to_fp8
from megatron_fp8.diagnosis.variants import SimulatedSite, round_significand
from megatron_fp8.recipe import GEMM_OPERANDS, DelayedScaling

EVERY = frozenset((gemm, role) for gemm, roles in GEMM_OPERANDS.items() for role in roles)


def _linear(recipe="tensorwise"):
    torch.manual_seed(0)
    model = convert_to_fp8(torch.nn.Sequential(torch.nn.Linear(48, 32)).to(torch.bfloat16), recipe)
    return model[0], torch.randn(24, 48).to(torch.bfloat16).requires_grad_()


def _run(linear, x):
    y = linear(x)
    return [y, *torch.autograd.grad(y.float().square().sum(), [x, linear.weight])]


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8", DelayedScaling()])
def test_with_every_operand_it_computes_the_site_s_bits(recipe):
    linear, x = _linear(recipe)
    right = _run(linear, x)
    site = linear.fp8_site
    with site.replaced_by(SimulatedSite(site, EVERY, {})):
        assert all(map(torch.equal, _run(linear, x), right))
    assert site.active_site is site


def test_with_none_it_is_the_unconverted_layer():
    linear, x = _linear()
    y = torch.nn.functional.linear(x, linear.weight, linear.bias)
    plain = [y, *torch.autograd.grad(y.float().square().sum(), [x, linear.weight])]
    with linear.fp8_site.replaced_by(SimulatedSite(linear.fp8_site, frozenset(), {})):
        assert all(map(torch.equal, _run(linear, x), plain))


@pytest.mark.parametrize("gemm", GEMM_OPERANDS)
def test_one_gemm_in_fp8_changes_its_own_result_alone(gemm):
    linear, x = _linear()
    site, dy = linear.fp8_site, torch.randn(24, 32).to(torch.bfloat16)

    def results(quantized):
        with site.replaced_by(SimulatedSite(site, quantized, {})):
            y = linear(x)
            return dict(zip(GEMM_OPERANDS, [y, *torch.autograd.grad(y, [x, linear.weight], dy)], strict=True))

    plain, fp8 = results(frozenset()), results(EVERY)
    mixed = results(frozenset((gemm, role) for role in GEMM_OPERANDS[gemm]))
    assert torch.equal(mixed[gemm], fp8[gemm]) and not torch.equal(fp8[gemm], plain[gemm])
    for other in set(GEMM_OPERANDS) - {gemm}:
        assert torch.allclose(mixed[other].float(), plain[other].float(), rtol=2**-7, atol=2**-7)


def test_rounding_keeps_so_many_bits_and_no_fewer():
    x = torch.randn(4096)
    for bits in (3, 4, 8):
        error = ((round_significand(x, bits) - x) / x).abs()
        assert 2.0 ** -(bits + 1) < error.max() <= 2.0**-bits * (1 + 2**-20)
    bf16 = x.to(torch.bfloat16)
    assert (round_significand(bf16, 8) != bf16.float()).float().mean() > 0.4, (
        "values of 8 bits are rounded too"
    )
    odd = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-30, -1e30])
    rounded = round_significand(odd, 4)
    assert torch.equal(rounded[:4], odd[:4]) and rounded[4].isnan()
    assert torch.allclose(rounded[5:], odd[5:], rtol=2**-4)


def test_rounded_operands_are_multiplied_in_float32():
    linear, x = _linear()
    site, bits = linear.fp8_site, dict.fromkeys(EVERY, 4)
    with site.replaced_by(SimulatedSite(site, frozenset(), bits)):
        y = linear(x)
    weight = round_significand(linear.weight.detach(), 4)
    expected = round_significand(x.detach(), 4) @ weight.t() + linear.bias.float()
    assert torch.allclose(y.float(), expected, rtol=2**-7, atol=2**-7)
    assert site.state.counts.fp8_gemms == 0


def test_what_is_cast_in_an_experiment_leaves_no_trace():
    linear, x = _linear(DelayedScaling())
    _run(linear, x)
    state = linear.fp8_site.state
    rows, counts = [arena.rows.clone() for arena in state.arenas], repr(state.counts)

    class Told:
        def wants(self, iteration):
            return True

        def cast(self, *args, **kwargs):
            raise AssertionError("an experiment is nobody's business")

        product = cast

    told = Told()
    state.watch(told)
    with state.unrecorded():
        _run(linear, 100 * x)
    assert state.observer is told and repr(state.counts) == counts
    assert all(map(torch.equal, rows, [arena.rows for arena in state.arenas]))
