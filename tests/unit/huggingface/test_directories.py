"""Directories and runs on the disk: whole or not at all, and bad input by name. One run is imported for all tests."""

from __future__ import annotations

import json
import os
import resource
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from megatron_fp8.commands.export import size_in_bytes
from megatron_fp8.commands.main import main
from megatron_fp8.files.checkpoint import (
    check_files,
    find_checkpoint,
    read_manifest,
    read_metadata,
    read_tensor,
)
from megatron_fp8.huggingface.checkpoint_reader import Source
from megatron_fp8.huggingface.directory import Tensors, new_directory, write_tensors
from megatron_fp8.inference.calibration import Calibration, Range
from tests.support.hf_small import refused, tensors, write
from tests.support.manifests import edit

Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    write(folder / "hf")
    (folder / "hf" / "tokenizer_config.json").write_text("{}")
    assert main(["import", str(folder / "hf"), str(folder / "run")]) == 0
    return folder / "run"


# ------------------------------------------------------------------------------------------------------------- files


def test_files_are_cut_at_the_size_and_indexed(tmp_path):
    tmp_path = tmp_path / "open"
    tmp_path.mkdir()
    named = [(f"t{i}", torch.full((10,), float(i))) for i in range(7)]
    names = write_tensors(tmp_path, iter(named), shard_bytes=80)
    assert names == [f"model-0000{i}-of-00004.safetensors" for i in (1, 2, 3, 4)]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 280 and index["weight_map"]["t6"] == names[3]
    assert sorted(load_file(tmp_path / names[0])) == ["t0", "t1"]
    with Tensors(tmp_path) as read:
        assert read.names() == {name for name, _ in named} and read.shape("t3") == [10]
        for name, tensor in named:
            assert torch.equal(read[name], tensor)
    assert {oct(path.stat().st_mode & 0o777) for path in tmp_path.iterdir()} == {"0o644"}


def test_one_file_has_no_index_and_a_large_tensor_its_own(tmp_path):
    named = [("small", torch.zeros(1)), ("large", torch.zeros(100)), ("last", torch.zeros(1))]
    assert write_tensors(tmp_path, iter(named), shard_bytes=10**9) == ["model.safetensors"]
    assert os.listdir(tmp_path) == ["model.safetensors"]
    (tmp_path / "cut").mkdir()
    assert len(write_tensors(tmp_path / "cut", iter(named), shard_bytes=8)) == 3


def test_a_directory_is_whole_or_not_there(tmp_path, monkeypatch):
    with pytest.raises(RuntimeError, match="half way"), new_directory(tmp_path / "out") as folder:
        (folder / "config.json").write_text("{}")
        raise RuntimeError("half way")
    assert not os.listdir(tmp_path)
    with new_directory(tmp_path / "out") as folder:
        (folder / "config.json").write_text("{}")
        assert not (tmp_path / "out").exists()
    assert os.listdir(tmp_path / "out") == ["config.json"] and os.listdir(tmp_path) == ["out"]
    with pytest.raises(ValueError, match="is there already"), new_directory(tmp_path / "out"):
        pass
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")  # it cannot be renamed over while somebody stands in it
    with pytest.raises(ValueError, match=r"'\.' is there already"), new_directory(Path()):
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be written"), new_directory(tmp_path / "file" / "out"):
        pass


def test_what_a_killed_export_left_is_named(tmp_path):
    """Of the same directory, by a name of just that form; and the new one is written beside it."""
    for name in (".out.0123abcd", ".out.notes", ".other.0123abcd"):
        (tmp_path / name).mkdir()
    with pytest.warns(UserWarning) as said, new_directory(tmp_path / "out") as folder:
        (folder / "file").write_text("whole")
    (warning,) = said
    assert str(warning.message).startswith(f"'{tmp_path}/.out.0123abcd' is unfinished: remove it")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".other.0123abcd",
        ".out.0123abcd",
        ".out.notes",
        "out",
    ]


