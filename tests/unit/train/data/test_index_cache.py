"""Indices of samples that are kept: what other starts left beside them is said."""

import os
import warnings

import pytest

from megatron_fp8.train.data.index_cache import index_folder

NAME, OTHER = "a" * 32, "b" * 32


def _aged(folder, days):
    folder.mkdir(parents=True)
    when = folder.stat().st_mtime - days * 86400
    os.utime(folder, (when, when))
    return folder


def test_what_starts_left_unfinished_for_days_is_said_and_stays(tmp_path):
    kept = tmp_path / "indices"
    left = [_aged(kept / f".{name}.{digit * 8}", 2) for name, digit in ((OTHER, "1"), (NAME, "2"))]
    for name in (f".{NAME}.{'3' * 8}-mine", NAME, ".git"):
        _aged(kept / name, 2)
    _aged(kept / f".{NAME}.{'4' * 8}", 0.5)  # being built, perhaps
    with pytest.warns(UserWarning) as said:
        folder = index_folder(kept, "c" * 32)
    (warning,) = [str(one.message) for one in said]
    assert warning.startswith(
        f"{str(left[1])!r} and 1 more: sample indices that a killed start left incomplete"
    )
    assert folder.is_dir() and all(map(os.path.isdir, left))


def test_nothing_is_said_where_nothing_was_left(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert index_folder(tmp_path / "indices", NAME).is_dir()
