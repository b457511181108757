"""Every layout starts from the same model: stages and tensor-parallel parts put together are the whole one."""

import pytest
import torch

from benchmarks.support.ranks import Layout, model_parallel
from megatron_fp8.train.config.run_config import parse

SMALL = [
    "--model.num_layers=4", "--model.hidden_size=32", "--model.num_attention_heads=4", "--model.ffn_hidden_size=48",
    "--model.gated_linear_unit=true", "--model.activation_func=silu", "--model.normalization=RMSNorm",
    "--model.add_bias_linear=false", "--model.use_cpu_initialization=true", "--train.seq_length=16",
]  # fmt: skip


def weights(layout, *options):
    """This rank's matrices by global name."""
    from megatron_fp8.mcore.names import named_parameters
    from megatron_fp8.train import model
    from megatron_fp8.train.config.model_section import transformer_config

    sizes = [
        f"--model.tensor_model_parallel_size={layout.tp}",
        f"--model.pipeline_model_parallel_size={layout.pp}",
        f"--model.expert_model_parallel_size={layout.ep}",
    ]
    if layout.etp:
        sizes.append(f"--model.expert_tensor_parallel_size={layout.etp}")
    if layout.vpp:
        sizes.append(f"--model.virtual_pipeline_model_parallel_size={layout.vpp}")
    run = parse([*SMALL, *sizes, *options])
    found = {}
    with model_parallel(layout):
        for chunk in model.build_chunks(transformer_config(run.model), run, vocab_size=64):
            stage = chunk.module.module
            for name, parameter in named_parameters(stage):
                if parameter.dim() > 1:
                    found[model._seed_name(stage, name)] = parameter.detach().clone()
    return found


@pytest.fixture(scope="module")
def whole(ranks):
    return ranks(1).run(weights, Layout())[0]


def test_pipeline_stages_are_parts_of_one_model(ranks, whole):
    first, last = ranks(2).run(weights, Layout(pp=2, vpp=2))
    assert not first.keys() & last.keys()
    together = {**first, **last}
    assert together.keys() == whole.keys()
    for name, weight in whole.items():
        assert torch.equal(together[name], weight), name


def test_tensor_parallel_parts_are_parts_of_one_model(ranks, whole):
    parts = ranks(2).run(weights, Layout(tp=2))
    for name, weight in whole.items():
        one, other = (part[name] for part in parts)
        if name.endswith("linear_fc1.weight"):  # the gate's halves, then the up projection's
            (gate, up), (other_gate, other_up) = one.chunk(2), other.chunk(2)
            joined = torch.cat([gate, other_gate, up, other_up])
        else:
            joined = torch.cat([one, other], dim=1 if name.endswith(("proj.weight", "fc2.weight")) else 0)
        assert torch.equal(joined, weight), name


def test_tied_embeddings_are_tied_over_stages(ranks):
    first, last = ranks(2).run(weights, Layout(pp=2), "--model.share_embeddings_and_output_weights=true")
    name = "embedding.word_embeddings.weight"
    assert torch.equal(first[name], last[name])


def test_deviations_are_megatrons(whole, ranks):
    other = ranks(1).run(weights, Layout(), "--train.seed=7")[0]
    for name, weight in whole.items():
        out = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
        expected = 0.02 / (2 * 4) ** 0.5 if out else 0.02
        assert weight.float().std().item() == pytest.approx(expected, rel=0.15), name
        assert not torch.equal(weight, other[name]), name


EXPERTS = [
    "--model.num_moe_experts=4", "--model.moe_ffn_hidden_size=48", "--model.mtp_num_layers=1",
    "--model.moe_shared_expert_intermediate_size=48", "--model.moe_router_load_balancing_type=none",
]  # fmt: skip


@pytest.mark.parametrize("layout", [Layout(ep=2), Layout(etp=2)], ids=["ep2", "etp2"])
def test_experts_are_parts_of_one_model(ranks, layout):
    """Each has weights of its own, wherever it lies."""
    whole = ranks(1).run(weights, Layout(), *EXPERTS)[0]
    one, other = ranks(2).run(weights, layout, *EXPERTS)
    name = "mtp.layers.0.transformer_layer.mlp.experts.{}.linear_fc2.weight"
    assert not torch.equal(whole[name.format(1)], whole[name.format(3)])
    assert {**one, **other}.keys() == whole.keys()
    for name, weight in whole.items():
        if ".experts." not in name or layout.ep == 2:
            parts = [part[name] for part in (one, other) if name in part]
            assert len(parts) == (1 if ".experts." in name else 2)
            assert all(torch.equal(part, weight) for part in parts), name
        elif name.endswith("linear_fc2.weight"):
            assert torch.equal(torch.cat([one[name], other[name]], dim=1), weight), name
