"""Bitwise comparison of replicated state across ranks.

Finite damage, such as a flipped bit in a master weight, shows in no loss and no cast. But several ranks hold most of
a model, and compute the same bits by the same operations:

    data parallel ranks      weights; masters and moments too, where the optimizer is not sharded; experts' biases
    tensor parallel ranks    weights that are not split (norms, routers, some biases), and their optimizer state
    first and last stage     the embedding that they share
    an amax group            scales and histories of delayed scaling

Also, each weight equals its rounded master. Each rank computes a digest of each tensor, in one read without a copy.
Ranks compare one number a group, the hash of all its digests. Only if these differ do they search for the tensor and
the ranks.

State without a replica is not checked: the sharded optimizer's masters and moments, and weights of tensor parallel ranks
without data parallelism. A damaged weight that the next step rewrites from its master is not found either; all ranks
used it in that step. With overlap_param_gather other ranks' weight shards are one step old, and are not compared.

Rejected: comparing the parameters, which sends them; sums of values, which lose a low bit of a large tensor and
depend on the order of rounding. A digest is a sum of integers: one flipped bit always changes it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed.finalize_model_grads import _get_shared_word_embedding_weight

from ..files.terminal import ranks_in_words
from ..params.fp8_parameter import Fp8Parameter
from ..state.collectives import device_of, equal_on_ranks, first_rank_with, size
from .names import in_whole_model, named_parameters
from .optimizer.adam import Moment
from .optimizer.layer_wise import owned_params
from .optimizer.optimizer_setup import parts_of
from .runtime import state_of, unwrap

_ROW = 4096
_ODD = 0x1E3779B97F4A7C15
_SHOWN = 8


class ReplicatedTensor(NamedTuple):
    """Tensors that this rank shares with others: a description (``words``) and a digest, int64 [k], of each;
    ``finite(i)`` returns whether all values of tensor i are finite."""

    words: list[str]
    digests: torch.Tensor
    finite: Callable[[int], bool]


@torch.no_grad()
def digest(tensor: torch.Tensor) -> torch.Tensor:
    """Returns int64 [], a digest of the bits of a tensor of any shape and dtype. Reads it once; nothing goes to the
    host.

    The sum, modulo 2^64, of its 8-byte words, where each block of 4,096 words has its own odd weight. Any change
    within one word changes the digest; changes in several words do, except for about one case in 2^64.
    """
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if data.storage_offset() % 8:
        data = data.clone()
    whole = data.numel() // 8 * 8
    words, rest = data[:whole].view(torch.int64), data[whole:]
    rows = words[: words.numel() // _ROW * _ROW].view(-1, _ROW).sum(1)
    weights = torch.arange(1, rows.numel() + 1, device=data.device, dtype=torch.int64) * _ODD | 1
    tail = torch.zeros(8, device=data.device, dtype=torch.uint8)
    tail[: rest.numel()] = rest
    return (rows * weights).sum() + words[rows.numel() * _ROW :].sum() + tail.view(torch.int64)[0]


def describe_differences(chunks: list[Any], optimizer: Any, *, redundant: bool = True) -> str:
    """Describes replicated state that differs between ranks; '' if all of it is equal. Collective, the same on all
    ranks.

    A tensor with NaN or Inf on some rank is skipped: train/health/finite_check.py checks for these.

    Args:
        chunks: of the model, in DistributedDataParallel.
        optimizer: Megatron-Core's, of these chunks.
        redundant: also compare tensors that each tensor parallel rank computes for itself. Such replicas may drift on
            devices whose kernels add up in no fixed order.
    """
    with state_of(unwrap(chunks[0]).config).uncounted():
        damaged = _find_weight_unlike_master(optimizer, _named_states(chunks))
    difference = ""
    for group, make_digests in _replicated_state(chunks, optimizer, redundant):
        if size(group) > 1:
            difference_here = _describe_difference(make_digests(), group)
            difference = difference or difference_here
    # A weight that differs from its master identifies the damaged rank; of two ranks that differ, either may be damaged.
    first = first_rank_with(damaged or difference or None, order=0 if damaged else 1)
    return "" if first is None else first[1]


# --------------------------------------------------------------------------------------------------- replicated tensors


class _NamedState(NamedTuple):
    name: str
    parameter: torch.nn.Parameter
    state: dict[str, torch.Tensor]
    """The master and the moments of the whole parameter, if this rank has them."""


def _named_states(chunks: list[Any]) -> list[_NamedState]:
    return [_NamedState(name, p, {}) for chunk in chunks for name, p in named_parameters(unwrap(chunk))]


def _add_state(named: list[_NamedState], optimizer: Any) -> None:
    """Adds each parameter's state in optimizers that do not shard it; a layer-wise one gives it to one rank."""
    if owned_params(optimizer):
        return
    of_master = {id(getattr(each.parameter, "main_param", each.parameter)): each for each in named}
    for part in parts_of(optimizer):
        if part.optimizer is None or _is_sharded(part):
            continue
        for group in part.param_groups:
            for master in group["params"]:
                each = of_master.get(id(master))
                if each is None:
                    continue
                if master is not each.parameter:
                    each.state["master"] = master
                for key, moment in part.optimizer.state.get(master, {}).items():
                    if isinstance(moment, torch.Tensor) and moment.dim():
                        each.state[key] = moment


