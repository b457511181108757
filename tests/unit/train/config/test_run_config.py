"""The typed run config: files and dotted options, unknown keys, wrong values, what is written back."""

import os
import re
from pathlib import Path

import pytest
import torch
import yaml

from megatron_fp8.estimate.config_reader import given_keys
from megatron_fp8.train.config.model_section import padded_vocab_size, transformer_config
from megatron_fp8.train.config.run_config import known_keys, load, parse
from megatron_fp8.train.launch.parallel import check_layout

CONFIGS = Path(__file__).parents[4] / "examples" / "configs"
SMALL = ["--model.num_layers=4", "--model.hidden_size=64", "--model.num_attention_heads=4"]


def small(*options):
    return parse([*SMALL, *options])


def test_options_win_over_files_wherever_they_stand(tmp_path):
    """Before `--config` they were the file's in silence, `--resume=auto` too where the file says never."""
    one, other = tmp_path / "one.yaml", tmp_path / "other.yaml"
    one.write_text("resume: never\ntrain: {train_iters: 7, seq_length: 32}\ndata: {paths: [a]}\n")
    other.write_text("train: {train_iters: 6}\n")
    words = ["--resume=auto", "--train.seq_length=64", "--data=b", "--config", str(one), f"--config={other}"]
    run = parse(words)
    assert (run.resume, run.train.train_iters, run.train.seq_length) == ("auto", 6, 64)
    assert run.data.paths == ["b"] and run.run_dir == "runs/other"
    assert run.to_dict() == parse([*words[3:], *words[:3]]).to_dict()


def test_a_warm_up_longer_than_the_run_is_shortened_and_said():
    with pytest.warns(UserWarning, match="lr_warmup_iters=100 would be all of a run of 100 iterations"):
        assert parse(["--optimizer.lr_warmup_iters=100"]).optimizer.lr_warmup_iters == 10
    assert parse(["--optimizer.lr_warmup_iters=99"]).optimizer.lr_warmup_iters == 99
    with pytest.raises(ValueError, match=r"lr_warmup_iters=9 must be less than the 5 .*: lower it, or raise"):
        parse(["--optimizer.lr_warmup_iters=9", "--optimizer.lr_decay_iters=5"])
    assert (
        parse(["--optimizer.lr_warmup_iters=9", "--optimizer.lr_decay_iters=10"]).optimizer.lr_decay_iters
        == 10
    )


def test_a_shipped_config_is_known_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for run in (parse(["--config", "tiny_gpt_cpu"]), parse(["--config=tiny_gpt_cpu"])):
        assert run.model.hidden_size == 256 and run.run_dir == "runs/tiny_gpt_cpu"
    with pytest.raises(
        ValueError, match=r"no such file\. Did you mean tiny_gpt_cpu\? Shipped ones, by name: .*tiny_gpt_cpu"
    ):
        parse(["--config=tiny_gpt_cpo"])


def test_padded_numbers_are_decimal_and_null_is_the_default():
    run = parse(["--train.seed=010", "--optimizer.lr=0010", "--run_dir=a", "--run_dir=null"])
    assert (run.train.seed, run.optimizer.lr, run.run_dir) == (10, 10.0, "runs/train")


def test_names_may_be_written_with_hyphens_and_flags_without_values():
    run = parse(["--train.train-iters", "5", "--run-dir=there", "--dry-run"])
    assert (run.train.train_iters, run.run_dir, run.dry_run, run.debug) == (5, "there", True, False)


