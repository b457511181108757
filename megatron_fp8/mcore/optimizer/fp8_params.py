"""Megatron-Core's optimizers over FP8 parameters: masters, casts, communication.

Most of it is Megatron's own: the distributed optimizer calls ``quantize_param_shard`` after its step and gathers
bytes; the other one calls ``copy_`` on every weight, which quantizes. This module fixes six things that Megatron
leaves to the training loop or silently gets wrong:

* **Masters start in high precision.** Megatron's plain FP16/BF16 optimizer makes them from the parameter, that is
  from the codes; and a rank without a piece of a weight never frees its high-precision original.
* **A skipped step still changes delayed scales.** Without FP8 parameters the weight is cast again in the next
  iteration, with the new scale. Megatron copies no master on a skipped step, so the codes would keep the old one.
* **A shared buffer is filled before every gather.** With reuse_grad_buf_for_mxfp8_param_ag parameters are sent
  through the gradient buffer. Megatron fills it in the optimizer step, or leaves that to the loop if gathers overlap
  the forward pass: a loop without it, or a validation in between, gathers zeros or gradients as weights. Here the
  gather itself fills it, from the masters.
* **Such a gather waits for all optimizers.** Experts that are split over ranks have an optimizer of their own. The first
  optimizer's step gathers all parameters, through the gradients that the other has not read yet.
* **A weight is read from the place where it was written.** Megatron pads the start of each parameter in the buffer to
  64 elements, but reads it at a running sum without padding: wrong after the first parameter whose size is no
  multiple of 64.
* **The gradient norm is the same for any order of shards.** Megatron sums squares in float32, shard by shard, in the
  order of its buffers. FP8 weights have a separate buffer, shards are split elsewhere, and the sum's last bits differ
  from the same training with BF16 weights; clipping spreads the difference to every gradient. Summed in float64 and
  rounded once, the norm is the same float32 number for any split (except for about one sum in 10^8, which is too
  close to a rounding boundary). Only the distributed optimizer shards, so other optimizers keep Megatron's norm.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from ...fp8_utils import quantizes
from ...params.fp8_parameter import Fp8Parameter
from ...state.collectives import own_device
from ..patches.patching import PatchList
from .cpu_offload import create_moments

patches = PatchList()
_DISTRIBUTED = "optimizer.distrib_optimizer.DistributedOptimizer"
_BUFFERS = "distributed.param_and_grad_buffer"


# --------------------------------------------------------------------------------------------------------- construction


@patches.wrap(
    "optimizer.optimizer.Float16OptimizerWithFloat16Params.__init__",
    "it makes float32 masters from FP8 codes",
)
def masters_from_the_start(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Masters start from the original weights, not from codes."""
    original(self, *args, **kwargs)
    if self.is_stub_optimizer:
        return
    for params, masters in zip(self.float16_groups, self.fp32_from_float16_groups, strict=True):
        for param, master in zip(params, masters, strict=True):
            if isinstance(param, Fp8Parameter):
                master.data.copy_(param.get_high_precision_init_val())
                param.clear_high_precision_init_val()


