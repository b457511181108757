"""Patches for multi-latent attention, which Megatron-Core 0.16.1 builds only from Transformer Engine's layers.

Its down projections are column parallel here: each rank computes a part of the latents, and attention gathers the
parts. The gather's backward takes the rank's own part of the gradient and sums nothing. For the latents that is
right: the up projections sum their input's gradient over ranks. For the rotary keys beside them it is wrong: they
enter the rank's own heads, so each rank has one term of a sum, and Megatron-Core's gradients depend on the number of
ranks. So here a down projection's result is gathered before attention checks its width.

Under sequence parallelism one all-to-all makes [s / tp, b, rank] of [s, b, rank / tp]. Megatron-Core gathers all
columns and discards most rows.

Without sequence parallelism each rank normalises whole latents of queries, so each has the whole gradient of that
norm's weight. Megatron-Core sums it over ranks, because of its name: in other attention a norm of that name processes
a rank's own heads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import all_to_all_hp2sp, gather_from_tensor_model_parallel_region
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from torch import Tensor

from ...linear.saved_operands import first_derivative_only
from .patching import PatchList

patches = PatchList()
without_te = PatchList("megatron.core.transformer.multi_latent_attention")
"""For processes without Transformer Engine."""


@without_te.wrap(
    "MLASelfAttention.__init__",
    "the gradient of the rotary keys lacks the other tensor parallel ranks' terms",
)
def gather_latents(original: Callable[..., None], self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
    """Down projections then return all columns."""
    original(self, config, *args, **kwargs)
    group = self.pg_collection.tp
    if group.size() == 1:
        return
    for name in ("linear_q_down_proj", "linear_kv_down_proj"):
        if hasattr(self, name):
            summed = config.qk_pos_emb_head_dim if name == "linear_kv_down_proj" else 0
            gather = functools.partial(_gather, group, config.sequence_parallel, summed)
            getattr(self, name).register_forward_hook(gather)


def _gather(group: Any, scatter: bool, summed: int, _module: Any, _inputs: Any, result: Any) -> Any:
    """Gathers a down projection's (output, bias): [s, b, columns / tp] -> [s, b, columns], or [s / tp, b, columns]
    with ``scatter``.

    Args:
        summed: number of last columns whose gradient is a sum over ranks; every rank has the others' whole. With
            ``scatter`` attention's own gather of the rows sums it.
    """
    part, bias = result
    if not scatter:
        return _GatherColumns.apply(part, group, summed), bias
    rows = part.shape[0] // group.size()
    return all_to_all_hp2sp(part, group).view(rows, part.shape[1], -1), bias


@patches.wrap(
    "distributed.finalize_model_grads._allreduce_non_tensor_model_parallel_grads",
    "the gradient of the queries' norm, whole on each tensor parallel rank, is summed because of its name",
)
def keep_whole_gradients(
    original: Callable[..., None], model: list[Any], config: Any, *args: Any, **kwargs: Any
) -> None:
    """Does not change the norms of queries' latents."""
    latent = config.multi_latent_attention and not config.sequence_parallel
    grads = list(_gradients_of_query_norms(model)) if latent else []
    saved = [grad.clone() for grad in grads]
    original(model, config, *args, **kwargs)
    for grad, whole in zip(grads, saved, strict=True):
        grad.copy_(whole)


def _gradients_of_query_norms(model: list[Any]) -> Iterator[Tensor]:
    for chunk in model:
        for module in chunk.modules():
            if isinstance(module, MultiLatentAttention) and hasattr(module, "q_layernorm"):
                for parameter in module.q_layernorm.parameters():
                    grad = getattr(parameter, "main_grad", parameter.grad)
                    if grad is not None:
                        yield grad


class _GatherColumns(torch.autograd.Function):
    """[s, b, columns / tp] -> [s, b, columns]; backward: this rank's columns, after the last ones were summed over
    ranks.

    Megatron-Core's copy_to_tensor_model_parallel_region would do for the sum, but for a gradient that is not
    contiguous it sums a copy and returns the original.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any, summed: int) -> Tensor:
        ctx.group, ctx.summed = group, summed
        return gather_from_tensor_model_parallel_region(part, group)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,), first_summed = grads, grads[0].shape[-1] - ctx.summed
        if ctx.summed:
            total = grad[..., first_summed:].contiguous()
            dist.all_reduce(total, group=ctx.group)
            grad = torch.cat([grad[..., :first_summed], total], dim=-1)
        return grad.chunk(ctx.group.size(), dim=-1)[ctx.group.rank()].contiguous(), None, None
