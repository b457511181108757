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
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from ..runtime import Fp8Runtime, runtime_of
from .patching import PatchList

patches = PatchList()


def reduced_by_experts_ranks(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
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
    )(reduced_by_experts_ranks)


@patches.wrap(
    "models.gpt.gpt_model.roll_tensor",
    "context parallel ranks predict different numbers of tokens, and each divides by its own",
)
def count_of_all_ranks(
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
def tied_without_a_weight(original: Callable[[Any], None], self: Any) -> None:
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