def _is_sharded(part: Any) -> bool:
    return hasattr(part, "gbuf_ranges")


def _replicated_state(
    chunks: list[Any], optimizer: Any, redundant: bool
) -> Iterator[tuple[Any, Callable[[], list[ReplicatedTensor]]]]:
    """Yields groups, and functions that digest what their ranks replicate; in equal order on all ranks of a group."""
    named = _named_states(chunks)
    _add_state(named, optimizer)
    dense = [each for each in named if getattr(each.parameter, "allreduce", True)]
    experts = [each for each in named if not getattr(each.parameter, "allreduce", True)]
    whole, whole_experts = (
        [each for each in some if _is_replicated(each, redundant)] for some in (dense, experts)
    )
    stale = any(chunk.ddp_config.overlap_param_gather for chunk in chunks)
    over_data = parallel_state.get_data_parallel_group(with_context_parallel=True)
    yield over_data, lambda: [*_bias_digests(chunks), *_digests(dense, weights=not stale)]
    yield parallel_state.get_expert_data_parallel_group(), lambda: _digests(experts, weights=not stale)
    yield parallel_state.get_tensor_model_parallel_group(), lambda: [*_bias_digests(chunks), *_digests(whole)]
    yield parallel_state.get_expert_tensor_parallel_group(), lambda: _digests(whole_experts)
    if (shared := _shared_embedding(chunks, named)) is not None:
        yield parallel_state.get_embedding_group(), lambda: _digests([shared], weights=not stale)
    for arena in state_of(unwrap(chunks[0]).config).arenas:
        yield arena.group, partial(_arena_digests, arena)


def _is_replicated(each: _NamedState, redundant: bool) -> bool:
    """Whether every tensor parallel rank holds the whole parameter, with equal bits."""
    if getattr(each.parameter, "tensor_model_parallel", False):
        return False
    return redundant or getattr(each.parameter, "sequence_parallel", False)


def _digests(named: list[_NamedState], *, weights: bool = True) -> list[ReplicatedTensor]:
    """Lists causes before effects: a wrong moment makes its master wrong in the next step, and that its weight."""
    found = []
    for each in named:
        for key, tensor in sorted(each.state.items(), key=lambda item: item[0] == "master"):
            words = f"the master of {each.name}" if key == "master" else f"{key} of {each.name}"
            found.append(_tensor_digest(words, tensor))
        if weights:
            found.append(_tensor_digest(f"the weight {each.name}", each.parameter))
    return found


def _tensor_digest(words: str, tensor: torch.Tensor) -> ReplicatedTensor:
    stored = tensor.stored_tensors() if isinstance(tensor, (Fp8Parameter, Moment)) else [tensor]
    digests = torch.stack([digest(one) * (2 * place + 1) for place, one in enumerate(stored)])
    return ReplicatedTensor([words], digests.sum()[None], partial(_are_finite, stored))


def _are_finite(tensors: list[torch.Tensor], _: int) -> bool:
    return all(bool(one.detach().float().isfinite().all()) for one in tensors)


def _bias_digests(chunks: list[Any]) -> Iterator[ReplicatedTensor]:
    """Yields experts' biases, which every rank of a stage updates by the same token counts."""
    for chunk in chunks:
        whole = in_whole_model(unwrap(chunk))
        for name, buffer in unwrap(chunk).named_buffers():
            if name.endswith("expert_bias"):
                yield _tensor_digest(whole(name), buffer)


def _shared_embedding(chunks: list[Any], named: list[_NamedState]) -> _NamedState | None:
    """Returns the embedding that the first and the last stage share; None if this rank does not hold it."""
    group = parallel_state.get_embedding_group(check_initialized=False)
    if not group or size(group) == 1 or dist.get_rank() not in dist.get_process_group_ranks(group):
        return None
    model = unwrap(chunks[0] if parallel_state.is_pipeline_first_stage(ignore_virtual=True) else chunks[-1])
    weight = _get_shared_word_embedding_weight(model, model.config)
    return next((each._replace(name="the embedding") for each in named if each.parameter is weight), None)


def _arena_digests(arena: Any) -> list[ReplicatedTensor]:
    """Delayed scales and histories, with one digest per tensor."""
    found = []
    for history in arena.histories():
        scales = arena.scale.index_select(0, history.index)
        for words, values in (("amax history", history.rings.rows), ("delayed scale", scales[None, :, None])):
            bits = (
                values.detach().view(torch.int32).sum((0, 2), dtype=torch.int64)
            )  # [blocks, slots, entries]
            names = [f"the {words} of {slot.name}" for slot in history.slots]
            found.append(ReplicatedTensor(names, bits, partial(_is_finite_slot, values)))
    return found