@pytest.mark.parametrize("command", ["import", "export"])
def test_a_full_disk_leaves_nothing(run, tmp_path, capsys, command):
    """No file may be longer than 100,000 bytes: as if the disk ended there."""
    import megatron_fp8.mcore.checkpoint.weights  # noqa: F401 (its modules' caches may be longer)

    source = run.parent / "hf" if command == "import" else run
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        said = refused(capsys, command, source, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "cannot be written" in said and "File too large" in said
    assert not os.listdir(tmp_path)


def test_sizes():
    assert [size_in_bytes(text) for text in ("5GB", "200 mb", "1GiB", "17")] == [
        5 * 10**9,
        2 * 10**8,
        2**30,
        17,
    ]
    for text in ("5 parsecs", "0MB", "-3GB", "", "GB"):
        with pytest.raises(ValueError, match="max-shard-size"):
            size_in_bytes(text)


# ------------------------------------------------------------------------------------------------------------ import


def test_an_imported_run_is_a_checkpoint_like_any_other(run):
    checkpoint = find_checkpoint(run)
    manifest, metadata = read_manifest(checkpoint), read_metadata(checkpoint)
    check_files(checkpoint, manifest)
    assert checkpoint.name == "iter_0000000" and manifest.iteration == 0
    embedding = read_tensor(checkpoint, metadata, "embedding.word_embeddings.weight")
    assert embedding.shape == (256, 128) and not embedding[200:].any()
    assert torch.equal(embedding[:200], tensors()["model.embed_tokens.weight"])
    assert (run / "tokenizer_config.json").read_text() == "{}" and os.listdir(run.parent) == ["hf", "run"]
    assert main(["inspect", str(run), "--check"]) == 0


CHANGES = {
    "missing": ({}, {Q: None}, f"has no {Q}, which its config.json asks for"),
    "left over": ({}, {"model.layers.0.extra.weight": torch.ones(2)}, "has model.layers.0.extra.weight, which"),
    "a third layer": ({"num_hidden_layers": 1}, {}, "has model.layers.1."),
    "another shape": ({}, {Q: torch.ones(128, 128)}, f"{Q} is [128, 128] in"),
    "another vocabulary": ({"vocab_size": 201}, {}, "is [200, 128] in"),
    "a head of its own": ({"tie_word_embeddings": True}, {}, "has a lm_head.weight other than its embedding"),
    "not finite": ({}, {Q: torch.full((256, 128), float("nan"))}, f"{Q} holds NaN or Inf"),
    "whole numbers": ({}, {Q: torch.ones(256, 128, dtype=torch.int32)}, f"{Q} is torch.int32 without a scale"),
    "codes alone": ({}, {Q: torch.ones(256, 128).to(torch.float8_e4m3fn)}, "torch.float8_e4m3fn without a scale"),
    "a scale too many": ({}, {"model.norm.weight_scale": torch.ones(1)}, "norm.weight is torch.bfloat16 with a scale"),
    "a scale of nothing": ({}, {"model.layers.9.mlp.up_proj.weight_scale": torch.ones(1)},
                           "has model.layers.9.mlp.up_proj.weight_scale"),
    "E5M2": ({}, {Q: torch.ones(256, 128).to(torch.float8_e5m2), Q.replace("weight", "weight_scale"): torch.ones(1)},
             "torch.float8_e5m2 with a scale"),
    "mixture": ({"architectures": ["Qwen3MoeForCausalLM"]}, {}, "architectures=['Qwen3MoeForCausalLM']"),
    "int4": ({"quantization_config": {"quant_method": "awq"}}, {}, "quant_method='awq'"),
}  # fmt: skip


@pytest.mark.parametrize("kind", CHANGES)
def test_a_directory_that_is_not_what_it_says(tmp_path, capsys, kind):
    config, changed, words = CHANGES[kind]
    write(tmp_path / "hf", config, **changed)
    assert words in refused(capsys, "import", tmp_path / "hf", tmp_path / "run")
    assert os.listdir(tmp_path) == ["hf"]


def test_what_follows_from_the_config_may_be_there(tmp_path):
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(64)}
    tied = {"lm_head.weight": tensors()["model.embed_tokens.weight"].clone()}
    write(tmp_path / "hf", {"tie_word_embeddings": True}, **extra, **tied)
    assert main(["import", str(tmp_path / "hf"), str(tmp_path / "run")]) == 0
    checkpoint = find_checkpoint(tmp_path / "run")
    assert "output_layer.weight" not in read_metadata(checkpoint).state_dict_metadata


