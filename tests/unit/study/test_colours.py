"""One colour for each recipe and format that a picture draws, told apart by anybody."""

from megatron_fp8.recipe import RECIPES
from megatron_fp8.study import colours


def test_every_recipe_has_a_colour_of_its_own():
    assert set(colours.RECIPES) == {*RECIPES, "bf16"}
    for table in (colours.RECIPES, colours.FORMATS):
        assert len(set(table.values())) == len(table)
