"""FP8 for any PyTorch model: three lines in a notebook.

from megatron_fp8.nn import convert_to_fp8, register_fp8_step

model = convert_to_fp8(model)            # in place; prints a table of converted and skipped modules
register_fp8_step(optimizer, model)      # scales and histories are updated once an iteration
"""

from .autocast import fp8_autocast
from .config import DEFAULT_SKIP, Fp8Config
from .convert import Fp8Report, convert_from_fp8, convert_to_fp8
from .frozen_weights import dequantize_weights, freeze_weights
from .fsdp import enable_fp8_all_gather
from .linear import Fp8Linear
from .matmul import fp8_matmul
from .state_dict import fp8_state_dict, load_fp8_state_dict
from .step import fp8_step, register_fp8_step

__all__ = [
    "DEFAULT_SKIP",
    "Fp8Config",
    "Fp8Linear",
    "Fp8Report",
    "convert_from_fp8",
    "convert_to_fp8",
    "dequantize_weights",
    "enable_fp8_all_gather",
    "fp8_autocast",
    "fp8_matmul",
    "fp8_state_dict",
    "fp8_step",
    "freeze_weights",
    "load_fp8_state_dict",
    "register_fp8_step",
]
