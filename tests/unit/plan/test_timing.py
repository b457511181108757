"""What is said of the machine: a GPU that torch cannot use is no CPU machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_fp8.commands import doctor
from megatron_fp8.plan import timing
from megatron_fp8.study import doctor as examination
from megatron_fp8.train.launch import parallel


def test_a_gpu_that_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    driver = tmp_path / "nvidiactl"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert timing.unused_gpu_reason({}, driver) is None, "no driver, no GPU"
    driver.touch()
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "is a build for the CPU" in (timing.unused_gpu_reason({}, driver) or "")
    assert timing.unused_gpu_reason({"CUDA_VISIBLE_DEVICES": ""}, driver) is None, "hidden on purpose"

    def too_old() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old\n(found version 12080)")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", too_old)
    assert (
        timing.unused_gpu_reason({}, driver)
        == "The NVIDIA driver on your system is too old (found version 12080)"
    )
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    assert "nvidia-smi" in (timing.unused_gpu_reason({}, driver) or "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert timing.unused_gpu_reason({}, driver) is None


def test_training_and_doctor_say_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(examination, "unused_gpu_reason", lambda: "too old")
    monkeypatch.setattr(examination, "trials", lambda: iter(()))
    assert doctor.main([]) == 0
    assert "not used: too old" in capsys.readouterr().out
    monkeypatch.setattr(parallel, "unused_gpu_reason", lambda: "too old")
    with pytest.warns(UserWarning, match="this machine has a GPU that is not used: too old"):
        parallel.warn_unused_gpu()
