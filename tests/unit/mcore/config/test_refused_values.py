"""TransformerConfig: which values are refused, and which settings have no effect."""

import warnings

import pytest
import torch

from tests.support.megatron_settings import FACTORY, make

ON = {"fp8": "hybrid"}
FP4 = {"fp4": "e2m1"}
PARAM_FP4 = {**FP4, "fp4_param": True, "bf16": True, "params_dtype": torch.bfloat16}
HEALING = {"fp8_high_precision_healing": 0.1}
PARAM = {**ON, "fp8_param": True, "bf16": True, "params_dtype": torch.bfloat16}
TWO_STAGES = {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.bfloat16}

REFUSED = [
    ({**ON, "fp8_format": "mxfp8", "fp8_recipe": "delayed"}, ["conflicts", "'mxfp8'", "'delayed'"]),
    ({**ON, "fp8_format": "e4m3"}, ["conflicts", "'e4m3'", "'hybrid'"]),
    ({"fp8": "hybird"}, ["'hybird'", "'hybrid'"]),
    ({"fp8": "e5m2"}, ["'e5m2'", "'e4m3', 'hybrid'"]),
    ({**ON, "fp8_format": "mxfp9"}, ["'mxfp9'", "Did you mean 'mxfp8'"]),
    ({**ON, "fp8_recipe": "blockwize"}, ["'blockwize'", "Did you mean 'blockwise'"]),
    ({**ON, "fp8_recipe": "current"}, ["'current'", "'tensorwise'", "or leave it out"]),
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
    ({**FP4, **HEALING, "fp8_high_precision_healing_parts": []}, ["healing_parts=[]", "['*:fprop']"]),
    ({**FP4, **HEALING, "fp8_high_precision_healing_parts": "*:fprop"}, ["healing_parts='*:fprop'", "a list"]),
    ({**FP4, **HEALING, "fp8_high_precision_healing_parts": ["*:input"]}, ["'*:input'", "an operand", "'*:fprop'"]),
    ({**FP4, **HEALING, "fp8_high_precision_healing_parts": ["*:fprob"]}, ["'fprob'", "Did you mean 'fprop'"]),
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
    ({**ON, **FP4}, ["fp8='hybrid' and fp4='e2m1'", "Set one of them to None", "fp8_overrides"]),
    ({"fp4": "e3m0"}, ["fp4='e3m0'", "'e2m1', or null"]),
    ({**FP4, "fp4_recipe": "mxfp8"}, ["fp4_recipe='mxfp8'", "fp8_overrides"]),
    ({"fp4_param": True}, ["fp4_param=True", "fp4 is None", "Set fp4='e2m1'"]),
    ({**FP4, "fp4_param": True}, ["fp4_param=True", "bf16=False", "bf16=True", "fp4_param=False"]),
    ({**PARAM_FP4, **HEALING}, ["healing=0.1", "BF16 weights", "fp4_param=False"]),
    ({**PARAM_FP4, "fp8_guard": True}, ["fp8_guard=True", "fp4_param=False"]),
    ({**FP4, "fp8_param": True}, ["fp8_param=True", "fp8 is None"]),
    ({**FP4, "fp4_recipe": "custom"}, ["fp4_quantizer_factory is None"]),
    ({**FP4, "fp4_quantizer_factory": "os.path.join"}, ["fp4_recipe is 'nvfp4'", "set fp4_recipe='custom'"]),
    ({**FP4, "fp8_margin": 2}, ["fp8_margin=2 does not exist for fp4_recipe='nvfp4'"]),
    ({**FP4, "fp8_backend": "transformer_engine"},
     ["NVFP4 by Transformer Engine is not in this release", "leave it out"]),
    ({**FP4, "fp8_overrides": {"*:dgrad": "fp8"}}, ["'*:dgrad'", "theirs is of FP4", "'nvfp4'", "'mxfp8'"]),
    ({**FP4, "fp4_disable_rht": "no"}, ["fp4_disable_rht='no'"]),
    ({**FP4, "moe_fp8_dispatch": True, "num_moe_experts": 4, "add_bias_linear": False},
     ["fp4_recipe='nvfp4'", "one scale per tensor", "fp4=None", "moe_fp8_dispatch=False"]),
    ({**ON, "fp8_recipe": "nvfp4"}, ["set fp4='e2m1' and fp8=None"]),
    ({**ON, "fp8_format": "nvfp4"}, ["set fp4='e2m1' and fp8=None"]),
]  # fmt: skip

NO_EFFECT = [
    ({"fp8": None, "fp8_format": "mxfp8"}, "fp8_recipe='mxfp8'"),
    ({**ON, "fp8_format": "mxfp8", "fp8_interval": 4}, "fp8_interval=4"),
    ({**ON, "fp8_recipe": "tensorwise", "tp_only_amax_red": True}, "tp_only_amax_red=True has no"),
    ({**ON, "fp8_format": "custom", **FACTORY, "fp8_stochastic_rounding": True}, "fp8_stochastic_rounding"),
    ({**ON, "fp8_format": "custom", **FACTORY, "fp8_pow2_scales": True}, "fp8_pow2_scales=True"),
    ({**ON, "num_layers_at_end_in_bf16": 2}, "num_layers_at_end_in_bf16=2"),
    ({"fp8_guard": True}, "fp8_guard=True has no effect because fp8 is None"),
    (
        {**FP4, "fp8_high_precision_healing_parts": ["*:fprop"]},
        "fp8_high_precision_healing_parts=.* has no effect with fp8_high_precision_healing=0",
    ),
    ({**ON, "fp8_guard_patience": 7}, "fp8_guard_patience=7 has no effect with fp8_guard=False"),
    (
        {**FP4, "fp8_stochastic_rounding": True},
        "fp8_stochastic_rounding=True has no effect with fp4_recipe='nvfp4'",
    ),
    ({**FP4, "fp8_pow2_scales": True}, "fp8_pow2_scales=True has no effect with fp4_recipe='nvfp4'"),
    ({**FP4, "fp8_amax_epsilon": 1e-3}, "fp8_amax_epsilon=0.001 has no effect with fp4_recipe='nvfp4'"),
    ({**FP4, "fp8_recipe": "mxfp8"}, "fp8_recipe='mxfp8' has no effect because fp8 is None"),
    ({**FP4, **FACTORY}, "fp8_quantizer_factory='os.path.join' has no effect because fp8 is None"),
    (
        {**ON, "fp4_recipe": "custom", "fp4_quantizer_factory": "a.b"},
        "fp4_recipe='custom' has no effect because fp4 is None",
    ),
    ({**ON, "fp4_disable_rht": True}, "fp4_disable_rht=True has no effect without the recipe nvfp4"),
    ({"fp4_disable_2d_quantization": True}, "fp4_disable_2d_quantization=True has no effect without"),
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
        make(fp8="hybrid", fp8_overrides={"*.linear_fc1": "nvfp4"}, fp4_disable_rht=True)
        make(fp4="e2m1", fp8_overrides={"*:dgrad": "tensorwise"}, fp8_pow2_scales=True)
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