def test_files_that_are_not_there_or_damaged(tmp_path, capsys):
    assert "has no config.json" in refused(capsys, "import", tmp_path / "nowhere", tmp_path / "run")
    folder = write(tmp_path / "hf")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "safetensors only" in refused(capsys, "import", folder, tmp_path / "run")
    (folder / "model.safetensors").write_bytes((folder / "pytorch_model.bin").read_bytes()[:5000])
    assert "damaged or no safetensors file" in refused(capsys, "import", folder, tmp_path / "run")
    (folder / "config.json").write_text("{")
    assert "config.json' cannot be read" in refused(capsys, "import", folder, tmp_path / "run")
    (folder / "config.json").write_text("[]")
    assert "is not an object, but list" in refused(capsys, "import", folder, tmp_path / "run")


def test_an_index_that_lies(tmp_path, capsys):
    folder = write(tmp_path / "hf")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys((*tensors(), "more"), "model.safetensors")}))
    assert "has no more, which its index says" in refused(capsys, "import", folder, tmp_path / "run")
    index.write_text(json.dumps({"weight_map": {"a": "../elsewhere.safetensors"}}))
    assert "outside of its folder" in refused(capsys, "import", folder, tmp_path / "run")
    (folder / "model.safetensors").unlink()
    index.write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    assert "has no gone.safetensors" in refused(capsys, "import", folder, tmp_path / "run")


def test_nothing_is_overwritten(run, tmp_path, capsys):
    assert "is there already" in refused(capsys, "import", run.parent / "hf", run)
    assert "is there already" in refused(capsys, "export", run, run.parent / "hf")


# ------------------------------------------------------------------------------------------------------------ export


def export(run: Path, out: Path, *arguments: str) -> dict[str, torch.Tensor]:
    assert main(["export", str(run), str(out), f"--like={run.parent / 'hf'}", *arguments]) == 0
    return load_file(out / "model.safetensors")


def test_linears_can_be_left_out(run, tmp_path, capsys):
    written = export(
        run, tmp_path / "out", "--format=fp8-tensor", "--ignore=*.mlp.*", "--ignore=*.1.self_attn.o_proj"
    )
    kept = {f"model.layers.{n}.mlp.{p}_proj" for n in (0, 1) for p in ("gate", "up", "down")} | {
        "model.layers.1.self_attn.o_proj"
    }
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert set(config["ignore"]) == kept | {"lm_head"}
    for name, tensor in tensors().items():
        if name.removesuffix(".weight") in kept:
            assert torch.equal(written[name], tensor), name
    assert sum(t.dtype == torch.float8_e4m3fn for t in written.values()) == 7
    assert "7 linears in FP8 (fp8-tensor), 7 kept in bfloat16" in capsys.readouterr().out


def test_layers_that_training_kept_in_bf16_stay_so(run, tmp_path):
    """As its config says: first and last layers, and overrides by name, which win."""
    config = tmp_path / "config.yaml"
    model = read_manifest(find_checkpoint(run)).facts["run"]["model"]
    fp8 = {
        "fp8": "hybrid", "fp8_recipe": "tensorwise", "first_last_layers_bf16": True,
        "num_layers_at_start_in_bf16": 0, "num_layers_at_end_in_bf16": 1,
        "fp8_overrides": {"linear_fc2": "bf16", "*.1.*.linear_proj": "rowwise"},
    }  # fmt: skip
    config.write_text(yaml.safe_dump({"model": {**model, **fp8}, "train": {"seq_length": 64}}))
    for options, expected in {
        (): {"0.self_attn.q", "0.self_attn.k", "0.self_attn.v", "0.self_attn.o", "0.mlp.gate", "0.mlp.up",
             "1.self_attn.o"},
        ("--quantize-all",): {f"{n}.{p}" for n in (0, 1) for p in (
            "self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")},
    }.items():  # fmt: skip
        written = export(
            run, tmp_path / f"out{len(options)}", "--format=fp8-tensor", f"--config={config}", *options
        )
        quantized = {name for name, tensor in written.items() if tensor.dtype == torch.float8_e4m3fn}
        assert quantized == {f"model.layers.{name}_proj.weight" for name in expected}


