"""Single parallel linears of Megatron-Core in FP8."""

from __future__ import annotations

import functools
from typing import Any

import torch


def make_linear(config: Any, kind: str = "column", *, plain: bool = False, **options: Any) -> Any:
    """A linear of 64 inputs and 96 outputs with the same weights each time; plain: Megatron-Core's own."""
    from megatron.core.tensor_parallel import layers as megatron

    from megatron_fp8.mcore.layers import linear as layers

    name = "ColumnParallelLinear" if kind == "column" else "RowParallelLinear"
    cls = getattr(megatron, name) if plain else getattr(layers, f"Fp8{name}")
    specific = {"gather_output": False} if kind == "column" else {"input_is_parallel": True}
    linear = cls(
        64,
        96,
        config=config,
        init_method=functools.partial(torch.nn.init.normal_, std=0.02),
        bias=options.pop("bias", True),
        skip_bias_add=options.pop("skip_bias_add", False),
        **specific,
        **options,
    )
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return linear


def random_input(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(6)).bfloat16().requires_grad_()
