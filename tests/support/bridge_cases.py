"""Megatron-Bridge's providers, conversions and precision recipes, run in an environment that has Megatron-Bridge.

    python -m tests.support.bridge_cases '["train", "llama", "mxfp8"]' '["convert", "deepseek", "mxfp8", "ep"]'

prints one line of JSON a case.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import traceback
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_fp8 import TransformerConfig, mcore

mcore.install()
from megatron_fp8.mcore import megatron_bridge  # noqa: E402

megatron_bridge.install()
logging.disable(logging.WARNING)
from megatron.bridge import AutoBridge, models  # noqa: E402
from megatron.bridge.training.mixed_precision import MIXED_PRECISION_RECIPES  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402

from megatron_fp8.mcore.iteration import iteration_counts  # noqa: E402
from megatron_fp8.mcore.report import site_report  # noqa: E402
from megatron_fp8.mcore.spec import get_gpt_decoder_block_fp8_spec, get_gpt_layer_fp8_spec  # noqa: E402
from megatron_fp8.params.fp8_parameter import Fp8Parameter  # noqa: E402

VOCAB, LENGTH, LAYERS = 128, 32, 3
BF16 = {"bf16": True, "params_dtype": torch.bfloat16}
SMALL = {
    "num_layers": LAYERS,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "ffn_hidden_size": 128,
    "seq_length": LENGTH,
    "vocab_size": VOCAB,
}
QWEN = {"kv_channels": 16, "num_query_groups": 2}
MOE = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32}
# What Megatron-Bridge itself sets for DeepSeek-V3, fusions included.
DEEPSEEK = {
    **MOE,
    "moe_layer_freq": [0, 1, 1],
    "moe_shared_expert_intermediate_size": 32,
    "moe_router_num_groups": 2,
    "moe_router_group_topk": 1,
    "kv_channels": 16,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 16,
    "v_head_dim": 16,
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "position_embedding_type": "rope",
    "add_bias_linear": False,
    "share_embeddings_and_output_weights": False,
    "qk_layernorm": True,
    "moe_grouped_gemm": True,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_pre_softmax": True,
    "cross_entropy_fusion_impl": "te",
    "moe_permute_fusion": True,
    "gradient_accumulation_fusion": True,
    "make_vocab_size_divisible_by": VOCAB,
}
PROVIDERS: dict[str, tuple[Any, dict[str, Any], Any]] = {
    "gpt": (models.GPTModelProvider, {}, get_gpt_layer_fp8_spec),
    "llama": (models.LlamaModelProvider, {}, get_gpt_layer_fp8_spec),
    "qwen3": (models.Qwen3ModelProvider, QWEN, get_gpt_layer_fp8_spec),
    "qwen3moe": (models.Qwen3MoEModelProvider, {**QWEN, **MOE}, get_gpt_layer_fp8_spec),
    "deepseek": (models.DeepSeekV3ModelProvider, DEEPSEEK, get_gpt_decoder_block_fp8_spec),
}


def switches(recipe: str | None) -> dict[str, Any]:
    """The fields that a user sets for a recipe."""
    if recipe is None:
        return {}
    if recipe == "nvfp4":
        return {"fp4": "e2m1"}
    return {"fp8": "e4m3" if recipe == "mxfp8" else "hybrid", "fp8_recipe": recipe}


# ------------------------------------------------------------------------------------------------------------- training


def begin(tp: int = 1, pp: int = 1, ep: int = 1) -> None:
    """Parallel state, unless there is one, with fresh random streams."""
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep)
    model_parallel_cuda_manual_seed(0)


def two_steps(chunks: list[Any], optimizer: Any) -> list[float]:
    """Losses of two optimizer steps on one batch, by Megatron-Core's schedule."""
    config = chunks[0].config
    config.finalize_model_grads_func, config.grad_scale_func = finalize_model_grads, optimizer.scale_loss
    tokens = torch.randint(VOCAB, (2, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    places = torch.arange(LENGTH).expand(2, LENGTH)

    def forward(_: Any, model: Any) -> Any:
        output = model(tokens[:, :-1], places, None, labels=tokens[:, 1:])
        return output, lambda losses: (losses.float().mean(), {"loss": losses.detach().float().mean()})

    losses = []
    for _ in range(2):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        found = get_forward_backward_func()(
            forward_step_func=forward, data_iterator=None, model=chunks, num_microbatches=1,
            seq_length=LENGTH, micro_batch_size=2,
        )  # fmt: skip
        assert optimizer.step()[0]
        losses.append(float(found[0]["loss"]))
    return losses


def built(provider: Any, ddp: dict[str, Any], optim: dict[str, Any]) -> tuple[list[Any], Any]:
    """The provider's model in DDP, and its optimizer."""
    provider.finalize()
    made = DistributedDataParallelConfig(**{"use_distributed_optimizer": True, **ddp})
    chunks = provider.provide_distributed_model(ddp_config=made)
    setting = {"optimizer": "adam", "lr": 1e-3, "use_distributed_optimizer": True, "bf16": True, **optim}
    return chunks, get_megatron_optimizer(OptimizerConfig(**setting), chunks)


def train(name: str, recipe: str | None) -> dict[str, Any]:
    """Two steps of a provider."""
    begin()
    kind, options, spec = PROVIDERS[name]
    provider = kind(**{**SMALL, **BF16, **options, **switches(recipe)}, transformer_layer_spec=spec)
    chunks, optimizer = built(provider, {}, {})
    losses = two_steps(chunks, optimizer)
    counts = iteration_counts(chunks[0].config) if recipe else {"fp8_gemms": 0, "hp_gemms": 0}
    sites = [site for site in site_report(chunks) if site["name"] != "output_layer"]
    return {
        "losses": losses,
        "gemms": [counts["fp8_gemms"], counts["hp_gemms"]],
        "sites": len(sites),
        "precisions": sorted({site["precision"] for site in sites}),
        "recipes": sorted({str(site["recipe"]) for site in sites}),
    }


# -------------------------------------------------------------------------------------------------- precision recipes


def precision(name: str) -> dict[str, Any]:
    """A precision recipe of Megatron-Bridge on its provider, and the same settings on this package's config."""
    begin()
    mixed = MIXED_PRECISION_RECIPES[name]()
    if not mixed.fp4:  # with it, finalize() asks for Transformer Engine's version
        mixed.finalize()
    layers = {"num_layers": 2 * mixed.num_layers_at_start_in_bf16 + 1}
    kind, _, spec = PROVIDERS["llama"]
    provider = kind(**{**SMALL, **layers}, transformer_layer_spec=spec)
    ddp, optim = DistributedDataParallelConfig(use_distributed_optimizer=True), OptimizerConfig()
    mixed.setup(provider, optim, ddp)
    given = {key: getattr(ddp, key) for key in _shared(ddp, mixed)}
    stepped = {key: getattr(optim, key) for key in _shared(optim, mixed)}
    theirs, optimizer = built(provider, given, stepped)
    result = {"losses": two_steps(theirs, optimizer), "params": _fp8_params(theirs)}

    begin()
    own = {field.name for field in fields(TransformerConfig)} & {field.name for field in fields(provider)}
    # Derived fields and functions are left out: each config makes its own.
    same = {key: getattr(provider, key) for key in own if not key.endswith(("init_method", "_func", "hook"))}
    config = TransformerConfig(**same, activation_func=provider.activation_func)
    model = GPTModel(config, spec(config), VOCAB, LENGTH, position_embedding_type="rope",
                     share_embeddings_and_output_weights=False)  # fmt: skip
    made = DistributedDataParallelConfig(**{"use_distributed_optimizer": True, **given})
    chunks = [DistributedDataParallel(config, made, Float16Module(config, model))]
    chunks[0].broadcast_params()
    setting = {"optimizer": "adam", "lr": 1e-3, "use_distributed_optimizer": True, **stepped}
    ours = two_steps(chunks, get_megatron_optimizer(OptimizerConfig(**setting), chunks))
    return {**result, "ours": ours, "our_params": _fp8_params(chunks)}


def _shared(config: Any, mixed: Any) -> list[str]:
    return [field.name for field in fields(mixed) if hasattr(config, field.name)]


def _fp8_params(chunks: list[Any]) -> int:
    return sum(isinstance(p, Fp8Parameter) for chunk in chunks for p in chunk.parameters())


# ---------------------------------------------------------------------------------------------------------- conversions


def hugging_face(name: str, folder: Path) -> dict[str, torch.Tensor]:
    """Saves a small model of transformers; its weights."""
    import transformers as hf

    sizes = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": LAYERS,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    experts = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
    latent = {
        "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16, "v_head_dim": 16, "scoring_func": "sigmoid",
        "rope_scaling": {"rope_type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
                         "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096},
    }  # fmt: skip
    make = {
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**sizes)),
        "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**sizes)),
        "qwen3moe": lambda: hf.Qwen3MoeForCausalLM(
            hf.Qwen3MoeConfig(**sizes, **experts, num_experts=4, mlp_only_layers=[])
        ),
        "deepseek": lambda: hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**{**sizes, **experts, **latent})),
    }
    torch.manual_seed(0)
    model = make[name]().to(torch.bfloat16)
    model.save_pretrained(folder)
    return dict(model.state_dict())


