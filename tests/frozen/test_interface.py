"""What users typed when the suite was frozen works: more may come, nothing goes and no default changes."""

from __future__ import annotations

from tests.frozen import interface
from tests.frozen.write import read

WANTED = read("interface")


def test_options_of_commands() -> None:
    found = interface.commands()
    lost = [
        f"{command} {option}: {default}"
        for command, options in WANTED["commands"].items()
        for option, default in options.items()
        if found.get(command, {}).get(option, "gone") != default
    ]
    assert lost == []


def test_keys_of_a_config() -> None:
    found = interface.keys()
    assert {name: sorted(set(keys) - set(found[name])) for name, keys in WANTED["keys"].items()} == {
        name: [] for name in WANTED["keys"]
    }


def test_documented_names() -> None:
    assert [name for name in WANTED["documented"] if not interface.resolves(name)] == []


def test_signatures_of_what_the_package_exports() -> None:
    found = interface.signatures()
    assert {name: found.get(name) for name in WANTED["signatures"]} == WANTED["signatures"]
