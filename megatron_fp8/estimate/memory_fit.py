"""Checks whether a run fits in memory, and finds a change that makes it fit.

Changes are tried in a fixed order, first alone, then combined: those that affect results and users least come
first. Nothing else of the run changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from .config_reader import Settings, check_layout
from .device import Device
from .estimate import Estimate, memory

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


def check_fit(found: Estimate, device: Device, reserve: float = RESERVE) -> Fit:
    """Checks whether the run fits in the device's memory, and if not, which change helps."""
    available, needed = int(device.memory * (1 - reserve)), found.fullest.total
    smallest = needed
    if needed <= available:
        return Fit(needed, available, None, None, smallest)
    for change, settings in changes(found.settings):
        stages = range(settings.model.pipeline_model_parallel_size)
        total = max(memory(settings, stage).total for stage in stages)
        smallest = min(smallest, total)
        if total <= available:
            return Fit(needed, available, change, total, smallest)
    return Fit(needed, available, None, None, smallest)


def changes(settings: Settings) -> Iterator[tuple[tuple[str, ...], Settings]]:
    """Candidate changes: more tensor, expert and pipeline parallelism, recomputation, FP8 parameters, a sharded
    optimizer, smaller micro-batches, each alone. Then the last four cumulatively, and all of these with each parallel
    split."""
    splits, recompute, smaller = list(_splits(settings)), _recompute(settings), _smaller(settings)
    fp8_param, sharded = _fp8_param(settings), _sharded(settings)
    candidates = [*splits, *recompute, *fp8_param, *sharded, *smaller]
    combined: dict[str, Any] = {}
    for more in (*sharded, *fp8_param, *recompute, *smaller):
        combined = combined | more
        if len(combined) > len(more):
            candidates.append(combined)
    if combined:
        candidates += [{**combined, **split} for split in splits]
    for candidate in candidates:
        if (changed := apply(settings, candidate)) is not None:
            yield tuple(f"--{key}={_value(value)}" for key, value in candidate.items()), changed


def apply(settings: Settings, change: dict[str, Any]) -> Settings | None:
    """The run with changed values of dotted keys; None if they are inconsistent."""
    changed: dict[str, Any] = {}
    try:
        for name in ("model", "train", "optimizer"):
            values = {k.partition(".")[2]: v for k, v in change.items() if k.startswith(f"{name}.")}
            changed[name] = replace(getattr(settings, name), **values)
        found = replace(settings, **changed)
        check_layout(found)
    except ValueError:
        return None
    return found


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
                tensor = {"model.tensor_model_parallel_size": 8, "model.sequence_parallel": True}
                yield {**tensor, "model.pipeline_model_parallel_size": pp}


def _recompute(settings: Settings) -> list[dict[str, Any]]:
    granularity = settings.model.recompute_granularity
    if granularity == "full":
        return []
    selective = {"model.recompute_granularity": "selective", "model.recompute_modules": ["core_attn"]}
    full: dict[str, Any] = {
        "model.recompute_granularity": "full",
        "model.recompute_method": "uniform",
        "model.recompute_num_layers": 1,
    }
    return [selective, full] if granularity is None else [full]


def _fp8_param(settings: Settings) -> list[dict[str, Any]]:
    return [{"model.fp8_param": True}] if settings.model.fp8 and not settings.model.fp8_param else []


def _sharded(settings: Settings) -> list[dict[str, Any]]:
    several = settings.data_parallel * settings.model.context_parallel_size > 1
    distributed = settings.optimizer.use_distributed_optimizer
    return [{"optimizer.use_distributed_optimizer": True}] if several and not distributed else []


def _smaller(settings: Settings) -> list[dict[str, Any]]:
    halvings = range(1, settings.train.micro_batch_size.bit_length())
    return [{"train.micro_batch_size": settings.train.micro_batch_size >> times} for times in halvings]


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{','.join(value)}]" if isinstance(value, list) else str(value)
