"""Small Llama, Qwen2 and Qwen3 models of transformers, and the logits of the same weights in Megatron-Core."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from benchmarks.support.ranks import Layout, model_parallel

VOCAB, SEQUENCE = 300, 24  # 300 tokens are padded to 384
KINDS = ("llama", "qwen2", "qwen3")
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
    name = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[kind]
    if kind != "qwen2":
        sizes["head_dim"] = 128
    config = getattr(transformers, f"{name}Config")(**{**sizes, **fields})
    torch.manual_seed(sum(map(ord, kind)))
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            assert parameter.std() > 0, parameter_name
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
    from megatron_fp8.mcore.checkpoint import training as checkpoints

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
