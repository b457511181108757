"""Fp8Conv1D: transformers' Conv1D (the linear layer of GPT-2) in FP8.

Conv1D stores its weight as [in, out], the transpose of nn.Linear. It is not a subclass of nn.Linear, so code
that reads ``weight`` (adapters, loaders) checks the class to learn the layout. This module is imported only
if a model contains a Conv1D, so transformers is installed.
"""

from __future__ import annotations

import torch
from transformers.pytorch_utils import Conv1D

from ..params.fp8_parameter import Fp8Parameter
from .linear import Fp8Layer


class Fp8Conv1D(Fp8Layer, Conv1D):
    """y = x @ weight + bias, weight [in_features, out_features]. Bit-identical to an Fp8Linear with the
    transposed weight.

    After ``prepare_for_inference`` the weight holds codes [out_features, in_features].
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
        """The weight as [out_features, in_features]."""
        return weight if isinstance(weight, Fp8Parameter) else weight.t()

    def to_stored_layout(self, matrix: torch.Tensor) -> torch.Tensor:
        """The matrix as [in_features, out_features]."""
        return matrix.t()

    def plain_forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Conv1D's forward in high precision."""
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), weight).view(*x.size()[:-1], self.nf)

    def __repr__(self) -> str:
        return f"Fp8Conv1D(nf={self.nf}, nx={self.nx}, recipe={self.fp8_config.resolved_recipe!r})"
