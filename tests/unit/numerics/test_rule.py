"""Rules and granularities: what cannot be is refused, and what can be made trains."""

import copy
import pickle

import pytest

from megatron_fp8.numerics.formats import E4M3, E8M0, ROLES, Format
from megatron_fp8.numerics.rule import Granularity, Rule
from megatron_fp8.recipe import CustomRecipe, Float8CurrentScaling
from tests.support.sites import data, make_site, run


@pytest.mark.parametrize("sizes", [(0, 0), (1, 0), (1, 32), (128, 128)], ids=str)
def test_what_is_settled_of_a_granularity_is_no_part_of_its_identity(sizes):
    one = Granularity(*sizes)
    assert (one.is_tensor, one.symmetric) == (sizes == (0, 0), sizes[0] == sizes[1])
    assert repr(one) == f"Granularity(rows={sizes[0]}, cols={sizes[1]})"
    for other in (Granularity(*sizes), copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert other == one and hash(other) == hash(one) and other.is_tensor == one.is_tensor


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"scale": "float32"}, "'float32'.*'fp32', 'pow2', 'e8m0'"),
        ({"scale": None}, "None"),
        ({"fmt": "e4m3"}, "'e4m3'.*E4M3"),
        ({"fmt": E8M0}, "E8M0|e8m0"),
        ({"granularity": (1, 32)}, r"\(1, 32\).*Granularity"),
        ({"granularity": Granularity(0, 32)}, "cols=32.*row along"),
        ({"granularity": Granularity(4, 0)}, "rows=4.*row along"),
        ({"stochastic": "no"}, "'no'"),
        ({"delayed": 1}, "delayed 1"),
        ({"delayed": True, "granularity": Granularity(1, 0)}, "per row"),
        ({"delayed": True, "granularity": Granularity(0, 0), "scale": "pow2"}, "pow2"),
        ({"scale": "e8m0", "margin": 1}, "margin 1.*no effect"),
        ({"scale": "e8m0", "epsilon": 0.5}, "epsilon 0.5.*no effect"),
        ({"margin": 65}, "margin 65"),
        ({"epsilon": float("nan")}, "nan"),
    ],
    ids=str,
)
def test_a_rule_that_cannot_be_carried_out_is_refused_when_it_is_made(changed, message):
    with pytest.raises(ValueError, match=message):
        Rule(**{"fmt": E4M3, "granularity": Granularity(1, 32), **changed})


@pytest.mark.parametrize("sizes", [(-1, 0), (1.0, 0), (True, 0), (1, "32"), (None, None)], ids=str)
def test_a_granularity_is_of_whole_numbers(sizes):
    with pytest.raises(ValueError, match="whole numbers"):
        Granularity(*sizes)


SIZES = [(0, 0), (1, 0), (1, 1), (1, 3), (3, 1), (1, 128), (32, 32), (3, 200), (200, 3)]


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("scale", ["fp32", "pow2", "e8m0"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_rule_that_can_be_made_trains(sizes, scale, role):
    """In forward and backward, close to the product that nothing quantized."""
    own, tensor = Rule(E4M3, Granularity(*sizes), scale), Float8CurrentScaling(fp8_format=Format.E4M3)
    x, w, dy = data(40, 70, 50)
    outcome = run(make_site(CustomRecipe(lambda asked: own if asked == role else tensor))[0], x, w, dy)
    exact = (x.double() @ w.double().t(), dy.double() @ w.double(), dy.double().t() @ x.double())
    for found, wanted in zip((outcome.y, outcome.dx, outcome.dw), exact, strict=True):
        assert (found.double() - wanted).norm() < 0.06 * wanted.norm()
