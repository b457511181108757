"""What a comparison would run, and which runs it takes as they are. Nothing is trained."""

import json
from pathlib import Path

import pytest

from megatron_fp8.study.compare_plan import plan
from megatron_fp8.study.compare_runs import command

CONFIG = str(Path(__file__).parents[3] / "examples/configs/tiny_gpt_cpu.yaml")


def planned(tmp_path, recipes="mxfp8", seeds="1", overrides=(), ranks=None):
    return plan(CONFIG, recipes, seeds, overrides, tmp_path / "out", ranks)


def test_runs_differ_in_recipe_and_seed_alone(tmp_path):
    comparison = planned(tmp_path, "mxfp8,bf16,delayed", "2", ["--train.train_iters=30"])
    assert comparison.recipes == ("bf16", "mxfp8", "delayed") and comparison.seeds == (1234, 1235)
    assert [run.name for run in comparison.runs[:4]] == [
        "bf16, seed 1234", "mxfp8, seed 1234", "delayed, seed 1234", "bf16, seed 1235",
    ]  # fmt: skip
    plain = [run.config.to_dict() for run in comparison.runs]
    for values in plain:
        assert values["train"]["train_iters"] == 30 and values["train"]["count_saved"]
    bf16, mxfp8 = plain[0]["model"], plain[1]["model"]
    assert bf16["fp8"] is None and not bf16["first_last_layers_bf16"] and mxfp8["fp8_recipe"] == "mxfp8"
    assert mxfp8["first_last_layers_bf16"], "the config's own"
    differ = {key for key in bf16 if bf16[key] != mxfp8[key]}
    assert differ == {"fp8", "fp8_recipe", "first_last_layers_bf16"}
    assert {key: plain[0][key] for key in ("optimizer", "data")} == {
        key: plain[5][key] for key in ("optimizer", "data")
    }


def test_a_recipe_brings_its_own_options(tmp_path):
    bf16, plain, other = planned(tmp_path, "nvfp4,nvfp4+fp4_disable_rht+fp8_wgrad=false").runs
    assert other.folder.name == "nvfp4+fp4_disable_rht+fp8_wgrad=false-seed-1234"
    changed = {
        key
        for key, value in plain.config.to_dict()["model"].items()
        if other.config.to_dict()["model"][key] != value
    }
    assert changed == {"fp4_disable_rht", "fp8_wgrad"} and other.config.model.fp4_disable_rht
    assert bf16.config.model.fp8_wgrad


def test_what_only_fp8_has_is_left_out_of_bf16(tmp_path):
    overrides = ["--model.fp8_overrides={'*.linear_qkv': bf16}", "--model.fp8_wgrad=false"]
    bf16, mxfp8 = planned(tmp_path, overrides=overrides).runs
    assert mxfp8.config.model.fp8_overrides and not mxfp8.config.model.fp8_wgrad
    assert not bf16.config.model.fp8_overrides and bf16.config.model.fp8 is None


def test_a_run_begins_where_the_config_says_until_it_has_something_to_go_on_from(tmp_path):
    """A start that was killed leaves an empty folder of checkpoints; there `auto` would begin with random weights."""
    config = tmp_path / "from_base.yaml"
    config.write_text(Path(CONFIG).read_text().replace("resume: never", "resume: runs/base"))

    def resumes():
        return plan(str(config), "mxfp8", "1", (), tmp_path / "out", None).runs[0].config.resume

    checkpoints = tmp_path / "out" / "runs" / "bf16-seed-1234" / "checkpoints"
    checkpoints.mkdir(parents=True)
    assert resumes() == "runs/base"
    (checkpoints / "started_from.json").touch()
    assert resumes() == "auto"
    (checkpoints / "started_from.json").unlink()
    (checkpoints / "iter_0000002").mkdir()
    assert resumes() == "auto"


def test_runs_do_not_share_a_folder_of_checkpoints(tmp_path):
    """The second one had the iterations of the first, and nothing to train."""
    with pytest.raises(ValueError, match=r"checkpoint\.folder='saves' would be one folder for all runs"):
        planned(tmp_path, overrides=["--checkpoint.folder=saves"])
    assert planned(tmp_path, overrides=["--checkpoint.folder=saves", "--checkpoint.folder=null"]).runs


