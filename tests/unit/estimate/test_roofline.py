"""The roofline: its operations by formula, and that it moves as it must."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_fp8.estimate.config_reader import read
from megatron_fp8.estimate.device import device
from megatron_fp8.estimate.estimate import Estimate, estimate
from megatron_fp8.estimate.fp8_speedup import group_sites, site_speedups
from megatron_fp8.estimate.roofline import linears, model_flops

LLAMA = "--config=examples/configs/llama3_8b.yaml"


def of(*options: str, on: str = "h100") -> Estimate:
    return estimate(read([LLAMA, *options], gpus=64), device(on))


def seconds(*options: str, on: str = "h100") -> float:
    return of(*options, on=on).time.seconds


def test_operations_are_six_a_parameter_and_token_and_attention() -> None:
    settings = read([LLAMA], gpus=64)
    tokens = 512 * 8192
    linears = (
        6 * tokens * (8_030_261_248 - 128256 * 4096 + 2_097_152 // 2)
    )  # no table; padding of the output layer
    attention = 6 * tokens * 32 * 8192 * 4096  # causal: half of 12 s h a layer
    assert model_flops(settings) == pytest.approx(linears + attention, rel=1e-4)
    for layout in (["--model.tensor_model_parallel_size=8"], ["--model.pipeline_model_parallel_size=2"]):
        assert model_flops(read([LLAMA, *layout], gpus=64)) == pytest.approx(linears + attention, rel=1e-3)


def test_what_costs_time_costs_time() -> None:
    fp8 = seconds()
    assert fp8 < seconds("--model.fp8=null")
    assert fp8 < seconds("--model.fp8_wgrad=false")
    full = [
        "--model.recompute_granularity=full",
        "--model.recompute_method=uniform",
        "--model.recompute_num_layers=1",
    ]
    assert fp8 < seconds(*full)
    assert fp8 < seconds("--model.pipeline_model_parallel_size=2"), "stages wait for each other"
    assert seconds(on="b200") < fp8


def test_small_linears_gain_nothing() -> None:
    """The casts of a linear cost as many bytes whatever its other side is; its GEMMs shrink with that."""
    wide, narrow = read([LLAMA], gpus=64), read([LLAMA, "--model.ffn_hidden_size=64"], gpus=64)
    ratios = []
    for settings in (wide, narrow):
        sites = group_sites(site_speedups(settings, device("h100")))
        fc1 = next(
            alike.site for alike in sites if alike.name == "mlp.linear_fc1" and alike.site.precision == "fp8"
        )
        ratios.append(fc1.seconds / fc1.seconds_bf16)
    assert ratios[0] < 0.75 < ratios[1]


def test_a_gemm_in_nvfp4_takes_its_own_time_and_each_site_its_own_plan() -> None:
    """Of a device whose memory is no limit, a GEMM takes its operations over its format's peak."""
    fast = dataclasses.replace(device("b200"), bandwidth=1e30, casts=1e30)
    fc1, fc2 = (f"decoder.layers.7.mlp.linear_{name}" for name in ("fc1", "fc2"))
    overrides = f"{{{fc1}: nvfp4, '{fc1}:dgrad': bf16, '{fc2}:wgrad': nvfp4}}"
    settings = read([LLAMA, f"--model.fp8_overrides={overrides}"], gpus=64)
    sites = {site.linear.site: site for site in site_speedups(settings, fast)}
    ratios = {name: [one.seconds / one.bf16 for one in sites[name].gemms] for name in (fc1, fc2)}
    fp4, fp8 = 2250 / 9000, 2250 / 4500
    assert ratios == {fc1: pytest.approx([fp4, 1, fp4]), fc2: pytest.approx([fp8, fp8, fp4])}
    assert [one.precision for one in sites[fc1].gemms] == ["fp4", "bf16", "fp4"]
    others = {site.precision for name, site in sites.items() if ".7.mlp." not in name}
    assert others == {"fp8", "bf16"}


def test_codes_of_nvfp4_are_half_a_byte() -> None:
    """Of a device whose GEMMs and casts take no time, the bytes are left: fprop reads two operands and writes BF16."""
    slow = dataclasses.replace(device("b200"), bf16=1e30, fp8=1e30, fp4=1e30, casts=1e30)
    settings = read([LLAMA, "--model.fp8=null", "--model.fp4=e2m1"], gpus=64)
    site = next(
        site for site in site_speedups(settings, slow) if site.linear.site.endswith("7.mlp.linear_fc1")
    )
    linear, fprop = site.linear, site.gemms[0]
    values = linear.tokens * linear.k + linear.n * linear.k
    assert fprop.seconds * slow.bandwidth == pytest.approx(values / 2 + 2 * linear.tokens * linear.n)


def test_operations_of_latent_attention_and_of_a_second_token() -> None:
    """Six a parameter and token that it meets, the table of tokens left out, and both products of attention."""
    settings = read(["--config=deepseek_v3"], gpus=2048)
    tokens = 15360 * 4096
    expert, norms, router, table = 3 * 7168 * 2048, 2 * 7168 + 1536 + 512, 256 * 7168, 129280 * 7168
    model = 37_552_282_624 - table - 61 * norms - 7168 - 58 * router
    # Eight of its experts and the shared one, and the output layer once more.
    second = 11_610_067_968 - 248 * expert - router - norms - 3 * 7168 + table
    attention = 62 * 3 * 4096 * 128 * (192 + 128)
    assert model_flops(settings) == pytest.approx(tokens * (6 * (model + second) + attention), rel=1e-3)


def test_experts_in_one_call_are_called_once_and_take_as_long() -> None:
    options = ["--config=qwen3_30b_a3b", "--model.moe_grouped_gemm={}"]
    sites = []
    for grouped_gemm in ("true", "false"):
        settings = read([option.format(grouped_gemm) for option in options], gpus=64)
        sites.append(
            next(linear for linear in linears(settings, settings.model.layers[0]) if linear.count > 1)
        )
    assert (sites[0].calls, sites[1].calls) == (1, 16)
    assert dataclasses.replace(sites[0], calls=16) == sites[1]


def test_parts_that_run_again_take_longer() -> None:
    again = "--model.recompute_modules=[{}]"
    times = {
        modules: estimate(
            read(["--config=deepseek_v3", again.format(modules)], gpus=2048), device("h100")
        ).time
        for modules in ("core_attn", "mla_up_proj", "moe", "mla_up_proj,moe")
    }
    assert times["mla_up_proj"].stage.gemms < times["moe"].stage.gemms < times["mla_up_proj,moe"].stage.gemms
    assert times["mla_up_proj"].stage.exchange < times["moe"].stage.exchange, "tokens go to experts once more"
    assert times["core_attn"].stage.attention > times["moe"].stage.attention
