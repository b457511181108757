"""The next token: greedy, temperature, top-k, top-p."""

import math

import pytest
import torch

from megatron_fp8.inference import Sampler

LOGITS = torch.tensor([[0.0, 3.0, 1.0, 3.0, -2.0], [5.0, 0.0, 0.0, 0.0, 9.0]])


def test_greedy_takes_the_first_of_equals_and_no_padding():
    assert Sampler(temperature=0)(LOGITS).tolist() == [1, 4]
    assert Sampler(temperature=0, vocab_size=4)(LOGITS).tolist() == [1, 0]


def test_probabilities_are_the_softmax_of_what_is_kept():
    expected = (LOGITS[0] / 0.7).double().softmax(-1)
    torch.testing.assert_close(Sampler(temperature=0.7).probabilities(LOGITS)[0].double(), expected)
    kept = Sampler(top_k=3).probabilities(LOGITS)[0]
    assert kept.nonzero().flatten().tolist() == [1, 2, 3]
    torch.testing.assert_close(kept[[1, 2, 3]], LOGITS[0, [1, 2, 3]].softmax(-1))


@pytest.mark.parametrize("p", [0.05, 0.3, 0.5, 0.9, 0.999])
def test_top_p_is_the_smallest_set_that_reaches_p(p):
    logits = torch.randn(20, 50, generator=torch.Generator().manual_seed(3)) * 2
    probabilities = logits.softmax(-1)
    found = Sampler(top_p=p).probabilities(logits)
    torch.testing.assert_close(found.sum(-1), torch.ones(20))
    for row, kept in zip(probabilities, found > 0, strict=True):
        inside, outside = row[kept], row[~kept]
        assert float(inside.sum()) >= p - 1e-6 and float(inside.sum() - inside.min()) < p
        assert not outside.numel() or outside.max() <= inside.min()


def test_the_smallest_temperatures_are_greedy_and_finite():
    for temperature in (1e-3, 1e-30, 5e-324):
        found = Sampler(temperature=temperature).probabilities(LOGITS[1:])
        assert found.tolist() == [[0, 0, 0, 0, 1]]


def test_a_seed_gives_the_same_tokens_and_frequencies_are_the_probabilities():
    logits = LOGITS[:1].expand(20_000, -1)
    draws = [Sampler()(logits, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    frequencies = torch.bincount(draws[0], minlength=5) / 20_000
    expected = LOGITS[0].softmax(-1)
    assert (frequencies - expected).abs().max() < 4 * math.sqrt(0.25 / 20_000)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": -0.1}, "temperature -0.1"),
        ({"temperature": math.nan}, "temperature nan"),
        ({"top_k": -1}, "top_k -1"),
        ({"top_p": 0.0}, "top_p 0.0"),
        ({"top_p": 1.5}, "top_p 1.5"),
        ({"vocab_size": 0}, "vocab_size 0"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        Sampler(**arguments)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_no_token(value, temperature):
    with pytest.raises(ValueError, match="logits hold NaN or Inf"):
        Sampler(temperature)(torch.tensor([[1.0, value]]))
    assert Sampler(temperature)(torch.tensor([[1.0, -math.inf]])).tolist() == [0]  # an id that is masked
