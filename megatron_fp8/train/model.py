"""The model of a run: Megatron-Core's GPTModel on FP8 layers, with data parallelism."""

from __future__ import annotations

import zlib
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
from torch import Tensor

from ..mcore.config.transformer_config import TransformerConfig
from ..mcore.names import named_parameters
from ..mcore.optimizer.adam import compact_state
from ..mcore.optimizer.loss_scaler import set_max_scale
from ..mcore.params import gather_settings
from ..mcore.runtime import unwrap
from ..mcore.spec import get_gpt_decoder_block_fp8_spec, get_gpt_mtp_block_fp8_spec
from ..state.collectives import own_device
from .config.model_section import failure_text
from .config.run_config import RunConfig
from .cuda_graph import side_stream
from .launch.parallel import RETRYABLE


def build_chunks(config: TransformerConfig, run: RunConfig, vocab_size: int) -> list[Any]:
    """This rank's model chunks, one per virtual pipeline stage, each in a DistributedDataParallel.

    Raises ValueError if the model cannot be built in this layout, or if Megatron-Core would reject its first step.
    """
    if config.num_moe_experts and config.tensor_model_parallel_size > 1 and not config.sequence_parallel:
        raise ValueError(
            f"model.tensor_model_parallel_size={config.tensor_model_parallel_size}, model.sequence_parallel=False and"
            f" model.num_moe_experts={config.num_moe_experts}: tensor parallel ranks send tokens of their own to experts:"
            " set model.sequence_parallel=true, or model.tensor_model_parallel_size=1."
        )
    # Micro-batches differ in tokens with a loss, so gradients are divided by the global batch's number of them.
    config.calculate_per_token_loss = run.data.loss != "all"
    stages = config.virtual_pipeline_model_parallel_size
    with _layout_errors():
        models = [
            _build_stage(config, run, vocab_size, stage if stages else None) for stage in range(stages or 1)
        ]
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=run.optimizer.overlap_grad_reduce,
        overlap_param_gather=run.optimizer.overlap_param_gather,
        use_distributed_optimizer=run.optimizer.use_distributed_optimizer,
        check_for_nan_in_grad=False,  # the optimizer detects them and skips the step
        **_gather_settings(config, run),
    )
    with side_stream() if run.train.cuda_graphs else nullcontext():
        chunks = [
            DistributedDataParallel(config, ddp, model, disable_bucketing=index > 0)
            for index, model in enumerate(models)
        ]
    for chunk in chunks:
        chunk.broadcast_params()
    return chunks


EXCLUDED_WEIGHTS = ("mtp.",)
"""Prefixes of the weights that ``build_model`` excludes."""


def build_model(config: TransformerConfig, run: RunConfig, vocab_size: int) -> Any:
    """The whole model of one pipeline stage, without data parallelism, for inference.

    Excludes layers of multi-token prediction (also from ``config``): they serve training, and Megatron-Core's GPTModel
    would run them in every forward pass, with or without labels.

    Raises ValueError if the model cannot be built in this layout.
    """
    config.mtp_num_layers = None
    with _layout_errors():
        return _build_stage(config, run, vocab_size, None)


@contextmanager
def _layout_errors() -> Iterator[None]:
    """Turn Megatron-Core's errors (assertions, indices, sizes) into ValueError. Errors in RETRYABLE pass through."""
    try:
        yield
    except Exception as error:
        if isinstance(error, (ValueError, *RETRYABLE)):
            raise
        raise ValueError(f"the model does not fit this layout: {failure_text(error)}") from error


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
    """Megatron-Core's optimizer. It skips steps with gradients that are not finite, in BF16 too."""
    section = run.optimizer
    with compact_state() if section.state_dtype == "fp8" else nullcontext():
        optimizer = get_megatron_optimizer(
            _optimizer_config(config, run),
            chunks,
            use_gloo_process_groups=False,  # no such groups exist
        )
    set_max_scale(optimizer, section.max_loss_scale)
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if section.overlap_grad_reduce:
        single_chunk = len(chunks) == 1
        config.no_sync_func = chunks[0].no_sync if single_chunk else [chunk.no_sync for chunk in chunks]
        if not single_chunk:  # interleaved stages signal when a chunk's gradients are complete
            config.grad_sync_func = [chunk.start_grad_sync for chunk in chunks]
            if section.overlap_param_gather:
                config.param_sync_func = [chunk.start_param_sync for chunk in chunks]
    return optimizer


def _optimizer_config(config: TransformerConfig, run: RunConfig) -> OptimizerConfig:
    section = run.optimizer
    return OptimizerConfig(
        optimizer="adam",
        lr=section.lr,
        min_lr=section.min_lr,
        weight_decay=section.weight_decay,
        adam_beta1=section.adam_beta1,
        adam_beta2=section.adam_beta2,
        adam_eps=section.adam_eps,
        clip_grad=section.clip_grad,
        bf16=config.bf16,
        fp16=config.fp16,
        params_dtype=config.params_dtype,
        # In BF16 a constant scale of 1 changes no gradient, and makes Megatron check gradients for NaN and Inf.
        loss_scale=section.loss_scale if config.fp16 else 1.0,
        initial_loss_scale=section.initial_loss_scale,
        min_loss_scale=section.min_loss_scale,
        loss_scale_window=section.loss_scale_window,
        hysteresis=section.hysteresis,
        use_distributed_optimizer=section.use_distributed_optimizer,
        overlap_param_gather=section.overlap_param_gather,
        fp8_recipe=config.fp8_recipe if config.fp8 and config.fp8_param else None,
        reuse_grad_buf_for_mxfp8_param_ag=_gather_settings(config, run)["reuse_grad_buf_for_mxfp8_param_ag"],
    )