@pytest.mark.parametrize(
    ("options", "paths"),
    [
        (["--data", "\N{GRINNING FACE} ä, b.txt", "c"], ["\N{GRINNING FACE} ä, b.txt", "c"]),
        (["--data=b", "--data=c"], ["b", "c"]),
        (["--data.paths+=b"], ["a", "b"]),
        (["--data.paths+=b", "--data=c"], ["c"]),
        (["--data", "b", "--data.paths+=c", "--data", "d"], ["b", "c", "d"]),
        (["--data.paths", "[b]", "--data=c", "--data", "d"], ["c", "d"]),
        (["--data", "b", "--data.paths=[c]", "--data=d"], ["d"]),
    ],
)
def test_the_later_one_of_data_and_its_paths_counts_and_plus_adds(tmp_path, options, paths):
    config = tmp_path / "one.yaml"
    config.write_text("data: {paths: [a]}\n")
    assert parse([f"--config={config}", *options]).data.paths == paths
    assert parse([*options, f"--config={config}"]).data.paths == paths
    # What `doctor` looks for is what `train` would take.
    assert given_keys([f"--config={config}", *options])["data.paths"] == paths


@pytest.mark.parametrize(
    "options", [["--data"], ["--data", "--dry_run"], ["--data=b", "--data"], ["--data", "--data=b"]]
)
def test_data_without_a_file_is_refused(options):
    """`--data $UNSET`: the config's paths are not what was meant."""
    for read in (parse, given_keys):
        with pytest.raises(
            ValueError, match=r"--data names no file: write --data FILE \.\.\., or leave it out"
        ):
            read(options)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--model.fp8_recepi=mxfp8", ["model.fp8_recepi", "Did you mean model.fp8_recipe"]),
        ("--fp8=hybrid", ["--fp8", "Did you mean model.fp8?"]),
        ("--trian.train_iters=3", ["Did you mean train.train_iters"]),
        ("--nonsense=3", ["nonsense", "Sections are model, train"]),
        ("--train.train_iters=many", ["train.train_iters", "many"]),
        ("--model.activation_func=tanh", ["model.activation_func", "tanh", "gelu"]),
        ("--optimizer.min_lr=1", ["optimizer.min_lr=1"]),
        ("--model.vocab_size=?", ["model.vocab_size='?'", "whole number"]),
        ("--train={}", ["train is a section", "--train.KEY"]),
        ("--model.=3", ["model."]),
        ("--config=", ["--config"]),
        ("--optimizer.overlap_param_gather=true", ["use_distributed_optimizer"]),
        ("--checkpoint.save_interval=nevre", ["'nevre'", "or 'never'"]),
        ("--resume=", ["resume=''", "'never'"]),
        ("--train.seed", ["--train.seed has no value"]),
        ("stray", ["'stray' is not an option"]),
        ("--", ["-- alone is not an option"]),
        ("--config+=a.yaml", ["--config=a.yaml"]),
        ("--train.seed+=5", ["train.seed", "whole number"]),
    ],
)
def test_bad_options_are_one_line_that_names_them(option, words):
    with pytest.raises(ValueError) as error:
        parse([option])
    for word in words:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


def test_a_number_is_not_added_to():
    with pytest.raises(ValueError, match=re.escape("train.seed has none: write --train.seed=VALUE")):
        parse(["--train.seed=3", "--train.seed+=5"])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("model: {fp8_fromat: mxfp8}", ["model.fp8_fromat", "or model.fp8_recipe"]),
        ("[1, 2]", ["holds no sections"]),
        ("model: {fp8: [", ["is not YAML"]),
        ("", ["is empty: it needs keys"]),
        ("train: [1]", ["train=[1] must be a section"]),
        (
            "model:\nnum_layers: 4",
            ["model=None must be a section", "are the lines below it indented under model:?"],
        ),
        ("num_layers: 4", ["num_layers is not a known key", "Is it indented under model:?"]),
        ("train: {num_layers: 4}", ["Did you mean model.num_layers? Is it indented under model:?"]),
        ("model: {run_dir: a}", ["Did you mean run_dir? Is it indented too far, under model:?"]),
        (
            "model: {train: {seed: 1}}",
            ["model.train is not a known key. It is a section: is it indented too far"],
        ),
        ("train: {seed: 1}\nmodel: {}\ntrain: {}", ["'train' stands twice, again in line 3"]),
        ("train: {? [1, 2] : 3}", ["the key in line 1 must be a name"]),
        ("run_dir: 2026-99-99", ["month must be in 1..12"]),
        ("model: {fp8_overrides.a: bf16}", ["Did you mean model.fp8_overrides"]),
        ("train: {seed: ['a']}", ["train.seed=['a'] must be a whole number"]),
    ],
)
def test_bad_files_are_named(tmp_path, content, words):
    file = tmp_path / "bad.yaml"
    file.write_text(content)
    with pytest.raises(ValueError) as error:
        load(file)
    assert str(file) in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_a_config_that_is_no_ordinary_file_is_not_read(tmp_path):
    """A device has no end, and a pipe is waited for."""
    file = tmp_path / "odd.yaml"
    os.mkfifo(file)
    with pytest.raises(ValueError, match=r"odd\.yaml': it is no ordinary file"):
        load(file)


