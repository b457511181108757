"""Directories that other people made: fields of the wrong kind, links, tokenizers in other forms, blocks of FP8."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fp8.commands.generate import prompt_ids
from megatron_fp8.commands.main import main
from megatron_fp8.huggingface.config import model_section
from megatron_fp8.huggingface.config_types import check_types
from megatron_fp8.train.data.tokenizers import JsonTokenizer, load_tokenizer
from tests.support.hf_small import CONFIG, write

NONSENSE: list[Any] = [
    *(None, True, False, 0, -1, 1, 10**9, 2**63, 1.5, -0.0, float("nan"), float("inf"), "", "128", "silu"),
    *([], [None], [128], {}, {"factor": "8"}, {"rope_type": ["llama3"]}, {"config_groups": [1]}),
]
READ = [
    *CONFIG,
    "head_dim",
    "layer_types",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "is_causal",
]


def refused(capsys, *arguments: object) -> str:
    """The one line that a command says when it refuses."""
    assert main([str(argument) for argument in arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1, said
    return said


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([*READ, "quantization_config"]),
    st.sampled_from(NONSENSE)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
        max_leaves=4,
    ),
)
def test_any_value_of_any_field_is_taken_or_refused_by_name(name, value):
    config = {**CONFIG, name: value}
    try:
        section = model_section(config)
    except ValueError as error:
        assert name in str(error) or "attention heads" in str(error), error
    else:
        json.dumps(section, allow_nan=False)


@pytest.mark.parametrize(
    "name, value",
    [
        ("hidden_size", "128"),
        ("num_hidden_layers", [2]),
        ("num_hidden_layers", 10**9),
        ("vocab_size", 200.0),
        ("num_attention_heads", True),
        ("rms_norm_eps", "1e-5"),
        ("rms_norm_eps", float("nan")),
        ("rope_theta", "10000"),
        ("tie_word_embeddings", "false"),
        ("max_position_embeddings", "long"),
        ("rope_scaling", ["llama3"]),
        ("quantization_config", "fp8"),
        ("architectures", "LlamaForCausalLM"),
        ("is_causal", False),
        ("auto_map", {"AutoModelForCausalLM": "modeling.Mine"}),
        ("eos_token_id", "</s>"),
    ],
)
def test_a_field_of_the_wrong_kind_is_one_line(tmp_path, capsys, name, value):
    said = refused(capsys, "import", write(tmp_path / "hf", {name: value}), tmp_path / "run")
    assert name in said and not (tmp_path / "run").exists()


def test_null_is_left_out():
    check_types(dict.fromkeys(READ))


# ------------------------------------------------------------------------------------------------------------ tokenizers

VOCABULARY = {"<s>": 0, "</s>": 1, "<|im_end|>": 2, "ham": 3, "and": 4, "eggs": 5}


def tokenizer_json(folder: Path, *, template: bool = False) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    made = Tokenizer(models.WordLevel(VOCABULARY))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["<s>", "</s>", "<|im_end|>"])
    if template:
        made.post_processor = processors.TemplateProcessing("<s> $A </s>", None, [("<s>", 0), ("</s>", 1)])
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def put(folder: Path, name: str, content: Any) -> None:
    (folder / name).write_text(json.dumps(content))


def test_without_anything_beside_it_nothing_starts_a_document(tmp_path):
    tokenizer = JsonTokenizer(tokenizer_json(tmp_path))
    assert (tokenizer.start, tokenizer.eod, tokenizer.ends) == ((), 1, {1})
    assert prompt_ids(tokenizer, b"ham and") == [3, 4] and prompt_ids(tokenizer, b"") == [1]


def test_the_post_processor_says_what_starts_a_document(tmp_path):
    tokenizer = JsonTokenizer(tokenizer_json(tmp_path, template=True))
    assert tokenizer.start == (0,) and tokenizer.name != JsonTokenizer(tokenizer_json(tmp_path)).name
    assert prompt_ids(tokenizer, b"ham and") == [0, 3, 4] == prompt_ids(tokenizer, b"<s> ham and")
    assert tokenizer.decode([0, 3, 4, 1]) == "ham and"
    put(tmp_path, "tokenizer_config.json", {"add_bos_token": False})
    assert JsonTokenizer(tokenizer_json(tmp_path, template=True)).start == ()


def test_the_files_beside_it_say_where_a_text_ends(tmp_path):
    """A chat model ends its turn with another token than a document."""
    path = tokenizer_json(tmp_path)
    put(
        tmp_path,
        "tokenizer_config.json",
        {"eos_token": {"content": "<|im_end|>"}, "add_bos_token": True, "bos_token": "<s>"},
    )
    put(tmp_path, "generation_config.json", {"eos_token_id": [1, 2]})
    tokenizer = JsonTokenizer(path)
    assert (tokenizer.start, tokenizer.eod, tokenizer.ends) == ((0,), 2, {1, 2})
    put(tmp_path, "generation_config.json", {"eos_token_id": 1})
    assert JsonTokenizer(path).ends == {1, 2}


@pytest.mark.parametrize(
    "name, content",
    [
        ("generation_config.json", {"eos_token_id": 77}),
        ("generation_config.json", {"eos_token_id": ["</s>"]}),
        ("generation_config.json", [1]),
        ("tokenizer_config.json", {"eos_token": "<nobody>"}),
        ("tokenizer_config.json", {"eos_token": 1}),
    ],
)
def test_files_beside_it_that_make_no_sense_are_named(tmp_path, name, content):
    path = tokenizer_json(tmp_path)
    put(tmp_path, name, content)
    with pytest.raises(ValueError, match=name):
        load_tokenizer(str(path))
    (tmp_path / name).write_text("{")
    with pytest.raises(ValueError, match=name):
        load_tokenizer(str(path))


def test_an_import_brings_along_where_a_text_begins_and_ends(tmp_path, capsys):
    source = write(tmp_path / "hf", {"eos_token_id": [1, 2], "bos_token_id": 0})
    tokenizer_json(source, template=True)
    assert main(["import", str(source), str(tmp_path / "run")]) == 0
    tokenizer = load_tokenizer(str(tmp_path / "run" / "tokenizer.json"))
    assert (tokenizer.start, tokenizer.ends) == ((0,), {1, 2})
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["bos_token_id"] == 0


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json"])
def test_a_tokenizer_in_another_form_is_not_taken_for_none(tmp_path, capsys, name):
    source = write(tmp_path / "hf")
    (source / name).write_bytes(b"\x0a\x0d")
    said = refused(capsys, "import", source, tmp_path / "run")
    assert name in said and "--tokenizer=" in said
    given = tokenizer_json(tmp_path / "converted")
    assert main(["import", str(source), str(tmp_path / "run"), f"--tokenizer={given}"]) == 0
    assert (tmp_path / "run" / "tokenizer.json").read_bytes() == given.read_bytes()


def test_no_tokenizer_at_all_is_said(tmp_path, capsys):
    assert main(["import", str(write(tmp_path / "hf")), str(tmp_path / "run")]) == 0
    assert "no tokenizer" in capsys.readouterr().out


# ----------------------------------------------------------------------------------------------------------------- links


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "config.json", "model.safetensors", "chat_template.jinja"]
)
def test_a_link_out_of_the_directory_is_not_followed(tmp_path, capsys, name):
    source = write(tmp_path / "hf")
    secret = tmp_path / "secret"
    secret.write_bytes((source / name).read_bytes() if (source / name).exists() else b"secret")
    (source / name).unlink(missing_ok=True)
    (source / name).symlink_to(secret)
    said = refused(capsys, "import", source, tmp_path / "run")
    assert name in said and "link" in said and not (tmp_path / "run").exists()


def test_a_snapshot_of_hugging_faces_cache_is_links_to_its_blobs(tmp_path):
    home = tmp_path / "models--a--b"
    snapshot = write(home / "snapshots" / "abc")
    tokenizer_json(snapshot)
    (home / "blobs").mkdir()
    for number, file in enumerate(sorted(snapshot.iterdir())):
        file.rename(home / "blobs" / str(number))
        file.symlink_to(Path("..", "..", "blobs", str(number)))
    assert main(["import", str(snapshot), str(tmp_path / "run")]) == 0
    assert (tmp_path / "run" / "tokenizer.json").is_file() and not (
        tmp_path / "run" / "tokenizer.json"
    ).is_symlink()


def test_what_is_no_file_is_not_read(tmp_path, capsys):
    source = write(tmp_path / "hf")
    (source / "tokenizer.json").mkdir()
    assert "not a file" in refused(capsys, "import", source, tmp_path / "run")


# ---------------------------------------------------------------------------------------------------------- blocks of FP8


def test_blocks_that_compressed_tensors_writes_are_read(tmp_path):
    """llm-compressor's FP8_BLOCK: 128x128, the scales named weight_scale."""
    from megatron_fp8.files.checkpoint import find_checkpoint, read_metadata, read_tensor

    config = {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {
                        "num_bits": 8,
                        "type": "float",
                        "symmetric": True,
                        "strategy": "block",
                        "block_structure": [128, 128],
                    },
                }
            },
        }
    }
    name = "model.layers.0.mlp.down_proj"
    codes = torch.randn(128, 256, generator=torch.Generator().manual_seed(1)).to(torch.float8_e4m3fn)
    scale = torch.tensor([[0.5, 2.0]])
    changed = {f"{name}.weight": codes, f"{name}.weight_scale": scale}
    source = write(tmp_path / "hf", config, **changed)
    assert main(["import", str(source), str(tmp_path / "run")]) == 0
    folder = find_checkpoint(tmp_path / "run")
    found = read_tensor(folder, read_metadata(folder), "decoder.layers.0.mlp.linear_fc2.weight")
    assert torch.equal(found, codes.float() * scale.repeat_interleave(128, 1))


def test_blocks_of_another_size_are_refused(tmp_path, capsys):
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [64, 128]}
    quantization = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    config = {"quantization_config": {**quantization, "config_groups": {"group_0": {"weights": weights}}}}
    assert "[128, 128]" in refused(capsys, "import", write(tmp_path / "hf", config), tmp_path / "run")
