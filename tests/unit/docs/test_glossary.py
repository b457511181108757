"""docs/glossary.md: a sentence and others' word for each term, in alphabetical order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from megatron_fp8.backends import BACKENDS, LAYER_BACKENDS
from megatron_fp8.numerics.formats import ROLES
from megatron_fp8.recipe import GEMM_OPERANDS, RECIPES

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
OUR_OWN = {
    "arena", "autocast state", "cast spec", "codes", "side", "site", "slot", "stamp", "weight generation",
}  # fmt: skip


def rows() -> list[list[str]]:
    """The cells of each row of the table."""
    lines = [line for line in PAGE.splitlines() if line.startswith("|")]
    assert lines[0] == "| term | meaning | elsewhere |"
    return [line.strip("| ").split(" | ") for line in lines[2:]]


def terms() -> list[str]:
    """The terms, without their marks."""
    return [row[0].strip("*") for row in rows()]


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_a_term_has_one_sentence_and_what_others_call_it(row):
    _, meaning, elsewhere = row
    assert re.fullmatch(r"[A-Z][^.]*(\.\w[^.]*)*\.", meaning), meaning
    assert elsewhere


def test_the_terms_are_in_alphabetical_order():
    assert terms() == sorted(set(terms()), key=str.casefold)


def test_the_words_of_our_own_are_there_and_marked():
    assert {row[0].strip("*") for row in rows() if row[0].startswith("**")} == OUR_OWN


def test_recipes_products_and_backends_are_there():
    wanted = {*RECIPES, *GEMM_OPERANDS} - {"custom", "rowwise"} | {"rowwise (codes)", "rowwise (recipe)"}
    assert wanted <= set(terms())
    assert all(f"`{name}`" in PAGE for name in [*ROLES, *BACKENDS, *LAYER_BACKENDS])


def test_it_is_the_first_page_after_the_home_page():
    pages = yaml.load((ROOT / "mkdocs.yml").read_text(), yaml.BaseLoader)["nav"]
    assert pages[:2] == [{"Home": "index.md"}, {"Glossary": "glossary.md"}]
