"""Rings of amaxes against lists that are rolled and read whole; what bad memory in them shows."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.support.compare import assert_same_bytes
from megatron_fp8.state import amax_history as rings_file
from megatron_fp8.state.amax_history import AmaxRingBuffer

CPU = torch.device("cpu")
COUNT = 7


def amaxes(generator: torch.Generator, step: int) -> torch.Tensor:
    """Of a step: 0 where a tensor was not cast; large ones are rare, so that most maxima fall out later; tiny ones."""
    value = torch.rand(COUNT, generator=generator) * 2.0 ** (8 * math.cos(step / 50))
    value[torch.rand(COUNT, generator=generator) < 0.02] *= 1e6
    value[torch.rand(COUNT, generator=generator) < 0.02] = 2.0**-149
    value[torch.rand(COUNT, generator=generator) < 0.2] = 0
    return value


class Plain:
    """One ring, as docs/numerics.md has it: row 0 is the running one."""

    def __init__(self, length: int):
        self.rows = [0.0] * length

    def step(self, value: float) -> float:
        """The largest of all rows, before they roll; those of a tensor that was not cast do not."""
        self.rows[0] = value
        largest = max(self.rows)
        if value:
            self.rows = self.rows[1:] + self.rows[:1]
        self.rows[0] = 0.0
        return largest


def step(rings: AmaxRingBuffer, value: torch.Tensor) -> torch.Tensor:
    rings.put(value)
    largest = rings.largest()
    rings.roll(value != 0)
    return largest


def stepped(length: int, steps: int, seed: int = 0) -> tuple[AmaxRingBuffer, list[Plain]]:
    rings, plain = AmaxRingBuffer(COUNT, length, CPU), [Plain(length) for _ in range(COUNT)]
    generator = torch.Generator().manual_seed(seed)
    for number in range(steps):
        value = amaxes(generator, number)
        expected = [one.step(v) for one, v in zip(plain, value.tolist(), strict=True)]
        assert_same_bytes(step(rings, value), torch.tensor(expected), f"step {number}")
    return rings, plain


@pytest.mark.parametrize(("length", "steps"), [(1, 30), (2, 100), (32, 200), (33, 200), (100, 400)])
def test_the_largest_is_that_of_all_entries(length: int, steps: int) -> None:
    """Until each ring has gone round: what was largest falls out of every block."""
    rings, plain = stepped(length, steps)
    for ring, expected in enumerate(plain):
        assert_same_bytes(rings.entries(ring), torch.tensor(expected.rows))
    assert_same_bytes(rings.unrolled(), torch.tensor([one.rows for one in plain]).t())
    assert not rings.damaged()


def test_many_rings_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rings_file, "TOGETHER", 2)
    stepped(33, 100)


def test_nothing_moves() -> None:
    """A captured step has the addresses."""
    rings = AmaxRingBuffer(COUNT, 40, CPU)
    before = [tensor.data_ptr() for tensor in (rings.head, rings.rows, rings.maxima)]
    for number in range(50):
        step(rings, amaxes(torch.Generator().manual_seed(number), number))
    assert [tensor.data_ptr() for tensor in (rings.head, rings.rows, rings.maxima)] == before


@pytest.mark.parametrize(("length", "steps"), [(1, 90), (6, 3), (6, 90), (40, 20), (64, 90)])
def test_what_was_saved_goes_on_in_a_ring_of_any_length(length: int, steps: int) -> None:
    """The latest that fit; the same again where the length is the same, whatever the ring held before."""
    source, plain = stepped(40, steps)
    taker, _ = stepped(length, 77, seed=1)
    for ring in range(COUNT):
        taker.load(ring, source.entries(ring))
        latest = plain[ring].rows[1:][-(length - 1) :] if length > 1 else []
        plain[ring] = Plain(length)
        plain[ring].rows[length - len(latest) :] = latest
        assert_same_bytes(taker.entries(ring), torch.tensor(plain[ring].rows))
    assert not taker.damaged()
    generator = torch.Generator().manual_seed(2)
    for number in range(2 * length):
        value = amaxes(generator, number)
        expected = [one.step(v) for one, v in zip(plain, value.tolist(), strict=True)]
        assert_same_bytes(step(taker, value), torch.tensor(expected), f"step {number}")


def test_more_rings_leave_those_before_as_they_were() -> None:
    rings, plain = stepped(40, 100)
    more = rings.grown(COUNT + 3)
    assert_same_bytes(more.largest()[:COUNT], rings.largest())
    for ring in range(COUNT):
        assert_same_bytes(more.entries(ring), torch.tensor(plain[ring].rows))
    assert not more.entries(COUNT + 2).any() and not more.damaged()


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("kept", ["rows", "maxima"])
def test_a_number_that_nobody_recorded_is_damage(kept: str, value: float) -> None:
    """Of any block, whether the next iterations read it or not; a maximum that was lost, too."""
    rings, _ = stepped(40, 200)
    for block in range(rings.rows.shape[0]):
        memory = getattr(rings, kept)[block, 3]
        before = memory.clone()
        for damaged in (value, 0.0) if kept == "maxima" else (value,):
            memory.view(-1)[:1] = damaged
            assert rings.damaged(), block
        memory.copy_(before)
        assert not rings.damaged()


def test_an_entry_below_zero_is_no_damage_and_changes_nothing() -> None:
    rings, _ = stepped(40, 200)
    before = rings.largest()
    smallest = rings.rows[1, 3].argmin()
    rings.rows[1, 3, smallest] = -math.inf
    assert not rings.damaged()
    assert_same_bytes(rings.largest(), before)
