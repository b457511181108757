"""What Triton lacks is one line with a remedy; compilers' cache folders are private."""

from __future__ import annotations

import os
import subprocess
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from megatron_fp8 import kernels
from megatron_fp8.backends import choose_backend, emulated
from megatron_fp8.kernels import triton_support
from megatron_fp8.kernels.cpu import library
from megatron_fp8.kernels.triton_support import INDUCTOR, TRITON, settle_inductor, settle_triton

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
    with mock.patch("megatron_fp8.kernels.gemm_layouts.transpose", seen.append), FakeTensorMode():
        triton_support._launch(torch.device("cpu"))
    assert not isinstance(seen[0], FakeTensor)


SETTLED = {TRITON: settle_triton, INDUCTOR: settle_inductor}


@pytest.fixture
def ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where kernels are kept instead; the system's temporary folder and HOME are two others, without anything in them."""
    for name in ("home", "tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / "tmp").chmod(0o1777)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    return tmp_path / "cache" / "megatron_fp8" / "kernels"


def defaults(ours: Path) -> dict[str, Path]:
    base = ours.parents[2]
    return {
        TRITON: base / "home" / ".triton" / "cache",
        INDUCTOR: base / "tmp" / f"torchinductor_{triton_support._user()}",
    }


@pytest.mark.parametrize("name", SETTLED)
def test_their_own_folder_is_made_before_anybody_else_can(ours, name):
    environ: dict[str, str] = {}
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            SETTLED[name](environ)
        assert environ == {} and defaults(ours)[name].stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", SETTLED)
@pytest.mark.parametrize("fault", ["everybody", "another user", "a link", "a file"])
def test_a_folder_that_another_user_filled_is_not_used(ours, monkeypatch, name, fault):
    theirs = defaults(ours)[name]
    theirs.parent.mkdir(parents=True, exist_ok=True)
    theirs.touch() if fault == "a file" else theirs.mkdir()
    if fault == "everybody":
        theirs.chmod(0o777)
    elif fault == "a link":
        other = theirs.rename(theirs.with_name("other"))
        other.chmod(0o777)
        theirs.symlink_to(other)
    elif fault == "another user":
        real = library._foreign_writer
        monkeypatch.setattr(
            library, "_foreign_writer", lambda path: "not mine" if path == theirs else real(path)
        )
    environ: dict[str, str] = {}
    with pytest.warns(UserWarning, match=f"keeps its kernels in {ours}.*set {name} for another folder"):
        SETTLED[name](environ)
    assert Path(environ[name]).parent == ours


@pytest.mark.parametrize("name", SETTLED)
def test_a_folder_that_the_environment_names_is_the_users_choice(ours, name):
    environ = {name: "/scratch"}
    SETTLED[name](environ)
    assert environ == {name: "/scratch"} and not defaults(ours)[name].exists()


def test_without_a_home(ours, monkeypatch):
    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", unknown)
    environ: dict[str, str] = {}
    with pytest.warns(UserWarning, match="cannot be made"):
        settle_triton(environ)
    assert Path(environ[TRITON]).parent == ours
    settle_triton(environ := {"TRITON_HOME": str(ours.parents[2] / "home")})
    assert TRITON not in environ


def test_torch_keeps_code_where_it_is_thought_to(ours, monkeypatch):
    from torch._inductor.runtime import cache_dir_utils as theirs

    find = getattr(theirs, "default_cache_dir", None)
    if find is None:
        pytest.skip("this torch names its folder elsewhere")
    assert find() == os.fspath(defaults(ours)[INDUCTOR])
