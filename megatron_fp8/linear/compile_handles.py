"""Integer handles of GEMM sites for compiled code. A graph holds a handle as a tensor."""

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
    """What compiled code needs of a site.

    Attributes:
        handle: int64 [] on the CPU, the site's number.
        saved_layout: memory layout of the saved input's codes and scales (a SideLayout as text); empty without FP8.
        owner: returns the site's layer, or None once that is deleted. It refers to no tensor.
    """

    def __init__(self, handle: torch.Tensor, saved_layout: str):
        self.handle, self.saved_layout = handle, saved_layout
        self.owner: Callable[[], Any] = lambda: None
        self._multiplied: int | None = None

    def multiplied_by(self, weight: torch.Tensor) -> None:
        """Remembers the weight [N, K] that a forward used."""
        self._multiplied = id(weight) if hasattr(weight, "main_grad") else None

    def parameter(self, weight: torch.Tensor) -> torch.Tensor:
        """The layer's parameter [N, K] with a main_grad, for a weight [N, K] that may be an offloaded copy of it."""
        layer = self.owner()
        if layer is None or self._multiplied is None:
            return weight
        own: Any = layer._parameters.get("weight")
        own = getattr(layer, "tied_weight", None) if own is None else own
        return own if id(own) == self._multiplied else weight


def register(site: GemmSite, saved_layout: str) -> CompileHandle:
    """Registers the site under a new handle, for the site's lifetime."""
    number = next(_numbers)
    _sites[number] = site
    return CompileHandle(torch.tensor(number, dtype=torch.int64, device="cpu"), saved_layout)


def site_by_handle(handle: torch.Tensor) -> GemmSite:
    """The site with this handle, int64 []. RuntimeError if the site was deleted."""
    site = _sites.get(int(handle))
    if site is None:
        raise RuntimeError("the FP8 layer whose compiled code runs is gone: compile the model that is there")
    return site
