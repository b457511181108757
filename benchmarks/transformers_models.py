"""transformers' own model tests over nine tiny models; transformers_tests.py runs this file with pytest.

The tests are in transformers' source distribution and nowhere here: ``their_tests`` is a package that the runner makes of
it. Where FP8_RECIPE is set, every model is converted at the end of its construction, output projections and heads
included.
"""

from __future__ import annotations

import contextlib
import io
import os
import unittest
from typing import Any

import torch
import transformers
from their_tests.test_modeling_common import ModelTesterMixin, floats_tensor, ids_tensor

from megatron_fp8.nn import convert_to_fp8

BATCH, LENGTH, VOCABULARY = 2, 8, 64
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = {**SIZES, **TOKENS, "num_key_value_heads": 1, "max_position_embeddings": 64}
PLAIN = {**SIZES, **TOKENS, "max_position_embeddings": 64}


def convert_at_construction(recipe: str) -> None:
    """Every transformers model made from now on has its linears in FP8, the head's too."""
    post_init = transformers.PreTrainedModel.post_init

    def converted(self: Any) -> None:
        post_init(self)
        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.suppress(ValueError),
        ):  # one without a linear
            convert_to_fp8(self, recipe, skip="*embed*")

    transformers.PreTrainedModel.post_init = converted  # type: ignore[method-assign]


if recipe := os.environ.get("FP8_RECIPE"):
    convert_at_construction(recipe)


class Tester:
    """What ModelTesterMixin asks of a model's tester."""

    batch_size, seq_length, is_training = BATCH, LENGTH, True
    hidden_size, num_hidden_layers, num_attention_heads = 32, 2, 2

    def __init__(self, config_class: type, options: dict[str, Any], image: bool):
        self.config_class, self.options, self.image = config_class, options, image
        if image:
            self.seq_length = 5  # four patches and the class token
            self.image_size, self.patch_size = 16, 8

    def get_config(self) -> Any:
        return self.config_class(**self.options)

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        config = self.get_config()
        if self.image:
            return config, {"pixel_values": floats_tensor([BATCH, 3, 16, 16])}
        inputs = {"input_ids": ids_tensor([BATCH, LENGTH], VOCABULARY - 3) + 3}
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        if config.is_encoder_decoder:
            inputs["decoder_input_ids"] = ids_tensor([BATCH, LENGTH], VOCABULARY - 3) + 3
            inputs["decoder_attention_mask"] = torch.ones_like(inputs["input_ids"])
        return config, inputs


def of(name: str, classes: tuple[str, ...], options: dict[str, Any], **facts: Any) -> type:
    """The test case of a model."""

    def set_up(self: Any) -> None:
        self.model_tester = Tester(
            getattr(transformers, f"{name}Config"), options, classes[-1].endswith("ImageClassification")
        )

    members = {
        "all_model_classes": tuple(getattr(transformers, c) for c in classes),
        "setUp": set_up,
        **facts,
    }
    return type(f"{name}Test", (ModelTesterMixin, unittest.TestCase), {**members, "__module__": __name__})


LlamaTest = of("Llama", ("LlamaModel", "LlamaForCausalLM"), GROUPED)
Qwen3Test = of("Qwen3", ("Qwen3Model", "Qwen3ForCausalLM"), {**GROUPED, "head_dim": 16})
MixtralTest = of(
    "Mixtral",
    ("MixtralModel", "MixtralForCausalLM"),
    {**GROUPED, "num_local_experts": 2},
    test_all_params_have_gradient=False,
)
GPTNeoXTest = of("GPTNeoX", ("GPTNeoXModel", "GPTNeoXForCausalLM"), PLAIN)
GPT2Test = of(
    "GPT2",
    ("GPT2Model", "GPT2LMHeadModel"),
    {**TOKENS, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64},
)
BertTest = of("Bert", ("BertModel", "BertForMaskedLM", "BertForSequenceClassification"), PLAIN)
T5Test = of(
    "T5",
    ("T5Model", "T5ForConditionalGeneration"),
    {
        **TOKENS,
        "d_model": 32,
        "d_kv": 16,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 2,
        "decoder_start_token_id": 0,
    },
    is_encoder_decoder=True,
)
_ends = {
    f"{end}_{what}": size
    for end in ("encoder", "decoder")
    for what, size in (("layers", 2), ("attention_heads", 2), ("ffn_dim", 64))
}
BartTest = of(
    "Bart",
    ("BartModel", "BartForConditionalGeneration"),
    {**TOKENS, **_ends, "d_model": 32, "max_position_embeddings": 64, "decoder_start_token_id": 2},
    is_encoder_decoder=True,
)
ViTTest = of(
    "ViT",
    ("ViTModel", "ViTForImageClassification"),
    {**SIZES, "image_size": 16, "patch_size": 8},
    test_resize_embeddings=False,
)