def convert(name: str, recipe: str | None, layout: str = "") -> dict[str, Any]:
    """Hugging Face -> Megatron-Core -> Hugging Face with FP8 parameters, on two ranks where there is a layout."""
    tp, pp, ep = (2 if layout == kind else 1 for kind in ("tp", "pp", "ep"))
    begin(tp, pp, ep)
    with tempfile.TemporaryDirectory() as folder:
        weights = hugging_face(name, Path(folder))
        bridge = AutoBridge.from_hf_pretrained(folder)
        provider = bridge.to_megatron_provider()
        provider.seq_length, provider.transformer_layer_spec = LENGTH, PROVIDERS[name][2]
        provider.tensor_model_parallel_size, provider.pipeline_model_parallel_size = tp, pp
        provider.expert_model_parallel_size, provider.sequence_parallel = ep, tp > 1
        provider.num_layers_in_first_pipeline_stage = 1 if pp > 1 else None  # of three
        kept = recipe not in (None, "nvfp4")
        for field, value in {**switches(recipe), **({"fp8_param": True} if kept else {})}.items():
            setattr(provider, field, value)
        reuse = {"reuse_grad_buf_for_mxfp8_param_ag": recipe == "mxfp8"}
        chunks, _ = built(provider, {"fp8_param_gather": kept, **reuse}, reuse)
        found = dict(bridge.export_hf_weights(chunks, show_progress=False))
    return {
        "names": sorted(set(weights) ^ set(found)),
        "changed": sorted(key for key in found if not torch.equal(found[key], weights[key])),
        "weights": len(found),
        "params": _fp8_params(chunks),
    }


CASES = {"train": train, "precision": precision, "convert": convert}


def in_ranks(case: str, *arguments: Any) -> list[dict[str, Any]]:
    """A case's result on each of its ranks, which are forked: one, or two for a third argument of a conversion."""
    world = 2 if len(arguments) == 3 else 1
    with tempfile.TemporaryDirectory() as folder:
        pids = []
        for rank in range(world):
            if (pid := os.fork()) == 0:
                try:
                    dist.init_process_group(
                        "gloo", rank=rank, world_size=world, init_method=f"file://{folder}/store"
                    )
                    result = CASES[case](*arguments)
                except BaseException:
                    result = {"error": traceback.format_exc()[-2000:]}
                Path(folder, f"{rank}.json").write_text(json.dumps(result))
                os._exit(0)
            pids.append(pid)
        for pid in pids:
            os.waitpid(pid, 0)
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(world)]


def main() -> None:
    """Runs the cases of the command line."""
    torch.set_num_threads(1)
    output, sys.stdout = sys.stdout, sys.stderr  # Megatron-Bridge prints
    for text in sys.argv[1:]:
        print(json.dumps(in_ranks(*json.loads(text))), file=output, flush=True)


if __name__ == "__main__":
    main()
