"""FP8 training for Megatron-Core and for any PyTorch model, and the numbers it is made of.

Importing this package loads torch only; Megatron-Core comes with ``TransformerConfig`` or ``megatron_fp8.mcore``.
"""

import importlib
from typing import TYPE_CHECKING, Any

from . import moved
from .numerics.formats import Format
from .quantizer import quantize
from .tensor import Float8Tensor

if TYPE_CHECKING:
    from .mcore.config.transformer_config import TransformerConfig
    from .nn import (
        Fp8Config,
        Fp8Linear,
        convert_from_fp8,
        convert_to_fp8,
        fp8_autocast,
        fp8_matmul,
        fp8_step,
        register_fp8_step,
    )
    from .nn.trainer import Fp8Trainer
    from .state.loss_scaler import LossScaler
    from .telemetry.diagnosis import diagnose

__version__ = "0.1.0"

_LATER = {
    "TransformerConfig": ".mcore.config.transformer_config",
    "Fp8Config": ".nn",
    "Fp8Linear": ".nn",
    "Fp8Trainer": ".nn.trainer",
    "LossScaler": ".state.loss_scaler",
    "convert_from_fp8": ".nn",
    "convert_to_fp8": ".nn",
    "diagnose": ".telemetry.diagnosis",
    "fp8_autocast": ".nn",
    "fp8_matmul": ".nn",
    "fp8_step": ".nn",
    "register_fp8_step": ".nn",
}
"""Names that are imported when they are first used, and the module each is in."""

__all__ = [
    "Float8Tensor",
    "Format",
    "Fp8Config",
    "Fp8Linear",
    "Fp8Trainer",
    "LossScaler",
    "TransformerConfig",
    "__version__",
    "convert_from_fp8",
    "convert_to_fp8",
    "diagnose",
    "fp8_autocast",
    "fp8_matmul",
    "fp8_step",
    "quantize",
    "register_fp8_step",
]

moved.install()


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "TransformerConfig":
        importlib.import_module(".mcore.installed", __name__).require_megatron()
    return getattr(importlib.import_module(_LATER[name], __name__), name)