def test_text_that_config_yaml_cannot_hold_is_refused():
    with pytest.raises(ValueError, match=r"run_dir='a\\udc80b' holds bytes that are no UTF-8"):
        small("--run_dir=a\udc80b")


def test_what_is_saved_holds_every_key_and_runs_the_same(tmp_path):
    run = small(
        "--model.fp8=hybrid", "--model.fp8_format=mxfp8", "--model.fp8_overrides={'*.linear_fc2:wgrad': bf16}"
    )
    path = tmp_path / "config.yaml"
    run.save(path)
    saved = yaml.safe_load(path.read_text())
    flat = {f"{name}.{key}" for name, part in saved.items() if isinstance(part, dict) for key in part}
    flat |= {name for name, part in saved.items() if not isinstance(part, dict)}
    assert flat == set(known_keys())
    assert load(path).to_dict() == run.to_dict()
    assert load(path).model.fp8_overrides == {"*.linear_fc2:wgrad": "bf16"}


@pytest.mark.parametrize("given", ["", "[a]"])
def test_overrides_that_are_no_mapping_say_what_one_is(given):
    with pytest.raises(
        ValueError, match=r"model\.fp8_overrides=.* must be a mapping, as .* is, or \{\} for none"
    ):
        small(f"--model.fp8_overrides={given}")


# ---------------------------------------------------------------------------------------- the model


