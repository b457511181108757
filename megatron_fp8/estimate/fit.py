"""Does it fit: if not, the nearest change of the config with which it does.

Changes are tried in an order, each on the run as it is, then those of a kind with the next: what costs least of the
numbers and of the user first. Nothing else of the run is changed.
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
"""Part of a device's memory that is left to what no estimate here knows: CUDA's context, NCCL's buffers, workspaces of
GEMMs, fragments. An assumption, not a measurement."""


@dataclass(frozen=True)
class Fit:
    """Whether a run fits.

    Attributes:
        needed, there: bytes of the fullest rank, and of the device without its reserve.
        change: options with which it fits, None where it does as it is, or where nothing tried is enough.
        changed: bytes with that change.
        smallest: the least that any change tried needs.
    """

    needed: int
    there: int
    change: tuple[str, ...] | None
    changed: int | None
    smallest: int

    @property
    def fits(self) -> bool:
        """As it is."""
        return self.needed <= self.there


def fit(found: Estimate, device: Device, reserve: float = RESERVE) -> Fit:
    """Whether the run fits into the device, and if not what would make it."""
    there, needed = int(device.memory * (1 - reserve)), found.fullest.total
    smallest, plans = needed, Plans(found.settings.model)  # no change here is of the plan
    if needed <= there:
        return Fit(needed, there, None, None, smallest)
    for change, settings in changes(found.settings):
        total = fullest(settings, plans)
        smallest = min(smallest, total)
        if total <= there:
            return Fit(needed, there, change, total, smallest)
    return Fit(needed, there, None, None, smallest)


def fullest(settings: Settings, plans: Plans) -> int:
    """Bytes of the fullest rank on GPUs."""
    stages = range(settings.model.pipeline_model_parallel_size)
    return max(memory(settings, stage, plans, gpu=True).total for stage in stages)


def changes(settings: Settings) -> Iterator[tuple[tuple[str, ...], Settings]]:
    """Changes one after the other: more tensor, expert and pipeline parallelism, recomputation, FP8 weights, a sharded
    optimizer, smaller micro-batches; then the last four one upon the other, and all of them with each split."""
    splits = list(_splits(settings))
    rest = [change for group in (_recompute, _fp8_param, _sharded, _smaller) for change in group(settings)]
    for one in [*splits, *rest]:
        if (made := apply(settings, one)) is not None:
            yield _words(one), made
    together: dict[str, Any] = {}
    for group in (_sharded, _fp8_param, _recompute, _smaller):
        for more in group(settings):
            together |= more
            if len(together) > len(more) and (made := apply(settings, together)) is not None:
                yield _words(together), made
    for split in splits:
        if together and (made := apply(settings, {**together, **split})) is not None:
            yield _words({**together, **split}), made


def layouts(settings: Settings) -> Iterator[tuple[tuple[str, ...], Settings]]:
    """Every tensor, pipeline and expert parallel size that the GPUs allow, fewest ranks of a model first; each alone,
    then with a sharded optimizer, FP8 weights, recomputation and smaller micro-batches, one upon the other."""
    model = settings.model
    tensor = [size for size in (1, 2, 4, 8) if settings.gpus % size == 0]
    pipeline = [size for size in (1, 2, 4, 8, 16, 32) if model.num_layers % size == 0]
    experts = [size for size in range(1, (model.num_moe_experts or 1) + 1) if settings.gpus % size == 0]
    sizes = [one for one in itertools.product(pipeline, tensor, experts) if one[0] * one[1] <= settings.gpus]
    for pp, tp, ep in sorted(sizes, key=lambda one: (one[0] * one[1], one)):
        together: dict[str, Any] = {
            "model.tensor_model_parallel_size": tp,
            "model.sequence_parallel": tp > 1,
            "model.pipeline_model_parallel_size": pp,
        }
        if model.virtual_pipeline_model_parallel_size:
            together["model.virtual_pipeline_model_parallel_size"] = None
        if model.num_moe_experts:
            together["model.expert_model_parallel_size"] = ep
        if (made := apply(settings, together)) is None:
            continue
        yield _words(together), made
        for group in (_sharded, _fp8_param, _recompute, _smaller):
            for more in group(made):
                together |= more
                if (smaller := apply(settings, together)) is not None:
                    yield _words(together), smaller


def layout(settings: Settings, gpus: int, device: Device, reserve: float = RESERVE) -> tuple[str, ...] | None:
    """Options with which the model fits into so many GPUs, whatever its settings' layout; None: nothing tried does."""
    plans, there = Plans(settings.model), int(device.memory * (1 - reserve))
    tried = layouts(replace(settings, gpus=gpus))

    def enough(made: Settings) -> bool:
        stages = range(made.model.pipeline_model_parallel_size)
        return all(memory(made, stage, plans, gpu=True).total <= there for stage in stages)

    return next((words for words, made in tried if enough(made)), None)


def apply(settings: Settings, change: dict[str, Any]) -> Settings | None:
    """The run with other values of dotted keys; None where they do not fit together."""
    parts: dict[str, dict[str, Any]] = {"model": {}, "train": {}, "optimizer": {}}
    for key, value in change.items():
        section, _, name = key.partition(".")
        parts[section][name] = value
    try:
        model = replace(settings.model, **parts["model"])
        made = replace(
            settings,
            model=model,
            train=replace(settings.train, **parts["train"]),
            optimizer=replace(settings.optimizer, **parts["optimizer"]),
        )
    except ValueError:
        return None
    at_once = made.train.micro_batch_size * made.data_parallel
    divides = settings.gpus % model.model_ranks == 0 and made.data_parallel > 0
    if not divides or not at_once or made.train.global_batch_size % at_once:
        return None
    if made.gpus % (model.expert_ranks):
        return None
    tp = model.tensor_model_parallel_size
    cut = [model.num_attention_heads, model.query_groups, model.ffn, model.hidden_size]
    if model.multi_latent_attention:
        cut += [model.q_lora_rank or 0, model.kv_lora_rank + model.qk_pos_emb_head_dim]
    if any(size % tp for size in cut) or (model.sequence_parallel and made.train.seq_length % tp):
        return None
    return made


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
    """Options as a command line takes them."""
    return tuple(f"--{key}={_value(value)}" for key, value in change.items())


def _value(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{','.join(value)}]" if isinstance(value, list) else str(value)
