"""Patches against other sources: a change of each kind is seen, and the installed Megatron-Core has every name."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import megatron.core
import pytest

from benchmarks import common, megatron_sources
from benchmarks.megatron_sources import compared, findings, main
from benchmarks.support.megatron_sources import Sources

INFO = "MAJOR = 0\nMINOR = {}\nPATCH = 1\nPRE_RELEASE = ''\n"
BASE = "class Base:\n    def inherited(self, a):\n        return a\n"
USER = '''
from megatron.core import base as b
from megatron.core.base import Base
try:
    from megatron.core.extra import optional
except ImportError:
    optional = None

LIMIT = 3

class User(Base):
    def own(self, x, *, y=1):
        """What it does."""
        return x + y  # a comment

class Other(b.Base):
    pass

def function(a, b=2, *args, c, **rest):
    return a
'''


def sources(folder: Path, minor: int = 16, **files: str) -> Sources:
    core = folder / "megatron" / "core"
    core.mkdir(parents=True)
    texts = {"__init__": "", "package_info": INFO.format(minor), "base": BASE, "user": USER, **files}
    for name, text in texts.items():
        (core / f"{name}.py").write_text(text)
    return Sources(folder)


@pytest.fixture
def installed(tmp_path: Path) -> Sources:
    return sources(tmp_path / "installed")


@pytest.mark.parametrize(
    "name, change, state, note",
    [
        ("user.function", ("    return a", '    """Text."""\n    return a  # text'), "same", ""),
        ("user.function", ("    return a", "    return b"), "body", ""),
        ("user.function", ("b=2, *args, c", "b=3, *args, c, d=None"), "signature", "-b=2 +b=3 +d=None"),
        ("user.function", ("a, b=2, *args, c,", "b=2, *args, c, a,"), "signature", "in another order"),
        ("user.function", ("def function", "def renamed"), "gone", ""),
        ("user.User.own", ("return x + y", "return x - y"), "body", ""),
        ("user.User.own", ("*, y=1", "y=1"), "signature", "-*"),
        ("user.User.own", ("class User", "class Owner"), "gone", ""),
        ("user.User.inherited", ("(Base)", ""), "gone", ""),
        ("user.Other.inherited", ("b.Base", "Base"), "same", ""),
        ("user.User", ("y=1", "y=2"), "body", ""),
        ("user.LIMIT", ("LIMIT = 3", "LIMIT = 4"), "body", ""),
        ("user.optional", ("optional = None", "pass"), "body", ""),
        ("user", ("LIMIT = 3", "LIMIT = 4"), "same", ""),
    ],
)
def test_a_change_is_seen(installed, tmp_path, name, change, state, note):
    assert change[0] in USER
    other = sources(tmp_path / "other", 20, user=USER.replace(*change))
    found = compared("patch", f"megatron.core.{name}", installed, other)
    assert (found.state, found.note) == (state, note)
    assert (installed.version, other.version) == ("0.16.1", "0.20.1")


def test_a_change_of_what_a_name_stands_for_is_seen(installed, tmp_path):
    other = sources(tmp_path / "other", base=BASE.replace("return a", "return -a"))
    for name in ("user.User.inherited", "user.Other.inherited", "user.Base.inherited", "base.Base"):
        assert compared("import", f"megatron.core.{name}", installed, other).state == "body", name
    assert compared("patch", "megatron.core.user.nothing", installed, other) is None
    moved = sources(
        tmp_path / "moved", base=BASE + "def function(a): pass", user=USER.replace("def function", "def f")
    )
    assert compared("patch", "megatron.core.user.function", installed, moved).note == "megatron.core.base"
    defined = sources(tmp_path / "more", user=USER + "nothing = 1\n")
    assert compared("patch", "megatron.core.user.nothing", installed, defined).note == "it was not defined"


def test_the_installed_megatron_core_has_every_name(tmp_path):
    here = Sources(Path(megatron.core.__path__[0]).parents[1])
    found = findings(here, here)
    assert {finding.state for finding in found} == {"same"}
    counts = Counter(finding.kind for finding in found)
    assert counts["patch"] > 130 and counts["override"] > 25 and counts["import"] > 70, counts
    patched = {finding.name for finding in found if finding.kind == "patch"}
    unknown = set(megatron_sources.patched_names()) - patched
    # Names that only Transformer Engine's presence defines.
    assert all(here.find(name) is None for name in unknown) and len(unknown) < 8, unknown


def test_exit_codes(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(common, "RESULTS", tmp_path / "results")
    assert main([str(tmp_path)]) == 2
    assert "has no megatron/core/__init__.py" in capsys.readouterr().err
    sources(tmp_path / "other", 20)
    assert main([str(tmp_path / "other"), "--write"]) == 1
    assert "megatron-core 0.20.1" in capsys.readouterr().out
    written = (tmp_path / "results" / "megatron_sources.md").read_text()
    assert written.startswith("# Patches of Megatron-Core 0.16.1 in the sources of 0.20.1")
