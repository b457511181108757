"""Patches of Megatron-Core functions that compute wrongly in any precision.

**Experts with a different tensor parallel size, without expert parallelism.** With expert parallelism above 1
Megatron-Core holds experts' weights in separate buffers, which experts' own data parallel ranks reduce. With 1, and
experts split over more or fewer tensor parallel ranks than dense layers, the ranks that share an expert's weight also
differ from a dense layer's. With TP=2 and ETP=1 each rank has the gradient of its own tokens, and Megatron-Core does
not sum them. With TP=1 and ETP=2 it broadcasts one rank's part of a weight over the other's. Both are silent.

**Multi-token prediction.** Its loss is the mean over the tokens of all ranks. Megatron-Core divides the sum of a
rank's losses by the number of tokens that the rank predicts, and takes the mean over ranks. The rank with the end of
the sequence predicts fewer, so its tokens have more weight, and gradients depend on the layout. And a last stage that
predicts several tokens has the embedding's table: a tied output layer gets that table, and needs no weight of its
own; Megatron-Core makes one nevertheless, and then fails at the first save, which expects none.

**Routers with expert biases.** After each batch Megatron-Core raises an expert's bias if it got fewer tokens than the
mean, and lowers it if it got more (DeepSeek-V3's balance without a loss, arXiv:2408.15664). It updates biases while
gradients are finalised, before it is known whether the step will run; here those of a step that the optimizer skips
are restored (optimizer/loss_scaler.py). And it counts tokens in a buffer that Float16Module rounds to the model's
dtype: from 256 on BF16 loses odd counts, from 512 on a single token, and the result depends on micro-batches and
ranks. Here counts are float32, exact to 2^24 tokens.

**Multi-latent attention**, which Megatron-Core builds only from Transformer Engine's layers. Its down projections are
column parallel here: each rank computes a part of the latents, and attention gathers the parts. The gather's backward
takes the rank's own part of the gradient and sums nothing. For the latents that is right: the up projections sum their
input's gradient over ranks. For the rotary keys beside them it is wrong: they enter the rank's own heads, so each rank
has one term of a sum, and Megatron-Core's gradients depend on the number of ranks. So here a down projection's result is
gathered before attention checks its width. Under sequence parallelism one all-to-all makes [s / tp, b, rank] of
[s, b, rank / tp]; Megatron-Core gathers all columns and discards most rows. Without it each rank normalises whole
latents of queries, so each has the whole gradient of that norm's weight. Megatron-Core sums it over ranks, because of
its name: in other attention a norm of that name processes a rank's own heads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import all_to_all_hp2sp, gather_from_tensor_model_parallel_region
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from torch import Tensor

from ...linear.saved_operands import first_derivative_only
from ..runtime import Fp8Runtime, runtime_of
from .missing_packages import without_te
from .patching import PatchList

patches = PatchList()


def mark_expert_parameters(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """A linear's __init__ that marks an expert's parameters if experts have their own data parallel ranks."""
    original(self, *args, **kwargs)
    if self.is_expert and (
        parallel_state.get_expert_tensor_parallel_world_size()
        != parallel_state.get_tensor_model_parallel_world_size()
    ):
        for parameter in (self.weight, self.bias):
            if parameter is not None:
                parameter.allreduce = False


for _kind in ("Column", "Row"):
    patches.wrap(
        f"tensor_parallel.layers.{_kind}ParallelLinear.__init__",
        "experts' gradients are reduced over the dense layers' ranks where expert parallelism is 1",
    )(mark_expert_parameters)


@patches.wrap(
    "models.gpt.gpt_model.roll_tensor",
    "context parallel ranks predict different numbers of tokens, and each divides by its own",
)
def mean_over_ranks(
    original: Callable[..., Any], tensor: torch.Tensor, *args: Any, cp_group: Any = None, **kwargs: Any
) -> Any:
    """The sum of a mask becomes the mean over context parallel ranks, not this rank's."""
    rolled, count = original(tensor, *args, cp_group=cp_group, **kwargs)
    if cp_group is None or cp_group.size() == 1:
        return rolled, count
    dist.all_reduce(count, group=cp_group)
    return rolled, count / cp_group.size()


@patches.wrap(
    "models.common.language_module.language_module.LanguageModule.setup_embeddings_and_output_layer",
    "a last stage that predicts several tokens cannot be saved with a weight of its tied output layer",
)
def drop_tied_weight(original: Callable[[Any], None], self: Any) -> None:
    """Removes the weight of a tied output layer first."""
    has_table = getattr(self, "mtp_process", False) and not self.pre_process
    if has_table and self.post_process and self.share_embeddings_and_output_weights:
        self.output_layer.weight = None
    original(self)


_COUNTS = ("local_tokens_per_expert", "global_tokens_per_expert", "ga_steps")


@patches.wrap(
    "distributed.finalize_model_grads._update_router_expert_bias",
    "experts' biases are updated before it is known whether the step is skipped",
)
def remember_biases(original: Callable[..., None], model: list[Any], config: Any) -> None:
    """Saves the old biases until the optimizer decides whether it steps."""
    biases = [
        bias
        for chunk in model
        for module in chunk.modules()
        if (bias := getattr(module, "expert_bias", None)) is not None
    ]
    runtime_of(config).moved_biases = [(bias, bias.clone()) for bias in biases]
    original(model, config)


def settle_biases(runtime: Fp8Runtime, *, skipped: bool) -> None:
    """Restores the biases of a runtime's models if the step after their update was skipped."""
    saved, runtime.moved_biases = runtime.moved_biases, []
    for bias, before in saved if skipped else []:
        bias.copy_(before)


@patches.wrap(
    "transformer.moe.router.TopKRouter._maintain_float32_expert_bias",
    "tokens are counted in the model's dtype, which loses some of them",
)
def count_in_float32(original: Callable[[Any], None], self: Any) -> None:
    """Makes the token counts float32 too."""
    original(self)
    for name in _COUNTS:
        counts = getattr(self, name, None)
        if counts is not None and counts.dtype != torch.float32:
            counts.data = counts.data.float()


@patches.wrap(
    "tensor_parallel.random.checkpoint",
    "recompute_modules=['mlp'] with biases returns a bias from the region: endless recursion",
    everywhere=True,
)
def alias_returned_parameters(
    checkpoint: Callable[..., Any],
    function: Callable[..., Any],
    distribute_saved_activations: bool,
    *args: Any,
) -> Any:
    """An activation checkpoint for functions that also return a parameter (an MLP: its bias).

    An autograd function that returns a parameter makes it its own output: recomputing the region would differentiate
    through the region again, in endless recursion. An alias of the parameter is an ordinary output.
    """

    def region(*inputs: Any) -> Any:
        outputs = function(*inputs)
        return tuple(map(_alias, outputs)) if isinstance(outputs, tuple) else _alias(outputs)

    return checkpoint(region, distribute_saved_activations, *args)


def _alias(value: Any) -> Any:
    return value.view_as(value) if isinstance(value, torch.nn.Parameter) else value


@patches.wrap(
    "tensor_parallel.mappings.reduce_from_tensor_model_parallel_region",
    "experts with biases add them in place to its output, which autograd forbids for the view that it is",
    everywhere=True,
)
def return_no_view(reduce: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """An all-reduce whose result can be changed in place, as a new tensor with the same memory."""
    y = reduce(*args, **kwargs)
    return torch.ops.aten._unsafe_view(y, y.shape)


# --------------------------------------------------------------------------------------------- multi-latent attention


@without_te.wrap(
    "transformer.multi_latent_attention.MLASelfAttention.__init__",
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
