"""The last line of a training says where things are: its folder, checkpoints elsewhere, a model that was done before."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_fp8.train.config.sections import CheckpointSection
from megatron_fp8.train.report import next_commands, no_iterations_left, summary_line


def trainer(
    finished: int,
    folder: str | None = None,
    save_interval: Any = 0,
    backend: str | None = None,
    data: tuple[str, ...] = ("text",),
) -> Any:
    run = SimpleNamespace(
        model=SimpleNamespace(fp8_backend=backend),
        data=SimpleNamespace(paths=list(data)),
        train=SimpleNamespace(train_iters=9),
        checkpoint=CheckpointSection(folder=folder, save_interval=save_interval),
        run_dir="mine",
    )
    live = SimpleNamespace(skipped=0, taken=9 - finished, spike="")
    return SimpleNamespace(
        run=run,
        finished=finished,
        started=Path("saves/iter_0000009"),
        monitor=live,
        stepper=SimpleNamespace(stop=SimpleNamespace(reason="SIGTERM")),
    )


def test_it_says_where_the_model_and_the_rest_are():
    losses = {"first_loss": 5.0, "last_loss": 4.0}
    told = "done: 9 iterations in 3 s, loss 5.0000 -> 4.0000, skipped 0 of 9 steps; everything is in mine"
    assert summary_line(trainer(0), {"iteration": 9, **losses}, 3.0) == told
    assert (
        summary_line(trainer(0, "my saves"), {"iteration": 9, **losses}, 3.0)
        == f"{told}, its checkpoints in my saves"
    )
    assert summary_line(trainer(9, save_interval="never"), {"iteration": 9}, 3.0) == (
        "done: all 9 iterations were done before; the model is saves/iter_0000009; everything is in mine"
    )
    resumed = summary_line(trainer(6), {"iteration": 9, **losses}, 3.0)
    assert resumed.startswith("done: 9 iterations, 3 of them in 3 s, loss")
    stopped = summary_line(trainer(0), {"iteration": 4, **losses}, 3.0)
    assert stopped.startswith("stopped by SIGTERM after 4 of 9 iterations, saved, loss")
    assert stopped.endswith("everything is in mine; --resume=auto goes on from there")


def test_the_commands_after_it_read_what_the_run_wrote():
    done, page = {"iteration": 9.0}, "next: megatron-fp8 report mine --html report.html"
    text = '      megatron-fp8 generate {} --prompt "Once upon a time"'
    assert next_commands(trainer(0), done) == [page, text.format("mine")]
    assert next_commands(trainer(0, "my saves"), done) == [page, text.format("'my saves'")]
    before = trainer(9, save_interval="never")
    assert next_commands(before, done) == [page, text.format("saves/iter_0000009")]
    engine = next_commands(trainer(0, backend="transformer_engine"), done)
    assert engine == [page, text.format("mine") + " --model.fp8_backend=auto"]
    python = next_commands(trainer(0, data=()), done)
    assert python == [page, '      megatron-fp8 generate mine --prompt "def "']
    assert next_commands(trainer(0, save_interval="never"), done) == []
    assert next_commands(trainer(0), {"iteration": 4.0}) == []


def test_of_a_run_that_never_saves_it_says_that_the_weights_are_gone():
    losses = {"first_loss": 5.0, "last_loss": 4.0}
    gone = (
        "; the trained weights are gone, as checkpoint.save_interval=never asks: mine has the records alone;"
        " next: megatron-fp8 report mine"
    )
    done = summary_line(trainer(0, save_interval="never"), {"iteration": 9, **losses}, 3.0)
    assert done == f"done: 9 iterations in 3 s, loss 5.0000 -> 4.0000, skipped 0 of 9 steps{gone}"
    stopped = summary_line(trainer(0, save_interval="never"), {"iteration": 4, **losses}, 3.0)
    assert stopped.startswith("stopped by SIGTERM after 4 of 9 iterations, loss") and stopped.endswith(gone)


def test_of_a_checkpoint_that_is_not_its_own_it_says_which():
    said = no_iterations_left(trainer(9).run, Path("base/iter_0000009"))
    assert "the model is base/iter_0000009, which is not this run's own" in said
    assert "everything is in" not in said
