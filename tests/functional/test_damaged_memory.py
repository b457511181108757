"""NaN and Inf that one rank's memory holds all of a sudden: all ranks skip the step, or the run ends; each time a line
says what and where. docs/reliability.md has the table."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from benchmarks.support.ranks import Layout, RankPool, model_parallel
from megatron_fp8.files.checkpoint import complete_checkpoints
from tests.support.command import APP, torchrun
from tests.support.small_run import STEPS, small_run

RANK = 1
SITE = "decoder.layers.1.mlp.linear_fc1"
TP2, DP2 = Layout(tp=2, sp=True), Layout()


@dataclass
class Seen:
    """What one rank saw."""

    skipped: list[int] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    failed: str = ""


def damaged_training(layout: Layout, options: list[str], words: str) -> Seen:
    """A rank case: a rank's memory is damaged between two steps."""
    with model_parallel(layout):
        from megatron_fp8.train.stop import TrainingFailed
        from tests.support.memory_damage import damage_from_words

        trainer, seen = small_run(layout, options), Seen()
        trainer.display.say = seen.said.append
        after, change = damage_from_words(words)
        timed = trainer._timed_step

        def step(iteration: int, training: Any) -> Any:
            metrics = timed(iteration, training)
            seen.skipped.append(metrics.skipped)
            if iteration == after:
                change(trainer)
            return metrics

        trainer._timed_step = step
        try:
            trainer.train()
        except TrainingFailed as error:
            seen.failed = str(error)
        return seen


def unsound(layout: Layout, options: list[str], kinds: list[str]) -> list[str]:
    """A rank case: what a save after a step finds on each rank, with nothing damaged, then with each kind."""
    with model_parallel(layout):
        import torch.distributed as dist

        from megatron_fp8.mcore.checkpoint.store import prepare
        from megatron_fp8.mcore.checkpoint.training_state import sharded_state
        from tests.support.memory_damage import damage

        trainer = small_run(layout, options)
        trainer.stepper.step(trainer.stepper.training_data(0))
        found = []
        for kind in ["", *kinds]:
            if kind and dist.get_rank() == RANK:
                damage(trainer, kind, math.inf)
            state = sharded_state(trainer.stepper.chunks, trainer.stepper.optimizer)
            found.append(prepare(state, copy=False).not_finite)
            if kind and dist.get_rank() == RANK:
                damage(trainer, kind, 1.0)
        return found


ONCE, NEVER = [0, 0, 1, 0, 0], [0] * STEPS
STATE = "the optimizer or FP8 state of a rank is damaged"
MAX = ["--model.fp8_amax_compute_algo=max", "--model.fp8_amax_history_len=8"]
LONG = ["--model.fp8_amax_compute_algo=max", "--model.fp8_amax_history_len=1024"]
SHARDED = ["--optimizer.use_distributed_optimizer=true"]


def look(seen: list[Seen]) -> Seen:
    """What all ranks saw alike."""
    assert seen[0] == seen[1], seen
    return seen[0]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("input:nan", f"the FP8 cast of {SITE}.input met 1 NaN or Inf"),
        ("gradient:nan", "the gradient of decoder.final_layernorm.weight holds 64 NaN or Inf"),
        ("summed:inf", f"the gradient of {SITE}.weight holds 1 NaN or Inf"),
        ("amax:inf", f"the amax of {SITE}.input was a number that no cast can have made"),
        ("scale:inf", f"the delayed scale of {SITE}.input was a number that no cast can have made"),
        ("scale:0", f"the delayed scale of {SITE}.input was a number that no cast can have made"),
    ],
)
def test_what_is_made_anew_costs_one_step_on_all_ranks(ranks: RankPool, what: str, words: str) -> None:
    layout = DP2 if what.startswith(("summed", "scale:inf")) else TP2
    seen = look(ranks(2).run(damaged_training, layout, ["--model.fp8_recipe=delayed"], f"{what}:2:1"))
    assert seen.skipped == ONCE and not seen.failed
    (said,) = seen.said
    assert said.startswith(f"warning: the step of iteration 3 was skipped on all ranks: {words} on rank ")


@pytest.mark.parametrize(
    ("what", "layout", "options", "words"),
    [
        ("weight:nan", DP2, ["--model.fp8_recipe=blockwise"], f"the weight {SITE}.weight holds 1 NaN or Inf"),
        ("master:inf", TP2, ["--model.fp8_recipe=blockwise"], f"the master of {SITE}.weight holds NaN or Inf"),
        ("moment:nan", DP2, ["--model.fp8=null"], f"the master of {SITE}.weight holds NaN or Inf"),
        ("history:nan", DP2, MAX, "the amax histories of "),
    ],
)  # fmt: skip
def test_what_stays_ends_the_run(
    ranks: RankPool, what: str, layout: Layout, options: list[str], words: str
) -> None:
    seen = look(ranks(2).run(damaged_training, layout, options, f"{what}:1:1"))
    assert sum(seen.skipped) == 3 and len(seen.said) == 1 and "was skipped on all ranks" in seen.said[0]
    assert "3 steps in a row were skipped" in seen.failed and f"first, {words}" in seen.failed


