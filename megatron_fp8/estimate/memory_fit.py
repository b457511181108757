"""Checks whether a run fits in memory, and finds a change that makes it fit.

Changes are tried in a fixed order, first alone, then combined: those that affect results and users least come
first. Nothing else of the run changes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from .estimate import Estimate, memory
from .peaks import Device
from .settings import Settings
from .sites import Plans

RESERVE = 0.1
"""Part of a device's memory reserved for what the estimate does not include: CUDA's context, NCCL's buffers, GEMM
workspaces, fragmentation. An assumption, not a measurement."""


@dataclass(frozen=True)
class Fit:
    """Result of the check.

    Attributes:
        needed, there: bytes of the fullest rank, and of the device without the reserve.
        change: options with which it fits; None if it fits already or no change suffices.
        changed: bytes with that change.
        smallest: the smallest need of any change tried.
    """

    needed: int
    there: int
    change: tuple[str, ...] | None
    changed: int | None
    smallest: int

    @property
    def fits(self) -> bool:
        """Whether it fits unchanged."""
        return self.needed <= self.there


def fit(found: Estimate, device: Device, reserve: float = RESERVE) -> Fit:
    """Checks whether the run fits in the device's memory, and if not, which change helps."""
    available, needed = int(device.memory * (1 - reserve)), found.fullest.total
    smallest, plans = needed, Plans(found.settings.model)  # no change affects the plans
    if needed <= available:
        return Fit(needed, available, None, None, smallest)
    for change, settings in changes(found.settings):
        total = fullest(settings, plans)
        smallest = min(smallest, total)
        if total <= available:
            return Fit(needed, available, change, total, smallest)
    return Fit(needed, available, None, None, smallest)


def fullest(settings: Settings, plans: Plans) -> int:
    """Bytes of the fullest rank on GPUs."""
    stages = range(settings.model.pipeline_model_parallel_size)
    return max(memory(settings, stage, plans, gpu=True).total for stage in stages)


def changes(settings: Settings) -> Iterator[tuple[tuple[str, ...], Settings]]:
    """Candidate changes: more tensor, expert and pipeline parallelism, recomputation, FP8 parameters, a sharded
    optimizer, smaller micro-batches, each alone. Then the last four cumulatively, and all of these with each parallel
    split."""
    splits = list(_splits(settings))
    rest = [change for group in (_recompute, _fp8_param, _sharded, _smaller) for change in group(settings)]
    for single in [*splits, *rest]:
        if (changed := apply(settings, single)) is not None:
            yield _words(single), changed
    combined: dict[str, Any] = {}
    for group in (_sharded, _fp8_param, _recompute, _smaller):
        for more in group(settings):
            combined |= more
            if len(combined) > len(more) and (changed := apply(settings, combined)) is not None:
                yield _words(combined), changed
    for split in splits:
        if combined and (changed := apply(settings, {**combined, **split})) is not None:
            yield _words({**combined, **split}), changed


def layouts(settings: Settings) -> Iterator[tuple[tuple[str, ...], Settings]]:
    """All tensor, pipeline and expert parallel sizes possible on these GPUs, fewest model-parallel ranks first. Each
    alone, then cumulatively with a sharded optimizer, FP8 parameters, recomputation and smaller micro-batches."""
    model = settings.model
    tensor = [size for size in (1, 2, 4, 8) if settings.gpus % size == 0]
    pipeline = [size for size in (1, 2, 4, 8, 16, 32) if model.num_layers % size == 0]
    experts = [size for size in range(1, (model.num_moe_experts or 1) + 1) if settings.gpus % size == 0]
    sizes = [one for one in itertools.product(pipeline, tensor, experts) if one[0] * one[1] <= settings.gpus]
    for pp, tp, ep in sorted(sizes, key=lambda one: (one[0] * one[1], one)):
        combined: dict[str, Any] = {
            "model.tensor_model_parallel_size": tp,
            "model.sequence_parallel": tp > 1,
            "model.pipeline_model_parallel_size": pp,
        }
        if model.virtual_pipeline_model_parallel_size:
            combined["model.virtual_pipeline_model_parallel_size"] = None
        if model.num_moe_experts:
            combined["model.expert_model_parallel_size"] = ep
        if (changed := apply(settings, combined)) is None:
            continue
        yield _words(combined), changed
        for group in (_sharded, _fp8_param, _recompute, _smaller):
            for more in group(changed):
                combined |= more
                if (smaller := apply(settings, combined)) is not None:
                    yield _words(combined), smaller