def test_the_model_section_becomes_a_transformer_config():
    options = ("--model.fp8=hybrid", "--model.fp8_format=mxfp8", "--model.activation_func=silu")
    config = transformer_config(small(*options, "--model.num_query_groups=2").model)
    assert (config.fp8, config.fp8_recipe, config.num_query_groups) == ("hybrid", "mxfp8", 2)
    assert config.activation_func is torch.nn.functional.silu
    assert (config.bf16, config.params_dtype, config.pipeline_dtype) == (True, torch.bfloat16, torch.bfloat16)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model.pipeline_model_parallel_layout=E*9999999999tL"], "nothing more than 1,000 times"),
        (["--model.sequence_parallel=true"], "sequence parallelism"),
        # An assertion of Megatron-Core's that says nothing: what failed is shown.
        (["--model.transformer_impl=inference_optimized"], '`assert self.normalization == "RMSNorm"`'),
    ],
)
def test_models_that_cannot_be(options, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        transformer_config(small(*options).model)


def test_the_vocabulary_is_padded_for_tensor_parallelism():
    run = small("--model.tensor_model_parallel_size=2")
    assert padded_vocab_size(run.model, 257) == 512
    run = small("--model.vocab_size=32000", "--model.make_vocab_size_divisible_by=1")
    assert padded_vocab_size(run.model, 257) == 32000
    with pytest.raises(ValueError, match=r"model\.vocab_size=100 is less than the tokenizer's 257"):
        padded_vocab_size(small("--model.vocab_size=100").model, 257)


# ----------------------------------------------------------------------------------- shipped configs

LAYOUTS = {
    "tiny_gpt_cpu": 2,
    "tiny_gelu_cpu": 2,
    "tiny_moe_cpu": 2,
    "padded_heads_cpu": 1,
    "dense_182m": 8,
    "one_gpu": 1,
    "llama3_8b": 64,
    "llama3_70b": 256,
    "qwen3_30b_a3b": 64,
    "deepseek_v3": 2048,
}


def test_every_shipped_config_is_listed_here():
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == set(LAYOUTS)


@pytest.mark.parametrize(("name", "world_size"), LAYOUTS.items())
def test_shipped_configs_are_valid(name, world_size):
    run = parse([f"--config={CONFIGS / name}.yaml"], world_size)
    config = transformer_config(run.model)
    experts = config.num_moe_experts is not None  # trained as DeepSeek-V3 was: E4M3, all layers in FP8
    assert config.fp8 == ("e4m3" if experts else "hybrid")
    # padded_heads_cpu has two layers in all
    assert config.first_last_layers_bf16 == (name != "padded_heads_cpu" and not experts)
    check_layout(run.model, run.train, world_size)
    assert name == "deepseek_v3" or config.num_layers % config.pipeline_model_parallel_size == 0
    for recipe in ("delayed", "mxfp8"):
        options = [f"--model.fp8_format={recipe}"]
        if config.moe_fp8_dispatch and recipe == "delayed":
            with pytest.raises(ValueError, match=r"one scale per tensor.*or moe_fp8_dispatch=False"):
                transformer_config(load(CONFIGS / f"{name}.yaml", *options).model)
            options += ["--model.moe_fp8_dispatch=false"]
        again = load(CONFIGS / f"{name}.yaml", *options)
        assert transformer_config(again.model).fp8_recipe == recipe


def test_the_tiny_configs_have_gemm_sizes_that_are_multiples_of_128_on_each_rank():
    for name in ("tiny_gpt_cpu", "tiny_gelu_cpu"):
        run = load(CONFIGS / f"{name}.yaml")
        config, ranks = transformer_config(run.model), run.model.tensor_model_parallel_size
        heads = config.num_attention_heads + 2 * config.num_query_groups
        ffn = config.ffn_hidden_size * (2 if config.gated_linear_unit else 1)
        attention = config.num_attention_heads * config.kv_channels
        tokens = run.train.micro_batch_size * run.train.seq_length
        for size in (heads * config.kv_channels, ffn, attention, config.ffn_hidden_size, tokens):
            assert size % (128 * ranks) == 0, (name, size)
        assert config.hidden_size % 128 == 0


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        (["--data.paths=y", "--data", "z"], "data.paths='y' must be a list"),
        (["--train.train_iters=x", "--train.train_iters=5"], "train.train_iters='x' must be"),
        (["--config={file}", "--train.seed=5"], "{file}: train.seed='x' must be"),
    ],
)
def test_of_several_values_the_one_that_is_wrong_is_named(tmp_path, options, refused):
    file = tmp_path / "run.yaml"
    file.write_text("train: {seed: x}")
    with pytest.raises(ValueError, match=f"^{re.escape(refused.format(file=file))}"):
        parse([option.format(file=file) for option in options])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "ranks, options, tensor, sequence",
    [
        (2, [], 2, True),
        (4, [], 2, True),  # two query groups
        (3, [], 1, False),
        (2, ["--model.sequence_parallel=false"], 2, False),
        (2, ["--model.tensor_model_parallel_size=1"], 1, False),
    ],
)
def test_a_tensor_parallel_size_of_auto_is_that_of_the_ranks(ranks, options, tensor, sequence):
    run = parse(["--config=tiny_gpt_cpu", *options], ranks)
    assert (run.model.tensor_model_parallel_size, run.model.sequence_parallel) == (tensor, sequence)
