"""The model of a run: Megatron-Core's GPTModel on FP8 layers, with data parallelism."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module

from ..mcore.config.transformer_config import TransformerConfig
from ..mcore.optimizer.compact_moments import compact_state
from ..mcore.optimizer.loss_scaler import set_max_scale
from ..mcore.params import gather_settings
from ..mcore.runtime import unwrap
from ..mcore.spec import get_gpt_decoder_block_fp8_spec, get_gpt_mtp_block_fp8_spec
from ..state.ranks import own_device
from .config.model_section import what_failed
from .config.run_config import RunConfig
from .initial import draw_weights, is_expert
from .launch.parallel import PASSING


def build_chunks(config: TransformerConfig, run: RunConfig, vocab_size: int) -> list[Any]:
    """This rank's model chunks, one per virtual pipeline stage, each a DistributedDataParallel.

    Raises ValueError if the model cannot be built in this layout, or Megatron-Core would refuse its first step.
    """
    if config.num_moe_experts and config.tensor_model_parallel_size > 1 and not config.sequence_parallel:
        raise ValueError(
            f"model.tensor_model_parallel_size={config.tensor_model_parallel_size}, model.sequence_parallel=False and"
            f" model.num_moe_experts={config.num_moe_experts}: tensor parallel ranks send tokens of their own to experts:"
            " set model.sequence_parallel=true, or model.tensor_model_parallel_size=1."
        )
    # A micro-batch may have any number of tokens with a loss: gradients are divided by those of the global batch.
    config.calculate_per_token_loss = run.data.loss != "all"
    stages = config.virtual_pipeline_model_parallel_size
    with _refusing_a_layout():
        models = [
            _build_stage(config, run, vocab_size, stage if stages else None) for stage in range(stages or 1)
        ]
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=run.optimizer.overlap_grad_reduce,
        overlap_param_gather=run.optimizer.overlap_param_gather,
        use_distributed_optimizer=run.optimizer.use_distributed_optimizer,
        check_for_nan_in_grad=False,  # the optimizer sees them and skips the step
        **_gather_settings(config, run),
    )
    chunks = [
        DistributedDataParallel(config, ddp, model, disable_bucketing=index > 0)
        for index, model in enumerate(models)
    ]
    for chunk in chunks:
        chunk.broadcast_params()
    return chunks


LEFT_OUT = ("mtp.",)
"""What names of weights begin with that ``build_model`` leaves out of a model."""


def build_model(config: TransformerConfig, run: RunConfig, vocab_size: int) -> Any:
    """The whole model of one pipeline stage, not wrapped for data parallelism: for inference.

    Layers of multi-token prediction are left out, of ``config`` too: they serve training, and Megatron-Core's GPTModel
    runs them on whatever it is given, with labels or without.

    Raises ValueError if the model cannot be built in this layout.
    """
    config.mtp_num_layers = None
    with _refusing_a_layout():
        return _build_stage(config, run, vocab_size, None)


@contextmanager
def _refusing_a_layout() -> Iterator[None]:
    """Megatron-Core's ways to refuse (an assertion, an index, a size) become a ValueError. What passes, passes."""
    try:
        yield
    except Exception as error:
        if isinstance(error, (ValueError, *PASSING)):
            raise
        raise ValueError(f"the model does not fit this layout: {what_failed(error)}") from error


def _build_stage(config: TransformerConfig, run: RunConfig, vocab_size: int, stage: int | None) -> Any:
    layers = get_gpt_decoder_block_fp8_spec(config, vp_stage=stage)
    model = GPTModel(
        config=config,
        transformer_layer_spec=layers,
        mtp_block_spec=get_gpt_mtp_block_fp8_spec(config, layers, vp_stage=stage),
        vocab_size=vocab_size,
        max_sequence_length=run.train.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=stage is None, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=stage is None, vp_stage=stage),
        share_embeddings_and_output_weights=run.model.share_embeddings_and_output_weights,
        position_embedding_type=run.model.position_embedding_type,
        rotary_percent=run.model.rotary_percent,
        rotary_base=run.model.rotary_base,
        rope_scaling=run.model.rope_scaling,
        rope_scaling_factor=run.model.rope_scaling_factor,
        vp_stage=stage,
    )
    if config.use_cpu_initialization:
        draw_weights(model, config, run.train.seed)
    if torch.cuda.is_available():
        model.cuda(torch.cuda.current_device())
    return Float16Module(config, model) if config.bf16 or config.fp16 else model


