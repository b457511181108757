"""Experts, their router and latent attention: what maps both ways, and what is refused, by field and value."""

import math
from pathlib import Path

import pytest

from megatron_fp8.huggingface.architectures import entries, layers_of_experts
from megatron_fp8.huggingface.checkpoint_reader import Source
from megatron_fp8.huggingface.config import exported_architecture, hf_config, model_section
from megatron_fp8.huggingface.exporter import describe
from megatron_fp8.huggingface.qkv_layout import part_shapes
from tests.support.hf_experts import DEEPSEEK, FAMILIES


@pytest.mark.parametrize("name", FAMILIES)
def test_a_config_becomes_a_section_and_comes_back(name):
    given = FAMILIES[name]
    back = hf_config(model_section(given), 200, 64)
    unread = ("auto_map", "aux_loss_alpha", "seq_aux", "ep_size", "rope_scaling")
    assert {key: back[key] for key in given if key not in unread} == {
        key: value for key, value in given.items() if key not in unread
    }
    assert (back["rope_scaling"] or {}) | {"rope_type": "yarn"} == {
        **given.get("rope_scaling", {}),
        "rope_type": "yarn",
    }


@pytest.mark.parametrize("name", FAMILIES)
def test_the_section_is_one_that_megatron_core_takes(name):
    from megatron_fp8.train.config.model_section import transformer_config
    from megatron_fp8.train.config.run_config import ModelSection

    given = {**FAMILIES[name], "q_lora_rank": None}
    config = transformer_config(ModelSection(**model_section(given)))
    assert config.num_moe_experts in (8, 16) and config.moe_router_dtype == "fp32"
    assert getattr(config, "q_lora_rank", None) is None
    if name == "deepseek":
        assert (config.moe_layer_freq, config.mtp_num_layers) == ([0, 1, 1, 1], 1)
        assert (config.moe_router_num_groups, config.moe_router_group_topk) == (4, 2)
        assert (config.mscale, config.mscale_all_dim, config.rotary_scaling_factor) == (1.0, 1.0, 40.0)