def layout(settings: Settings, gpus: int, device: Device, reserve: float = RESERVE) -> tuple[str, ...] | None:
    """Options with which the model fits on ``gpus`` GPUs, whatever its current layout; None if no candidate fits."""
    plans, available = Plans(settings.model), int(device.memory * (1 - reserve))
    tried = layouts(replace(settings, gpus=gpus))

    def enough(candidate: Settings) -> bool:
        stages = range(candidate.model.pipeline_model_parallel_size)
        return all(memory(candidate, stage, plans, gpu=True).total <= available for stage in stages)

    return next((words for words, candidate in tried if enough(candidate)), None)


def apply(settings: Settings, change: dict[str, Any]) -> Settings | None:
    """The run with changed values of dotted keys; None if they are inconsistent."""
    parts: dict[str, dict[str, Any]] = {"model": {}, "train": {}, "optimizer": {}}
    for key, value in change.items():
        section, _, name = key.partition(".")
        parts[section][name] = value
    try:
        model = replace(settings.model, **parts["model"])
        changed = replace(
            settings,
            model=model,
            train=replace(settings.train, **parts["train"]),
            optimizer=replace(settings.optimizer, **parts["optimizer"]),
        )
    except ValueError:
        return None
    per_step = changed.train.micro_batch_size * changed.data_parallel
    divides = settings.gpus % model.model_ranks == 0 and changed.data_parallel > 0
    if not divides or not per_step or changed.train.global_batch_size % per_step:
        return None
    if changed.gpus % (model.expert_ranks):
        return None
    tp = model.tensor_model_parallel_size
    cut = [model.num_attention_heads, model.query_groups, model.ffn, model.hidden_size]
    if model.multi_latent_attention:
        cut += [model.q_lora_rank or 0, model.kv_lora_rank + model.qk_pos_emb_head_dim]
    if any(size % tp for size in cut) or (model.sequence_parallel and changed.train.seq_length % tp):
        return None
    return changed


def _splits(settings: Settings) -> Iterator[dict[str, Any]]:
    model = settings.model
    for tp in (2, 4, 8):
        if tp > model.tensor_model_parallel_size:
            yield {"model.tensor_model_parallel_size": tp, "model.sequence_parallel": True}
    for ep in (2, 4, 8, 16, 32, 64, 128):
        if ep > model.expert_model_parallel_size and (model.num_moe_experts or 1) % ep == 0:
            yield {"model.expert_model_parallel_size": ep}
    parts = model.virtual_pipeline_model_parallel_size or 1
    uneven = (
        model.num_layers_in_first_pipeline_stage
        or model.num_layers_in_last_pipeline_stage
        or model.account_for_embedding_in_pipeline_split
        or model.account_for_loss_in_pipeline_split
    )
    for pp in (2, 4, 8, 16, 32):
        if pp > model.pipeline_model_parallel_size and model.num_layers % (pp * parts) == 0 and not uneven:
            yield {"model.pipeline_model_parallel_size": pp}
            if model.tensor_model_parallel_size < 8:
                yield {
                    "model.tensor_model_parallel_size": 8,
                    "model.sequence_parallel": True,
                    "model.pipeline_model_parallel_size": pp,
                }


def _recompute(settings: Settings) -> Iterator[dict[str, Any]]:
    if settings.model.recompute_granularity is None:
        yield {"model.recompute_granularity": "selective", "model.recompute_modules": ["core_attn"]}
    if settings.model.recompute_granularity != "full":
        yield {
            "model.recompute_granularity": "full",
            "model.recompute_method": "uniform",
            "model.recompute_num_layers": 1,
        }


def _fp8_param(settings: Settings) -> Iterator[dict[str, Any]]:
    if settings.model.fp8 and not settings.model.fp8_param:
        yield {"model.fp8_param": True}


def _sharded(settings: Settings) -> Iterator[dict[str, Any]]:
    group = settings.data_parallel * settings.model.context_parallel_size
    if not settings.optimizer.use_distributed_optimizer and group > 1:
        yield {"optimizer.use_distributed_optimizer": True}


def _smaller(settings: Settings) -> Iterator[dict[str, Any]]:
    size = settings.train.micro_batch_size // 2
    while size:
        yield {"train.micro_batch_size": size}
        size //= 2


def _words(change: dict[str, Any]) -> tuple[str, ...]:
    """The change as command-line options."""
    return tuple(f"--{key}={_value(value)}" for key, value in change.items())


def _value(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{','.join(value)}]" if isinstance(value, list) else str(value)