def build_optimizer(config: TransformerConfig, run: RunConfig, chunks: list[Any]) -> Any:
    """Megatron-Core's optimizer; in BF16 also it finds gradients that are not finite and skips their step."""
    wanted = run.optimizer
    with compact_state() if wanted.state_dtype == "fp8" else nullcontext():
        optimizer = get_megatron_optimizer(
            _optimizer_config(config, run),
            chunks,
            use_gloo_process_groups=False,  # there are none
        )
    set_max_scale(optimizer, wanted.max_loss_scale)
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if wanted.overlap_grad_reduce:
        one = len(chunks) == 1
        config.no_sync_func = chunks[0].no_sync if one else [chunk.no_sync for chunk in chunks]
        if not one:  # interleaved stages say themselves when a chunk's gradients are complete
            config.grad_sync_func = [chunk.start_grad_sync for chunk in chunks]
            if wanted.overlap_param_gather:
                config.param_sync_func = [chunk.start_param_sync for chunk in chunks]
    return optimizer


def _optimizer_config(config: TransformerConfig, run: RunConfig) -> OptimizerConfig:
    wanted = run.optimizer
    return OptimizerConfig(
        optimizer="adam",
        lr=wanted.lr,
        min_lr=wanted.min_lr,
        weight_decay=wanted.weight_decay,
        adam_beta1=wanted.adam_beta1,
        adam_beta2=wanted.adam_beta2,
        adam_eps=wanted.adam_eps,
        clip_grad=wanted.clip_grad,
        bf16=config.bf16,
        fp16=config.fp16,
        params_dtype=config.params_dtype,
        # In BF16 a constant scale of 1 changes no gradient and makes Megatron look for Inf and NaN in them.
        loss_scale=wanted.loss_scale if config.fp16 else 1.0,
        initial_loss_scale=wanted.initial_loss_scale,
        min_loss_scale=wanted.min_loss_scale,
        loss_scale_window=wanted.loss_scale_window,
        hysteresis=wanted.hysteresis,
        use_distributed_optimizer=wanted.use_distributed_optimizer,
        overlap_param_gather=wanted.overlap_param_gather,
        fp8_recipe=config.fp8_recipe if config.fp8 and config.fp8_param else None,
        reuse_grad_buf_for_mxfp8_param_ag=_gather_settings(config, run)["reuse_grad_buf_for_mxfp8_param_ag"],
    )


def _gather_settings(config: TransformerConfig, run: RunConfig) -> dict[str, bool]:
    wanted = run.optimizer
    return gather_settings(
        config,
        distributed=wanted.use_distributed_optimizer,
        share=wanted.reuse_grad_buf_for_mxfp8_param_ag,
    )


def build_scheduler(run: RunConfig, optimizer: Any) -> OptimizerParamScheduler:
    """Learning rate by iteration: linear warm-up, then decay."""
    wanted = run.optimizer
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=wanted.lr,
        min_lr=wanted.min_lr,
        lr_warmup_steps=wanted.lr_warmup_iters,
        lr_decay_steps=wanted.lr_decay_iters or run.train.train_iters,
        lr_decay_style=wanted.lr_decay_style,
        start_wd=wanted.weight_decay,
        end_wd=wanted.weight_decay,
        wd_incr_steps=run.train.train_iters,
        wd_incr_style="constant",
    )
    scheduler.step(1)  # else the first step would have a learning rate of 0 and the last one miss the minimum
    return scheduler


def count_parameters(chunks: list[Any]) -> dict[str, int]:
    """Parameters of the whole model over all its ranks: 'total', and 'non_embedding' (no token or position table, no
    output projection). Tied weights count once. With experts also 'active': of the latter, those that one token meets.
    Collective."""
    config = unwrap(chunks[0]).config
    counts = torch.zeros(3, dtype=torch.int64, device=own_device())
    for name, parameter in _named_parameters(chunks):
        expert = is_expert(name)
        replica, part = _place(expert)
        split = getattr(parameter, "tensor_model_parallel", False)
        if replica or (part and not split) or (getattr(parameter, "shared", False) and _is_second_copy()):
            continue
        counts[0] += parameter.numel()
        if not ("embedding." in name or "output_layer." in name):
            counts[1] += parameter.numel()
            counts[2] += parameter.numel() if expert else 0
    dist.all_reduce(counts)
    total, non_embedding, experts = counts.tolist()
    found = {"total": total, "non_embedding": non_embedding}
    if config.num_moe_experts:
        left_out = config.num_moe_experts - config.moe_router_topk
        found["active"] = non_embedding - experts * left_out // config.num_moe_experts
    return found


def _place(expert: bool) -> tuple[int, int]:
    """Which replica of its parameters, and which tensor parallel part of them, this rank has; of experts, theirs."""
    if expert:
        replica = parallel_state.get_expert_data_parallel_rank()
        return replica, parallel_state.get_expert_tensor_parallel_rank()
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return replica, parallel_state.get_tensor_model_parallel_rank()


def _named_parameters(chunks: list[Any]) -> Iterable[tuple[str, torch.nn.Parameter]]:
    for chunk in chunks:
        yield from chunk.named_parameters()


def _is_second_copy() -> bool:
    """A tied embedding has its copy on the last pipeline stage, when that is not the first one too."""
    return parallel_state.get_pipeline_model_parallel_rank() > 0