def _gather_settings(config: TransformerConfig, run: RunConfig) -> dict[str, bool]:
    section = run.optimizer
    return gather_settings(
        config,
        distributed=section.use_distributed_optimizer,
        share=section.reuse_grad_buf_for_mxfp8_param_ag,
    )


def build_scheduler(run: RunConfig, optimizer: Any) -> OptimizerParamScheduler:
    """Learning rate by iteration: linear warm-up, then decay."""
    section = run.optimizer
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=section.lr,
        min_lr=section.min_lr,
        lr_warmup_steps=section.lr_warmup_iters,
        lr_decay_steps=section.lr_decay_iters or run.train.train_iters,
        lr_decay_style=section.lr_decay_style,
        start_wd=section.weight_decay,
        end_wd=section.weight_decay,
        wd_incr_steps=run.train.train_iters,
        wd_incr_style="constant",
    )
    scheduler.step(1)  # otherwise the first step would have rate 0 and the last would miss the minimum
    return scheduler


def count_parameters(chunks: list[Any]) -> dict[str, int]:
    """Number of parameters of the whole model over all ranks. Collective.

    Keys: 'total'; 'non_embedding' (no token or position table, no output projection); with experts also 'active', the
    non-embedding parameters that one token uses. Tied weights count once.
    """
    config = unwrap(chunks[0]).config
    counts = torch.zeros(3, dtype=torch.int64, device=own_device())
    for name, parameter in _named_parameters(chunks):
        expert = is_expert(name)
        replica, part = _parallel_ranks(expert)
        split = getattr(parameter, "tensor_model_parallel", False)
        if replica or (part and not split) or (getattr(parameter, "shared", False) and _is_second_copy()):
            continue
        counts[0] += parameter.numel()
        if not ("embedding." in name or "output_layer." in name):
            counts[1] += parameter.numel()
            counts[2] += parameter.numel() if expert else 0
    dist.all_reduce(counts)
    total, non_embedding, experts = counts.tolist()
    result = {"total": total, "non_embedding": non_embedding}
    if config.num_moe_experts:
        left_out = config.num_moe_experts - config.moe_router_topk
        result["active"] = non_embedding - experts * left_out // config.num_moe_experts
    return result


def _parallel_ranks(expert: bool) -> tuple[int, int]:
    """This rank's data-parallel and tensor-parallel rank, in the experts' groups if `expert`."""
    if expert:
        replica = parallel_state.get_expert_data_parallel_rank()
        return replica, parallel_state.get_expert_tensor_parallel_rank()
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return replica, parallel_state.get_tensor_model_parallel_rank()


def _named_parameters(chunks: list[Any]) -> Iterable[tuple[str, torch.nn.Parameter]]:
    for chunk in chunks:
        yield from chunk.named_parameters()


def _is_second_copy() -> bool:
    """Whether this stage has the copy of a tied embedding: the last stage, unless it is also the first."""
    return parallel_state.get_pipeline_model_parallel_rank() > 0


_OUTPUT_PROJECTIONS = ("linear_proj.weight", "linear_fc2.weight")


@torch.no_grad()
def draw_weights(model: Any, config: Any, seed: int) -> None:
    """Initialise every matrix of `model` (this rank's stage, not wrapped yet); vectors keep their constants.

    The weights do not depend on the parallel layout. Megatron-Core draws them in the order in which each rank builds its
    layers, so another number of pipeline stages gives another model, and expert-parallel ranks draw identical experts.
    Here every matrix is drawn in full, with the standard deviation of Megatron-Core's config, from a generator seeded by
    the run's seed and the matrix's global name. Each rank then copies its shard.
    """
    for name, parameter in named_parameters(model):
        if parameter.dim() < 2:
            continue
        group = _tensor_parallel_group(name)
        name = _seed_name(model, name)
        whole = torch.empty(_whole_shape(parameter, group), dtype=torch.float32, device="cpu")
        if "embedding" in name:
            draw = config.embedding_init_method
        else:
            projects_out = name.endswith(_OUTPUT_PROJECTIONS)
            draw = config.output_layer_init_method if projects_out else config.init_method
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            draw(whole)
        parameter.copy_(_shard(whole, parameter, group))


def _seed_name(model: Any, name: str) -> str:
    """The parameter name that seeds the generator: a tied output layer is drawn as the embedding."""
    if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
        return "embedding.word_embeddings.weight"
    return name.replace(".experts.local_experts.", ".experts.")


def is_expert(name: str) -> bool:
    """Whether a parameter belongs to an expert. Experts use other parallel groups than the other parameters."""
    return ".experts.local_experts." in name


def _tensor_parallel_group(name: str) -> Any:
    """The tensor-parallel group of a matrix, named ``name`` on this rank."""
    if is_expert(name):
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def _whole_shape(parameter: Any, group: Any) -> list[int]:
    shape = list(parameter.shape)
    if getattr(parameter, "tensor_model_parallel", False):
        shape[parameter.partition_dim] *= group.size()
    return shape


def _shard(whole: Tensor, parameter: Any, group: Any) -> Tensor:
    """This tensor-parallel rank's shard; of a fused gate and up projection (stride 2) a shard of each."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return whole
    dim = parameter.partition_dim
    fused = whole.chunk(parameter.partition_stride, dim)
    return torch.cat([part.chunk(group.size(), dim)[group.rank()] for part in fused], dim)
