"""The small all-reduces of an iteration: NaN and Inf of casts and gradients, gradient norms.

They are apart from the estimate's ``wire``, since their bytes are nothing: what they cost is that everybody waits.
"""

from __future__ import annotations

from .buffers import is_apart
from .model import Chunk
from .parameters import of_chunk
from .settings import Settings
from .wire_linear import Traffic


def of_step(settings: Settings, chunks: list[Chunk]) -> list[Traffic]:
    """Those of a rank of these chunks' stage, one entry a call; groups of one rank ask nothing.

    The loss is not among them: whoever trains sums it up. `megatron-fp8 train` does so in one all-reduce, together with
    what else ranks tell each other once an iteration (train/step.py).
    """
    model, distributed = settings.model, settings.optimizer.use_distributed_optimizer
    found = [_one("whether any rank met NaN or Inf in gradients", settings.gpus, 4)]
    stages = model.pipeline_model_parallel_size
    if model.fp8 and (stages > 1 or model.expert_model_parallel_size > 1):  # else amaxes told all ranks
        found.append(_one("what casts met", settings.gpus, 8))
    # An optimizer's ranks: all that hold parts of it, or copies of its model's parts (Megatron-Core, optimizer.py,
    # get_grad_stats_parallel_group). Experts have one of their own.
    dense = settings.gpus if distributed else model.tensor_model_parallel_size * stages
    optimizers = [dense]
    if any(is_apart(model, parameter) for chunk in chunks for parameter in of_chunk(model, chunk)):
        optimizers.append(settings.gpus if distributed else model.expert_ranks)
    found += [_one("whether an optimizer's gradients are finite", ranks, 4) for ranks in optimizers]
    if distributed:  # one of both together; in float64 where FP8 weights lie in buffers of their own
        found.append(_one("the norm of gradients", settings.gpus, 8 if model.fp8 else 4))
    else:
        found += [_one("the norm of an optimizer's gradients", ranks, 4) for ranks in optimizers]
    return [one for one in found if one.ranks > 1]


def _one(what: str, ranks: int, size: int) -> Traffic:
    return Traffic(what, "all-reduce", "verdict", ranks, size)
