"""Combines the estimates of a run: memory, communication and time."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from . import calibration
from .activations import of_chunk, working_set
from .communication import of_stage as wire_of_stage
from .communication_linear import Traffic
from .iteration_time import StepTime, step_time
from .model_state_bytes import StateBytes, of_stage
from .parameters import Totals, totals
from .peaks import Device
from .pipeline import peak
from .saved_tensors import CPU, GPU
from .settings import Settings
from .sites import Plans


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
        chosen: whether the user named the device; otherwise bytes are those of a CPU run.
        parameters: of the whole model.
        stages: memory of the fullest rank of each pipeline stage.
        wire: traffic of each stage's ranks.
        time: time of one iteration.
    """

    settings: Settings
    device: Device
    chosen: bool
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
            "device": {**dataclasses.asdict(self.device), "chosen": self.chosen},
            "kind": "roofline from peaks, not a measurement",
            "how_far_off": calibration.measured(),
        }  # fmt: skip
        return found


def estimate(settings: Settings, device: Device, *, chosen: bool = True) -> Estimate:
    """Estimates a run.

    Args:
        device: for times.
        chosen: True: bytes of a run on this device, whose kernels save other tensors than CPUs; False: of a
            CPU run.
    """
    plans = Plans(settings.model)
    stages, wire = [], []
    for stage in range(settings.model.pipeline_model_parallel_size):
        stages.append(memory(settings, stage, plans, gpu=chosen))
        wire.append(wire_of_stage(settings, _chunks(settings, stage), plans))
    moved = {stage_memory.stage: _optimizer_bytes(stage_memory.state) for stage_memory in stages}
    time = step_time(settings, plans, device, moved)
    return Estimate(settings, device, chosen, totals(settings.model), stages, wire, time)


def in_bf16(settings: Settings) -> Settings:
    """The same run without FP8."""
    model = replace(
        settings.model, fp8=None, fp8_param=False, fp8_overrides={}, activation_func_fp8_input_store=False
    )
    return replace(settings, model=model)


def memory(settings: Settings, stage: int, plans: Plans, *, gpu: bool) -> Memory:
    """Memory of a stage's fullest rank; ``gpu``: with the native backend."""
    device = GPU if gpu else CPU
    chunks = _chunks(settings, stage)
    saved = [of_chunk(settings, chunk, plans, device) for chunk in chunks]
    sizes = {chunk.part: kinds.total() for chunk, kinds in zip(chunks, saved, strict=True)}
    most, in_flight = peak(settings.model, stage, settings.microbatches, sizes)
    working = max(working_set(settings, chunk, plans, device) for chunk in chunks)
    if any(chunk.last for chunk in chunks):
        model = settings.model
        rows = model.padded_vocabulary // model.tensor_model_parallel_size
        working = max(working, (model.activation_bytes + 4) * settings.tokens * rows)
    if settings.model.sequence_parallel:
        working += settings.model.activation_bytes * settings.tokens * settings.model.hidden_size
    state = of_stage(settings, chunks, plans, both_contiguous=keeps_both(settings, gpu=gpu))
    return Memory(stage, state, most, sum(saved, Counter()), in_flight, working)


def keeps_both(settings: Settings, *, gpu: bool) -> bool:
    """Whether symmetric codes are stored once per direction, as tensor cores read them."""
    return gpu and settings.model.fp8_backend != "emulated"


def _chunks(settings: Settings, stage: int) -> list[Any]:
    return [chunk for chunk in settings.model.chunks() if chunk.stage == stage]


def _optimizer_bytes(state: StateBytes) -> int:
    """Bytes that a step reads and writes: gradients are read, masters and moments read and written, weights written."""
    return state.masters + 2 * state.masters + 2 * state.moments + state.weights
