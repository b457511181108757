"""TransformerConfig: which values are refused, and which settings have no effect."""

import warnings

import pytest
import torch

from tests.support.megatron_settings import FACTORY, make

FP8_PARAM = {"fp8": "hybrid", "fp8_param": True, "bf16": True, "params_dtype": torch.bfloat16}


@pytest.mark.parametrize(
    ("settings", "both"),
    [
        ({"fp8": "hybrid", "fp8_format": "mxfp8", "fp8_recipe": "delayed"}, ("'mxfp8'", "'delayed'")),
        ({"fp8": "hybrid", "fp8_format": "e4m3"}, ("'e4m3'", "'hybrid'")),
    ],
)
def test_conflicting_values_are_an_error_that_names_both(settings, both):
    with pytest.raises(ValueError, match="conflicts") as error:
        make(**settings)
    assert all(value in str(error.value) for value in both)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"fp8": "hybird"}, ["'hybird'", "'hybrid'"]),
        ({"fp8": "e5m2"}, ["'e5m2'", "'e4m3', 'hybrid'"]),
        ({"fp8": "hybrid", "fp8_format": "mxfp9"}, ["'mxfp9'", "Did you mean 'mxfp8'"]),
        ({"fp8": "hybrid", "fp8_recipe": "blockwize"}, ["'blockwize'", "Did you mean 'blockwise'"]),
        ({"fp8": "hybrid", "fp8_backend": "cuda"}, ["fp8_backend='cuda'", "'emulated'"]),
        ({"fp8": "hybrid", "fp8_fallback": "silent"}, ["fp8_fallback='silent'"]),
        ({"fp8": "hybrid", "fp8_interval": 0}, ["fp8_interval=0", "at least 1"]),
        ({"fp8": "hybrid", "fp8_interval": 1.5}, ["fp8_interval=1.5"]),
        ({"fp8": "hybrid", "fp8_margin": -1}, ["fp8_margin=-1"]),
        ({"fp8": "hybrid", "fp8_recipe": "mxfp8", "fp8_margin": 2}, ["fp8_margin=2 does not exist", "mxfp8"]),
        (
            {"fp8": "hybrid", "fp8_recipe": "rowwise", "fp8_margin": 2},
            ["fp8_margin=2 does not exist", "rowwise"],
        ),
        ({"fp8": "hybrid", "fp8_amax_history_len": 0}, ["fp8_amax_history_len=0"]),
        ({"fp8": "hybrid", "fp8_amax_compute_algo": "mean"}, ["fp8_amax_compute_algo='mean'", "'max'"]),
        ({"fp8": "hybrid", "fp8_wgrad": "no"}, ["fp8_wgrad='no'"]),
        ({"fp8": "hybrid", "fp8_amax_epsilon": float("nan")}, ["fp8_amax_epsilon=nan"]),
        ({"fp8": "hybrid", "fp8_amax_epsilon": -1e-6}, ["fp8_amax_epsilon"]),
        (
            {"fp8": "hybrid", "fp8_overrides": {"*.linear_fc2": "bf17"}},
            ["'*.linear_fc2'", "'bf17'", "'bf16'"],
        ),
        ({"fp8": "hybrid", "fp8_overrides": ["bf16"]}, ["fp8_overrides"]),
        ({"fp8": "hybrid", "fp8_format": "mxfp8", "fp8_pow2_scales": False}, ["fp8_pow2_scales=False"]),
        ({"fp8": "hybrid", "fp8_format": "delayed", "fp8_pow2_scales": True}, ["fp8_pow2_scales=True"]),
        ({"fp8": "hybrid", "fp8_format": "custom"}, ["fp8_quantizer_factory is None"]),
        ({"fp8": "hybrid", "fp8_format": "mxfp8", **FACTORY}, ["'os.path.join'", "'mxfp8'"]),
        ({"fp8_param": True}, ["fp8_param=True", "fp8 is None"]),
        (
            {"fp8": "hybrid", "fp8_param": True},
            ["fp8_param=True", "bf16=False", "bf16=True", "fp8_param=False"],
        ),
        (
            {
                "fp8": "hybrid",
                "fp16": True,
                "pipeline_model_parallel_size": 2,
                "pipeline_dtype": torch.bfloat16,
            },
            ["pipeline_dtype=torch.bfloat16", "fp16=True", "the activations' dtype"],
        ),
        (
            {"fp8": "hybrid", "fp8_high_precision_warmup": -0.1},
            ["fp8_high_precision_warmup=-0.1", "at least 0 and at most 1"],
        ),
        ({"fp8": "hybrid", "fp8_high_precision_warmup": True}, ["fp8_high_precision_warmup=True"]),
        ({"fp8": "hybrid", "fp8_high_precision_healing": 1.5}, ["fp8_high_precision_healing=1.5"]),
        ({"fp8": "hybrid", "fp8_high_precision_healing": float("nan")}, ["fp8_high_precision_healing=nan"]),
        ({"fp8": "hybrid", "fp8_high_precision_warmup": 1.0}, ["fp8_high_precision_warmup=1.0", "fp8=None"]),
        (
            {"fp8": "hybrid", "fp8_high_precision_warmup": 0.5, "fp8_high_precision_healing": 0.5},
            ["warmup=0.5", "healing=0.5", "sum"],
        ),
        (
            {**FP8_PARAM, "fp8_high_precision_warmup": 0.1},
            ["fp8_param=True", "warmup=0.1", "BF16 weights", "fp8_param=False"],
        ),
        (
            {**FP8_PARAM, "fp8_high_precision_healing": 0.1},
            ["fp8_param=True", "healing=0.1"],
        ),
        (
            {**FP8_PARAM, "fp8_guard": True},
            ["fp8_guard=True", "fp8_param=False"],
        ),
        ({"fp8": "hybrid", "fp8_guard": "ladder", "tp_only_amax_red": True}, ["tp_only_amax_red=False"]),
        ({"fp8": "hybrid", "fp8_guard": "blockwise"}, ["fp8_guard='blockwise'", "'ladder'"]),
        ({"fp8": "hybrid", "fp8_guard": True, "fp8_guard_patience": 0}, ["fp8_guard_patience=0"]),
        (
            {"fp8": "hybrid", "fp8_dot_product_attention": True},
            ["fp8_dot_product_attention=True", "attention itself runs in BF16", "does not support FP8"],
        ),
        ({"fp8": "hybrid", "fp8_multi_head_attention": True}, ["fp8_multi_head_attention=True"]),
        ({"fp8": "hybrid", "fp8_output_layer": "yes"}, ["fp8_output_layer='yes'"]),
        (
            {
                "fp8": "hybrid",
                "fp8_output_layer": True,
                "defer_embedding_wgrad_compute": True,
                "gradient_accumulation_fusion": False,
                "pipeline_model_parallel_size": 2,
                "pipeline_dtype": torch.bfloat16,
                "bf16": True,
                "params_dtype": torch.bfloat16,
            },
            ["fp8_output_layer=True", "defer_embedding_wgrad_compute=True"],
        ),
        (
            {"fp8": "hybrid", "fp8_output_layer": True, "fp8_backend": "transformer_engine"},
            ["fp8_output_layer=True", "transformer_engine"],
        ),
        (
            {"fp8": "hybrid", "cuda_graph_impl": "local"},
            ["cuda_graph_impl='local'", "'none'", "CapturedStep"],
        ),
        ({"fp8_format": "mxfp8"}, ["fp8_format='mxfp8' without fp8", "'hybrid'"]),
        (
            {"fp8": "hybrid", "first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 3},
            ["num_layers_at_end_in_bf16=3", "none of num_layers=4 in FP8"],
        ),
        ({"fp8": "hybrid", "kv_channels": 0}, ["kv_channels=0", "at least 1"]),
        ({"fp8": "hybrid", "layernorm_epsilon": float("nan")}, ["layernorm_epsilon=nan", "finite number"]),
        ({"fp8": "hybrid", "num_query_groups": 3}, ["num_attention_heads=4, num_query_groups=3", "multiple"]),
        (
            {"fp8": "hybrid", "num_moe_experts": 2, "moe_router_topk": 3},
            ["moe_router_topk=3, num_moe_experts=2"],
        ),
        (
            {"fp8": "hybrid", "num_moe_experts": 6, "expert_model_parallel_size": 4},
            [
                "num_moe_experts=6, expert_model_parallel_size=4",
                "equal number of experts",
                "Change one of them",
            ],
        ),
    ],
)
def test_bad_values_are_named(settings, words):
    with pytest.raises(ValueError) as error:
        make(**settings)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(("start", "end"), [(-1, 1), (1, -1), (5, 0), (0, 5), (3, 2), (True, 1)])
