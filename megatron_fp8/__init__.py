"""FP8 training for Megatron-Core, and the numbers it is made of.

Importing this package loads torch only; Megatron-Core comes with ``TransformerConfig`` or ``megatron_fp8.mcore``.
"""

from typing import TYPE_CHECKING, Any

from .formats import Format
from .quantizer import quantize
from .tensor import Float8Tensor

if TYPE_CHECKING:
    from .mcore.config import TransformerConfig

__version__ = "0.1.0"

__all__ = ["Float8Tensor", "Format", "TransformerConfig", "__version__", "quantize"]


def __getattr__(name: str) -> Any:
    if name == "TransformerConfig":
        from .mcore.config import TransformerConfig

        return TransformerConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
