"""What a linear is handed besides an ordinary tensor: a jagged batch, or the stand-in of a symbolic trace."""

from __future__ import annotations

from typing import Any

import torch


def call_in_graph(module: torch.nn.Module, proxy: torch.fx.Proxy) -> torch.fx.Proxy:
    """A call of the module as one node of the graph that torch.fx.symbolic_trace writes, as it does for nn.Linear.

    Raises ValueError: the module itself is what is being traced.
    """
    tracer: Any = proxy.tracer
    if tracer.root is module:
        raise ValueError("torch.fx traces what calls an FP8 linear, not the linear: put it into a module")
    called: torch.fx.Proxy = tracer.create_proxy("call_module", tracer.path_of_module(module), (proxy,), {})
    return called


def call_on_values(module: torch.nn.Module, nested: torch.Tensor) -> torch.Tensor:
    """The module's forward on the tokens of a jagged nested tensor [batch, ragged, ..., in_features].

    Raises ValueError: another layout, whose tokens do not lie in one matrix; or features that are ragged.
    """
    jagged: Any = nested
    if nested.layout is not torch.jagged or jagged._ragged_idx == nested.ndim - 1:
        raise ValueError(
            "an FP8 linear takes nested tensors whose layout is torch.jagged and whose last dimension is the same for"
            " all: torch.nested.nested_tensor(list, layout=torch.jagged)"
        )
    if jagged.lengths() is not None:  # between its sequences is memory with any content, which would be cast
        jagged = jagged.contiguous()
    return torch.nested.nested_tensor_from_jagged(
        module.forward(jagged.values()),
        jagged.offsets(),
        jagged_dim=jagged._ragged_idx,
        min_seqlen=jagged._maybe_min_seqlen,
        max_seqlen=jagged._maybe_max_seqlen,
    )
