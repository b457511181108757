"""What a manifest says of the directory that was imported: read as it was written, and nothing else is taken."""

import json

import pytest
import torch

from megatron_fp8.huggingface.checkpoint_reader import SourceMetadata, source_metadata_of


def test_it_is_read_as_it_was_written():
    made = SourceMetadata({"a": "float16", "b": "float32"}, {"c": "why"})
    found = source_metadata_of(json.loads(json.dumps(made.fact())))
    assert found == made and (found.dtype("a"), found.dtype("b"), found.dtype("c")) == (
        torch.float16,
        torch.float32,
        None,
    )
    assert (
        source_metadata_of(None) == SourceMetadata()
        and not SourceMetadata().was_in_blocks
        and SourceMetadata(lost={"c": "why"}).was_in_blocks
    )


@pytest.mark.parametrize(
    "fact",
    [[], {}, {"floats": {}}, {"floats": [], "lost": {}}, {"floats": {"a": "int8"}, "lost": {}},
     {"floats": {}, "lost": {"a": 1}}, {"floats": {"a": []}, "lost": {}}],
)  # fmt: skip
def test_anything_else_is_refused(fact):
    with pytest.raises(ValueError, match=r"facts\.directory is not what an import writes"):
        source_metadata_of(fact)
