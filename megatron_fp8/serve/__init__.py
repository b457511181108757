"""Training's weights in inference engines: streams, transports, and comparison of both computations.

adapters       LoRA and DoRA of PEFT, merged or alone
sources        live models, as a plan of Hugging Face tensors reads them
stream         (name, tensor) of a live model, and the interfaces that reinforcement learning calls
transport      a stream to other processes: broadcast, shared memory, CUDA IPC

Importing this package does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .stream import save_quantized, weight_stream

__all__ = ["ENGINES", "KV_CACHE_DTYPES", "save_quantized", "weight_stream"]

ENGINES = ("vllm", "sglang", "transformers")
"""Inference engines whose rules are known (engine_rules.py)."""
KV_CACHE_DTYPES = ("auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2")
"""vLLM's and SGLang's names of a KV cache's dtype. `fp8` is E4M3; `auto`: by config.json, else the model's."""


def __getattr__(name: str) -> Any:
    if name in ("save_quantized", "weight_stream"):
        from . import stream

        return getattr(stream, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
