"""Directories that other people made: fields of the wrong kind, links, tokenizers in other forms, blocks of FP8."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_fp8.commands.generate import prompt_ids
from megatron_fp8.commands.main import main
from megatron_fp8.huggingface.config import check_types, model_section
from megatron_fp8.train.data.tokenizers import JsonTokenizer, load_tokenizer
from tests.support.draws import draws
from tests.support.hf_small import CONFIG, refused, write

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


@draws(100)
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
        ("num_hidden_layers", 10**9),
        ("num_attention_heads", True),
        ("rms_norm_eps", "1e-5"),
        ("tie_word_embeddings", "false"),
        ("rope_scaling", ["llama3"]),
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
        ("generation_config.json", {"eos_token_id": -1}),
        ("generation_config.json", {"eos_token_id": 10**400}),
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


@pytest.mark.parametrize(
    "name", ["tokenizer.model", "vocab.json", "spiece.model", "qwen.tiktoken", "tekken.json"]
)
def test_a_tokenizer_in_another_form_is_not_taken_for_none(tmp_path, capsys, name):
    source = write(tmp_path / "hf")
    (source / name).write_bytes(b"\x0a\x0d")
    said = refused(capsys, "import", source, tmp_path / "run")
    assert name in said and "--tokenizer=" in said
    given = tokenizer_json(tmp_path / "converted")
    assert main(["import", str(source), str(tmp_path / "run"), f"--tokenizer={given}"]) == 0
    assert (tmp_path / "run" / "tokenizer.json").read_bytes() == given.read_bytes()


def test_how_a_file_cut_and_filled_up_texts_is_left_out(tmp_path):
    """As whoever trained on pieces of one length saves it: documents would end there."""
    path = tokenizer_json(tmp_path)
    plain = JsonTokenizer(path)
    content = json.loads(path.read_text())
    cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    fill = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None}
    fill |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "<s>"}
    for changed in ({"truncation": cut}, {"padding": fill}):
        path.write_text(json.dumps({**content, **changed}))
        tokenizer = JsonTokenizer(path)
        assert tokenizer.encode(b"ham and eggs").tolist() == [3, 4, 5] and tokenizer.start == ()
        assert tokenizer.name != plain.name and tokenizer.name.endswith("-whole")


def test_ids_may_leave_gaps(tmp_path):
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"ham": 0, "eggs": 70})).save(str(tmp_path / "tokenizer.json"))
    tokenizer = JsonTokenizer(tmp_path / "tokenizer.json")
    assert (tokenizer.eod, tokenizer.vocab_size) == (71, 72)


def test_an_end_that_only_other_files_name_is_taken(tmp_path):
    path = tokenizer_json(tmp_path)
    put(tmp_path, "special_tokens_map.json", {"eos_token": "<|im_end|>"})
    put(tmp_path, "tokenizer_config.json", {"eos_token": None})
    assert JsonTokenizer(path).eod == 2
    from tokenizers import Tokenizer, models

    unusual = tmp_path / "unusual"
    unusual.mkdir()
    Tokenizer(models.WordLevel({"ham": 0, "<done>": 1})).save(str(unusual / "tokenizer.json"))
    put(unusual, "generation_config.json", {"eos_token_id": [1]})
    tokenizer = JsonTokenizer(unusual / "tokenizer.json")
    assert (tokenizer.eod, tokenizer.vocab_size, tokenizer.ends) == (1, 2, {1})


def test_an_export_ends_where_the_imported_model_does(tmp_path):
    source = write(tmp_path / "hf")
    tokenizer_json(source)
    put(source, "generation_config.json", {"eos_token_id": [1, 2], "temperature": 0.6})
    assert main(["import", str(source), str(tmp_path / "run")]) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert written["eos_token_id"] == [1, 2] and written["temperature"] == 0.6


def test_a_null_says_nothing_of_the_end(tmp_path):
    source = write(tmp_path / "hf", {"eos_token_id": 2})
    tokenizer_json(source)
    put(source, "generation_config.json", {"eos_token_id": None})
    assert main(["import", str(source), str(tmp_path / "run")]) == 0
    assert load_tokenizer(str(tmp_path / "run" / "tokenizer.json")).ends == {1, 2}


def test_a_tokenizer_that_does_not_fit_is_refused_with_the_directorys_name(tmp_path, capsys):
    source = write(tmp_path / "hf")
    path = tokenizer_json(source)
    put(source, "generation_config.json", {"eos_token_id": 77})
    assert str(source / "generation_config.json") in refused(capsys, "import", source, tmp_path / "run")
    (source / "generation_config.json").unlink()
    content = json.loads(path.read_text())
    content["model"]["vocab"] |= {f"word{number}": number for number in range(6, 201)}
    path.write_text(json.dumps(content))
    said = refused(capsys, "import", source, tmp_path / "run")
    assert "201 tokens" in said and "vocab_size=200" in said and "resize_token_embeddings" in said


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


def test_what_is_not_the_file_itself_says_so(tmp_path, capsys):
    source = write(tmp_path / "hf")
    (source / "tokenizer.json").symlink_to(source / "gone")
    assert "complete the download" in refused(capsys, "import", source, tmp_path / "run")
    (source / "tokenizer.json").unlink()
    (source / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    )
    assert "git lfs pull" in refused(capsys, "import", source, tmp_path / "run")


def test_weights_under_another_name_or_twice(tmp_path, capsys):
    source = write(tmp_path / "hf")
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}
    put(source, "model.safetensors.index.json", index)
    assert "stale" in refused(capsys, "import", source, tmp_path / "run")
    (source / "model.safetensors.index.json").unlink()
    (source / "model.safetensors").rename(source / "model-00001-of-00001.safetensors")
    said = refused(capsys, "import", source, tmp_path / "run")
    assert "model-00001-of-00001.safetensors" in said and "index" in said
    (source / "config.json").rename(source / "adapter_config.json")
    assert "adapter" in refused(capsys, "import", source, tmp_path / "run")


# ---------------------------------------------------------------------------------------------------------- blocks of FP8


@pytest.mark.parametrize("block", [[128, 128], "128x128"])
def test_blocks_that_compressed_tensors_writes_are_read(tmp_path, block):
    """llm-compressor's FP8_BLOCK: 128x128, the scales named weight_scale; beside them those of an FP8 cache."""
    from megatron_fp8.files.checkpoint import find_checkpoint, read_metadata, read_tensor

    config = {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": None,
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "format": "float-quantized",
                    "weights": {
                        "num_bits": 8,
                        "type": "float",
                        "symmetric": True,
                        "strategy": "block",
                        "block_structure": block,
                    },
                }
            },
        }
    }
    name = "model.layers.0.mlp.down_proj"
    codes = torch.randn(128, 256, generator=torch.Generator().manual_seed(1)).to(torch.float8_e4m3fn)
    scale = torch.tensor([[0.5, 2.0]])
    changed = {f"{name}.weight": codes, f"{name}.weight_scale": scale}
    changed |= {
        f"model.layers.1.self_attn.{last}": torch.ones(1) for last in ("k_scale", "v_proj.output_scale")
    }
    source = write(tmp_path / "hf", config, **changed)
    assert main(["import", str(source), str(tmp_path / "run")]) == 0
    folder = find_checkpoint(tmp_path / "run")
    found = read_tensor(folder, read_metadata(folder), "decoder.layers.0.mlp.linear_fc2.weight")
    assert torch.equal(found, codes.float() * scale.repeat_interleave(128, 1))


