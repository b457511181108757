"""What sites note while they run reaches report.json and the screen."""

import json
from types import SimpleNamespace

import pytest

from megatron_fp8.commands import report as show
from megatron_fp8.train import startup
from megatron_fp8.train.loop import Trainer
from megatron_fp8.train.report import format_notes
from megatron_fp8.train.resume.checkpoints import Start
from megatron_fp8.train.run_record import RunRecord

NOTED = [
    {"name": "layers.0.fc1", "notes": ["gathered in high precision"]},
    {"name": "layers.1.fc1", "notes": ["gathered in high precision"]},
    {"name": "layers.1.fc2", "notes": []},
]

CHUNK = SimpleNamespace(config=SimpleNamespace(fp8=None))


def test_notes_are_one_line_each_with_their_sites():
    assert format_notes(NOTED) == "note        gathered in high precision (2 sites, such as layers.0.fc1)"
    assert format_notes(NOTED[2:]) == ""


def test_the_first_rank_writes_and_prints_them(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(startup, "site_report", lambda chunks: NOTED)
    for first in (False, True):
        startup._add_site_notes({"device": "d", "sites": []}, [CHUNK], tmp_path, first)
        assert (tmp_path / "report.json").exists() is first
    assert json.loads((tmp_path / "report.json").read_text()) == {"device": "d", "sites": NOTED, "guard": []}
    assert "gathered in high precision" in capsys.readouterr().out


def test_they_are_asked_for_after_the_first_step_only_and_a_save_says_how_long_it_took(monkeypatch):
    calls = []
    wanted = SimpleNamespace(
        train_iters=3,
        eval_interval=0,
        eval_iters=0,
        max_skipped_steps=10,
        check_replicas_every=0,
        global_batch_size=1,
        seq_length=1,
    )
    stepper = SimpleNamespace(
        run=SimpleNamespace(train=wanted),
        chunks=[CHUNK],
        optimizer=SimpleNamespace(),
        stop=SimpleNamespace(reason=None, saved_in=lambda seconds: calls.append(f"saved in {seconds} s")),
        training_data=lambda *_: [],
        damaged=False,
        state_is_damaged=lambda: False,
        describe_differences=lambda: "",
        watchdog=SimpleNamespace(enter=lambda kind, iteration: None),
    )
    saves = SimpleNamespace(
        due=lambda n, stopped: n == 2, save=lambda *_: None, seconds=7, close=lambda: None
    )
    trainer = Trainer(
        stepper, Start(), 1.0, after_first_step=lambda: calls.append("noted"), checkpoints=saves
    )

    def step(iteration, training):
        calls.append(iteration)
        return SimpleNamespace(iteration=iteration, lm_loss=1.0, skipped=0)

    monkeypatch.setattr(trainer, "_timed_step", step)
    trainer.train()
    assert calls == [1, "noted", 2, "saved in 7 s", 3]


@pytest.mark.parametrize(
    ("name", "content"),
    [("report.json", "[" * 90_000 + "\n"), ("metrics.jsonl", "x\n"), ("validation.jsonl", "x\n")],
)
def test_a_damaged_record_is_one_line_that_names_its_file(tmp_path, capsys, monkeypatch, name, content):
    (tmp_path / "report.json").write_text("{}")
    (tmp_path / name).write_text(content)
    monkeypatch.setattr("megatron_fp8.train.report.format_report", lambda report: "")
    if name != "report.json":
        monkeypatch.setattr(RunRecord, "report", lambda record: {})
    assert show.main([str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1 and name in said
