"""What a manifest says of the directory that was imported: read as it was written, and nothing else is taken."""

from __future__ import annotations

import json

import pytest
import torch

from megatron_fp8.huggingface.origin import Origin, origin_of


def test_it_is_read_as_it_was_written():
    made = Origin({"a": "float16", "b": "float32"}, {"c": "why"})
    found = origin_of(json.loads(json.dumps(made.fact())))
    assert found == made and (found.dtype("a"), found.dtype("b"), found.dtype("c")) == (
        torch.float16,
        torch.float32,
        None,
    )
    assert (
        origin_of(None) == Origin() and not Origin().was_in_blocks and Origin(lost={"c": "why"}).was_in_blocks
    )


@pytest.mark.parametrize(
    "fact",
    [[], {}, {"floats": {}}, {"floats": [], "lost": {}}, {"floats": {"a": "int8"}, "lost": {}},
     {"floats": {}, "lost": {"a": 1}}, {"floats": {"a": []}, "lost": {}}],
)  # fmt: skip
def test_anything_else_is_refused(fact):
    with pytest.raises(ValueError, match=r"facts\.directory is not what an import writes"):
        origin_of(fact)
