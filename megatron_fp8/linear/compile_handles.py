"""Numbers by which compiled code finds GEMM sites. A graph can hold a number as a tensor."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .gemm_site import GemmSite

_sites: weakref.WeakValueDictionary[int, GemmSite] = weakref.WeakValueDictionary()
_numbers = itertools.count()


class CompileHandle:
    """A site's part for compiled code.

    Attributes:
        handle: int64 [] on the CPU, the site's number.
        saved_layout: how its input's codes and scales lie (a SideLayout as text); empty without FP8.
        owner: gives the layer whose site it is, while that lives: no tensor of it is referred to.
    """

    def __init__(self, handle: torch.Tensor, saved_layout: str):
        self.handle, self.saved_layout = handle, saved_layout
        self.owner: Callable[[], Any] = lambda: None
        self._multiplied: int | None = None

    def multiplied_by(self, weight: torch.Tensor) -> None:
        """A forward has used this weight."""
        self._multiplied = id(weight) if hasattr(weight, "main_grad") else None

    def parameter(self, weight: torch.Tensor) -> torch.Tensor:
        """The parameter with a main_grad whose values a backward was given: those may be a copy, made by offloading."""
        layer = self.owner()
        if layer is None or self._multiplied is None:
            return weight
        own: Any = layer._parameters.get("weight")
        own = getattr(layer, "tied_weight", None) if own is None else own
        return own if id(own) == self._multiplied else weight


def register(site: GemmSite, saved_layout: str) -> CompileHandle:
    """Make the site known, for as long as it lives."""
    number = next(_numbers)
    _sites[number] = site
    return CompileHandle(torch.tensor(number, dtype=torch.int64, device="cpu"), saved_layout)


def site_by_handle(handle: torch.Tensor) -> GemmSite:
    """The site that has this handle. RuntimeError if it is gone."""
    site = _sites.get(int(handle))
    if site is None:
        raise RuntimeError("the FP8 layer whose compiled code runs is gone: compile the model that is there")
    return site
