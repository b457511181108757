"""What is read of a config, without Megatron-Core, is what the app reads of it with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_fp8.estimate.config_reader import known_keys, read
from megatron_fp8.estimate.model_state import group_size
from megatron_fp8.mcore.config.fields import FIELD_RULES, OWN_RULES

# What None means in these follows from the layout, and is a property of the model; and what has other names here.
OTHERWISE = {
    "expert_tensor_parallel_size", "microbatch_group_size_per_vp_stage", "recompute_modules", "positions", "fp8_options",
    "params_dtype", "activation_func", "vocab_size",
}  # fmt: skip
NAMES = ("llama3_8b", "deepseek_v3", "tiny_moe_cpu", "tiny_gelu_cpu", "padded_heads_cpu")
CONFIGS = [Path(f"examples/configs/{name}.yaml") for name in NAMES]
TINY = "--config=examples/configs/tiny_gpt_cpu.yaml"


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_the_app_reads_the_same(config: Path, tmp_path: Path) -> None:
    from megatron_fp8.train.config import run_config
    from megatron_fp8.train.config.model_section import padded_vocab_size, transformer_config

    settings, run = read([f"--config={config}"]), run_config.load(config)
    made = transformer_config(run.model)
    for name, value in vars(settings.model).items():
        if name in OTHERWISE:
            continue
        there: Any = getattr(made if hasattr(made, name) else run.model, name)
        assert value == there, name
    assert settings.model.expert_tp == made.expert_tensor_parallel_size
    assert settings.model.padded_vocabulary == padded_vocab_size(run.model, 257)
    assert (settings.train, settings.optimizer) == (run.train, run.optimizer)
    run.save(tmp_path / "config.yaml")  # as a run writes it, with every key
    assert read([f"--config={tmp_path}/config.yaml"]).model.chunks() == settings.model.chunks()


def test_every_key_of_the_app_is_known_and_no_other() -> None:
    from megatron_fp8.train.config import run_config

    # resume, run_dir and such are the same; fields that a newer Megatron-Core adds would show here.
    assert set(known_keys()) >= set(run_config.known_keys())


def test_defaults_are_megatrons() -> None:
    from megatron_fp8.train.config import run_config
    from megatron_fp8.train.config.model_section import transformer_config

    options = ["--model.num_layers=2", "--model.hidden_size=64", "--model.num_attention_heads=4"]
    made = transformer_config(run_config.parse(options).model)
    for name, value in vars(read(options).model).items():
        if hasattr(made, name) and name not in OTHERWISE:
            assert value == getattr(made, name), name


def test_later_options_win_and_dashes_are_underscores() -> None:
    settings = read([TINY, "--model.num-layers=6", "--model.num_layers=8", "--optimizer.lr=1e-4"])
    assert settings.model.num_layers == 8 and settings.optimizer.lr == 1e-4


@pytest.mark.parametrize(
    "option, words",
    [
        ("--model.num_layer=2", "not a known key. Did you mean model.num_layers?"),
        ("--model.pipeline_model_parallel_layout=Et*4L", "no estimate is known for it"),
        ("--model.multi_latent_attention=true", "leave num_query_groups out"),
        ("--model.recompute_modules=[x]", None),
        ("--model.fp8_format=fp7", "model.fp8_recipe='fp7' must be one of"),
        ("--model.fp8_overrides={'*fc9': bf16}", "fc9"),
        ("--model.fp8=hybird", "Did you mean 'hybrid'?"),
        ("--train.global_batch_size=7", "must be a multiple of train.micro_batch_size=8"),
        ("--model.num_query_groups=1", "make the first a multiple|Make the first a"),
        ("--model.ffn_hidden_size=7", "equal part of ffn_hidden_size"),
        ("--model.pipeline_model_parallel_size=3", "cannot be split"),
        ("--model.fp4=e2m1", "model.fp4='e2m1': set one of them to null"),
        ("--model.fp4_param=true", "model.fp4_param=True needs FP4 training"),
        ("nothing", "is not an option"),
    ],
)
def test_what_cannot_be_is_said(option: str, words: str | None) -> None:
    if words is None:
        read([TINY, option])  # without recompute_granularity nobody reads it
        return
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        read([TINY, "--model.tensor_model_parallel_size=2", option])


def test_overrides_may_name_an_expert_of_any_rank() -> None:
    """tiny_moe_cpu has eight experts on two ranks; the note says whose figures these are."""
    moe = "--config=examples/configs/tiny_moe_cpu.yaml"
    settings = read([moe, "--model.fp8_overrides={'*.local_experts.7.*': bf16}"])
    assert settings.model.expert_model_parallel_size == 2
    assert any("the rank with the first experts" in note for note in settings.notes)
    assert not any("the rank with the first experts" in note for note in read([moe]).notes)
    with pytest.raises(ValueError, match=r"local_experts.8.* matches no GEMM site"):
        read([moe, "--model.fp8_overrides={'*.local_experts.8.*': bf16}"])


def test_a_note_says_what_heals() -> None:
    healing = [TINY, "--model.fp8_high_precision_healing=0.18"]
    parts = "--model.fp8_high_precision_healing_parts=['*:fprop']"
    assert "phases in BF16: the figures are of iterations in FP8" in read(healing).notes
    assert read([*healing, parts]).notes[0] == (
        "healing: *:fprop in BF16 in the last 18 % of iterations; the figures are of those before"
    )


@pytest.mark.parametrize("key", ["fp8_format", "fp8_recipe"])
def test_a_recipe_without_fp8_is_refused_as_train_does(key: str) -> None:
    sizes = ["--model.num_layers=2", "--model.hidden_size=64", "--model.num_attention_heads=4"]
    with pytest.raises(
        ValueError, match=r"model\.fp8_recipe='mxfp8' without model\.fp8, which would train in BF16"
    ):
        read([*sizes, f"--model.{key}=mxfp8"])
    assert read([*sizes, f"--model.{key}=mxfp8", "--model.fp8=null"]).model.fp8 is None


def test_without_gpus_it_is_as_few_as_hold_the_model_and_its_experts() -> None:
    moe = ["--config=tiny_moe_cpu", "--model.tensor_model_parallel_size=2", "--model.sequence_parallel=true"]
    settings = read(moe)
    assert (settings.gpus, settings.data_parallel) == (4, 2), "experts are cut in two, on two ranks each"
    assert group_size(settings, expert=True) == 1
    assert read([*moe, "--model.expert_tensor_parallel_size=1"]).gpus == 2


def test_ranks_that_hold_no_whole_model_are_refused() -> None:
    with pytest.raises(ValueError, match="--gpus=3 must be a multiple of the 2 ranks"):
        read([TINY, "--model.tensor_model_parallel_size=2"], gpus=3)


def test_an_estimate_is_quick_and_imports_no_megatron() -> None:
    """Under three seconds of processor time beyond torch's import, of the largest shipped model, a change searched."""
    arguments = ["--config=llama3_70b", "--gpus=2048", "--device=h100", "--set", "model.tensor_model_parallel_size=1",
                 "--set", "model.sequence_parallel=false"]  # fmt: skip
    code = (
        "import sys, time, torch; before = time.process_time(); from megatron_fp8.commands.estimate import main;"
        f" assert main({arguments!r}) == 0; taken = time.process_time() - before;"
        " assert 'megatron' not in sys.modules; assert taken < 3, taken"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "does not fit" in done.stdout and "It fits" in done.stdout


def test_what_is_not_known_of_experts_is_noted() -> None:
    experts = [TINY, "--model.num_moe_experts=4"]
    notes = " ".join(read(experts).notes)
    assert "these are the bytes of 'alltoall'" in notes and "capacity" not in notes
    sent = ["--model.moe_token_dispatcher_type=alltoall", "--model.moe_expert_capacity_factor=1.0"]
    notes = " ".join(read([*experts, *sent]).notes)
    assert "alltoall" not in notes and "the estimate drops no tokens" in notes


@pytest.mark.parametrize(
    "options",
    [
        ["--optimizer.lr_decay_iters=1", "--optimizer.lr_warmup_iters=5"],
        ["--telemetry.statistics=[nope]"],
        ["--data.split=9,9"],
        ["--checkpoint.keep_last=x"],
        ["--train.rewind_on_spike=2", "--checkpoint.save_interval=0"],
    ],
    ids=" ".join,
)
def test_what_the_app_refuses_is_refused(options: list[str]) -> None:
    from megatron_fp8.train.config import run_config

    for reads in (read, run_config.parse):
        with pytest.raises(
            ValueError, match=options[0].removeprefix("--").partition("=")[0].replace(".", r"[. ]")
        ):
            reads([TINY, *options])


@pytest.mark.parametrize("name", sorted(FIELD_RULES | OWN_RULES))
def test_each_field_has_the_rule_that_train_has(name: str) -> None:
    """A word that no field takes, or, where text is taken, a number."""
    rule = (FIELD_RULES | OWN_RULES)[name]
    value = next(value for value in ("never", "7", "[7]", "{a: 7}") if not rule.holds(yaml.safe_load(value)))
    with pytest.raises(ValueError, match=name):
        read(["--config=tiny_gpt_cpu", f"--model.{name}={value}"])
