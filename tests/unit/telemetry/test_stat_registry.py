"""The catalogue: what names mean, which there are not, and the page that lists them."""

import re
from pathlib import Path

import pytest

from megatron_fp8.recipe import RECIPES
from megatron_fp8.telemetry.stat_registry import (
    BY_NAME,
    DEFAULT,
    QUANTIZED,
    STATISTICS,
    TE_TENSORS,
    TENSORS,
    WHAT_IF,
    Blocks,
    Variant,
    names_of_tensor,
    parse,
    parse_all,
)

PAGE = (Path(__file__).parents[3] / "docs" / "telemetry.md").read_text(encoding="utf-8")


def test_every_name_has_its_own_statistic_and_comes_back():
    for statistic in STATISTICS:
        wanted = parse(statistic.name)
        assert wanted.statistic is statistic
        assert parse(wanted.name) == wanted
        if statistic.needs == "codes":
            for variant in (Variant(recipe, column) for recipe in ("", "mxfp8") for column in (False, True)):
                assert parse(variant.named(statistic.name)).variant == variant


@pytest.mark.parametrize(
    "blocks", [Blocks(), Blocks(128, 2), Blocks(7, 1, True)], ids=lambda blocks: blocks.name
)
def test_blockwise_ranges_in_transformer_engines_spelling(blocks):
    assert parse(blocks.name).blocks == blocks
    assert re.fullmatch(
        r"max_blockwise_dynamic_range_block_size_\d+_dims_[12](_max_over_orientations)?", blocks.name
    )


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("kurtosi", "statistic 'kurtosi' is unknown. Did you mean 'kurtosis'?"),
        ("mxfp8_mean", "mean is a figure of the values, the same whatever their codes: ask for 'mean'"),
        ("fp8_current_scaling_mse_columnwise", "ask for 'fp8_current_scaling_mse'"),
        ("max_blockwise_dynamic_range_block_size_32_dims_3", "unknown"),
        ("qqqqqqqq", "There are min, max, mean"),
        (3, "a name is needed"),
    ],
)
def test_what_is_no_name_is_an_error_with_the_closest(name, told):
    with pytest.raises(ValueError, match=re.escape(told)) as error:
        parse(name)
    assert repr(name) in str(error.value)


def test_each_name_once_in_order():
    names = ["mean", "max_blockwise_dynamic_range", "mean", Blocks().name, "min"]
    assert [wanted.name for wanted in parse_all(names)] == ["mean", Blocks().name, "min"]


def test_products_have_no_codes():
    assert names_of_tensor(["mean", "mse"], "dgrad") == ("mean",)
    assert all(names_of_tensor(["mean", "mse"], tensor) == ("mean", "mse") for tensor in QUANTIZED)
    assert set(TE_TENSORS.values()) == set(TENSORS) and set(WHAT_IF.values()) < set(RECIPES)


def test_the_page_lists_every_statistic_as_the_catalogue_has_it():
    table = PAGE.split("## Statistics")[1].split("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    expected = [f"| `{s.name}` | {s.meaning} | {s.needs} |" for s in STATISTICS]
    assert [row.rpartition("|")[0].rpartition("|")[0] + "|" for row in rows] == expected, "\n".join(expected)
    for prefix, recipe in WHAT_IF.items():
        assert f"| `{prefix}_` | {recipe} |" in PAGE
    assert set(DEFAULT) < set(BY_NAME)
