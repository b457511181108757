"""Training's weights in inference engines: streams, transports, and comparison of both computations.

sources        live models, as a plan of Hugging Face tensors reads them
stream         (name, tensor) of a live model, and the interfaces that reinforcement learning calls
transport      a stream to other processes: broadcast, shared memory, CUDA IPC

Importing this package does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .stream import weight_stream

__all__ = ["ENGINES", "weight_stream"]

ENGINES = ("vllm", "sglang", "transformers")
"""Inference engines whose rules are known (engine_rules.py)."""


def __getattr__(name: str) -> Any:
    if name == "weight_stream":
        from .stream import weight_stream

        return weight_stream
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