@pytest.mark.parametrize(
    "scales, words",
    [
        ({"weight_scale": torch.tensor([127], dtype=torch.uint8)}, "scales of torch.uint8"),
        ({"weight_scale": torch.ones(1), "weight_scale_inv": torch.ones(1)}, "two scales"),
    ],
)
def test_scales_that_may_mean_something_else_are_refused(tmp_path, capsys, scales, words):
    """Whole numbers are exponents, and of two names the other may be the divisor."""
    name = "model.layers.0.mlp.up_proj"
    changed = {f"{name}.weight": torch.zeros(256, 128).to(torch.float8_e4m3fn)}
    changed |= {f"{name}.{last}": scale for last, scale in scales.items()}
    assert words in refused(capsys, "import", write(tmp_path / "hf", **changed), tmp_path / "run")


@pytest.mark.parametrize("number", [0.0, -1.0, 1e-36, float("nan"), float("inf")])
@pytest.mark.parametrize("shape", [(), (1,), (256, 1), (2, 1)])
@pytest.mark.parametrize("last", ["weight_scale", "weight_scale_inv"])
def test_scales_that_no_quantizer_writes_are_damage(tmp_path, capsys, last, shape, number):
    """Of a tensor, of rows and of blocks: the weights would be zeros, of the other sign, or a few bits of themselves."""
    name = "model.layers.0.mlp.up_proj"
    scale = torch.ones(shape)
    scale.view(-1)[-1] = number
    changed = {f"{name}.weight": torch.ones(256, 128).to(torch.float8_e4m3fn), f"{name}.{last}": scale}
    said = refused(capsys, "import", write(tmp_path / "hf", **changed), tmp_path / "run")
    assert (
        f"{name}.weight is damaged: a scale of it is {number:.3g}, and scales are finite and at least 6e-36"
        in said
    )