@patches.wrap(f"{_DISTRIBUTED}.__init__", "it does not compare its config with DDP's")
def check_and_clear(
    original: Callable[..., None],
    self: Any,
    optimizer: Any,
    config: Any,
    grad_scaler: Any,
    init_state_fn: Any,
    model_chunks: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Checks its config against the model's, frees the original weights, and lets an offloaded one create its state."""
    ddp = model_chunks[0].ddp_config
    if config.reuse_grad_buf_for_mxfp8_param_ag != ddp.reuse_grad_buf_for_mxfp8_param_ag:
        raise ValueError(
            f"OptimizerConfig.reuse_grad_buf_for_mxfp8_param_ag={config.reuse_grad_buf_for_mxfp8_param_ag}, and"
            f" DistributedDataParallelConfig's is {ddp.reuse_grad_buf_for_mxfp8_param_ag}: one would gather what the"
            " other does not fill. Give both the same value."
        )
    if isinstance(optimizer, HybridDeviceOptimizer) and "betas" in optimizer.defaults:  # Adam's moments
        init_state_fn = create_moments
    original(self, optimizer, config, grad_scaler, init_state_fn, model_chunks, *args, **kwargs)
    for param in _fp8_params_of(self):
        param.clear_high_precision_init_val()
        _set_owned_piece(self, param)


def _set_owned_piece(optimizer: Any, param: Fp8Parameter) -> None:
    """Sets the part of a parameter's master that this rank holds. Of several instances with it, the first owns it."""
    if param not in optimizer.model_param_gbuf_map or optimizer.distributed_optimizer_instance_id != 0:
        param.own_piece(0, 0)
        return
    piece = optimizer._get_model_param_range_map(param)["param"]
    param.own_piece(piece.start, piece.end)


@patches.wrap(
    f"{_DISTRIBUTED}._build_model_and_main_param_groups",
    "for delayed scaling it keeps slices of dequantized weights",
)
def without_slices_of_codes(
    original: Callable[..., Any], gbuf_ranges: Any, param_gbuf_map: Any, opt_group_ranges: Any, config: Any
) -> Any:
    """Hides the recipe 'delayed' from it.

    For delayed scaling alone Megatron stores a flat slice of each FP8 weight; a slice of a wrapper is a dequantized
    copy.
    """
    plain = copy.copy(config)
    plain.fp8_recipe = None
    return original(gbuf_ranges, param_gbuf_map, opt_group_ranges, plain)


# ------------------------------------------------------------------------------------------------------- skipped steps


def recast_when_skipped(original: Callable[..., Any], self: Any) -> Any:
    """A step after which, if it was skipped, delayed codes are cast again from masters, with new scales."""
    result = original(self)
    if not result[0]:
        for optimizer in getattr(self, "chained_optimizers", [self]):
            recast(optimizer)
    return result


for _owner in ("MixedPrecisionOptimizer", "ChainedOptimizer"):
    patches.wrap(
        f"optimizer.optimizer.{_owner}.step",
        "a skipped step copies no master, and delayed scales have changed",
    )(recast_when_skipped)


@torch.no_grad()
def recast(optimizer: Any) -> None:
    """Casts delayed FP8 weights again from this optimizer's masters. Collective over its data-parallel group."""
    if not any(param.rule.delayed for param in _fp8_params_of(optimizer)):
        return
    optimizer._copy_main_params_to_model_params()
    ddp = getattr(optimizer, "ddp_config", None)
    # With overlap_param_gather the next forward pass gathers.
    if ddp is not None and not ddp.overlap_param_gather:
        for chunk in optimizer.model_chunks:
            chunk.start_param_sync()


def _fp8_params_of(optimizer: Any) -> list[Fp8Parameter]:
    """Returns the FP8 parameters that an optimizer updates; for the distributed one the same list on all its ranks."""
    if getattr(optimizer, "is_stub_optimizer", True):
        return []
    if hasattr(optimizer, "buffers"):
        params = [param for buffer in optimizer.buffers for param in buffer.params]
    else:
        params = [param for group in getattr(optimizer, "float16_groups", []) for param in group]
    return [param for param in params if isinstance(param, Fp8Parameter)]


# ------------------------------------------------------------------------------------------------------- shared buffer


@patches.wrap(
    f"{_BUFFERS}._ParamAndGradBucketGroup.start_param_sync",
    "a gather through the gradient buffer sends its current content",
)
def send_masters(original: Callable[..., None], self: Any, force_sync: bool = False) -> None:
    """Fills a buffer that is shared with gradients from the masters first."""
    shared = self.ddp_config.reuse_grad_buf_for_mxfp8_param_ag
    if shared and self.param_gather_handle is None:  # else it is running
        ranks = self.intra_distributed_optimizer_instance_size
        for bucket in self.buckets:
            _fill(bucket, self.intra_distributed_optimizer_instance_rank, ranks)
    original(self, force_sync)
    # Megatron copies weights out in the forward pre-hook or the model's start_param_sync, not after a forced gather.
    if shared and force_sync and self.ddp_config.overlap_param_gather:
        for bucket in self.buckets:
            for param in bucket.params:
                start, end = bucket.param_to_index[param]
                param.data.copy_(bucket.param_data[start:end].view(param.shape))
            bucket.param_data.zero_()


@patches.wrap(
    "optimizer.optimizer.ChainedOptimizer.step_with_ready_grads",
    "the first optimizer's gather overwrites gradients that the next one reads",
)
def gather_after_all_steps(original: Callable[[Any], bool], self: Any) -> bool:
    """Holds back gathers through gradient buffers until every optimizer has stepped, then gathers once."""
    sharing = [part for part in self.chained_optimizers if isinstance(part, DistributedOptimizer)]
    chunks = dict.fromkeys(
        chunk
        for part in sharing
        for chunk in part.model_chunks
        if chunk.ddp_config.reuse_grad_buf_for_mxfp8_param_ag and not chunk.ddp_config.overlap_param_gather
    )
    if len(self.chained_optimizers) == 1 or not chunks:
        return original(self)
    try:
        for chunk in chunks:
            chunk.start_param_sync = lambda *_, **__: None
        stepped = original(self)
    finally:
        for chunk in chunks:
            del chunk.start_param_sync
    for chunk in chunks:
        chunk.start_param_sync()
    return stepped


@torch.no_grad()
def _fill(bucket: Any, rank: int, ranks: int) -> None:
    """Fills this rank's part of the bucket from masters; without an optimizer, from the parameters' values."""
    size = bucket.param_data.numel() // ranks
    for param in bucket.params_list:
        start, end = bucket.param_to_index[param]
        low, high = max(start, rank * size), min(end, (rank + 1) * size)
        if low >= high:
            continue
        value = getattr(param, "main_param", None)
        if value is None:
            whole = param.get_high_precision_init_val() if isinstance(param, Fp8Parameter) else param.detach()
            value = whole.reshape(-1)[low - start : high - start]
        bucket.param_data[low:high].copy_(value.view(-1))


@patches.wrap(f"{_BUFFERS}._ParamAndGradBuffer._new_bucket", "it ignores the padding between parameters")
def indices_as_laid_out(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Gives the bucket the real positions of its parameters."""
    bucket = original(self, *args, **kwargs)
    for param in bucket.params_list:
        start, end, _ = self.param_index_map[param]
        bucket.param_to_index[param] = (start - bucket.offset, end - bucket.offset)
    return bucket


# -------------------------------------------------------------------------------------------------------- gradient norm


@torch.no_grad()
def norm_on_device(grads: list[torch.Tensor], group: Any) -> torch.Tensor:
    """Returns the 2-norm of all gradients of all ranks of ``group`` as one vector: float32 [1]. Collective.

    NaN or Inf in any gradient makes it NaN or Inf. A rank may have no gradients.
    """
    squares = torch.zeros(1, dtype=torch.float64, device=own_device())
    for grad in grads:
        squares += torch.linalg.vector_norm(grad, dtype=torch.float64).square()
    dist.all_reduce(squares, group=group)
    return squares.sqrt().to(torch.float32)


def norm_of_shards(original: Callable[[Any], Any], self: Any) -> Any:
    """The norm of an optimizer, or of chained ones in one group, if all of them shard FP8 models."""
    parts = getattr(self, "chained_optimizers", [self])
    if not all(isinstance(part, DistributedOptimizer) and trains_fp8(part) for part in parts):
        return original(self)
    if len(parts) > 1 and not self.grads_states_parallel_group_is_shared():
        return original(self)
    grads = [grad for part in parts for grad in part.get_main_grads_for_grad_norm()]
    return float(norm_on_device(grads, parts[0].get_grad_stats_parallel_group()))


for _owner in (_DISTRIBUTED, "optimizer.optimizer.ChainedOptimizer"):
    patches.wrap(
        f"{_owner}.get_grad_norm",
        "the norm of shards depends on the buffers' layout, and FP8 weights have a separate buffer",
    )(norm_of_shards)


def trains_fp8(optimizer: Any) -> bool:
    """Whether the models of a distributed optimizer have FP8 layers."""
    return quantizes(optimizer.model_chunks[0].config)
