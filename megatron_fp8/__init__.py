"""FP8 training for Megatron-Core and for any PyTorch model.

Importing this package loads nothing else: each name brings its module when it is first used, torch with the first of
them, Megatron-Core with its configs or ``megatron_fp8.mcore``. So `megatron-fp8 --help` is not made to wait.
"""

import importlib
from typing import TYPE_CHECKING, Any

from . import moved

if TYPE_CHECKING:
    from .diagnosis.diagnosis import diagnose
    from .mcore.config.transformer_config import MLATransformerConfig, TransformerConfig
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
    from .numerics.formats import Format
    from .quantizer import quantize
    from .state.loss_scaler import LossScaler
    from .tensor import Float8Tensor

__version__ = "0.1.0"

_LATER = {
    "Float8Tensor": ".tensor",
    "Format": ".numerics.formats",
    "MLATransformerConfig": ".mcore.config.transformer_config",
    "TransformerConfig": ".mcore.config.transformer_config",
    "Fp8Config": ".nn",
    "Fp8Linear": ".nn",
    "Fp8Trainer": ".nn.trainer",
    "LossScaler": ".state.loss_scaler",
    "convert_from_fp8": ".nn",
    "convert_to_fp8": ".nn",
    "diagnose": ".diagnosis.diagnosis",
    "fp8_autocast": ".nn",
    "fp8_matmul": ".nn",
    "fp8_step": ".nn",
    "quantize": ".quantizer",
    "register_fp8_step": ".nn",
}
"""Names that are imported when they are first used, and the module each is in."""

_MODULES = ("backends", "kernels", "nn", "numerics", "quantizer", "recipe", "state", "tensor")
"""Modules that are attributes of the package without an import of their own: `megatron_fp8.recipe`."""

__all__ = [
    "Float8Tensor",
    "Format",
    "Fp8Config",
    "Fp8Linear",
    "Fp8Trainer",
    "LossScaler",
    "MLATransformerConfig",
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
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name.endswith("TransformerConfig"):
        importlib.import_module(".mcore.environment", __name__).require_megatron()
    return getattr(importlib.import_module(_LATER[name], __name__), name)
