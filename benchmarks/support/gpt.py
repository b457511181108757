"""A small GPT on Megatron-Core: config, model, optimizer, data and step, for any layout.

    with model_parallel(Layout(tp=2)) as layout:
        config = gpt_config(layout)  # any TransformerConfig class: cls=..., any field: name=...
        run = train(config, steps=3)  # run.losses, run.grad_norms, run.chunks

Initial weights depend on a parameter's global name and the seed alone, so every layout starts from the same
model; batches depend on the iteration alone, so every layout sees the same tokens.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.support.ranks import Layout

VOCAB, SEQUENCE = 512, 64


def gpt_config(
    layout: Layout | None = None, *, cls: type | None = None, llama: bool = True, **fields: Any
) -> Any:
    """A TransformerConfig of two small layers: Llama-like (GQA, SwiGLU, RMSNorm, no bias) or GPT-like.

    GEMM sizes are multiples of 128 on each of two tensor-parallel ranks.
    """
    from megatron.core.transformer.transformer_config import TransformerConfig

    kind: dict[str, Any] = (
        {
            "num_query_groups": 2,
            "gated_linear_unit": True,
            "activation_func": F.silu,
            "normalization": "RMSNorm",
        }
        if llama
        else {"gated_linear_unit": False, "activation_func": F.gelu, "normalization": "LayerNorm"}
    )
    defaults = dict(
        num_layers=2,
        hidden_size=256,
        num_attention_heads=4,
        ffn_hidden_size=512,
        add_bias_linear=not llama,
        bf16=True,
        params_dtype=torch.bfloat16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        **kind,
    )
    return (cls or TransformerConfig)(**{**defaults, **(layout or Layout()).config_fields(), **fields})


def bf16_spec(config: Any) -> Any:
    """Layer spec of Megatron-Core's own parallel linears with this package's norm and core attention."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from megatron_fp8.mcore.layers.attention import CoreAttention
    from megatron_fp8.mcore.layers.norm import Norm

    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        normalization=config.normalization,
        qk_layernorm=config.qk_layernorm,
    )
    parts = spec.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = Norm
    parts.self_attention.submodules.core_attention = CoreAttention
    return spec


