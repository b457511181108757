"""Whole transformers models against the specification of FP8 (benchmarks/support/reference.py): results and gradients.

benchmarks/transformers_tests.py asks this of nine models, and whether the specification loses each test that they lose
in FP8.
"""

from __future__ import annotations

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")

from benchmarks.specified_linear import RULES, is_specified, specify  # noqa: E402
from benchmarks.transformers_tests import explain  # noqa: E402
from megatron_fp8.nn import convert_to_fp8  # noqa: E402
from megatron_fp8.nn.linear import Fp8Layer  # noqa: E402

TOKENS = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
T5 = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
GPT2 = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 16}


def model_of(name: str, dtype: torch.dtype) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A tiny model in evaluation mode, and inputs."""
    transformers.set_seed(0)
    ids = torch.randint(3, 64, (3, 7))
    if name == "T5":
        config = transformers.T5Config(**TOKENS, **T5)
        return transformers.T5Model(config).to(dtype).eval(), {"input_ids": ids, "decoder_input_ids": ids}
    config = transformers.GPT2Config(**TOKENS, **GPT2)
    return transformers.GPT2LMHeadModel(config).to(dtype).eval(), {"input_ids": ids}


def results(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The first output, and the gradient of every parameter that has one."""
    output = model(**inputs)[0]
    (output.float() * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"output": output.detach(), **gradients}


@pytest.mark.parametrize("recipe", RULES)
@pytest.mark.parametrize("name", ["T5", "GPT2"])
def test_results_and_gradients_are_the_specified_ones(name: str, recipe: str, capsys) -> None:
    """In float32, where only the order of sums differs."""
    model, inputs = model_of(name, torch.float32)
    plain, reference = results(copy.deepcopy(model), inputs), copy.deepcopy(model)
    found = results(convert_to_fp8(model, recipe, skip=[]), inputs)
    assert all(isinstance(module, Fp8Layer) for module in model.modules() if is_specified(module))
    with specify(recipe):
        expected = results(reference, inputs)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(
            found[key], value, rtol=1e-5, atol=1e-6 * value.abs().max().item(), msg=key
        )
    assert (plain["output"] - found["output"]).norm() > 1e-3 * plain["output"].norm()  # FP8 it is


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "mxfp8"])
def test_in_bfloat16_bit_for_bit_with_powers_of_two(recipe: str, capsys) -> None:
    """Codes times powers of two make sums that float32 holds exactly, or almost: one rounding, to the same bits."""
    model, inputs = model_of("T5", torch.bfloat16)
    reference = copy.deepcopy(model)
    found = results(convert_to_fp8(model, recipe, skip=[]), inputs)
    with specify(recipe):
        expected = results(reference, inputs)
    assert [key for key, value in expected.items() if not torch.equal(found[key], value)] == []


@pytest.mark.parametrize(
    ("test", "recipe", "by_specification", "expected"),
    [
        ("T5Test.test_batching_equivalence", "tensorwise", "failed: apart", True),
        ("T5Test.test_batching_equivalence", "tensorwise", "passed", False),  # then it is this package
        ("T5Test.test_batching_equivalence", "mxfp8", "failed: apart", False),
        ("T5Test.test_eager_matches_sdpa_inference_08_fp32_pad_left", "mxfp8", "failed: apart", False),
        ("T5Test.test_training", "tensorwise", "not run", False),
    ],
)
def test_a_loss_is_believed_to_be_of_fp8_only_where_the_specification_has_it(
    test: str, recipe: str, by_specification: str, expected: bool
) -> None:
    loss = explain(test, "failed: here", by_specification, recipe)
    assert (loss.reason is not None) == expected
