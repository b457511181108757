"""Tables for fp8_size_filter as `megatron-fp8 bench --tune` would write them on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_fp8 import Format
from megatron_fp8.plan.gemm_size_table import FORMAT, roles_of
from megatron_fp8.plan.timing import processor_name
from megatron_fp8.recipe import MXFP8BlockScaling, Recipe, recipe_name

MXFP8 = MXFP8BlockScaling(fp8_format=Format.HYBRID)


def make_table(
    path: Path, rows: dict[tuple[int, int, int], float], recipe: Recipe = MXFP8, **changes: Any
) -> str:
    """Write (K, N, tokens) -> FP8's time over BF16's; the path as text."""
    entries = [
        {"k": k, "n": n, "tokens": t, "ratio": ratio, "spread": 0.0} for (k, n, t), ratio in rows.items()
    ]
    found = {"format": FORMAT, "device": processor_name(), "backend": "emulated", "date": "2026-11-21"}
    found |= {"recipe": recipe_name(recipe), "roles": roles_of(recipe), "rows": entries}
    path.write_text(json.dumps({**found, **changes}))
    return str(path)
