"""Megatron-Core's layer-wise optimizer, of Muon, over FP8 parameters: masters on one rank, codes on all.

It gives each weight to one data-parallel rank, which alone has its master and steps it. Afterwards every rank gets every
weight in BF16. Of an FP8 weight Megatron-Core would send what its codes mean. The other ranks would quantize that again,
by another amax, so their codes would differ, without an error. Here the owner sends the master in BF16: the others cast
the owner's bytes by the same scale.

Rejected: sending codes and scales. Per-row and 1-wide blocks have two sets, which are no smaller than BF16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from ...params.fp8_parameter import Fp8Parameter
from ..patches.patching import PatchList

patches = PatchList("megatron.core.optimizer.layer_wise_optimizer.LayerWiseDistributedOptimizer")


def shared_lists(optimizer: Any) -> list[tuple[list[list[torch.nn.Parameter]], Any]]:
    """(parameters of each rank, group), for experts apart; [] where no rank shares its weights with others."""
    groups = optimizer.pg_collection
    if groups is None:
        return []
    pairs = (optimizer.dp_cp_params_list, "dp_cp"), (optimizer.expt_dp_params_list, "expt_dp")
    return [(found, getattr(groups, name)) for found, name in pairs if found]


def owned_params(optimizer: Any) -> dict[int, bool]:
    """Returns id of a weight -> whether its master is on this rank, for the weights that ranks share."""
    if not isinstance(optimizer, LayerWiseDistributedOptimizer):
        return {}
    return {
        id(param): owner == dist.get_rank(group)
        for params_of, group in shared_lists(optimizer)
        for owner, params in enumerate(params_of)
        for param in params
    }


@patches.wrap("__init__", "weights of other ranks keep their high-precision originals")
def free_originals(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Frees the originals of FP8 weights, and tells each whether its master is here."""
    original(self, *args, **kwargs)
    for params_of, group in shared_lists(self):
        for owner, params in enumerate(params_of):
            for param in params:
                if isinstance(param, Fp8Parameter):
                    param.clear_high_precision_init_val()
                    param.own_piece(0, param.numel() if owner == dist.get_rank(group) else 0)


@patches.wrap(
    "allgather_params",
    "of an FP8 weight it sends what the codes mean, which others quantize again; gloo gathers no pieces of unequal size",
)
@torch.no_grad()
def send_masters(original: Callable[[Any], None], self: Any) -> None:
    """Sends every rank's weights to all, an FP8 weight as its master in the nominal dtype. Collective."""
    for params_of, group in shared_lists(self):
        rank = dist.get_rank(group)
        for owner, params in enumerate(params_of):
            if not params:
                continue
            mine = owner == rank
            values = [
                _sent_value(p) if mine else torch.empty(p.shape, dtype=p.dtype, device=p.device)
                for p in params
            ]
            flat = _flatten_dense_tensors(values)
            dist.broadcast(flat, dist.get_global_rank(group, owner), group=group)
            if not mine:
                for param, value in zip(params, _unflatten_dense_tensors(flat, values), strict=True):
                    param.data.copy_(value)


def _sent_value(param: Any) -> torch.Tensor:
    value = param.master if isinstance(param, Fp8Parameter) else param
    assert value is not None, "the owner of a weight has its master"
    sent: torch.Tensor = value.detach().to(param.dtype)
    return sent
