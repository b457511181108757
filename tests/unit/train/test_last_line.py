"""The last line of a training says where things are: its folder, checkpoints elsewhere, a model that was done before."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_fp8.train.last_line import last_line, nothing_left


def trainer(finished: int, folder: str | None = None) -> Any:
    run = SimpleNamespace(
        train=SimpleNamespace(train_iters=9), checkpoint=SimpleNamespace(folder=folder), run_dir="mine"
    )
    live = SimpleNamespace(skipped=0, taken=9 - finished, spike="")
    return SimpleNamespace(
        run=run,
        finished=finished,
        started=Path("saves/iter_0000009"),
        liveness=live,
        stepper=SimpleNamespace(stop=SimpleNamespace(reason="SIGTERM")),
    )


def test_it_says_where_the_model_and_the_rest_are():
    losses = {"first_loss": 5.0, "last_loss": 4.0}
    told = "done: 9 iterations in 3 s, loss 5.0000 -> 4.0000, skipped 0 of 9 steps; everything is in mine"
    assert last_line(trainer(0), {"iteration": 9, **losses}, 3.0) == told
    assert (
        last_line(trainer(0, "saves"), {"iteration": 9, **losses}, 3.0) == f"{told}, its checkpoints in saves"
    )
    assert last_line(trainer(9), {"iteration": 9}, 3.0) == (
        "done: all 9 iterations were done before; the model is saves/iter_0000009; everything is in mine"
    )
    stopped = last_line(trainer(0), {"iteration": 4, **losses}, 3.0)
    assert stopped.startswith("stopped by SIGTERM after 4 of 9 iterations, saved, loss")
    assert stopped.endswith("everything is in mine; --resume=auto goes on from there")


def test_of_a_checkpoint_that_is_not_its_own_it_says_which():
    said = nothing_left(trainer(9).run, Path("base/iter_0000009"))
    assert "the model is base/iter_0000009, which is not this run's own" in said
    assert "everything is in" not in said
