"""Memory that goes bad on one rank while a run trains: NaN, Inf or another number in one place, once, between two steps.

    python tests/support/app.py damage master:nan:2:1 train ...     WHAT:VALUE:ITERATION:RANK

after iteration 2 a value of a master weight of rank 1 is NaN. What is damaged is of the second layer's linear_fc1, unless
it says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron_fp8.mcore.optimizer.optimizer_setup import parts_of
from megatron_fp8.mcore.sites import fp8_linears

SITE = "layers.1.mlp.linear_fc1"


def damage(trainer: Any, what: str, value: float) -> None:
    """Put a number where it does not belong."""
    _KINDS[what](trainer, value)


def damage_from_words(words: str) -> tuple[int, Callable[[Any], None]]:
    """The iteration after which, and what then changes a trainer; on other ranks it changes nothing."""
    what, value, iteration, rank = words.split(":")

    def change(trainer: Any) -> None:
        if dist.get_rank() == int(rank):
            damage(trainer, what, float(value))

    return int(iteration), change


def _parameter(trainer: Any, name: str) -> torch.nn.Parameter:
    return next(p for n, p in trainer.stepper.chunks[0].named_parameters() if name in n)


def _weight(trainer: Any, value: float) -> None:
    _set(_parameter(trainer, f"{SITE}.weight"), value)


def _unread(trainer: Any, value: float) -> None:
    """Of the last row of the embedding, a token that no text has: nobody reads it."""
    _set(_moments(trainer, _parameter(trainer, "word_embeddings.weight"))["master"], value, -1)


def _set(tensor: torch.Tensor, value: float, place: int = 0) -> None:
    kept = tensor.stored_tensors()[-1] if hasattr(tensor, "stored_tensors") else tensor
    kept.data.view(-1)[place] = value


def _moments(trainer: Any, parameter: Any) -> dict[str, torch.Tensor]:
    """The master and both moments of a parameter; of another one, where this rank has none of it."""
    found = [
        (master is not getattr(parameter, "main_param", None), -master.numel(), index, part, master)
        for part in parts_of(trainer.stepper.optimizer)
        for group in part.param_groups
        for index, master in enumerate(group["params"])
    ]
    *_, part, master = min(found, key=lambda one: one[:3])
    return {"master": master, **part.optimizer.state[master]}


def _state(name: str) -> Callable[[Any, float], None]:
    def change(trainer: Any, value: float) -> None:
        _set(_moments(trainer, _parameter(trainer, f"{SITE}.weight"))[name], value)

    return change


def _bit(trainer: Any, value: float) -> None:
    """The lowest bit of one value of a master, whatever it is: no value is given."""
    _moments(trainer, _parameter(trainer, f"{SITE}.weight"))["master"].data.view(torch.int32).view(-1)[0] ^= 1


def _whole(name: str) -> Callable[[Any, float], None]:
    """A master of what other ranks of a tensor or pipeline parallel group have too."""

    def change(trainer: Any, value: float) -> None:
        _set(_moments(trainer, _parameter(trainer, name))["master"], value)

    return change


def _input(trainer: Any, value: float) -> None:
    module = trainer.stepper.chunks[0].get_submodule(f"module.module.decoder.{SITE}")

    def spoil(_: Any, args: Any) -> Any:
        handle.remove()
        x = args[0].clone()
        x.view(-1)[0] = value
        return (x, *args[1:])

    handle = module.register_forward_pre_hook(spoil)


def _gradient(trainer: Any, value: float) -> None:
    """Of the last norm's weight, as autograd has it: before ranks add theirs up."""

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        handle.remove()
        return torch.full_like(gradient, value)

    handle = _parameter(trainer, "final_layernorm.weight").register_hook(spoil)


def _summed(trainer: Any, value: float) -> None:
    """A gradient that all ranks have added up, before the optimizer takes it."""
    optimizer, step = trainer.stepper.optimizer, trainer.stepper.optimizer.step

    def spoiled() -> Any:
        optimizer.step = step
        _set(_parameter(trainer, f"{SITE}.weight").main_grad, value)
        return step()

    optimizer.step = spoiled


def _slot(trainer: Any) -> Any:
    chunks = trainer.stepper.chunks
    site = next(x.fp8_site for x in fp8_linears(chunks) if x.fp8_site.plan.name.endswith(SITE))
    return site.quantizers["input"].slot


def _amax(trainer: Any, value: float) -> None:
    slot = _slot(trainer)
    slot.arena.rows[0, slot.index] = value


def _scale(trainer: Any, value: float) -> None:
    slot = _slot(trainer)
    slot.arena.scale[slot.index] = value


def _history(trainer: Any, value: float) -> None:
    slot = _slot(trainer)
    rings = slot.arena._histories[slot.delayed, slot.fmt.name].rings
    latest = int(rings.head[slot.column]) - 1
    rings.rows[latest // rings.block, slot.column, latest % rings.block] = value


def _maximum(trainer: Any, value: float) -> None:
    """Of the last block of a history, which no iteration writes for long."""
    slot = _slot(trainer)
    slot.arena._histories[slot.delayed, slot.fmt.name].rings.maxima[-1, slot.column] = value


_KINDS: dict[str, Callable[[Any, float], None]] = {
    "weight": _weight,
    "unread": _unread,
    "bit": _bit,
    "norm": _whole("final_layernorm.weight"),
    "embedding": _whole("output_layer.weight"),
    "master": _state("master"),
    "moment": _state("exp_avg"),
    "second": _state("exp_avg_sq"),
    "input": _input,
    "gradient": _gradient,
    "summed": _summed,
    "amax": _amax,
    "scale": _scale,
    "history": _history,
    "maximum": _maximum,
}
