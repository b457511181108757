"""What a config needs and is not here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_fp8.backends import transformer_engine as engine
from megatron_fp8.study import requirements
from megatron_fp8.study.requirements import missing_needs

TINY = "--config=tiny_gpt_cpu"


@pytest.fixture(autouse=True)
def a_cpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(requirements, "megatron", lambda: "0.16.1")


def named(*options: str) -> list[str]:
    return [need.what for need in missing_needs([TINY, *options])]


def test_the_tiny_config_needs_nothing_more():
    assert named() == []
    assert named("--model.fp8=null", "--model.fp8_backend=native") == [], "without FP8 no backend is asked"


@pytest.mark.parametrize("version", [None, "0.17.0", "installed, version unknown"])
def test_megatron(version: str | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(requirements, "megatron", lambda: version)
    (need,) = missing_needs([TINY])
    assert need.what == "megatron-core 0.16" and (version or "not installed") in need.reason
    assert need.remedy.startswith("pip install megatron-core==0.16.1")


def test_a_backend_by_name():
    (need,) = missing_needs([TINY, "--model.fp8_backend=native"])
    assert (
        need.what == "fp8_backend=native" and "needs an NVIDIA GPU" in need.reason and "auto" in need.remedy
    )
    with pytest.raises(ValueError, match="must be one of 'auto'"):
        named("--model.fp8_backend=nativ")


def test_a_recipe_that_a_backend_lacks_counts_wherever_it_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine, "unavailable_reason", lambda: None)
    monkeypatch.setattr(engine, "device_reason", lambda device: None)
    monkeypatch.setattr(engine, "_refusal_of_te", lambda recipe: None)
    te = "--model.fp8_backend=transformer_engine"
    assert named(te) == []
    assert named(te, "--model.fp8_format=rowwise") == ["fp8_backend=transformer_engine"]
    assert named(te, "--model.fp8_margin=1") == ["fp8_backend=transformer_engine"], (
        "tensorwise has no margin there"
    )
    assert named(te, "--model.fp8_overrides={'*.linear_fc1': 'rowwise'}") == [
        "fp8_backend=transformer_engine"
    ]


def test_functions_of_transformer_engine_s(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(requirements, "has_te", lambda: False)
    assert named("--model.moe_router_fusion=true") == ["model.moe_router_fusion"]
    assert named("--model.gradient_accumulation_fusion=true", "--model.apply_rope_fusion=true") == [], (
        "they go off"
    )
    monkeypatch.setattr(requirements, "has_te", lambda: True)
    assert named("--model.moe_router_fusion=true") == []


def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    text, pair = tmp_path / "text.txt", tmp_path / "pair"
    assert named(f"--data.paths=[{text},{pair}]") == [f"data.paths={text}", f"data.paths={pair}"]
    text.touch()
    for ending in (".bin", ".idx"):
        pair.with_suffix(ending).touch()
    assert named(f"--data.paths=[{text},{pair},{pair}.idx]") == []
    assert named(f"--data.tokenizer={tmp_path}/none.json") == [f"data.tokenizer={tmp_path}/none.json"]
    assert named(f"--run_dir={tmp_path}/runs/new", f"--telemetry.te_config={text}") == []
    assert named(f"--run_dir={text}/below") == [f"run_dir={text}/below"], "a file is in the way"
    monkeypatch.setattr(requirements.util, "find_spec", lambda name: None)
    assert named(f"--data.tokenizer={text}", "--telemetry.wandb=true") == [
        "data.tokenizer",
        "telemetry.wandb",
    ]