def test_ranks_are_those_of_the_layout(tmp_path):
    assert planned(tmp_path).ranks == 1
    assert planned(tmp_path, ranks=2).runs[0].config.model.tensor_model_parallel_size == 2
    two = "--model.tensor_model_parallel_size=2"
    comparison = planned(tmp_path, overrides=[two])
    assert comparison.ranks == 2
    assert command(comparison.runs[0], comparison.ranks)[3:6] == ["launch", "--ranks=2", "train"]
    assert command(comparison.runs[0], 1)[3] == "train"
    assert planned(tmp_path, ranks=4, overrides=["--train.micro_batch_size=4"]).ranks == 4
    experts = [
        two,
        "--model.num_moe_experts=4",
        "--model.expert_model_parallel_size=2",
        "--train.micro_batch_size=4",
    ]
    assert planned(tmp_path, overrides=experts).ranks == 4  # beside tensor parallel 2


@pytest.mark.parametrize(
    "change, words",
    [
        ({"recipes": "mxfp9"}, "'mxfp9' is unknown"),
        ({"recipes": "mxfp9+fp8_margin=1"}, "'mxfp9' is unknown"),
        ({"recipes": "mxfp8+fp8_marginal=1"}, "mxfp8+fp8_marginal=1: "),
        ({"recipes": "mxfp8+fp8_recipe=a/b"}, "cannot contain '/'"),
        ({"recipes": "bf16"}, "compares nothing"),
        ({"seeds": "1,1"}, "names a seed twice"),
        ({"seeds": "many"}, "--seeds=many must be"),
        ({"ranks": 3}, "does not divide"),
        ({"ranks": 0}, "--ranks=0 must be at least 1"),
        ({"overrides": ["--run_dir=x"]}, "--run_dir is what a comparison sets itself"),
        ({"recipes": "custom"}, "custom: "),
    ],
)
def test_bad_input_is_found_before_anything_runs(tmp_path, change, words):
    with pytest.raises(ValueError) as refused:
        planned(tmp_path, **change)
    assert words in str(refused.value) and not (tmp_path / "out").exists()


def written(run, **changes):
    """The run's folder as a finished training leaves it, with other settings where they are given."""
    run.folder.mkdir(parents=True)
    text = run.folder / "config.yaml"
    run.config.save(text)
    for old, new in changes.items():
        text.write_text(
            text.read_text().replace(f"{old}: {getattr(run.config.optimizer, old)}", f"{old}: {new}")
        )
    iterations = run.config.train.train_iters
    lines = [{"iteration": i + 1} for i in range(iterations)]
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run.folder / "validation.jsonl").write_text(json.dumps({"iteration": iterations}) + "\n")


def test_a_finished_run_that_agrees_is_taken(tmp_path):
    run = planned(tmp_path, overrides=["--train.train_iters=30"]).runs[1]
    assert not run.finished
    written(run)
    run.check_existing()
    assert run.finished
    again = planned(tmp_path, overrides=["--train.train_iters=30", "--train.log_interval=1"]).runs[1]
    again.check_existing()  # what is printed does not matter
    (run.folder / "validation.jsonl").write_text('{"iteration": 20}\n{"iter')
    assert (
        run.lacks()
        == f"{run.folder}/validation.jsonl ends with iteration 20 of 30, and its last line is cut off"
    )
    (run.folder / "validation.jsonl").write_text("")
    assert not run.finished, "it ended before its last validation"
    (run.folder / "metrics.jsonl").write_text(json.dumps({"iteration": 29}) + "\n")
    assert not run.finished


def test_a_run_of_other_settings_is_one_clear_line(tmp_path):
    run = planned(tmp_path, overrides=["--train.train_iters=30"]).runs[1]
    shorter = planned(tmp_path, overrides=["--train.train_iters=20"]).runs[1]
    written(run, clip_grad=0.5)
    with pytest.raises(ValueError, match=r"holds a run with train.train_iters=30"):
        shorter.check_existing()  # the user's key, before those that differ too
    with pytest.raises(
        ValueError, match=r"holds a run with optimizer.clip_grad=0.5, and this comparison has 1.0"
    ):
        run.check_existing()
    (run.folder / "config.yaml").write_text("train: [")
    with pytest.raises(ValueError, match=rf"'{run.folder}/config.yaml' cannot be read .*give another --out"):
        run.check_existing()