@pytest.mark.parametrize(
    ("family", "fields", "section"),
    [
        ("mixtral", {}, {"moe_router_pre_softmax": False, "moe_ffn_hidden_size": 96, "moe_router_topk": 2}),
        ("mixtral", {"rope_theta": None, "rms_norm_eps": None}, {"rotary_base": 1000000, "layernorm_epsilon": 1e-5}),
        ("qwen", {"norm_topk_prob": None}, {"moe_router_pre_softmax": True, "qk_layernorm": True}),
        ("qwen", {"mlp_only_layers": [2], "decoder_sparse_step": 2}, {"moe_layer_freq": [0, 1, 0, 1]}),
        ("qwen", {"num_experts": None, "num_local_experts": 6}, {"num_moe_experts": 6}),
        ("deepseek", {"n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0}, {"mtp_num_layers": None}),
        ("deepseek", {"n_shared_experts": None}, {"moe_shared_expert_intermediate_size": 32}),
        ("deepseek", {"rope_scaling": None}, {"rope_type": "rope"}),
        ("deepseek", {"rope_scaling": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 16}},
         {"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 0.0, "beta_fast": 32.0}),
        ("deepseek", {"num_experts_per_tok": 1, "norm_topk_prob": False, "n_group": 1, "topk_group": 1},
         {"moe_router_topk": 1}),
    ],
)  # fmt: skip
def test_other_forms(family, fields, section):
    made = model_section({**FAMILIES[family], **fields})
    assert {name: made[name] for name in section} == section
    again = model_section(hf_config(made, 200, 64))
    assert {name: made[name] for name in made if made[name] != again.get(name)} == {}


@pytest.mark.parametrize(
    ("family", "fields", "words"),
    [
        ("mixtral", {"num_local_experts": None}, "has no num_local_experts"),
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok=9, and num_local_experts=8"),
        ("mixtral", {"num_experts_per_tok": 1}, "num_experts_per_tok=1 with scores that add up to 1"),
        ("mixtral", {"sliding_window": 4096}, "sliding_window=4096"),
        ("qwen", {"mlp_only_layers": [0, 1, 2, 3]}, r"mlp_only_layers=\[0, 1, 2, 3\].* no layer with experts"),
        ("qwen", {"num_hidden_layers": 2**20}, "num_hidden_layers=1048576: at most 65536"),
        ("qwen", {"num_experts": 2**17}, "num_experts is .131072."),
        ("deepseek", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ("deepseek", {"topk_method": "greedy"}, "topk_method='greedy'"),
        ("deepseek", {"norm_topk_prob": None}, "norm_topk_prob=None with num_experts_per_tok=4"),
        ("deepseek", {"norm_topk_prob": False}, "norm_topk_prob=False with num_experts_per_tok=4"),
        ("deepseek", {"topk_group": 1}, "topk_group=1 with num_experts_per_tok=4.*best 2 .*=4"),
        ("deepseek", {"n_group": None, "topk_group": 1}, r"no n_group \(then it is 8\) and topk_group=1 with"),
        ("deepseek", {"n_group": None, "topk_group": None}, r"no topk_group \(then it is 4\) with num_exp"),
        ("deepseek", {"num_hidden_layers": 3, "first_k_dense_replace": None}, r"no first_k_dense_replace \(then"),
        ("deepseek", {"n_group": 3}, "n_group must divide n_routed_experts=16"),
        ("deepseek", {"first_k_dense_replace": 4}, "first_k_dense_replace=4"),
        ("deepseek", {"n_shared_experts": 0}, "n_shared_experts=0"),
        ("deepseek", {"rms_norm_eps": 1e-5}, "rms_norm_eps=1e-05.*norms of latents"),
        ("deepseek", {"num_key_value_heads": 2}, "num_key_value_heads=2"),
        ("deepseek", {"kv_lora_rank": None}, "has no kv_lora_rank"),
        ("deepseek", {"auto_map": {"AutoModel": "mine.Model"}}, "auto_map="),
        ("deepseek", {"rope_scaling": {"rope_type": "llama3"}}, "type 'llama3': 'default' and 'yarn'"),
        ("deepseek", {"rope_scaling": {"rope_type": "yarn"}}, "has no factor in its rope scaling"),
        ("deepseek", {"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "no original_max_position_embeddings in"),
        ("deepseek", {"rope_parameters": {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}},
         "mscale=1.0 in its rope_scaling and None in its rope_parameters; mscale_all_dim"),
        ("deepseek", {"rope_scaling": {**DEEPSEEK["rope_scaling"], "mscale": None}}, "mscale_all_dim=1.0 without mscale"),
        ("deepseek", {"rope_scaling": {**DEEPSEEK["rope_scaling"], "attention_factor": 2.0}}, "attention_factor=2.0"),
        ("deepseek", {"rope_scaling": {**DEEPSEEK["rope_scaling"], "truncate": False}}, "truncate=False"),
    ],
)  # fmt: skip
def test_what_megatron_core_cannot_compute_is_refused_by_name(family, fields, words):
    with pytest.raises(ValueError, match=words):
        model_section({**FAMILIES[family], **fields})


@pytest.mark.parametrize(
    ("family", "name", "value"),
    [
        ("mixtral", "moe_router_pre_softmax", True), ("mixtral", "moe_layer_freq", [0, 1, 1, 1]),
        ("mixtral", "moe_router_score_function", "sigmoid"), ("mixtral", "add_qkv_bias", True),
        ("mixtral", "moe_expert_capacity_factor", 1.0), ("mixtral", "mtp_num_layers", 1),
        ("qwen", "moe_shared_expert_intermediate_size", 32), ("qwen", "moe_router_topk_scaling_factor", 2.0),
        ("qwen", "moe_router_load_balancing_type", "sinkhorn"), ("qwen", "moe_router_group_topk", 2),
        ("deepseek", "moe_layer_freq", [1, 0, 1, 1]), ("deepseek", "moe_shared_expert_intermediate_size", 40),
        ("deepseek", "moe_router_enable_expert_bias", False), ("deepseek", "moe_router_group_topk", 1),
        ("deepseek", "layernorm_epsilon", 1e-5), ("deepseek", "qk_layernorm", False),
        ("deepseek", "num_moe_experts", None), ("deepseek", "moe_shared_expert_gate", True),
    ],
)  # fmt: skip
def test_what_no_family_computes_is_not_exported(family, name, value):
    section = model_section(FAMILIES[family])
    assert exported_architecture(section).model_type == FAMILIES[family]["model_type"]
    with pytest.raises(ValueError, match=f"model.{name}="):
        exported_architecture({**section, name: value})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rope_type": "rope"}, "model.mscale_all_dim=1.0 with model.rope_type='rope'"),
        ({"mscale": 2.0, "mscale_all_dim": 0.0}, "model.mscale=2.0 with model.mscale_all_dim=0.0"),
    ],
)
def test_scalings_that_no_reader_knows(fields, words):
    with pytest.raises(ValueError, match=words):
        hf_config({**model_section(DEEPSEEK), **fields}, 200, 64)


@pytest.mark.parametrize(
    ("fields", "positions"),
    [
        ({}, 40 * 4096),
        ({"rotary_scaling_factor": 2.0}, 8192),
        ({"rope_type": "rope", "mscale_all_dim": 0.0}, 96),
    ],
)
def test_an_export_says_how_far_yarn_stretches(fields, positions):
    """transformers 4 makes YaRN's factor of it."""
    run = {"train": {"seq_length": 96}}
    source = Source(Path("run"), {**model_section(DEEPSEEK), **fields}, run, None, None, [])
    assert describe(source, None, None, None)["max_position_embeddings"] == positions
    assert describe(source, None, None, 50)["max_position_embeddings"] == 50


def test_deepseek_v3_itself_has_as_many_parameters_as_published():
    """671 billion without multi-token prediction's layer, by the shapes of every tensor."""
    sizes = {
        "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
        "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 129280,
        "num_nextn_predict_layers": 0,
    }  # fmt: skip
    section = model_section({**DEEPSEEK, **sizes})
    listed = entries(exported_architecture(section), section)
    shapes = (shape for entry in listed for shape in part_shapes(entry, section).values())
    assert sum(map(math.prod, shapes)) == 671_026_419_200


def test_which_layers_have_experts():
    assert layers_of_experts({"num_layers": 4}) == [False] * 4
    section = {"num_layers": 4, "num_moe_experts": 2}
    assert layers_of_experts(section) == [True] * 4
    assert layers_of_experts({**section, "moe_layer_freq": 2}) == [True, False, True, False]
    assert layers_of_experts({**section, "moe_layer_freq": [0, 0, 1, 1]}) == [False, False, True, True]
