"""Where compiled kernels are kept, and what is not loaded: damaged files, and what others may have written."""

from __future__ import annotations

import ctypes
import os
import stat
import warnings
from pathlib import Path

import pytest

from benchmarks.support.fork_server import python
from megatron_fp8.kernels.cpu import library


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "answer.c"
    path.write_text("int answer(void) { return 42; }\n")
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This user's cache folder; the system's temporary folder is another empty one."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    return tmp_path / "cache" / "megatron_fp8" / "kernels"


FLAGS = "-shared -fPIC"


def answer(source: Path) -> int:
    loaded, why = library.load([source], FLAGS)
    assert loaded is not None, why
    loaded.answer.restype = ctypes.c_int
    found: int = loaded.answer()
    return found


def libraries(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.so"))


def test_one_whole_file_that_only_the_user_can_write(source, cache):
    assert answer(source) == 42
    (made,) = libraries(cache.parents[2])
    assert made.parent == cache
    for path in (made, cache, cache.parent):
        assert not path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    written = made.stat().st_mtime_ns, made.stat().st_ino
    assert answer(source) == 42
    assert (made.stat().st_mtime_ns, made.stat().st_ino) == written, "compiled twice"


def test_a_header_beside_the_source_that_changes_is_compiled_again(source, cache):
    header = source.with_name("number.h")
    source.write_text('#include "number.h"\nint answer(void) { return NUMBER; }\n')
    for number in (1, 2):
        header.write_text(f"#define NUMBER {number}\n")
        assert answer(source) == number
    assert len(libraries(cache)) == 2


def test_what_is_no_file_under_a_librarys_name_is_not_opened(source, cache):
    """Opening a pipe would wait for a writer for ever."""
    cache.mkdir(parents=True, mode=0o700, exist_ok=True)
    os.mkfifo(cache / "cpu-0123-4567.so")
    assert library._cached_library(cache, "0123") is None


@pytest.mark.parametrize("damage", ["cut short", "empty", "one bit"])
def test_a_damaged_library_is_compiled_again(source, cache, tmp_path, damage):
    """In a process of its own: with a file that is cut short, loading it is not an error but the end of the process."""
    (made,) = libraries(cache) if answer(source) == 42 else ()
    good = made.read_bytes()
    bad = {"cut short": good[:8192], "empty": b"", "one bit": good[:-1] + bytes([good[-1] ^ 1])}[damage]
    made.unlink()  # this process has it mapped
    made.write_bytes(bad)
    code = (
        "from pathlib import Path; from megatron_fp8.kernels.cpu import library;"
        f"loaded, why = library.load([Path({str(source)!r})], {FLAGS!r}); print(loaded.answer(), why)"
    )
    (tmp_path / "load.py").write_text(code)
    run = python(str(tmp_path / "load.py"), env=os.environ, timeout=200)
    assert (run.returncode, run.stdout, run.stderr) == (0, "42 None\n", "")
    assert [path.read_bytes() for path in libraries(cache)] == [good]


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a folder another user's: root can; for others the user becomes another one."""
    user = os.getuid()
    if user == 0:
        os.chown(path, 12345, -1)
    else:
        monkeypatch.setattr(os, "getuid", lambda: user + 1)


@pytest.mark.parametrize("which", ["kernels", "megatron_fp8", "cache"])
@pytest.mark.parametrize("fault", ["everybody", "its group", "another user", "link"])
def test_a_folder_that_others_may_write_is_left_alone(source, cache, monkeypatch, which, fault):
    """The folder itself and those above it: who can rename one of these can put another in its place."""
    cache.mkdir(parents=True, mode=0o755)
    folder = {"kernels": cache, "megatron_fp8": cache.parent, "cache": cache.parents[1]}[which]
    monkeypatch.setattr(library, "_is_own_group", lambda number: False)
    (cache / "theirs.so").write_text("not ours")
    if fault == "another user":
        give_away(folder, monkeypatch)
        said = "belongs to another user"
    elif fault == "link":
        other = cache.parents[2] / "other"
        os.rename(folder, other)
        folder.symlink_to(other)
        other.chmod(0o777)
        said = f"{other} can be written by everybody"
    else:
        folder.chmod(0o777 if fault == "everybody" else 0o775)
        said = f"can be written by {fault}"
    with pytest.warns(RuntimeWarning, match=said):
        assert answer(source) == 42
    assert [path.name for path in libraries(cache)] == ["theirs.so"]


def test_a_users_own_group_may_write(source, cache, monkeypatch):
    cache.mkdir(parents=True)
    cache.chmod(0o775)
    monkeypatch.setattr(library, "_is_own_group", lambda number: True)
    assert answer(source) == 42 and len(libraries(cache)) == 1


def test_a_file_that_others_may_write_is_not_loaded(source, cache):
    assert answer(source) == 42
    (made,) = libraries(cache)
    inode = made.stat().st_ino
    made.chmod(0o777)
    assert answer(source) == 42
    (made,) = libraries(cache)
    assert made.stat().st_ino != inode and not made.stat().st_mode & stat.S_IWOTH


@pytest.mark.parametrize("trouble", ["no home", "a file", "read-only"])
def test_where_no_cache_folder_can_be_made(source, cache, monkeypatch, trouble):
    """Nobody is warned of it: a folder of this user's under the temporary one serves, for all of the user's processes."""
    if trouble == "no home":
        monkeypatch.delenv("XDG_CACHE_HOME")

        def unknown() -> Path:
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.setattr(Path, "home", unknown)
    elif trouble == "a file":
        cache.parents[1].write_text("not a folder")
    else:
        make = Path.mkdir

        def refuse(path: Path, *args: object, **kwargs: object) -> None:
            if cache.parents[1] in (path, *path.parents):
                raise OSError(30, "Read-only file system")
            make(path, *args, **kwargs)

        monkeypatch.setattr(Path, "mkdir", refuse)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert answer(source) == 42 and answer(source) == 42
    (made,) = libraries(cache.parents[2])
    assert made.parts[-4:-1] == ("tmp", f"megatron_fp8-{os.getuid()}", "kernels")


def test_the_private_folder_is_made_in_a_sticky_temporary_one_and_kept(source, cache):
    """As /tmp is: everybody may write there, and nobody renames what is another's."""
    temporary = cache.parents[2] / "tmp"
    temporary.chmod(0o1777)
    cache.mkdir(parents=True, exist_ok=True)
    cache.chmod(0o777)
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match="can be written by everybody") as said:
            assert answer(source) == 42
        assert len(said) == 1
    (made,) = libraries(cache.parents[2])
    assert made.parent == temporary / f"megatron_fp8-{os.getuid()}" / "kernels"