@dataclass
class Run:
    """What a training run gave. Losses and norms are the same on all ranks."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    chunks: list[Any] = field(default_factory=list)
    optimizer: Any = None


def train(
    config: Any,
    *,
    spec: Callable[[Any], Any] = bf16_spec,
    steps: int = 1,
    micro_batch: int = 2,
    global_batch: int = 8,
    sequence: int = SEQUENCE,
    vocab: int = VOCAB,
    tied: bool = False,
    ddp: dict[str, Any] | None = None,
    optim: dict[str, Any] | None = None,
    seed: int = 7,
    on_step: Callable[[int, Run], None] | None = None,
) -> Run:
    """Builds the model and takes `steps` optimizer steps as Megatron-LM's loop does. Call it on every rank.

    spec      config -> layer spec (ModuleSpec or TransformerBlockSubmodules)
    ddp/optim fields of DistributedDataParallelConfig / OptimizerConfig over this file's defaults
    on_step   called after each step with its index and the Run so far
    """
    chunks = build_chunks(config, spec=spec, sequence=sequence, vocab=vocab, tied=tied, ddp=ddp, seed=seed)
    optimizer = build_optimizer(config, chunks, ddp=ddp, optim=optim)
    run = Run(chunks=chunks, optimizer=optimizer)
    for step in range(steps):
        loss, norm = train_step(
            config,
            chunks,
            optimizer,
            step,
            micro_batch=micro_batch,
            global_batch=global_batch,
            sequence=sequence,
            vocab=vocab,
        )
        run.losses.append(loss)
        run.grad_norms.append(norm)
        if on_step is not None:
            on_step(step, run)
    return run


def build_chunks(
    config: Any,
    *,
    spec: Callable[[Any], Any] = bf16_spec,
    sequence: int = SEQUENCE,
    vocab: int = VOCAB,
    tied: bool = False,
    ddp: dict[str, Any] | None = None,
    seed: int = 7,
) -> list[Any]:
    """This rank's chunks (one per virtual stage): Megatron's DDP around Float16Module around GPTModel."""
    from megatron.core import parallel_state as ps
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.module import Float16Module

    vpp = config.virtual_pipeline_model_parallel_size
    chunks = []
    for stage in range(vpp or 1):
        vp_stage = stage if vpp else None
        layers = spec(config)
        model = GPTModel(
            config,
            layers,
            vocab_size=vocab,
            max_sequence_length=sequence,
            pre_process=ps.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=ps.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            share_embeddings_and_output_weights=tied,
            position_embedding_type="rope" if config.gated_linear_unit else "learned_absolute",
            mtp_block_spec=_mtp_spec(config, layers, vp_stage),
            vp_stage=vp_stage,
        )
        initialise(model, config, seed)
        chunks.append(Float16Module(config, model) if config.bf16 or config.fp16 else model)
    ddp_config = _ddp_config(ddp)
    wrapped = []
    for index, chunk in enumerate(chunks):
        # As Megatron-LM does: only the first chunk's buckets are split, the others are reduced whole.
        wrapped.append(DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=index > 0))
    for chunk in wrapped:
        chunk.broadcast_params()
    return wrapped


def _mtp_spec(config: Any, layers: Any, vp_stage: int | None) -> Any:
    """Of multi-token prediction, where the config asks for it."""
    if not config.mtp_num_layers:
        return None
    from megatron_fp8.mcore.spec import get_gpt_mtp_block_fp8_spec

    return get_gpt_mtp_block_fp8_spec(config, layers, vp_stage)


def build_optimizer(
    config: Any, chunks: list[Any], *, ddp: dict[str, Any] | None = None, optim: dict[str, Any] | None = None
) -> Any:
    """Adam by get_megatron_optimizer, and the config's hooks that the schedules call."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    ddp_config = _ddp_config(ddp)
    defaults = {
        "optimizer": "adam",
        "lr": 1e-3,
        "weight_decay": 0.01,
        "clip_grad": 1.0,
        "bf16": config.bf16,
        "fp16": config.fp16,
        "params_dtype": config.params_dtype,
        "use_distributed_optimizer": ddp_config.use_distributed_optimizer,
        "overlap_param_gather": ddp_config.overlap_param_gather,
    }
    optimizer = get_megatron_optimizer(OptimizerConfig(**{**defaults, **(optim or {})}), chunks)
    one = len(chunks) == 1
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if ddp_config.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = no_sync[0] if one else no_sync
        if not one:
            config.grad_sync_func = [chunk.start_grad_sync for chunk in chunks]
    if ddp_config.overlap_param_gather and not one:
        config.param_sync_func = [chunk.start_param_sync for chunk in chunks]
    return optimizer