def _is_finite_slot(values: torch.Tensor, slot: int) -> bool:
    return bool(values[:, slot].isfinite().all())


# ------------------------------------------------------------------------------------------------ comparison over ranks


def _describe_difference(held: list[ReplicatedTensor], group: Any) -> str:
    """Describes the first tensor that differs between a group's ranks; '' if none. Collective over the group."""
    words = [name for each in held for name in each.words]
    digests = torch.cat([each.digests for each in held]).tolist() if held else []
    names = _hash("\n".join(words))
    if equal_on_ranks([names, _hash(str(digests))], group):
        return ""
    if not equal_on_ranks([len(words), names], group):
        return "ranks that should hold the same tensors hold different ones"
    ranks = dist.get_process_group_ranks(group)
    finite = [partial(each.finite, place) for each in held for place in range(len(each.words))]
    gathered = _gather(digests, group)  # [ranks, tensors]
    places = (gathered != gathered[0]).any(0).nonzero().view(-1).tolist()[:_SHOWN]
    all_finite = _gather([finite[place]() for place in places], group).all(0).tolist()
    for place, comparable in zip(places, all_finite, strict=True):
        if comparable:
            return f"{words[place]} {_odd_ones(gathered[:, place].tolist(), ranks)}"
    return ""


def _gather(numbers: list[int], group: Any) -> torch.Tensor:
    """Returns every rank's numbers, int64 [ranks, n]; each rank gives equally many."""
    mine = torch.tensor(numbers, dtype=torch.int64, device=device_of(group))
    all_of_them = [torch.empty_like(mine) for _ in range(size(group))]
    dist.all_gather(all_of_them, mine, group=group)
    return torch.stack(all_of_them)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def _odd_ones(numbers: list[int], ranks: list[int]) -> str:
    """Describes which ranks have another number than most."""
    (usual, most), *others = Counter(numbers).most_common()
    if others and others[0][1] == most:
        return f"differs between {ranks_in_words(ranks)}"
    odd = [rank for number, rank in zip(numbers, ranks, strict=True) if number != usual]
    rest = [rank for number, rank in zip(numbers, ranks, strict=True) if number == usual]
    return f"is another one on {ranks_in_words(odd)} than on {ranks_in_words(rest)}"


# ------------------------------------------------------------------------------------------------ weights and masters


@torch.no_grad()
def _find_weight_unlike_master(optimizer: Any, named: list[_NamedState]) -> str:
    """Describes the first weight of this rank that differs from its rounded master; '' if none."""
    names = {id(each.parameter): each.name for each in named}
    for weight, shard, master in _pairs(optimizer):
        if not _equals_master(shard, master) and bool(master.isfinite().all()):
            name = names.get(id(weight), "a parameter")
            return f"the weight {name} or its master is damaged on rank {dist.get_rank()}: one is not the other, rounded"
    return ""


def _pairs(optimizer: Any) -> Iterator[tuple[Any, torch.Tensor, torch.Tensor]]:
    """Yields (parameter, this rank's part of it, the master of that part)."""
    for part in parts_of(optimizer):
        if part.optimizer is None or getattr(part.config, "reuse_grad_buf_for_mxfp8_param_ag", False):
            continue  # gathered through the gradient buffer: a weight may be one step old
        weights = getattr(part, "model_float16_groups" if _is_sharded(part) else "float16_groups", [])
        parts = getattr(part, "shard_float16_groups", []) if _is_sharded(part) else weights
        masters = getattr(
            part, "shard_fp32_from_float16_groups" if _is_sharded(part) else "fp32_from_float16_groups", []
        )
        for group in zip(weights, parts, masters, strict=True):
            for weight, shard, master in zip(*group, strict=True):
                if shard is not None and master is not None:
                    yield weight, shard, master


def _equals_master(weight: torch.Tensor, master: torch.Tensor) -> bool:
    """Whether a weight's bits are its master's, rounded; of an FP8 weight, rounded and cast."""
    rounded = master.detach().to(weight.dtype).view(weight.shape)
    if not isinstance(weight, Fp8Parameter):
        return torch.equal(rounded, weight.detach()) or not bool(weight.isfinite().all())
    requantized = weight.quantizer.quantize(rounded, "both").tensor
    for mine, other in (
        (weight.quantized.rowwise, requantized.rowwise),
        (weight.quantized.columnwise, requantized.columnwise),
    ):
        assert mine is not None and other is not None
        if not torch.equal(mine.codes.view(torch.uint8), other.codes.view(torch.uint8)):
            return False
        if not torch.equal(mine.scale_inv, other.scale_inv):
            return False
    return True
