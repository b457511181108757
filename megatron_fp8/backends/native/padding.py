"""Weights whose codes are padded in each product, for the plan's report (layout.py).

That changes no number, and costs a pass over the codes of weight and tokens; other sizes cost none (docs/no_speed_up.md).
"""

from __future__ import annotations

import torch

from ...recipe import Products, Recipe
from .backend import multiply, requests
from .layout import padded_sizes
from .probe import refusals

_FITS = 512
"""Tokens that every product takes as they are."""


def padded_products(device: torch.device, recipe: Recipe | Products, n: int, k: int) -> list[str]:
    """The GEMMs of a weight [N, K] whose operands are padded, whatever the number of tokens; this package's own kernel
    pads nothing. Of a recipe that ``supports`` does not refuse."""
    sizes = {"fprop": (_FITS, n, k), "dgrad": (_FITS, k, n), "wgrad": (n, k, _FITS)}  # M, N, K
    found = []
    for which, request in requests(recipe, refusals(device, multiply)).items():
        if not request.triton and padded_sizes(request, *sizes[which]) != sizes[which]:
            found.append(which)
    return found
