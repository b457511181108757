"""The callbacks of megatron_fp8.integrations in their libraries' own loops: resume, unhealthy steps, logs."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from megatron_fp8.nn import Fp8Linear, convert_to_fp8
from tests.support.command import torchrun
from tests.support.integrations_app import DELAYED, ROWS, llama
from tests.support.lightning_trainer import quiet_trainer
from tests.support.small_training import Tower, batch

CASES = {
    "transformers,ddp,bf16,accumulate,recompute": 32,
    "transformers,fsdp2,bf16,accumulate": 16,
    "accelerate,fsdp2,bf16,accumulate,recompute": 16,
    "lightning,ddp,bf16,accumulate,recompute": 32,
}
"""A training by a library -> the rows of 32 that a rank has of a weight: it is whole, or sharded."""


SOME = tuple(case for case in CASES if not case.startswith("transformers,fsdp2"))
"""transformers' Trainer shards by accelerate."""


@pytest.mark.parametrize(
    "cases", [SOME, pytest.param(tuple(CASES), marks=pytest.mark.long)], ids=["some", "all"]
)
def test_resumed_runs_on_two_ranks_are_the_uninterrupted_ones(forking_python, tmp_path, cases):
    """One after the other in the same ranks."""
    for library in ("transformers", "accelerate", "pytorch_lightning"):
        pytest.importorskip(library)
    done = torchrun("-m", "tests.support.integrations_app", tmp_path, *cases, python=forking_python)
    assert done.returncode == 0, done.stderr[-3000:]
    for case in cases:
        for rank in range(2):
            line = f"{case}: rank {rank} has the same 238 tensors, {CASES[case]} rows of 32"
            assert line in done.stdout, done.stdout


def trainer_of(folder: Path, *, callbacks: Any = (), model: Any = None, **options: Any) -> Any:
    """A Trainer of four steps, with what the callback of docs/pytorch.md says, and a checkpoint every two."""
    transformers = pytest.importorskip("transformers")
    from megatron_fp8.integrations.transformers import Fp8Callback

    given = {
        "max_steps": 4,
        "save_steps": 2,
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        **options,
    }
    arguments = transformers.TrainingArguments(
        folder, per_device_train_batch_size=2, use_cpu=True, learning_rate=1e-2, **given
    )
    rows = [{"input_ids": row, "labels": row} for row in ROWS]
    return transformers.Trainer(
        llama() if model is None else model,
        arguments,
        train_dataset=rows,
        eval_dataset=rows[:2],
        callbacks=[*callbacks, Fp8Callback()],
    )


def iterations(model: torch.nn.Module) -> set[int]:
    return {m.fp8_group.iteration for m in model.modules() if isinstance(m, Fp8Linear)}


def test_resume_from_checkpoint_of_trainer(tmp_path):
    options = {"bf16": True, "gradient_accumulation_steps": 2, "activation_checkpointing": True}
    whole, resumed = trainer_of(tmp_path, **options), trainer_of(tmp_path, **options)
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert iterations(whole.model) == iterations(resumed.model) == {4}
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
    losses = [[row["loss"] for row in t.state.log_history if "loss" in row] for t in (whole, resumed)]
    assert losses[0] == losses[1] and losses[0][-1] < losses[0][0]
    assert not [path for path in tmp_path.rglob("*fp8*") if path.suffix != ".safetensors"]