@pytest.mark.parametrize(
    ("what", "layout", "options", "words"),
    [
        ("second:inf", DP2, ["--model.fp8_recipe=delayed"], f"exp_avg_sq of {SITE}.weight"),
        ("second:inf", DP2, ["--model.fp8_recipe=blockwise", *SHARDED], "exp_avg_sq of "),
        ("second:inf", TP2, ["--optimizer.state_dtype=fp8"], f"exp_avg_sq of {SITE}.weight"),
        ("unread:nan", TP2, ["--model.fp8_recipe=blockwise"], "the master of embedding.word_embeddings.weight"),
        ("history:inf", TP2, MAX, "the amax histories of "),
        ("maximum:9", DP2, LONG, "the amax histories of "),
    ],
)  # fmt: skip
def test_what_no_step_feels_ends_the_run_too(
    ranks: RankPool, what: str, layout: Layout, options: list[str], words: str
) -> None:
    """No loss and no cast shows these: a weight never moves again, a row waits for its token, a scale is 1."""
    seen = look(ranks(2).run(damaged_training, layout, options, f"{what}:2:1"))
    assert seen.skipped == NEVER and not seen.said
    assert STATE in seen.failed and f"first, {words}" in seen.failed
    assert seen.failed.count(" on rank 1. No checkpoint is from before") == 1


TIED = ["--model.share_embeddings_and_output_weights=true"]
FP8 = ["--model.fp8_recipe=blockwise", "--model.fp8_param=true", *SHARDED]


@pytest.mark.parametrize(
    ("what", "layout", "options", "words"),
    [
        ("bit:0:2", DP2, ["--model.fp8_recipe=blockwise"], "the master of {}.weight differs between ranks 0, 1"),
        ("second:1e-3:2", DP2, ["--optimizer.state_dtype=fp8"], "exp_avg_sq of {}.weight differs between ranks 0, 1"),
        ("scale:7:5", DP2, MAX, "the delayed scale of {}.input differs between ranks 0, 1"),
        ("weight:2:5", DP2, FP8, "the weight {}.weight differs between ranks 0, 1"),
        ("weight:2:5", DP2, ["--model.fp8=null"], "the weight {}.weight or its master is damaged on rank 1"),
        ("weight:2:5", TP2, FP8[:2], "the weight {}.weight or its master is damaged on rank 1"),
        ("norm:2:2", TP2, ["--model.fp8_recipe=rowwise"], "the master of decoder.final_layernorm.weight differs"),
        ("embedding:2:2", Layout(pp=2), TIED, "the master of the embedding differs between"),
    ],
)  # fmt: skip
def test_finite_damage_of_what_ranks_share_ends_the_run(
    ranks: RankPool, what: str, layout: Layout, options: list[str], words: str
) -> None:
    seen = look(ranks(2).run(damaged_training, layout, options, f"{what}:1"))
    assert seen.skipped == NEVER and not seen.said
    assert seen.failed.startswith(f"training failed: after iteration {STEPS} {words.format(SITE)}"), (
        seen.failed
    )


def test_the_rank_that_differs_from_most_is_named_as_soon_as_it_is_looked(ranks: RankPool) -> None:
    options = [
        "--model.fp8_recipe=tensorwise",
        "--train.global_batch_size=4",
        "--train.check_replicas_every=1",
    ]
    seen = ranks(4).run(damaged_training, DP2, options, "bit:0:2:2")
    assert seen == [seen[0]] * 4
    assert (
        f"after iteration 2 the master of {SITE}.weight is another one on rank 2 than on ranks 0, 1, 3. A"
        in seen[0].failed
    )


def test_a_damaged_model_is_not_saved_over_a_good_one(
    folder: Path, config: Path, forking_python: str
) -> None:
    out = folder / "damaged"
    options = [f"--config={config}", f"--run_dir={out}", "--checkpoint.save_interval=2"]
    done = torchrun(APP, "damage", "bit:0:3:1", "train", *options, python=forking_python)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    saved = out / "checkpoints" / "iter_0000002"
    assert (
        "training failed: after iteration 4 the master of decoder.layers.1.mlp.linear_fc1.weight differs"
        in line
    )
    assert f"Go back to {saved} (--resume={saved}); where it comes again" in line
    assert [path.name for path in complete_checkpoints(out / "checkpoints")] == ["iter_0000002"]


def test_no_complete_checkpoint_holds_it_nor_was_made_beside_it(ranks: RankPool) -> None:
    """A replica that went bad is written by nobody, and still spoils what comes after."""
    options = ["--model.fp8_recipe=delayed", *MAX]
    first, second = ranks(2).run(unsound, DP2, options, ["second", "master", "history"])
    assert first == ["", "", "", ""]
    assert second[0] == "" and second[3] == ""
    kinds = ("exp_avg_sq", "fp32_param")  # _w: the gate's half
    assert second[1:3] == [f"optimizer.state.{kind}.{SITE}.weight_w" for kind in kinds]