def train_step(
    config: Any,
    chunks: list[Any],
    optimizer: Any,
    iteration: int,
    *,
    micro_batch: int = 2,
    global_batch: int = 8,
    sequence: int = SEQUENCE,
    vocab: int = VOCAB,
    forward_only: bool = False,
) -> tuple[float, float]:
    """One iteration of the layout's schedule; returns (mean loss, gradient norm) on every rank."""
    from megatron.core import parallel_state as ps
    from megatron.core.pipeline_parallel import get_forward_backward_func

    replicas = ps.get_data_parallel_world_size()
    count, rest = divmod(global_batch, micro_batch * replicas)
    assert rest == 0 and count > 0, (global_batch, micro_batch, replicas)
    for chunk in chunks:
        if not forward_only:
            chunk.zero_grad_buffer()
        chunk.train(not forward_only)
    if not forward_only:
        optimizer.zero_grad()
    data = [_batches(iteration, count, micro_batch, sequence, vocab) for _ in chunks]
    results = get_forward_backward_func()(
        forward_step_func=_forward_step,
        data_iterator=data if len(chunks) > 1 else data[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=count,
        seq_length=sequence,
        micro_batch_size=micro_batch,
        forward_only=forward_only,
    )
    norm = 0.0
    if not forward_only:
        stepped, norm, _ = optimizer.step()
        assert stepped
    # [sum of losses, tokens]; only last stages have results, and tensor-parallel ranks hold the same ones.
    total = torch.zeros(2, dtype=torch.float64)
    if ps.get_tensor_model_parallel_rank() == 0:
        for result in results:
            total += result["lm loss"].double()
    dist.all_reduce(total)
    return float(total[0] / total[1]), float(norm)


def initialise(model: torch.nn.Module, config: Any, seed: int) -> None:
    """Gives every parameter this rank's slice of values that depend on its global name and `seed` only.

    Matrices are normal with deviation 0.02; vectors (norms, biases) keep their value plus such noise.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            assert names[id(parameter)] == name
            parts = _partitions(name)
            whole = _slice(_noise(_global_name(model, name), parameter, seed, parts[0]), parameter, parts)
            parameter.copy_(whole if parameter.dim() > 1 else parameter.float() + whole)


def _noise(name: str, parameter: Any, seed: int, parts: int) -> Tensor:
    """The whole tensor, of which `parameter` may be one of so many parts, float32."""
    shape = list(parameter.shape)
    if getattr(parameter, "tensor_model_parallel", False):
        shape[parameter.partition_dim] *= parts
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    return torch.randn(shape, generator=generator) * 0.02


def _slice(whole: Tensor, parameter: Any, parts: tuple[int, int]) -> Tensor:
    """This tensor-parallel rank's part; stride 2 (fused gate and up projection) is a part of each half."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return whole
    size, rank = parts
    dim = parameter.partition_dim
    halves = whole.chunk(parameter.partition_stride, dim)
    return torch.cat([half.chunk(size, dim)[rank] for half in halves], dim)


def _partitions(name: str) -> tuple[int, int]:
    """(size, rank) of the tensor-parallel group that shares a parameter; experts may have another one."""
    from megatron.core import parallel_state as ps

    if "local_experts." in name:
        return ps.get_expert_tensor_parallel_world_size(), ps.get_expert_tensor_parallel_rank()
    return ps.get_tensor_model_parallel_world_size(), ps.get_tensor_model_parallel_rank()


def _global_name(model: Any, name: str) -> str:
    """The name with global layer and expert numbers; a tied output layer has the embedding's name."""
    from megatron.core import parallel_state as ps

    if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
        return "embedding.word_embeddings.weight"
    if match := re.match(r"decoder\.layers\.(\d+)\.(.*)", name):
        layer = model.decoder.layers[int(match[1])]
        name = f"decoder.layers.{layer.layer_number - 1}.{match[2]}"
    if expert := re.search(r"local_experts\.(\d+)", name):
        here = model.config.num_moe_experts // ps.get_expert_model_parallel_world_size()
        first = ps.get_expert_model_parallel_rank() * here
        name = name.replace(expert[0], f"experts.{first + int(expert[1])}")
    return name


def _ddp_config(ddp: dict[str, Any] | None) -> Any:
    from megatron.core.distributed import DistributedDataParallelConfig

    return DistributedDataParallelConfig(**{"grad_reduce_in_fp32": True, **(ddp or {})})


def _batches(
    iteration: int, count: int, micro_batch: int, sequence: int, vocab: int
) -> Iterator[dict[str, Tensor]]:
    """This rank's microbatches: [micro_batch, sequence] tokens and labels, or the CP rank's part of them."""
    from megatron.core import parallel_state as ps
    from megatron.core.utils import get_batch_on_this_cp_rank

    replicas, replica = ps.get_data_parallel_world_size(), ps.get_data_parallel_rank()
    for index in range(count):
        first = (index * replicas + replica) * micro_batch
        rows = [_sample(iteration, first + row, sequence, vocab) for row in range(micro_batch)]
        whole = torch.stack(rows)
        yield get_batch_on_this_cp_rank(
            {
                "tokens": whole[:, :-1].contiguous(),
                "labels": whole[:, 1:].contiguous(),
                "position_ids": torch.arange(sequence).expand(micro_batch, -1).contiguous(),
            }
        )


def _sample(iteration: int, index: int, sequence: int, vocab: int) -> Tensor:
    """A learnable sequence: each token is the previous one plus a step that is 1, 2 or 3."""
    generator = torch.Generator().manual_seed(1_000_003 * iteration + index)
    steps = torch.randint(1, 4, (sequence + 1,), generator=generator)
    return (steps.cumsum(0) + torch.randint(vocab, (1,), generator=generator)) % vocab


def _forward_step(batches: Iterator[dict[str, Tensor]], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
    batch = next(batches)
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return losses, partial(_loss, losses.numel())


def _loss(count: int, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sum of the microbatch's losses and its token count for backward; both again for the report."""
    total, tokens = losses.float().sum(), torch.tensor(count, dtype=torch.int)
    return total, tokens, {"lm loss": torch.stack([total.detach(), tokens])}
