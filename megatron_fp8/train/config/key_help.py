"""One line of help for each config key, from the fields' docstrings.

They are this package's and those of the installed Megatron-Core.
"""

from __future__ import annotations

import functools
import re
import textwrap
from typing import Any

from docstring_parser import parse_from_object

from ...mcore.config.transformer_config import MLATransformerConfig
from ...recipe import RECIPES
from .model_section import GPTOptions
from .run_config import SECTIONS, RunConfig, known_keys

OWN: dict[str, str] = {
    "model.fp8": "FP8: 'hybrid' (E4M3, and E5M2 for gradients) or 'e4m3' (E4M3 everywhere); None: BF16.",
    "model.fp8_recipe": f"Which scaling: {', '.join(name for name in RECIPES if name != 'nvfp4')}; None: tensorwise.",
    "model.fp4": "FP4: 'e2m1' (NVFP4), in place of model.fp8; None: off.",
    "model.fp4_recipe": "With model.fp4: nvfp4, or custom with model.fp4_quantizer_factory.",
    "model.fp4_param": "Keep the weights of FP4 GEMMs as NVFP4 alone, with float32 masters in the optimizer.",
    "model.fp4_quantizer_factory": "As model.fp8_quantizer_factory, for model.fp4_recipe=custom.",
    "model.fp8_param": "Keep the weights of FP8 GEMMs as FP8 alone, with float32 masters in the optimizer.",
    "model.fp8_wgrad": "Compute the weights' gradients in FP8 too; False: in high precision.",
    "model.fp8_dot_product_attention": "Attention's own products in FP8: refused, only Transformer Engine has them.",
    "model.fp8_multi_head_attention": "Attention's own products in FP8: refused, only Transformer Engine has them.",
    "model.fp8_interval": "Delayed scaling: iterations between two scales; histories roll every iteration.",
    "model.fp8_margin": "Powers of two of headroom that scales leave (delayed, tensorwise).",
    "model.fp8_amax_history_len": "Delayed scaling: iterations whose largest magnitudes are remembered.",
    "model.fp8_amax_compute_algo": "Delayed scaling: 'max' of the history, or 'most_recent'.",
    "model.fp8_quantizer_factory": "Import path of a custom recipe's factory, such as package.module.function.",
    "model.activation_func_fp8_input_store": "Store the input of the MLP's activation in FP8 until the backward.",
    "model.moe_router_padding_for_fp8": "Old name of moe_router_padding_for_quantization.",
    "model.fp16": "Train in float16 with a loss scale, not in BF16 (docs/unstable.md).",
    "model.first_last_layers_bf16": "Keep the first and last layers in BF16.",
    "model.num_layers_at_start_in_bf16": "With first_last_layers_bf16: layers in BF16 at the start.",
    "model.num_layers_at_end_in_bf16": "With first_last_layers_bf16: layers in BF16 at the end.",
    "model.tp_only_amax_red": "Delayed scaling: reduce amaxes over tensor and context parallel ranks only.",
    "model.transformer_impl": "Which layers a model is made from: 'local', Megatron-Core's own with this package's FP8.",
}
"""In place of Megatron-Core's docstrings, which speak of Transformer Engine or say less."""

_WIDTH = 130
_LEFT, _INDENT = 50, " " * 6
_FIRST_SENTENCE = re.compile(r"(.{20,}?[.!?])(?: (?=[A-Z'\"])|$)")


def key_help() -> dict[str, str]:
    """Dotted key -> one line of help, in the order of ``known_keys``; empty without a docstring."""
    return {key: OWN.get(key) or _one_line(_description(key)) for key in known_keys()}


def key_lines(width: int) -> list[str]:
    """Every key with its default and its help, in lines of at most ``width`` columns.

    Help that does not fit beside its key is indented below it; a single long word may exceed the width.
    """
    values = RunConfig().to_dict()
    lines = []
    for key, help_text in key_help().items():
        section, _, name = key.rpartition(".")
        default = f"{key} = {(values[section] if section else values)[name]!r}"
        line = f"{default:<{_LEFT}} {help_text}"
        if len(line) <= width:
            lines.append(line)
            continue
        for text, first in ((default, ""), (help_text, _INDENT)):
            lines += textwrap.wrap(
                text,
                width,
                initial_indent=first,
                subsequent_indent=_INDENT,
                break_long_words=False,
                break_on_hyphens=False,
            )
    return lines


def _description(key: str) -> str:
    section, _, name = key.rpartition(".")
    if section == "model":
        return _docstrings(GPTOptions).get(name) or _docstrings(MLATransformerConfig).get(name, "")
    return _docstrings(SECTIONS[section] if section else RunConfig).get(name, "")


@functools.cache
def _docstrings(kind: Any) -> dict[str, str]:
    """Field -> its docstring, in a dataclass and its base classes."""
    result: dict[str, str] = {}
    for each in kind.__mro__[:-1]:
        for parameter in parse_from_object(each).params:
            result.setdefault(parameter.arg_name, " ".join((parameter.description or "").split()))
    return result


def _one_line(text: str) -> str:
    """The first sentence, shortened to one line."""
    sentence = _FIRST_SENTENCE.match(text)
    return textwrap.shorten(sentence[1] if sentence else text, _WIDTH, placeholder=" ...")
