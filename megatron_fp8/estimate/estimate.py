"""Combines the estimates of a run: memory, communication and time."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from .activations import saved_by_chunk, working_set
from .communication import stage_traffic
from .config_reader import Settings
from .device import Device
from .linear_communication import Traffic
from .model import Chunk, Model
from .model_state import StateBytes, stage_state
from .parameter_counts import Totals, totals
from .roofline import StepTime, calibration, step_time


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank of a pipeline stage.

    Attributes:
        stage: the pipeline stage.
        state: memory held between iterations.
        activations: saved by all microbatches in flight at the peak.
        by_kind: saved by one microbatch, by kind.
        in_flight: microbatches at the peak, by virtual stage.
        working: temporary memory: recomputed layers or logits and their gradients, and gathered tokens.
    """

    stage: int
    state: StateBytes
    activations: int
    by_kind: Counter[str]
    in_flight: Counter[int]
    working: int

    @property
    def total(self) -> int:
        """The sum."""
        return self.state.total + self.activations + self.working


@dataclass(frozen=True)
class Estimate:
    """The estimate of one run.

    Attributes:
        settings: the run's settings.
        device: device whose peaks the time uses.
        has_device: whether the user named the device; otherwise bytes are those of a CPU run.
        parameters: of the whole model.
        stages: memory of the fullest rank of each pipeline stage.
        wire: traffic of each stage's ranks.
        time: time of one iteration.
    """

    settings: Settings
    device: Device
    has_device: bool
    parameters: Totals
    stages: list[Memory]
    wire: list[list[Traffic]]
    time: StepTime

    @property
    def fullest(self) -> Memory:
        """The stage that needs most memory."""
        return max(self.stages, key=lambda stage: stage.total)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as printed by ``--json``; bytes and ``wire`` are those of the fullest stage."""
        full, settings, time = self.fullest, self.settings, self.time
        state = dataclasses.asdict(full.state)
        found: dict[str, Any] = {
            "parameters": dataclasses.asdict(self.parameters),
            "gpus": settings.gpus,
            "data_parallel": settings.data_parallel,
            "microbatches": settings.microbatches,
            "bytes": {
                **state,
                "activations": full.activations,
                "working": full.working,
                "total": full.total,
                "stage": full.stage,
                "activations_by_kind": dict(full.by_kind),
                "in_flight": {str(part): count for part, count in full.in_flight.items()},
            },
            "stages": [
                {"stage": one.stage, "total": one.total, **dataclasses.asdict(one.state),
                 "activations": one.activations, "working": one.working}
                for one in self.stages
            ],
            "wire": [{**dataclasses.asdict(one), "sent": one.sent} for one in self.wire[full.stage]],
            "notes": list(settings.notes),
            "flops": time.flops,
            "step_seconds": time.seconds,
            "mfu": time.mfu,
            "tokens_per_second": time.tokens_per_second,
            "bubble_seconds": time.bubble,
            "time": {**dataclasses.asdict(time.stage), "microbatches": settings.microbatches,
                     "slowest_stage": time.slowest},
            "device": {**dataclasses.asdict(self.device), "chosen": self.has_device},
            "kind": "roofline from peaks, not a measurement",
            "how_far_off": calibration(),
        }  # fmt: skip
        return found


def estimate(settings: Settings, device: Device, *, has_device: bool = True) -> Estimate:
    """Estimates a run.

    Args:
        device: for times.
        has_device: True: bytes of a run on this device, whose kernels save other tensors than CPUs; False: of a
            CPU run.
    """
    settings = replace(settings, on_gpu=has_device)
    stages, wire = [], []
    for stage in range(settings.model.pipeline_model_parallel_size):
        stages.append(memory(settings, stage))
        wire.append(stage_traffic(settings, _chunks(settings, stage)))
    moved = {stage_memory.stage: _optimizer_bytes(stage_memory.state) for stage_memory in stages}
    time = step_time(settings, device, moved)
    return Estimate(settings, device, has_device, totals(settings.model), stages, wire, time)


def in_bf16(settings: Settings) -> Settings:
    """The same run without FP8."""
    model = replace(
        settings.model,
        fp8=None,
        fp4=None,
        fp8_param=False,
        fp4_param=False,
        fp8_overrides={},
        activation_func_fp8_input_store=False,
    )
    return replace(settings, model=model)


def memory(settings: Settings, stage: int) -> Memory:
    """Memory of a stage's fullest rank."""
    model, chunks = settings.model, _chunks(settings, stage)
    saved = [saved_by_chunk(settings, chunk) for chunk in chunks]
    sizes = {chunk.part: kinds.total() for chunk, kinds in zip(chunks, saved, strict=True)}
    most, in_flight = peak(model, stage, settings.microbatches, sizes)
    working = max(working_set(settings, chunk) for chunk in chunks)
    if any(chunk.last for chunk in chunks):
        rows = model.padded_vocabulary // model.tensor_model_parallel_size
        working = max(working, (model.activation_bytes + 4) * settings.tokens * rows)
    if model.sequence_parallel:
        working += model.activation_bytes * settings.tokens * model.hidden_size
    return Memory(stage, stage_state(settings, chunks), most, sum(saved, Counter()), in_flight, working)


def _chunks(settings: Settings, stage: int) -> list[Chunk]:
    return [chunk for chunk in settings.model.chunks() if chunk.stage == stage]


def _optimizer_bytes(state: StateBytes) -> int:
    """Bytes that a step reads and writes: gradients are read, masters and moments read and written, weights written."""
    return state.masters + 2 * state.masters + 2 * state.moments + state.weights


def peak(model: Model, stage: int, microbatches: int, sizes: Mapping[int, int]) -> tuple[int, Counter[int]]:
    """(peak bytes, microbatches in flight at the peak by chunk) of a stage, by Megatron-Core's schedules.

    Without virtual stages a stage runs as many forwards as there are stages after it, then alternates forward and
    backward (1F1B). With virtual stages its chunks alternate, with a group of microbatches each, and more are in
    flight.

    Args:
        sizes: chunk of the stage -> bytes that one microbatch saves there until its backward pass.
    """
    stages, parts = model.pipeline_model_parallel_size, model.virtual_pipeline_model_parallel_size or 1
    forwards = _order(model, microbatches)
    warmup = stages - stage - 1
    if parts > 1:
        group = model.microbatch_group_size_per_vp_stage or stages
        warmup = 2 * warmup + (parts - 1) * group
    in_flight: Counter[int] = Counter()
    best, at_peak = 0, Counter[int]()
    for index, part in enumerate(forwards):
        in_flight[part] += 1
        size = sum(sizes[chunk] * count for chunk, count in in_flight.items())
        if size > best:
            best, at_peak = size, in_flight.copy()
        if index >= warmup:  # each forward is followed by a backward, with chunks in reverse order
            in_flight[parts - 1 - forwards[index - warmup]] -= 1
    return best, at_peak


def _order(model: Model, microbatches: int) -> list[int]:
    """The chunk of each forward of a stage, in order."""
    parts = model.virtual_pipeline_model_parallel_size or 1
    group = model.microbatch_group_size_per_vp_stage or model.pipeline_model_parallel_size
    if parts == 1:
        return [0] * microbatches
    found = []
    for first in range(0, microbatches, group):
        count = min(group, microbatches - first)
        found += [part for part in range(parts) for _ in range(count)]
    return found