def test_an_imported_run_keeps_its_tokenizer_wherever_it_is(tmp_path, monkeypatch):
    """Its config names the file as the command line did: from a folder that is not this one, before the run was moved."""
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"<eos>": 0, "ham": 1})).save(str(write(tmp_path / "hf") / "tokenizer.json"))
    monkeypatch.chdir(tmp_path)
    assert main(["import", "hf", "run"]) == 0
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").rename(tmp_path / "elsewhere" / "moved")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(["export", "moved", "out"]) == 0
    copy = Path("out", "tokenizer.json").read_bytes()
    assert copy == (tmp_path / "hf" / "tokenizer.json").read_bytes()
    assert json.loads(Path("out", "tokenizer_config.json").read_text())["eos_token"] == "<eos>"
    # Readers would take Llama's 1 for a missing first token.
    for name in ("config.json", "generation_config.json"):
        special = json.loads(Path("out", name).read_text())
        assert special["bos_token_id"] is None and special["eos_token_id"] == 0


SHAPES = {
    "self_attention.linear_qkv": (512, 128),
    "self_attention.linear_proj": (128, 256),
    "mlp.linear_fc1": (512, 128),
    "mlp.linear_fc2": (128, 256),
}


def save_calibration(folder: Path, **changed: Range | None) -> Path:
    """Amaxes of 3, 4, 5 ... in the model's own shapes; by the last part of a site's name others, or none."""
    sites = [(f"decoder.layers.{n}.{name}", shape) for n in (0, 1) for name, shape in SHAPES.items()]
    ranges = {}
    for amax, (site, shape) in enumerate(sites, start=3):
        found = changed.get(
            site.split("_")[-1], Range(amax, torch.tensor([float(amax)]), shape, {"max": amax})
        )
        if found is not None:
            ranges[f"{site}.input"] = found
    return Calibration(ranges).save(folder)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            Range(3.0, torch.tensor([3.0]), (512, 64), {}),
            "linear_fc1 is [512, 128] here, and [512, 64] there",
        ),
        (None, "linear_fc1 is [512, 128] here, and nothing of it there"),
        (
            Range(0.0, torch.tensor([0.0]), (512, 128), {}),
            "nothing but zeros go into decoder.layers.0.mlp.linear_fc1",
        ),
    ],
    ids=["another shape", "a linear left out", "zeros"],
)
def test_a_calibration_that_does_not_fit_is_refused(run, tmp_path, capsys, changed, words):
    folder = save_calibration(tmp_path / "ranges", fc1=changed)
    said = refused(capsys, "export", run, tmp_path / "out", "--format=fp8-tensor", f"--calibration={folder}")
    assert words in said and os.listdir(tmp_path) == ["ranges"]


@pytest.mark.parametrize("form", ["bf16", "fp8-channel"])
def test_weights_that_are_not_finite_are_not_exported(run, tmp_path, capsys, monkeypatch, form):
    """Also where no scale would show it: a norm."""
    sound = Source.tensor

    def diverged(self: Source, name: str, **kept: bool) -> torch.Tensor:
        tensor = sound(self, name, **kept)
        return tensor.fill_(torch.nan) if name == "decoder.final_layernorm.weight" else tensor

    monkeypatch.setattr(Source, "tensor", diverged)
    said = refused(capsys, "export", run, tmp_path / "out", f"--format={form}")
    assert "decoder.final_layernorm.weight holds NaN or Inf" in said and not os.listdir(tmp_path)