def test_a_full_cache_folder_and_a_squatted_temporary_one(source, cache, monkeypatch):
    """What is left is a folder of this process alone."""
    squatted = cache.parents[2] / "tmp" / f"megatron_fp8-{os.getuid()}"
    squatted.mkdir()
    squatted.chmod(0o777)
    compile_into = library._compile

    def full(folder: Path, *args: object) -> Path:
        if folder == cache:
            raise OSError(28, "No space left on device")
        return compile_into(folder, *args)

    monkeypatch.setattr(library, "_compile", full)
    with pytest.warns(RuntimeWarning, match="can be written by everybody"):
        assert answer(source) == 42
    (made,) = libraries(cache.parents[2])
    assert made.parent.name.startswith("megatron_fp8-") and made.parent.parent.name == "tmp"
    assert not libraries(squatted)


@pytest.mark.parametrize(
    "compiler, said",
    [("'gcc", "No closing quotation"), ("/", "Permission denied"), ("false", "exits with 1")],
)
def test_a_compiler_that_is_none(source, cache, monkeypatch, compiler, said):
    monkeypatch.setenv("CC", compiler)
    loaded, why = library.load([source], FLAGS)
    assert loaded is None and why is not None and said in why


def test_what_a_compiler_makes_and_nothing_can_load_is_not_kept(source, cache, monkeypatch):
    """A compiler that exits with 0 and writes no library: the next start, with one that is mended, finds nothing old."""
    compiler = source.with_name("compiler")
    monkeypatch.setenv("CC", str(compiler))
    for does, said in (
        ("for to; do :; done; echo junk > $to; echo 1.0", "no folder"),
        ('exec cc "$@"', None),
    ):
        compiler.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo 1.0; exit; fi\n{does}\n')
        compiler.chmod(0o755)
        _, why = library.load([source], FLAGS)
        assert said in why if said else why is None, why
        assert len(libraries(cache.parents[2])) == int(said is None)
