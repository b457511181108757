"""YAML of which nothing is dropped."""

import pytest

from megatron_fp8.files import strict_yaml
from megatron_fp8.files.strict_yaml import load_yaml


def test_what_it_reads():
    text = b"a: {b: [1, 2.5, null]}\nc: &x [1]\nd: *x\n"
    assert load_yaml(text) == {"a": {"b": [1, 2.5, None]}, "c": [1], "d": [1]}


def bomb(entry, alias):
    """Thirty lines that stand for 9 ** 30 entries."""
    found = [f"- &a0 {entry.format('{a: 1}')}"]
    found += [f"- &a{i} {entry.format(', '.join([alias.format(i - 1)] * 9))}" for i in range(1, 30)]
    return "\n".join(found).encode()


def test_sections_that_are_merged_into_others():
    """The merged one keeps its own keys, wherever it stands itself."""
    text = b"a: &b {x: 1}\nb:\n  c: &m {<<: *b, x: 2}\nd: {<<: *m, y: 3}\n"
    assert load_yaml(text) == {"a": {"x": 1}, "b": {"c": {"x": 2}}, "d": {"x": 2, "y": 3}}


@pytest.mark.parametrize(
    "content, said",
    [
        (b"a: 1\n'a': 2", "stands twice, again in line 2"),
        (b"[a]: 1", "must be a name"),
        (b"a: [", "expected"),
        (b"a:\n  b: 1\n c: 2", "^line 3 does not begin where the other keys"),
        (b"on: a", "the key 'on' in line 1 must be a name, and is read as bool: put it in quotes"),
        (b'a: "\\ud800"', "surrogates"),
        (b"\xff", "byte 0 of it is no UTF-8"),
        (b"[" * 40_000, "deeper than 64 levels"),
        (
            b"- &a0 [1]\n" + b"".join(b"- &a%d [*a%d]\n" % (i, i - 1) for i in range(1, 65)),
            "deeper than 64 levels",
        ),
        (b"[" + b"1," * 1000 + b"]", "more than 1,000 entries"),
        (bomb("[{}]", "*a{}"), "more than 1,000 entries where aliases repeat"),
        (bomb("{{<<: [{}]}}", "*a{}"), "more than 1,000 entries where aliases repeat"),
        (b"a: &a\n  b: *a", "has an alias of itself in it"),
        (b"a: 1" + b":59" * 10**4, "the number in line 1 has too many digits"),
        (b"a: !!int ''", "index"),
        (b"a: !!timestamp x", "NoneType"),
        (b"a: 2026-99-99", "month"),
        (b"a: !!python/object/apply:os.system [x]", "could not determine a constructor"),
    ],
)
def test_what_it_refuses_in_one_line(content, said, monkeypatch):
    monkeypatch.setattr(strict_yaml, "_MOST", 1000)
    with pytest.raises(ValueError, match=said) as error:
        load_yaml(content)
    assert "\n" not in str(error.value)