def test_calibrated_inputs_get_static_scales(run, tmp_path):
    save_calibration(tmp_path / "ranges")
    written = export(run, tmp_path / "out", "--format=fp8-channel", f"--calibration={tmp_path / 'ranges'}")
    group = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"][
        "config_groups"
    ]["group_0"]
    assert (group["input_activations"]["dynamic"], group["input_activations"]["strategy"]) == (
        False,
        "tensor",
    )
    scales = {name: tensor for name, tensor in written.items() if name.endswith("input_scale")}
    assert len(scales) == 14
    for part in "qkv":
        scale = scales[f"model.layers.1.self_attn.{part}_proj.input_scale"]
        assert scale.dtype == torch.float32 and scale.shape == (1,)
        assert scale.item() == pytest.approx(7.0 / 448, rel=1e-6)


BAD = {
    ("--format=fp8",): "invalid choice: 'fp8'",
    ("--frmat=bf16",): "unrecognized arguments: --frmat=bf16",
    ("--format=fp8-tensor", "--ignore=*.typo"): "--ignore='*.typo' matches no linear",
    ("--format=fp8-tensor", "--ignore=*.q_proj"): "as one GEMM, and they must be ignored together",
    ("--format=fp8-tensor", "--ignore=*"): "every linear would stay in high precision",
    ("--vocab-size=300",): "embedding.word_embeddings.weight is [256, 128] in",
    ("--vocab-size=0",): "--vocab-size=0 must be at least 1",
    ("--max-shard-size=huge",): "--max-shard-size='huge'",
    ("--like=nowhere",): "'nowhere' has no config.json",
    ("--config=nowhere.yaml",): "--config='nowhere.yaml' cannot be read",
    ("--calibration=x",): "--calibration with --format=bf16",
    ("--calibration=x", "--format=fp8-block"): "--calibration with --format=fp8-block",
    ("--calibration=x", "--format=mxfp8"): "static input scales are of fp8-tensor, fp8-channel, nvfp4,",
    ("--calibration=nowhere", "--format=fp8-tensor"): "nowhere",
}


@pytest.mark.parametrize("arguments", BAD, ids=" ".join)
def test_bad_exports_leave_nothing(run, tmp_path, capsys, arguments):
    assert BAD[arguments] in refused(capsys, "export", run, tmp_path / "out", *arguments)
    assert not os.listdir(tmp_path)


def test_a_directory_of_another_model_is_not_like_this_one(run, tmp_path, capsys):
    write(tmp_path / "hf", {"rms_norm_eps": 1e-6})
    said = refused(capsys, "export", run, tmp_path / "out", f"--like={tmp_path / 'hf'}")
    assert "rms_norm_eps is 1e-06 there and 1e-05 in the checkpoint" in said


def test_a_damaged_checkpoint_is_not_exported(run, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "run")
    shard = find_checkpoint(tmp_path / "run") / "__0_0.distcp"
    os.truncate(shard, shard.stat().st_size - 1)
    assert "__0_0.distcp has" in refused(capsys, "export", tmp_path / "run", tmp_path / "out")


def test_a_config_of_another_model_names_the_tensor(run, tmp_path, capsys):
    """Of a checkpoint that does not say itself what run it is of."""
    model = read_manifest(find_checkpoint(run)).facts["run"]["model"]
    unsaid = shutil.copytree(run, tmp_path / "unsaid")
    edit(find_checkpoint(unsaid), lambda content: content["facts"].pop("run"))
    for changes, words in {
        (("ffn_hidden_size", 512),): "mlp.linear_fc1.weight_w is [256, 128] in",
        (("num_layers", 1),): "has, and the exported model has not, decoder.layers.1.",
        (("num_layers", 3),): "has no decoder.layers.2.",
        (("add_qkv_bias", True),): "has no decoder.layers.0.self_attention.linear_qkv.bias",
        (("normalization", "LayerNorm"),): "model.normalization='LayerNorm'",
    }.items():
        config = tmp_path / "config.yaml"
        config.write_text(yaml.safe_dump({"model": {**model, **dict(changes)}, "train": {"seq_length": 64}}))
        assert words in refused(capsys, "export", unsaid, tmp_path / "out", f"--config={config}")


def test_help_teaches(capsys):
    for command, words in {"export": "fp8-block", "import": "megatron-fp8 train --config="}.items():
        try:
            code = main([command, "--help"])
        except SystemExit as ended:
            code = ended.code
        assert code == 0 and words in capsys.readouterr().out
