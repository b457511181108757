"""Cycles are looked for again afterwards, whatever happened, if they were before."""

from __future__ import annotations

import gc

import pytest

from megatron_fp8.files.gc_pause import gc_paused


@gc_paused()
def planned(fails: bool) -> bool:
    with gc_paused():
        pass
    if fails:
        raise ValueError("a plan that cannot be")
    return gc.isenabled()


@pytest.mark.parametrize("collects", [True, False])
def test_no_cycles_are_looked_for_inside(collects: bool) -> None:
    try:
        if not collects:
            gc.disable()
        assert not planned(False)
        assert gc.isenabled() == collects
        with pytest.raises(ValueError, match="cannot be"):
            planned(True)
        assert gc.isenabled() == collects
    finally:
        gc.enable()
