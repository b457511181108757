"""Values of special Megatron-Core fields: recipes, dtypes, pipeline layouts, CUDA-graph scopes."""

from __future__ import annotations

import re
from typing import Any

import torch
from megatron.core.transformer.enums import CudaGraphScope

from ...recipe import RECIPES
from .rules import COUNT, Rule, either, integer, list_of, optional

RECIPE = Rule(
    f"one of {', '.join(map(repr, RECIPES))}", lambda v: getattr(v, "name", v) in RECIPES, tuple(RECIPES)
)
DTYPE = Rule("a floating dtype", lambda v: isinstance(v, torch.dtype) and v.is_floating_point)
FUNCTION = Rule("a function", callable)
PATTERN = optional(either(COUNT, list_of(integer(0, 1))))
_MOST_TIMES = 1000


def _is_layout_text(value: Any) -> bool:
    """Whether a value is a layout of limited size. Megatron-Core expands 't*1000' before any check."""
    if not isinstance(value, str) or not value.strip(" ,|"):
        return False
    times = re.findall(r"\*(\d+)", value.replace(",", ""))
    return all(len(number) <= 9 and int(number) <= _MOST_TIMES for number in times)


LAYOUT = Rule(
    f"text such as 'Et|tL' or 'E(tt|)*3tL', with nothing more than {_MOST_TIMES} times, or a list of lists of layers'"
    " names",
    lambda v: (
        hasattr(v, "virtual_pipeline_model_parallel_size")
        or _is_layout_text(v)
        or (isinstance(v, list) and bool(v) and all(isinstance(row, list) and row for row in v))
    ),
)
_SCOPE_NAMES = frozenset(CudaGraphScope.__members__)
SCOPE = Rule(
    f"'full' or a list of {', '.join(sorted(_SCOPE_NAMES))}",
    lambda v: (
        v is None
        or isinstance(v, CudaGraphScope)
        or (isinstance(v, str) and (v == "full" or set(v.split(",")) <= _SCOPE_NAMES))
        or (isinstance(v, list) and all(str(getattr(scope, "name", scope)) in _SCOPE_NAMES for scope in v))
    ),
)
