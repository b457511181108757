"""Handles a linear's unusual inputs: nested tensors and symbolic traces."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from ..files.argument_check import check_tensor


def refuse_script(name: str) -> NoReturn:
    """Raises RuntimeError: torch.jit.script would compile the module's source, and FP8 state has no TorchScript."""
    raise RuntimeError(
        f"{name}: torch.jit.script does not compile an FP8 linear: use torch.compile, or script the model after"
        " convert_from_fp8(model)"
    )


def call_in_graph(module: torch.nn.Module, proxy: Any) -> torch.fx.Proxy:
    """Records a call of the module as one node of a torch.fx.symbolic_trace graph, as for nn.Linear.

    Raises:
        ValueError: the trace's root is the module itself.
        TypeError: the input is neither a tensor nor an fx proxy.
    """
    if not isinstance(proxy, torch.fx.Proxy):
        check_tensor(getattr(module, "fp8_name", "") or type(module).__name__, proxy)
    tracer: Any = proxy.tracer
    if tracer.root is module:
        raise ValueError("torch.fx cannot trace an FP8 linear itself: put it into a module and trace that")
    node: torch.fx.Proxy = tracer.create_proxy("call_module", tracer.path_of_module(module), (proxy,), {})
    return node


def call_on_values(module: torch.nn.Module, nested: torch.Tensor) -> torch.Tensor:
    """The module's forward on the tokens of a jagged nested tensor [batch, ragged, ..., in_features].

    Raises ValueError: the layout is not torch.jagged, or the ragged dimension is the last.
    """
    jagged: Any = nested
    if nested.layout is not torch.jagged or jagged._ragged_idx == nested.ndim - 1:
        raise ValueError(
            "an FP8 linear takes nested tensors whose layout is torch.jagged and whose last dimension is the same for"
            " all: torch.nested.nested_tensor(list, layout=torch.jagged)"
        )
    if jagged.lengths() is not None:  # uninitialised memory between sequences would be cast too
        jagged = jagged.contiguous()
    return torch.nested.nested_tensor_from_jagged(
        module.forward(jagged.values()),
        jagged.offsets(),
        jagged_dim=jagged._ragged_idx,
        min_seqlen=jagged._maybe_min_seqlen,
        max_seqlen=jagged._maybe_max_seqlen,
    )