def test_a_checkpoint_that_was_trained_without_the_callback_warns(tmp_path):
    trainer = trainer_of(tmp_path)
    trainer.train()
    (tmp_path / "checkpoint-2" / "fp8_state.safetensors").unlink()
    with pytest.warns(UserWarning, match=r"checkpoint-2 has no FP8 state: delayed scaling starts anew"):
        trainer_of(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_trainer_skips_an_unhealthy_step_and_logs_it(tmp_path):
    """Also to callbacks that came before, as TensorBoard's; and a resumed run counts on."""
    transformers = pytest.importorskip("transformers")
    seen: list[dict[str, Any]] = []
    weights: list[torch.Tensor] = []
    watched = "model.layers.0.mlp.up_proj"

    class Before(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **kwargs):
            weights.append(model.get_parameter(f"{watched}.weight").detach().clone())

        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append(dict(logs))

    def trainer(**options: Any) -> Any:
        model = llama()

        def overflow(module: Any, given: Any) -> Any:
            rows = given[0].clone()
            rows[0, 0, 0] = float("inf")
            return (rows,) if iterations(model) == {1} and module.training else None

        model.get_submodule(watched).register_forward_pre_hook(overflow)
        return trainer_of(tmp_path, model=model, callbacks=[Before()], max_grad_norm=0.0, **options)

    whole = trainer()
    whole.train()
    skipped = [torch.equal(before, after) for before, after in pairwise(weights)]
    assert skipped == [False, True, False]
    assert all(torch.isfinite(p).all() for p in whole.model.parameters())
    counts = [row["fp8_skipped_steps"] for row in seen if "loss" in row]
    assert counts == [0, 1, 1, 1]
    assert counts == [row["fp8_skipped_steps"] for row in whole.state.log_history if "loss" in row]
    assert whole.state.log_history[1]["fp8_nonfinite"] > 0
    resumed = trainer()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    nonfinite = [[row.get("fp8_nonfinite") for row in t.state.log_history] for t in (whole, resumed)]
    assert nonfinite[0] == nonfinite[1]


def test_the_best_weights_come_with_their_scales(tmp_path):
    trainer = trainer_of(
        tmp_path,
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=True,  # so that it is not the last
    )
    trainer.train()
    assert trainer.state.best_global_step == 2 and iterations(trainer.model) == {2}
    then = next(row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row)
    assert trainer.evaluate()["eval_loss"] == then


def test_lightning_callback_is_one_of_both_its_names(monkeypatch):
    """Lightning is installed as `lightning` too, whose Trainer takes a callback that is one of its own."""
    pytorch_lightning = pytest.importorskip("pytorch_lightning")
    for name in ("lightning", "lightning.pytorch"):
        other = ModuleType(name)
        other.__spec__, other.Callback = ModuleSpec(name, None), type("Callback", (), {})
        monkeypatch.setitem(sys.modules, name, other)
    spec = find_spec("megatron_fp8.integrations.lightning")
    module = module_from_spec(spec)  # the file once more, as where both names are installed
    spec.loader.exec_module(module)
    assert module.Fp8Callback.__bases__ == (other.Callback, pytorch_lightning.Callback)


def lightning_run(folder: Path, steps: int, checkpoint: Path | None = None) -> tuple[Any, Any]:
    import pytorch_lightning as lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.tower = convert_to_fp8(Tower(), DELAYED)

        def training_step(self, _: torch.Tensor, index: int) -> torch.Tensor:
            rows = batch(index).detach()
            if index == 1:
                rows[0, 0] = float("inf")
            return self.tower(rows).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.1)

    module = Module()
    trainer = quiet_trainer(folder, max_steps=steps)
    trainer.fit(module, torch.utils.data.DataLoader(torch.zeros(100), batch_size=1), ckpt_path=checkpoint)
    return module, trainer


def test_lightning_skips_an_unhealthy_step_logs_it_and_resumes(tmp_path):
    pytest.importorskip("pytorch_lightning")
    one, _ = lightning_run(tmp_path, 1)
    two, trainer = lightning_run(tmp_path, 2)
    for name, value in one.state_dict().items():
        assert torch.equal(value, two.state_dict()[name]), name
    assert (
        trainer.callback_metrics["fp8_skipped_steps"] == 1 and trainer.callback_metrics["fp8_nonfinite"] >= 1
    )
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    # plain tensors and values: nothing that could run code
    torch.load(tmp_path / "two.ckpt", weights_only=True)
    whole, _ = lightning_run(tmp_path, 4)
    resumed, trainer = lightning_run(tmp_path, 4, tmp_path / "two.ckpt")
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    assert iterations(resumed) == {4} and trainer.callback_metrics["fp8_skipped_steps"] == 1


def test_accelerate_refuses_what_it_did_not_prepare():
    accelerate = pytest.importorskip("accelerate")
    from megatron_fp8.integrations.accelerate import register_fp8

    accelerator = accelerate.Accelerator(cpu=True)
    model = convert_to_fp8(Tower(), DELAYED)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        ValueError, match=r"a Tower that this accelerator did not prepare: give it the model that"
    ):
        register_fp8(accelerator, model, plain)
    prepared, optimizer = accelerator.prepare(model, plain)
    with pytest.raises(ValueError, match=r"a SGD: give it the AcceleratedOptimizer that accelerator.prepare"):
        register_fp8(accelerator, prepared, plain)
    register_fp8(accelerator, prepared, optimizer)
    with pytest.raises(ValueError, match=r"a closure runs the model inside of the optimizer's step"):
        optimizer.step(lambda: None)


def test_two_models_of_one_accelerator_have_a_file_each(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    from megatron_fp8.integrations.accelerate import register_fp8

    accelerator = accelerate.Accelerator(cpu=True)
    models = [convert_to_fp8(Tower(seed), DELAYED) for seed in (0, 1)]
    for model in models:
        register_fp8(accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    accelerator.save_state(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("fp8*")) == [
        "fp8_state.safetensors",
        "fp8_state_1.safetensors",
    ]
