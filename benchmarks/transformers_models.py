"""transformers' own model tests over nine tiny models; transformers_tests.py runs this file with pytest.

The tests are in transformers' source distribution and nowhere here: ``their_tests`` is a package that the runner makes of
it. Where FP8_RECIPE is set, every model is converted at the end of its construction, output projections and heads
included; with FP8_BY=specification linears compute by specified_linear.py in place of this package. Every test starts
from FP8_SEED, so that runs are compared on the same weights and inputs.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import unittest
from typing import Any

import torch
import transformers
from their_tests import test_modeling_common
from their_tests.test_modeling_common import ModelTesterMixin, floats_tensor, ids_tensor

from benchmarks.specified_linear import is_specified, specify
from megatron_fp8.nn import convert_from_fp8, convert_to_fp8
from megatron_fp8.nn.linear import Fp8Layer

RECIPE, BY = os.environ.get("FP8_RECIPE", ""), os.environ.get("FP8_BY", "package")
SEED = int(os.environ.get("FP8_SEED", "0"))
ROUNDING = 1e-5
"""Of results: sums in float32 differ by 2e-7 at most, rounding to FP8 by 1e-3 to 2e-1."""
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
        if any(is_specified(module) for module in self.modules()):
            with contextlib.redirect_stdout(io.StringIO()):
                convert_to_fp8(self, recipe, skip=[])

    transformers.PreTrainedModel.post_init = converted


if RECIPE and BY == "specification":
    specify(RECIPE)
elif RECIPE:
    convert_at_construction(RECIPE)


class Tester:
    """What ModelTesterMixin asks of a model's tester."""

    batch_size, seq_length, is_training = BATCH, LENGTH, True
    hidden_size, num_hidden_layers, num_attention_heads = 32, 2, 2

    def __init__(self, config_class: type, options: dict[str, Any], image: bool):
        self.config_class, self.options, self.image = config_class, options, image
        if image:
            self.seq_length = 5  # four patches and the class token
            self.image_size, self.patch_size = 16, 8
            self.num_masks, self.mask_length = 2, 4

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


def _numbers_are_the_specified_ones(self: Any) -> None:
    """Every linear runs in FP8, and in float32 results and gradients are those of specified_linear.py."""
    for kind in self.all_model_classes:
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        model = kind(config).eval()
        in_fp8 = [isinstance(module, Fp8Layer) for module in model.modules() if is_specified(module)]
        assert in_fp8 == [bool(RECIPE)] * len(in_fp8), (
            f"{kind.__name__}: {sum(in_fp8)} of {len(in_fp8)} in FP8"
        )
        if not RECIPE:
            continue
        plain = convert_from_fp8(copy.deepcopy(model))
        found = _results(model, inputs)
        with specify(RECIPE):
            expected = _results(plain, inputs)
        for what, mine, theirs in zip(("result", "gradients"), found, expected, strict=True):
            apart = ((mine - theirs).norm() / theirs.norm()).item()
            assert apart < ROUNDING, f"{kind.__name__}: {what} are {apart:.1e} from the specification's"


def _results(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The first output and all gradients, each as one float64 vector."""
    output = model(**inputs)[0]
    (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return output.detach().double().flatten(), torch.cat(gradients).double()


def of(name: str, classes: tuple[str, ...], options: dict[str, Any], **facts: Any) -> type:
    """The test case of a model."""

    def set_up(self: Any) -> None:
        transformers.set_seed(SEED)
        test_modeling_common.global_rng.seed(SEED)
        self.model_tester = Tester(
            getattr(transformers, f"{name}Config"), options, classes[-1].endswith("ImageClassification")
        )

    members = {
        "all_model_classes": tuple(getattr(transformers, c) for c in classes),
        "setUp": set_up,
        "test_numbers_are_the_specified_ones": _numbers_are_the_specified_ones,
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
