"""By what compiled code knows a GEMM site: a number, which it can hold as a tensor, and what else only it asks for."""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .site import GemmSite

_sites: weakref.WeakValueDictionary[int, GemmSite] = weakref.WeakValueDictionary()
_numbers = itertools.count()


@dataclass(eq=False)
class Traced:
    """A site's part for compiled code.

    Attributes:
        handle: int64 [] on the CPU, the site's number.
        saved_layout: how its input's codes and scales lie (a SideLayout as text); empty without FP8.
        gradient_owner: the parameter with a main_grad that compiled code last multiplied by: what it hands back in
            backward may be a copy that offloading made.
    """

    handle: torch.Tensor
    saved_layout: str
    gradient_owner: weakref.ref[torch.Tensor] | None = None


def register(site: GemmSite, saved_layout: str) -> Traced:
    """Make the site known, for as long as it lives."""
    number = next(_numbers)
    _sites[number] = site
    return Traced(torch.tensor(number, dtype=torch.int64, device="cpu"), saved_layout)


def site_by_handle(handle: torch.Tensor) -> GemmSite:
    """The site that has this handle. RuntimeError if it is gone."""
    site = _sites.get(int(handle))
    if site is None:
        raise RuntimeError("the FP8 layer whose compiled code runs is gone: compile the model that is there")
    return site
