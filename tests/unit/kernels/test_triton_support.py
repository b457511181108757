"""Triton is asked for a kernel before it is relied on: what it lacks is one line with a remedy, and no traceback."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from megatron_fp8 import kernels
from megatron_fp8.backends import choose_backend, emulated
from megatron_fp8.kernels import triton_support

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def asked_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """No answer of an earlier test, and a folder for Triton's kernels that can be written."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    triton_support.refusal.cache_clear()
    yield
    triton_support.refusal.cache_clear()


def refused(error: Exception | None) -> str | None:
    triton_support.refusal.cache_clear()
    with (
        mock.patch.object(triton_support, "_launch", side_effect=error),
        mock.patch.object(torch.version, "hip", None),
    ):
        return triton_support.refusal(GPU)


def test_one_launch_is_enough():
    with mock.patch.object(triton_support, "_launch") as launch:
        assert kernels.run_on(GPU) and kernels.run_on(GPU)
    launch.assert_called_once_with(GPU)


def test_what_is_missing_and_what_to_do():
    build = pytest.importorskip("triton.runtime.build")
    finds = getattr(build, "_find_compiler", None)
    if finds is not None:  # Triton's own words, where no compiler is on the path
        finds.cache_clear()
        with mock.patch.dict(os.environ, {"PATH": ""}), pytest.raises(RuntimeError) as raised:
            os.environ.pop("CC", None)
            finds("c")
        assert "gcc and python3-dev" in (refused(raised.value) or "")
        finds.cache_clear()
    no_headers = subprocess.CalledProcessError(1, ["/usr/bin/gcc", "main.c"])
    assert "Python's headers" in (refused(no_headers) or "")
    read_only = OSError(30, "Read-only file system", "/root/.triton")
    assert "Set TRITON_CACHE_DIR to a folder that can be written" in (refused(read_only) or "")
    assert (
        refused(RuntimeError("no driver\nat line 3"))
        == "Triton cannot run a kernel here: RuntimeError: no driver"
    )
    assert refused(None) is None
    with mock.patch.object(torch.version, "hip", "7.0"):
        triton_support.refusal.cache_clear()
        assert "NVIDIA" in (triton_support.refusal(GPU) or "")
    with mock.patch.object(triton_support, "find_spec", return_value=None):
        triton_support.refusal.cache_clear()
        assert "pip install megatron_fp8[gpu]" in (triton_support.refusal(GPU) or "")


def test_the_plan_says_why_native_does_not_run():
    with (
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
        mock.patch.object(torch.cuda, "get_device_name", return_value="Some GPU"),
        mock.patch.object(triton_support, "_launch", side_effect=RuntimeError("Failed to find C compiler.")),
    ):
        backend, why = choose_backend("auto", GPU)
        assert backend is emulated and "not native: Triton cannot run a kernel here" in why and "gcc" in why
        with pytest.raises(ValueError, match="Failed to find C compiler"):
            choose_backend("native", GPU)


def test_it_is_asked_with_memory_also_where_tensors_are_fake():
    seen = []
    with mock.patch("megatron_fp8.kernels.probe_kernel.launch", seen.append), FakeTensorMode():
        triton_support._launch(torch.device("cpu"))
    assert not isinstance(seen[0], FakeTensor)
