"""How generated ids become text while they come, and what a command line's recipe does to a run's config."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_fp8.commands.generate import _texts
from megatron_fp8.train.data.tokenizers import ByteTokenizer, tokenizer_file
from megatron_fp8.train.resume.restore import choose_recipe


def streamed(prompt: list[int], ids: list[int], tokenizer) -> list[str]:
    made: list[int] = []
    parts = list(_texts((torch.tensor([i]) for i in ids), prompt, made, tokenizer))
    assert made == ids
    return parts


def test_characters_of_several_bytes_wait_for_all_of_them():
    prompt, rest = list("naïv".encode()), list("é €!".encode())
    parts = streamed(prompt, rest, ByteTokenizer())
    assert "".join(parts) == "naïvé €!"
    assert parts == ["naïv", "é", " ", "", "", "€", "!", ""]


def test_bytes_that_are_no_text_show_as_such_and_the_end_of_document_does_not():
    tokenizer = ByteTokenizer()
    assert "".join(streamed([65], [0xC3, 66, 0xFF, 67], tokenizer)) == "A\ufffdB\ufffdC"
    assert "".join(streamed([65], [66, 0xE2, 0x82], tokenizer)) == "AB\ufffd"
    assert "".join(streamed([65], [66, tokenizer.eod], tokenizer)) == "AB"


def test_a_runs_own_tokenizer_is_taken_where_the_named_one_is_not(tmp_path):
    checkpoint, named = (
        tmp_path / "run" / "checkpoints" / "iter_0000001",
        tmp_path / "named" / "tokenizer.json",
    )
    assert tokenizer_file(None, checkpoint) is None
    # In neither place: the error names what was asked for.
    assert tokenizer_file(str(named), checkpoint) == str(named)
    own = tmp_path / "run" / "tokenizer.json"
    for path, found in ((own, own), (named, named)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
        assert tokenizer_file(str(named), checkpoint) == str(found)


@pytest.mark.parametrize(
    ("recipe", "fp8", "trained", "expected"),
    [
        (None, None, ("hybrid", "delayed", None), ("hybrid", "delayed", None)),
        ("bf16", None, ("hybrid", "delayed", None), (None, None, None)),
        ("bf16", None, (None, None, "e2m1"), (None, None, None)),
        ("nvfp4", None, ("hybrid", "delayed", None), (None, None, "e2m1")),
        ("mxfp8", None, ("e4m3", "delayed", None), ("e4m3", "mxfp8", None)),
        ("mxfp8", None, (None, None, None), ("hybrid", "mxfp8", None)),
        ("mxfp8", None, (None, None, "e2m1"), ("hybrid", "mxfp8", None)),
        (None, None, (None, None, "e2m1"), (None, None, "e2m1")),
        (None, "e4m3", ("hybrid", "delayed", None), ("e4m3", "delayed", None)),
        (None, "e4m3", (None, None, None), ("e4m3", "tensorwise", None)),
    ],
)
def test_the_recipe_is_the_runs_unless_another_is_asked_for(recipe, fp8, trained, expected):
    section = SimpleNamespace(fp8=trained[0], fp8_recipe=trained[1], fp4=trained[2])
    choose_recipe(section, recipe, fp8)
    assert (section.fp8, section.fp8_recipe, section.fp4) == expected


def test_recipes_that_cannot_be_meant():
    section = SimpleNamespace(fp8="hybrid", fp8_recipe="delayed", fp4=None)
    with pytest.raises(ValueError, match="contradict"):
        choose_recipe(section, "bf16", "hybrid")
    with pytest.raises(ValueError, match="fp8 recipe 'int8' is unknown"):
        choose_recipe(section, "int8", None)