@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_bf16_layers_out_of_range(recipe, start, end):
    with pytest.raises(ValueError, match="num_layers"):
        make(
            fp8="hybrid",
            fp8_format=recipe,
            first_last_layers_bf16=True,
            num_layers_at_start_in_bf16=start,
            num_layers_at_end_in_bf16=end,
        )


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"fp8": None, "fp8_format": "mxfp8"}, "fp8_recipe='mxfp8'"),
        ({"fp8_recipe": "nonsense"}, "fp8_recipe='nonsense'"),
        ({"fp8": "hybrid", "fp8_format": "mxfp8", "fp8_interval": 4}, "fp8_interval=4"),
        (
            {"fp8": "hybrid", "fp8_recipe": "tensorwise", "fp8_amax_compute_algo": "max"},
            "fp8_amax_compute_algo='max'",
        ),
        (
            {"fp8": "hybrid", "fp8_recipe": "tensorwise", "tp_only_amax_red": True},
            "tp_only_amax_red=True has no",
        ),
        ({"fp8": "hybrid", "fp8_format": "mxfp8", "fp8_amax_epsilon": 1e-6}, "fp8_amax_epsilon"),
        (
            {"fp8": "hybrid", "fp8_format": "custom", **FACTORY, "fp8_stochastic_rounding": True},
            "fp8_stochastic_rounding",
        ),
        (
            {"fp8": "hybrid", "fp8_format": "custom", **FACTORY, "fp8_pow2_scales": True},
            "fp8_pow2_scales=True",
        ),
        ({"fp8": "hybrid", "num_layers_at_end_in_bf16": 2}, "num_layers_at_end_in_bf16=2"),
        ({"fp8_guard": True}, "fp8_guard=True has no effect because fp8 is None"),
        ({"fp8_output_layer": True}, "fp8_output_layer=True has no effect because fp8 is None"),
        (
            {"fp8": "hybrid", "fp8_guard_patience": 7},
            "fp8_guard_patience=7 has no effect with fp8_guard=False",
        ),
    ],
)
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
    interleaved = {
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "pipeline_dtype": torch.bfloat16,
    }
    right = {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    fp8 = {"fp8": "hybrid", "bf16": True}
    with pytest.raises(ValueError, match="overlap_p2p_comm=True and batch_p2p_comm=False"):
        make(**interleaved, **fp8)
    make(**interleaved, **fp8, **right)
    with pytest.warns(UserWarning, match="overlap_p2p_comm=True and batch_p2p_comm=False"):
        make(**interleaved)
    make(**interleaved, **right)
