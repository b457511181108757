"""TransformerConfig: which values are refused, and which settings have no effect."""

import warnings

import pytest
import torch

from tests.support.megatron_settings import FACTORY, make

ON = {"fp8": "hybrid"}
PARAM = {**ON, "fp8_param": True, "bf16": True, "params_dtype": torch.bfloat16}
TWO_STAGES = {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.bfloat16}

REFUSED = [
    ({**ON, "fp8_format": "mxfp8", "fp8_recipe": "delayed"}, ["conflicts", "'mxfp8'", "'delayed'"]),
    ({**ON, "fp8_format": "e4m3"}, ["conflicts", "'e4m3'", "'hybrid'"]),
    ({"fp8": "hybird"}, ["'hybird'", "'hybrid'"]),
    ({"fp8": "e5m2"}, ["'e5m2'", "'e4m3', 'hybrid'"]),
    ({**ON, "fp8_format": "mxfp9"}, ["'mxfp9'", "Did you mean 'mxfp8'"]),
    ({**ON, "fp8_recipe": "blockwize"}, ["'blockwize'", "Did you mean 'blockwise'"]),
    ({**ON, "fp8_backend": "cuda"}, ["fp8_backend='cuda'", "'emulated'"]),
    ({**ON, "fp8_fallback": "silent"}, ["fp8_fallback='silent'"]),
    ({**ON, "fp8_interval": 0}, ["fp8_interval=0", "at least 1"]),
    ({**ON, "fp8_recipe": "mxfp8", "fp8_margin": 2}, ["fp8_margin=2 does not exist", "mxfp8"]),
    ({**ON, "fp8_amax_compute_algo": "mean"}, ["fp8_amax_compute_algo='mean'", "'max'"]),
    ({**ON, "fp8_wgrad": "no"}, ["fp8_wgrad='no'"]),
    ({**ON, "fp8_amax_epsilon": float("nan")}, ["fp8_amax_epsilon=nan"]),
    ({**ON, "fp8_overrides": {"*.linear_fc2": "bf17"}}, ["'*.linear_fc2'", "'bf17'", "'bf16'"]),
    ({**ON, "fp8_overrides": ["bf16"]}, ["fp8_overrides"]),
    ({**ON, "fp8_format": "mxfp8", "fp8_pow2_scales": False}, ["fp8_pow2_scales=False"]),
    ({**ON, "fp8_format": "delayed", "fp8_pow2_scales": True}, ["fp8_pow2_scales=True"]),
    ({**ON, "fp8_format": "custom"}, ["fp8_quantizer_factory is None"]),
    ({**ON, "fp8_format": "custom", "fp8_quantizer_factory": "factory"}, ["'factory'", "names no module"]),
    ({**ON, "fp8_format": "mxfp8", **FACTORY}, ["'os.path.join'", "'mxfp8'"]),
    ({"fp8_param": True}, ["fp8_param=True", "fp8 is None"]),
    ({**ON, "fp8_param": True}, ["fp8_param=True", "bf16=False", "bf16=True", "fp8_param=False"]),
    ({**ON, "fp16": True, **TWO_STAGES}, ["pipeline_dtype=torch.bfloat16", "fp16=True", "activations' dtype"]),
    ({**ON, "fp8_high_precision_warmup": -0.1}, ["fp8_high_precision_warmup=-0.1", "at least 0 and at most 1"]),
    ({**ON, "fp8_high_precision_healing": float("nan")}, ["fp8_high_precision_healing=nan"]),
    ({**ON, "fp8_high_precision_warmup": 0.5, "fp8_high_precision_healing": 0.5}, ["warmup=0.5", "healing=0.5", "sum"]),
    ({**PARAM, "fp8_high_precision_warmup": 0.1}, ["warmup=0.1", "BF16 weights", "fp8_param=False"]),
    ({**PARAM, "fp8_guard": True}, ["fp8_guard=True", "fp8_param=False"]),
    ({**ON, "fp8_guard": "ladder", "tp_only_amax_red": True}, ["tp_only_amax_red=False"]),
    ({**ON, "fp8_guard": "blockwise"}, ["fp8_guard='blockwise'", "'ladder'"]),
    ({**PARAM, "fp8_param": False, "fp8_output_layer": True, "defer_embedding_wgrad_compute": True, **TWO_STAGES},
     ["fp8_output_layer=True", "defer_embedding_wgrad_compute=True"]),
    ({"fp8_format": "mxfp8"}, ["fp8_format='mxfp8' without fp8", "'hybrid'"]),
    ({**ON, "gated_linear_unit": True, "activation_func": torch.nn.functional.silu,
      "activation_func_fp8_input_store": True}, ["only with bias_activation_fusion=True"]),
    ({**ON, "first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 3},
     ["num_layers_at_end_in_bf16=3", "none of num_layers=4 in FP8"]),
    ({**ON, "layernorm_epsilon": float("nan")}, ["layernorm_epsilon=nan", "finite number"]),
    ({**ON, "num_query_groups": 3}, ["num_attention_heads=4, num_query_groups=3", "multiple"]),
    ({**ON, "num_moe_experts": 6, "expert_model_parallel_size": 4},
     ["num_moe_experts=6, expert_model_parallel_size=4", "equal number of experts", "Change one of them"]),
]  # fmt: skip

NO_EFFECT = [
    ({"fp8": None, "fp8_format": "mxfp8"}, "fp8_recipe='mxfp8'"),
    ({**ON, "fp8_format": "mxfp8", "fp8_interval": 4}, "fp8_interval=4"),
    ({**ON, "fp8_recipe": "tensorwise", "tp_only_amax_red": True}, "tp_only_amax_red=True has no"),
    ({**ON, "fp8_format": "custom", **FACTORY, "fp8_stochastic_rounding": True}, "fp8_stochastic_rounding"),
    ({**ON, "fp8_format": "custom", **FACTORY, "fp8_pow2_scales": True}, "fp8_pow2_scales=True"),
    ({**ON, "num_layers_at_end_in_bf16": 2}, "num_layers_at_end_in_bf16=2"),
    ({"fp8_guard": True}, "fp8_guard=True has no effect because fp8 is None"),
    ({**ON, "fp8_guard_patience": 7}, "fp8_guard_patience=7 has no effect with fp8_guard=False"),
]


@pytest.mark.parametrize(("settings", "words"), REFUSED)
def test_bad_values_are_named(settings, words):
    with pytest.raises(ValueError) as error:
        make(**settings)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(("start", "end"), [(-1, 1), (1, -1), (5, 0), (3, 2), (True, 1)])
def test_bf16_layers_out_of_range(start, end):
    counts = {"num_layers_at_start_in_bf16": start, "num_layers_at_end_in_bf16": end}
    with pytest.raises(ValueError, match="num_layers"):
        make(**ON, fp8_format="delayed", first_last_layers_bf16=True, **counts)


@pytest.mark.parametrize(("settings", "name"), NO_EFFECT)
def test_a_setting_without_effect_is_said(settings, name):
    with pytest.warns(UserWarning, match=name):
        make(**settings)


def test_a_plain_config_warns_of_nothing_of_ours():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        make(fp8="hybrid", fp8_format="mxfp8")
        make()
    assert not [w for w in seen if "no effect" in str(w.message) or "BF16" in str(w.message)]


def test_two_interleaved_stages_need_overlapped_messages() -> None:
    interleaved = {**TWO_STAGES, "virtual_pipeline_model_parallel_size": 2}
    right = {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    fp8 = {"fp8": "hybrid", "bf16": True}
    with pytest.raises(ValueError, match="overlap_p2p_comm=True and batch_p2p_comm=False"):
        make(**interleaved, **fp8)
    make(**interleaved, **fp8, **right)
    with pytest.warns(UserWarning, match="overlap_p2p_comm=True and batch_p2p_comm=False"):
        make(**interleaved)
    make(**interleaved, **right)
