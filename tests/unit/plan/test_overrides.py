"""Exceptions by name: which sites a key means, which part of them, and what is refused."""

import pytest

from megatron_fp8.plan.overrides import (
    check_overrides,
    check_overrides_match,
    matching_overrides,
    whole_override,
)
from megatron_fp8.recipe import MXFP8BlockScaling

NAMES = [
    f"decoder.layers.{layer}.{part}"
    for layer in (0, 1, 10)
    for part in ("self_attention.linear_qkv", "mlp.linear_fc1")
]


@pytest.mark.parametrize(
    "pattern, matches",
    [
        ("*", NAMES),
        ("linear_fc1", [n for n in NAMES if n.endswith("linear_fc1")]),
        ("linear_*", NAMES),
        ("decoder.layers.0.*", NAMES[:2]),
        ("decoder.layers.1.*", NAMES[2:4]),
        ("decoder.layers.[01].mlp.*", [NAMES[1], NAMES[3]]),
        ("*.mlp.*", [n for n in NAMES if ".mlp." in n]),
        ("mlp.linear_fc1", []),
        ("layers.0", []),
        ("LINEAR_FC1", []),
    ],
)
def test_globs_match_the_full_name_or_its_last_part(pattern, matches):
    assert [name for name in NAMES if matching_overrides(name, {pattern: "bf16"})] == matches
    assert [name for name in NAMES if matching_overrides(name, {f"{pattern}:wgrad": "bf16"})] == matches


def test_last_match_wins():
    overrides = {"*": "bf16", "linear_fc1": "mxfp8", "decoder.layers.10.*": "rowwise", "*:wgrad": "bf16"}

    def winner(name, overrides):
        found = whole_override(name, overrides)
        return None if found is None else (found.key, found.value)

    assert winner(NAMES[0], overrides) == ("*", "bf16")
    assert winner(NAMES[1], overrides) == ("linear_fc1", "mxfp8")
    assert winner(NAMES[5], overrides) == ("decoder.layers.10.*", "rowwise")
    backwards = dict(reversed(overrides.items()))
    assert winner(NAMES[5], backwards) == ("*", "bf16")
    assert winner(NAMES[0], {}) is None and winner(NAMES[0], {"*:wgrad": "bf16"}) is None


def test_glob_that_matches_nothing_is_an_error():
    check_overrides_match({"linear_fc1": "bf16", "decoder.layers.10.*": "mxfp8"}, NAMES)
    check_overrides_match({}, [])
    with pytest.raises(
        ValueError, match=r"'linear_fc3' matches no GEMM site; the sites are decoder\.layers\.0\."
    ):
        check_overrides_match({"linear_fc1": "bf16", "linear_fc3": "bf16"}, iter(NAMES))
    with pytest.raises(ValueError, match=r"^overrides: 'fc3:wgrad' matches no GEMM site; the sites are a$"):
        check_overrides_match({"a:wgrad": "bf16", "fc3:wgrad": "bf16"}, ["a"], "overrides")


@pytest.mark.parametrize(
    "overrides, words",
    [
        ("bf16", ["overrides='bf16' must map globs"]),
        ({"": "bf16"}, ["has the key ''", "keys are globs such as"]),
        ({":wgrad": "bf16"}, ["has the key ':wgrad'"]),
        ({3: "bf16"}, ["has the key 3"]),
        (
            {"*:wgard": "bf16"},
            ["'wgard' is no part of a linear", "fprop, dgrad, wgrad", "Did you mean 'wgrad'?"],
        ),
        ({"*:": "bf16"}, ["'' is no part of a linear"]),
        (
            {"*:input": "bf17"},
            ["overrides['*:input']='bf17' is unknown", "'fp8'", "'mxfp8'", "'e5m2'", "'bf16'?"],
        ),
        ({"*": None}, ["=None is unknown"]),
        ({"*": ["bf16"]}, ["=['bf16'] is unknown"]),
    ],
    ids=str,
)
def test_what_cannot_be_read_is_refused(overrides, words):
    with pytest.raises(ValueError, match=r"^overrides") as error:
        check_overrides(overrides, "overrides")
    assert all(word in str(error.value) for word in words), error.value


def test_what_can_be_read():
    parts = ("", ":fprop", ":dgrad", ":wgrad", ":input", ":weight", ":grad_output")
    for value in ("bf16", "fp8", "mxfp8", "custom", "e4m3", "e5m2", "hybrid", MXFP8BlockScaling()):
        check_overrides({f"*.linear_fc1{part}": value for part in parts}, "fp8_overrides")
