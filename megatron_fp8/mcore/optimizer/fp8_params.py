"""Megatron-Core's optimizers over FP8 parameters: masters, casts, communication.

Most of it is Megatron's own: the distributed optimizer calls ``quantize_param_shard`` after its step and gathers
bytes; the other one calls ``copy_`` on every weight, which quantizes. This module fixes four things that Megatron
leaves to the training loop or silently gets wrong:

* **Masters start in high precision.** Megatron's plain FP16/BF16 optimizer makes them from the parameter, that is
  from the codes; and a rank without a piece of a weight never frees its high-precision original.
* **A skipped step still changes delayed scales.** Without FP8 parameters the weight is cast again in the next
  iteration, with the new scale. Megatron copies no master on a skipped step, so the codes would keep the old one.
* **A shared buffer is filled before every gather.** With reuse_grad_buf_for_mxfp8_param_ag parameters are sent
  through the gradient buffer. Megatron fills it in the optimizer step, or leaves that to the loop if gathers overlap
  the forward pass: a loop without it, or a validation in between, gathers zeros or gradients as weights. Here the
  gather itself fills it, from the masters.
* **A weight is read from the place where it was written.** Megatron pads the start of each parameter in the buffer to
  64 elements, but reads it at a running sum without padding: wrong after the first parameter whose size is no
  multiple of 64.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch

from ...params.fp8_parameter import Fp8Parameter
from ..patches.patching import Patch

# --------------------------------------------------------------------------------------------------------- construction


def masters_from_the_start(original: Callable[..., None]) -> Callable[..., None]:
    """Wraps Float16OptimizerWithFloat16Params.__init__: masters start from the original weights, not from codes."""

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.is_stub_optimizer:
            return
        for params, masters in zip(self.float16_groups, self.fp32_from_float16_groups, strict=True):
            for param, master in zip(params, masters, strict=True):
                if isinstance(param, Fp8Parameter):
                    master.data.copy_(param.get_high_precision_init_val())
                    param.clear_high_precision_init_val()

    return __init__


def checked_and_cleared(original: Callable[..., None]) -> Callable[..., None]:
    """Wraps DistributedOptimizer.__init__: checks its config against the model's, and frees the original weights."""

    @functools.wraps(original)
    def __init__(
        self: Any,
        optimizer: Any,
        config: Any,
        grad_scaler: Any,
        init_state_fn: Any,
        model_chunks: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        _check_config(config, model_chunks)
        original(self, optimizer, config, grad_scaler, init_state_fn, model_chunks, *args, **kwargs)
        for param in _fp8_params_of(self):
            param.clear_high_precision_init_val()
            _set_owned_piece(self, param)

    return __init__


def _set_owned_piece(optimizer: Any, param: Fp8Parameter) -> None:
    """Sets the part of a parameter's master that this rank holds. Of several instances with it, the first owns it."""
    if param not in optimizer.model_param_gbuf_map or optimizer.distributed_optimizer_instance_id != 0:
        param.own_piece(0, 0)
        return
    piece = optimizer._get_model_param_range_map(param)["param"]
    param.own_piece(piece.start, piece.end)


def _check_config(config: Any, model_chunks: list[Any]) -> None:
    ddp = model_chunks[0].ddp_config
    if config.reuse_grad_buf_for_mxfp8_param_ag != ddp.reuse_grad_buf_for_mxfp8_param_ag:
        raise ValueError(
            f"OptimizerConfig.reuse_grad_buf_for_mxfp8_param_ag={config.reuse_grad_buf_for_mxfp8_param_ag}, and"
            f" DistributedDataParallelConfig's is {ddp.reuse_grad_buf_for_mxfp8_param_ag}: one would gather what the"
            " other does not fill. Give both the same value."
        )


def without_slices_of_codes(original: Callable[..., Any]) -> Any:
    """Wraps DistributedOptimizer._build_model_and_main_param_groups: hides the recipe 'delayed' from it.

    For delayed scaling alone Megatron stores a flat slice of each FP8 weight; a slice of a wrapper is a dequantized
    copy.
    """

    def build(gbuf_ranges: Any, param_gbuf_map: Any, opt_group_ranges: Any, config: Any) -> Any:
        plain = copy.copy(config)
        plain.fp8_recipe = None
        return original(gbuf_ranges, param_gbuf_map, opt_group_ranges, plain)

    return staticmethod(build)


# ------------------------------------------------------------------------------------------------------- skipped steps


def recast_when_skipped(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps an optimizer's step: after a skipped one, casts delayed codes again from masters, with new scales."""

    @functools.wraps(original)
    def step(self: Any) -> Any:
        result = original(self)
        if not result[0]:
            for optimizer in getattr(self, "chained_optimizers", [self]):
                recast(optimizer)
        return result

    return step


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


def send_masters(original: Callable[..., None]) -> Callable[..., None]:
    """Wraps a bucket group's start_param_sync: fills a buffer that is shared with gradients from the masters first."""

    @functools.wraps(original)
    def start_param_sync(self: Any, force_sync: bool = False) -> None:
        shared = self.ddp_config.reuse_grad_buf_for_mxfp8_param_ag
        is_running = self.param_gather_handle is not None
        if shared and not is_running:
            for bucket in self.buckets:
                _fill(
                    bucket,
                    self.intra_distributed_optimizer_instance_rank,
                    self.intra_distributed_optimizer_instance_size,
                )
        original(self, force_sync)
        # Megatron copies weights out in the forward pre-hook or the model's start_param_sync, not after a forced gather.
        if shared and force_sync and self.ddp_config.overlap_param_gather:
            for bucket in self.buckets:
                for param in bucket.params:
                    start, end = bucket.param_to_index[param]
                    param.data.copy_(bucket.param_data[start:end].view(param.shape))
                bucket.param_data.zero_()

    return start_param_sync


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


def indices_as_laid_out(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps _ParamAndGradBuffer._new_bucket: gives the bucket the real positions of its parameters."""

    @functools.wraps(original)
    def _new_bucket(self: Any, *args: Any, **kwargs: Any) -> Any:
        bucket = original(self, *args, **kwargs)
        for param in bucket.params_list:
            start, end, _ = self.param_index_map[param]
            bucket.param_to_index[param] = (start - bucket.offset, end - bucket.offset)
        return bucket

    return _new_bucket


def patches() -> list[Patch]:
    """Returns the optimizer's patches for FP8 parameters."""
    core = "megatron.core"
    plain, distributed = (
        f"{core}.optimizer.optimizer",
        f"{core}.optimizer.distrib_optimizer.DistributedOptimizer",
    )
    buffers = f"{core}.distributed.param_and_grad_buffer"
    cast_again = "a skipped step copies no master, and delayed scales have changed"
    return [
        Patch(
            f"{plain}.Float16OptimizerWithFloat16Params",
            "__init__",
            masters_from_the_start,
            "it makes float32 masters from FP8 codes",
            wrap=True,
        ),
        Patch(
            distributed,
            "__init__",
            checked_and_cleared,
            "it does not compare its config with DDP's",
            wrap=True,
        ),
        Patch(
            distributed,
            "_build_model_and_main_param_groups",
            without_slices_of_codes,
            "for delayed scaling it keeps slices of dequantized weights",
            wrap=True,
        ),
        Patch(f"{plain}.MixedPrecisionOptimizer", "step", recast_when_skipped, cast_again, wrap=True),
        Patch(f"{plain}.ChainedOptimizer", "step", recast_when_skipped, cast_again, wrap=True),
        Patch(
            f"{buffers}._ParamAndGradBucketGroup",
            "start_param_sync",
            send_masters,
            "a gather through the gradient buffer sends its current content",
            wrap=True,
        ),
        Patch(
            f"{buffers}._ParamAndGradBuffer",
            "_new_bucket",
            indices_as_laid_out,
            "it ignores the padding between parameters",
            wrap=True,
        ),
    ]
