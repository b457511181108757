"""Same losses to the bit: what a process is told on GPUs before anything runs there, and what is said if it cannot be."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_fp8.commands import train as app
from megatron_fp8.train.failure import TrainingFailed
from megatron_fp8.train.launch import parallel
from megatron_fp8.train.launch.deterministic import be_deterministic, in_the_switch, in_words_of_the_run
from megatron_fp8.train.launch.environment import Launch

NO_FORM = (
    "cumsum_cuda_kernel does not have a deterministic implementation, but you set"
    " 'torch.use_deterministic_algorithms(True)'. You can turn off determinism just for this operation"
)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """A machine with GPUs whose settings are put back; what it was told, in order."""
    told: list[Any] = []
    for name in ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO"):
        monkeypatch.setenv(name, "")  # so that it is put back as it was
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: told.append("the first word to a GPU"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    yield told
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
    torch.backends.cuda.enable_cudnn_sdp(cudnn)


def test_all_that_it_takes(gpus: list[Any]) -> None:
    be_deterministic()
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled(), (
        "flash attention obeys errors, not warnings"
    )
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert (os.environ["CUBLAS_WORKSPACE_CONFIG"], os.environ["NCCL_ALGO"]) == (
        ":4096:8",
        "^NVLS,NVLSTree",
    )


def test_what_the_user_has_set_stays_or_is_an_error(gpus: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    be_deterministic()
    assert (os.environ["CUBLAS_WORKSPACE_CONFIG"], os.environ["NCCL_ALGO"]) == (":16:8", "Ring")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with pytest.raises(
        ValueError, match=r"CUBLAS_WORKSPACE_CONFIG=':0:0'.*unset it, or train with"
    ) as caught:
        be_deterministic()
    assert "\n" not in str(caught.value)


# Whole names, as NCCL compares them: "^NVLS" leaves NVLSTree, which is another one.
@pytest.mark.parametrize(
    ("algorithms", "left"),
    [
        ("^NVLS,NVLSTree", []),
        ("^nvlstree,PAT,nvls", []),
        ("Ring", []),
        ("ring,tree", []),
        ("^NVLS", ["NVLSTree"]),
        ("^Tree", ["NVLS", "NVLSTree"]),
        ("Ring,NVLS", ["NVLS"]),
        ("^NVLS,NVLSTree;AllReduce:^NVLS", ["NVLSTree"]),
        ("^Ring;allreduce:ring", ["NVLS", "NVLSTree"]),
        ("ring;broadcast:nvls", []),
    ],
)
def test_what_adds_inside_the_switch(
    gpus: list[Any], monkeypatch: pytest.MonkeyPatch, algorithms: str, left: list[str]
) -> None:
    assert in_the_switch(algorithms) == left
    monkeypatch.setenv("NCCL_ALGO", algorithms)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        be_deterministic()
        monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
        be_deterministic()
    assert [str(one.message).partition(", which")[0] for one in said] == (
        [f"NCCL_ALGO={algorithms!r} allows {' and '.join(left)}"] if left else []
    )
    assert os.environ["NCCL_ALGO"] == algorithms


@pytest.mark.parametrize("wanted", [True, False])
def test_before_a_gpu_is_spoken_to(gpus: list[Any], monkeypatch: pytest.MonkeyPatch, wanted: bool) -> None:
    """join, up to the process group."""

    def stop(*_: Any, **__: Any) -> None:
        raise InterruptedError

    monkeypatch.setattr(parallel, "check_layout", lambda *_: None)
    monkeypatch.setattr(parallel, "be_deterministic", lambda: gpus.append("deterministic"))
    monkeypatch.setattr(parallel, "look_at_gpu_machine", stop)
    launch = Launch("one process")
    with pytest.raises(InterruptedError):
        parallel.join(launch, None, SimpleNamespace(deterministic=wanted))
    assert gpus == (["deterministic"] if wanted else []) + ["the first word to a GPU"]


def test_an_operation_without_such_a_form_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    other = TrainingFailed("loss is NaN")
    assert in_words_of_the_run(other) is other
    launch = SimpleNamespace(rank=0, meeting=SimpleNamespace(tell=lambda code, line, say: say()))

    def fail(*_: Any) -> None:
        raise RuntimeError(NO_FORM)

    monkeypatch.setattr(app, "prepare", lambda *_: SimpleNamespace())
    monkeypatch.setattr(app, "_train", fail)
    assert app._run([], launch, None, False) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "Traceback" not in said
    assert "cumsum_cuda_kernel does not have" in said and "--train.deterministic=false" in said
