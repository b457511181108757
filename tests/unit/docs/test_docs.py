"""What the documentation shows is run."""

import doctest
import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch

from benchmarks import gradient_formats

ROOT = Path(__file__).parents[3]


def test_examples_of_numerics_print_what_they_say():
    failures, tried = doctest.testfile(str(ROOT / "docs" / "numerics.md"), module_relative=False)
    assert tried and not failures


def test_the_numbers_of_the_readme_run():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (numbers,) = (block for block in blocks if "qx" in block)
    names: dict = {}
    exec(numbers, names)
    assert names["y"].shape == (100, 50)
    assert (names["y"] - names["x"] @ names["w"].T).norm() < 0.06 * names["y"].norm()
    assert names["qx"].rowwise.scale_inv.dtype == torch.float8_e8m0fnu


def test_the_readme_has_the_commands_that_set_up_everything():
    """They are make's, and the second one is what the checks of a change run."""
    lines = (ROOT / "README.md").read_text().splitlines()
    targets = (ROOT / "Makefile").read_text()
    for command in ("make train", "make test"):
        assert any(line.partition("#")[0].strip() == command for line in lines), command
        assert f"\n{command.removeprefix('make ')}:" in targets, command
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1] == "make test"


PAGES = [
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md"),
    *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))),
]


@pytest.mark.parametrize("page", PAGES)
def test_links_between_pages_lead_somewhere(page):
    """Their anchors too: the build of the site finds those that are not there."""
    path = ROOT / page
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text()):
        assert (path.parent / link).exists(), f"{page} links to {link}"


@pytest.mark.parametrize("page", PAGES)
def test_links_to_elsewhere_have_the_form_of_an_address(page):
    for link in re.findall(r"\]\((\w+:[^)]*)\)", (ROOT / page).read_text()):
        parts = urlsplit(link)
        assert parts.scheme == "https" and re.fullmatch(r"([\w-]+\.)+[a-z]+", parts.netloc), f"{page}: {link}"
        assert not re.search(r"\s", link), f"{page}: {link}"


def test_the_table_of_gradient_formats_is_what_the_benchmark_prints():
    assert gradient_formats.section() in (ROOT / "docs" / "recipes.md").read_text()
