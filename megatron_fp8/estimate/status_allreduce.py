"""The small status all-reduces of an iteration: NaN and Inf, gradient norms.

They are not part of the estimate's ``wire``: they have few bytes, but every rank waits for them.
"""

from __future__ import annotations

from .buffers import is_apart
from .communication_linear import Traffic
from .model import Chunk
from .parameters import of_chunk
from .settings import Settings


def of_step(settings: Settings, chunks: list[Chunk]) -> list[Traffic]:
    """Status all-reduces of a rank of these chunks' stage, one entry per call; none for groups of one rank.

    The loss is not included: the caller sums it. `megatron-fp8 train` does so in one all-reduce per
    iteration, with other status values (train/step.py).
    """
    model, distributed = settings.model, settings.optimizer.use_distributed_optimizer
    found = [_all_reduce("whether any rank met NaN or Inf in gradients", settings.gpus, 4)]
    stages = model.pipeline_model_parallel_size
    if model.fp8 and (
        stages > 1 or model.expert_model_parallel_size > 1
    ):  # otherwise part of the amax all-reduce
        found.append(_all_reduce("what casts met", settings.gpus, 8))
    # An optimizer's group: all ranks with parts of its state, or of its model (Megatron-Core, optimizer.py,
    # get_grad_stats_parallel_group). Experts have their own optimizer.
    dense = settings.gpus if distributed else model.tensor_model_parallel_size * stages
    optimizers = [dense]
    if any(is_apart(model, parameter) for chunk in chunks for parameter in of_chunk(model, chunk)):
        optimizers.append(settings.gpus if distributed else model.expert_ranks)
    found += [_all_reduce("whether an optimizer's gradients are finite", ranks, 4) for ranks in optimizers]
    if distributed:  # one for both optimizers; in float64 if FP8 weights have their own buffers
        found.append(_all_reduce("the norm of gradients", settings.gpus, 8 if model.fp8 else 4))
    else:
        found += [_all_reduce("the norm of an optimizer's gradients", ranks, 4) for ranks in optimizers]
    return [one for one in found if one.ranks > 1]


def _all_reduce(what: str, ranks: int, size: int) -> Traffic:
    return Traffic(what, "all-reduce", "verdict", ranks, size)
