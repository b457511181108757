"""Compiled code is kept where nobody else can have put any: a folder that another user made first is not used."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest

from megatron_fp8.kernels import compiler_cache
from megatron_fp8.kernels.compiler_cache import INDUCTOR, TRITON, settle_inductor, settle_triton
from megatron_fp8.kernels.cpu import library

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
        INDUCTOR: base / "tmp" / f"torchinductor_{compiler_cache._user()}",
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
        real = library._foreign
        monkeypatch.setattr(library, "_foreign", lambda path: "not mine" if path == theirs else real(path))
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
