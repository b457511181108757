"""Fp8Conv1D: the linear layer of GPT-2 in FP8. transformers keeps its weight as [in, out], and calls it Conv1D.

Like Conv1D it is no nn.Linear: who reads ``weight`` (adapters that merge, loaders) asks for the class, to know how the
weight lies. This file is imported only where a model holds a Conv1D, so transformers is there.
"""

from __future__ import annotations

import torch
from transformers.pytorch_utils import Conv1D

from ..params.fp8_parameter import Fp8Parameter
from .linear import Fp8Layer


class Fp8Conv1D(Fp8Layer, Conv1D):
    """y = x @ weight + bias, weight [in_features, out_features]: the bits of an Fp8Linear with the transposed weight.

    After ``prepare_for_inference`` the weight is codes of [out_features, in_features].
    """

    plain_class = Conv1D
    nx: int
    nf: int

    @property
    def in_features(self) -> int:
        """Conv1D's nx."""
        return self.nx

    @property
    def out_features(self) -> int:
        """Conv1D's nf."""
        return self.nf

    def as_matrix(self, weight: torch.Tensor) -> torch.Tensor:
        """A weight of this layer as [out_features, in_features]."""
        return weight if isinstance(weight, Fp8Parameter) else weight.t()

    def laid_out(self, matrix: torch.Tensor) -> torch.Tensor:
        """[in_features, out_features]."""
        return matrix.t()

    def plain_forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """As Conv1D multiplies."""
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), weight).view(*x.size()[:-1], self.nf)

    def __repr__(self) -> str:
        return f"Fp8Conv1D(nf={self.nf}, nx={self.nx}, recipe={self.fp8_config.resolved_recipe!r})"
