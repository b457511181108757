"""Small models of transformers, dense and with experts, and the logits of the same weights in Megatron-Core."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from benchmarks.support.ranks import Layout, model_parallel

VOCAB, SEQUENCE = 300, 24  # 300 tokens are padded to 384
KINDS = ("llama", "mistral", "qwen2", "qwen3")
OF_EXPERTS = ("mixtral", "qwen3_moe", "deepseek_v3")
_NAMES = {
    "llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "mixtral": "Mixtral",
    "qwen3_moe": "Qwen3Moe", "deepseek_v3": "DeepseekV3", "phi3": "Phi3",
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 50000.0, "factor": 4.0, "original_max_position_embeddings": 16,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.7, "mscale_all_dim": 1.3,
}  # fmt: skip
_MORE: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": 128, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "head_dim": 64, "moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True,
        "mlp_only_layers": [0],
    },
    "deepseek_v3": {
        "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "moe_intermediate_size": 128, "n_routed_experts": 8,
        "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "n_shared_experts": 1,
        "q_lora_rank": 64, "kv_lora_rank": 96, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 64,
        "routed_scaling_factor": 1.7, "rope_parameters": YARN,
    },
}  # fmt: skip
os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # read when transformers is imported


def hf_model(kind: str, dtype: torch.dtype = torch.float32, **fields: Any) -> Any:
    """A model of two layers with grouped queries. Nothing is at its default: norms, biases and theta count."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 256,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-4,
        "rope_theta": 50000.0,
        "max_position_embeddings": 512,
        "initializer_range": 0.06,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if kind in _MORE:
        sizes |= {"hidden_size": 128, **_MORE[kind]}
    elif kind != "qwen2":
        sizes["head_dim"] = 128
    if kind == "mistral":
        sizes["sliding_window"] = None
    name = _NAMES[kind]
    config = getattr(transformers, f"{name}Config")(**{**sizes, **fields})
    torch.manual_seed(sum(map(ord, kind)))
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            assert parameter.std() > 0, parameter_name
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.1)
    return model.to(dtype)


def token_ids(batch: int = 2) -> torch.Tensor:
    """int64 [batch, SEQUENCE], the same ones always."""
    return torch.randint(VOCAB, (batch, SEQUENCE), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def hf_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """float32 [batch, SEQUENCE, VOCAB]."""
    return model(ids).logits.float()


def build(config_file: str, layout: Layout, *overrides: str) -> tuple[Any, list[Any], Any]:
    """(run, chunks, optimizer) of a run's config in a layout; the ranks have met."""
    from megatron_fp8.train import model
    from megatron_fp8.train.config import run_config
    from megatron_fp8.train.config.model_section import padded_vocab_size, transformer_config

    run = run_config.load(
        config_file,
        f"--model.tensor_model_parallel_size={layout.tp}",
        f"--model.pipeline_model_parallel_size={layout.pp}",
        f"--model.sequence_parallel={str(layout.sp).lower()}",
        f"--model.expert_model_parallel_size={layout.ep}",
        f"--train.seq_length={SEQUENCE}",
        *overrides,
    )
    config = transformer_config(run.model)
    chunks = model.build_chunks(config, run, padded_vocab_size(run.model, 1))
    return run, chunks, model.build_optimizer(config, run, chunks)


def loaded_logits(
    config_file: str, checkpoint: str, layout: Layout, ids: torch.Tensor, *overrides: str
) -> Any:
    """A case for ranks: float32 [batch, SEQUENCE, padded vocabulary] of a checkpoint; None before the last stage."""
    from megatron_fp8.files.checkpoint import find_checkpoint, read_manifest
    from megatron_fp8.mcore import checkpoint as checkpoints

    with model_parallel(layout):
        _, chunks, optimizer = build(config_file, layout, *overrides)
        folder = find_checkpoint(Path(checkpoint))
        checkpoints.load(folder, read_manifest(folder), chunks, optimizer)
        return megatron_logits(chunks[0], ids)


def megatron_logits(chunk: Any, ids: torch.Tensor) -> torch.Tensor | None:
    """The logits of a pipeline of one chunk a stage, gathered over tensor parallel ranks; None before the last stage."""
    from megatron.core import parallel_state as ps
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    def forward(batches: Any, model: Any) -> Any:
        positions = torch.arange(ids.shape[1]).expand_as(ids).contiguous()
        return model(next(batches), positions, None), lambda output, non_loss_data: output

    chunk.eval()
    with torch.no_grad():
        outputs = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter([ids]),
            model=chunk,
            num_microbatches=1,
            seq_length=ids.shape[1],
            micro_batch_size=ids.shape[0],
            forward_only=True,
            collect_non_loss_data=True,
        )
        if not ps.is_pipeline_last_stage():
            return None
        return gather_from_tensor_model_parallel_region(outputs[0]).float()


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a directory, read by the safetensors library alone."""
    from safetensors.torch import load_file

    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@torch.no_grad()
def next_token_layer(model: Any, folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """Put a layer of multi-token prediction into a DeepSeek-V3's directory, under DeepSeek's own names; its logits.

    transformers has the layer as a model of its own, and does not save it. float32 [batch, SEQUENCE, VOCAB]; the last
    one of a sequence lacks the token that follows.
    """
    from safetensors.torch import save_file
    from transformers.modeling_layers import MtpModel

    torch.manual_seed(9)
    further = MtpModel(model, 1).eval()
    layer, start = further.layers[0], f"model.layers.{model.config.num_hidden_layers}."
    found = {
        f"{start}embed_tokens.weight": model.model.embed_tokens.weight,
        f"{start}shared_head.head.weight": model.lm_head.weight,
    }
    for name, tensor in layer.state_dict().items():
        tensor.copy_(torch.randn_like(tensor) * (0.3 if tensor.dim() == 1 else 0.06) + (tensor.dim() == 1))
        name = name.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
        if name.endswith("experts.gate_up_proj"):
            for number, both in enumerate(tensor):
                for part, half in zip(("gate", "up"), both.chunk(2), strict=True):
                    found[f"{start}mlp.experts.{number}.{part}_proj.weight"] = half
        elif name.endswith("experts.down_proj"):
            found |= {
                f"{start}mlp.experts.{number}.down_proj.weight": one for number, one in enumerate(tensor)
            }
        else:
            found[start + name] = tensor
    everything = {**stored_tensors(folder), **{name: tensor.clone() for name, tensor in found.items()}}
    save_file(everything, folder / "model.safetensors", metadata={"format": "pt"})

    hidden = model.model(ids).last_hidden_state
    positions = torch.arange(ids.shape[1])[None]
    rolled = torch.cat([ids[:, 1:], ids[:, :1] * 0], dim=1)
    states = layer(
        model.model.embed_tokens(rolled),
        hidden,
        model.model.rotary_emb(hidden, positions),
        None,
        positions,
        None,
    )
    return model.lm_head(states).float()
