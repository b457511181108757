"""Config values from YAML files and dotted options, converted to their types.

    megatron-fp8 train --config FILE --model.fp8=hybrid --train.train_iters=300

Names may be written with '-' for '_'. A later option overrides an earlier one, and options override files, wherever
they stand. Needs no Megatron-Core, so that `estimate` can read configs without it.
"""

from __future__ import annotations

import enum
import json
import os
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ...files.strict_yaml import load_yaml, read_yaml
from ...files.user_paths import config_choices, config_hint, find_config, is_model_directory, path_hint
from ...mcore.config.rules import Rule, format_value
from ...plan.settings import fp8_format_field, nearest_key, without_fp8_format

FREE_FORM = "model.fp8_overrides"
"""The option whose keys users choose: `--model.fp8_overrides.PATTERN=VALUE` sets one."""
_FREE_WORDS = 'a mapping, as \'{"*.linear_fc2": "bf16"}\' is, or {} for none'
_COMMA_LISTS = (
    "checkpoint.accept",
    *(f"telemetry.{name}" for name in ("sites", "tensors", "statistics", "what_if")),
)
_FLAGS = ("dry_run", "debug")


def read_options(
    arguments: Iterable[str],
    kinds: Mapping[str, Any],
    rule_of: Callable[[str], Rule | None],
    base: dict[str, Any] | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """Key -> value for the keys that files and options set, and the names of the files.

    Args:
        arguments: a command line's words.
        kinds: every dotted key -> its type; Any: the value is taken as YAML has it.
        rule_of: the rule of a key, whose words an error message uses.
        base: a config's content, which files and options override.

    Raises ValueError in one line for an unknown key (with the nearest known one), for a value of the wrong type, and for
    a file that is missing or not YAML.
    """
    values: dict[str, Any] = {}
    sections = sections_of(kinds)

    def take(key: str, value: Any, where: str) -> None:
        check_text(key, value)
        if kinds[key] is str and value in (None, "null"):  # the default, as for other types
            values.pop(key, None)
            return
        try:
            values[key] = convert(value, kinds[key])
        except ValueError as error:
            rule = rule_of(key)
            kind = getattr(kinds[key], "__name__", kinds[key])
            words = rule.words if rule else _FREE_WORDS if key == FREE_FORM else f"of the type {kind}"
            raise ValueError(
                f"{where}{key}={format_value(value)} must be {words}: change it, or leave it out."
            ) from error

    options = list(_format_as_meant(_pairs(_data_as_paths(arguments))))
    files = [find_config(value) for name, value in options if name == "config"]
    contents = [] if base is None else [("its config", _checked(base, "its config", sections))]
    for where, content in [*contents, *((file, read_config(file, sections)) for file in files)]:
        for key, value in by_dotted_key(content, sections).items():
            check_key(key, f"{where}: ", kinds, in_file=True)
            take(key, value, f"{where}: ")
    for name, value in options:
        key = name.removesuffix("+")
        if name == "config":
            continue
        if name == "config+":
            raise ValueError(
                f"--config+={value} is not an option: write --config={value}, once for each file."
            )
        check_key(key, "--", kinds)
        if key.startswith(f"{FREE_FORM}."):
            check_text(key, value)
            values[FREE_FORM] = {**(values.get(FREE_FORM) or {}), key.removeprefix(f"{FREE_FORM}."): value}
        elif key in _COMMA_LISTS and not value.startswith("["):
            take(key, [*(values.get(key, []) if key == "checkpoint.accept" else []), *value.split(",")], "")
        elif name.endswith("+"):
            before = [] if values.get(key) is None else values[key]
            if not isinstance(before, list):
                raise ValueError(f"--{name}={value} adds to a list, and {key} has none: write --{key}=VALUE.")
            take(key, [*before, value], "")
        else:
            take(key, value, "")
    return values, files


def text_of_options(arguments: Iterable[str], keys: Collection[str]) -> dict[str, Any]:
    """Key -> value, unchecked, of those of these keys that the files and options of a command line set.

    For use before ``read_options`` knows the types. Raises ValueError for words and files that it refuses.
    """
    options = list(_format_as_meant(_pairs(_data_as_paths(arguments))))
    found: dict[str, Any] = {}
    for file in (find_config(value) for name, value in options if name == "config"):
        found.update(by_dotted_key(read_config(file, sections_of(keys)), sections_of(keys)))
    found.update(options)
    return {key: found[key] for key in keys if key in found}


def _pairs(arguments: Iterable[str]) -> Iterable[tuple[str, str]]:
    """(name, value) of every `--name=value`, `--name value` and flag. Raises ValueError for a stray word."""
    words = iter(arguments)
    word = next(words, None)
    while word is not None:
        if not word.startswith("--"):
            raise ValueError(
                f"{word!r} is not an option: options are --config FILE and --section.key=value.{config_hint(word)}"
            )
        name, equals, value = word[2:].partition("=")
        name, word = name.replace("-", "_"), next(words, None)
        if not name:
            raise ValueError("-- alone is not an option: leave it out, and write --section.key=value.")
        if not equals and name in _FLAGS:
            value = "true"
        elif not equals:
            if word is None or word.startswith("--"):
                raise ValueError(f"--{name} has no value: write --{name}=VALUE.")
            value, word = word, next(words, None)
        yield name, value


def _format_as_meant(options: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Rename `--model.fp8_format` to the setting that it means. Raises ValueError if an option sets that otherwise."""
    options = list(options)
    last = dict(options)
    for name, value in options:
        if name == "model.fp8_format":
            name = f"model.{fp8_format_field(value)}"
            other = last.get(name, value)
            if other != value and "null" not in (value, other):
                raise ValueError(
                    f"--model.fp8_format={value} conflicts with --{name}={other}: both name one thing. Give --{name}"
                    " alone."
                )
        yield name, value


def _data_as_paths(arguments: Iterable[str]) -> Iterator[str]:
    """Replace each `--data FILE ...` and `--data=FILE` in the arguments by `--data.paths`.

    As with other options, later ones replace earlier ones: `--data` replaces a config's `data.paths` and an earlier
    `--data.paths`. A second `--data` adds to the first, and `--data.paths+=FILE` to whatever precedes it.

    Raises ValueError if `--data` names no file, as with an empty shell variable.
    """
    adding = taking = False  # to an earlier --data; following words belong to --data
    missing = False

    def paths_option(file: str) -> str:
        nonlocal adding, missing
        append, adding, missing = adding, True, False
        return f"--data.paths+={file}" if append else f"--data.paths={json.dumps([file], ensure_ascii=False)}"

    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not argument.startswith("--"):
            yield paths_option(argument) if taking else argument
            continue
        if missing:
            break
        taking = missing = argument == "--data"
        adding = adding and name != "--data.paths"
        if not taking:
            yield paths_option(value) if name == "--data" and equals else argument
    if missing:
        raise ValueError(
            "--data names no file: write --data FILE ..., or leave it out, which takes data.paths of the config."
        )


def sections_of(keys: Iterable[str]) -> tuple[str, ...]:
    """The sections of dotted keys."""
    return tuple(dict.fromkeys(key.partition(".")[0] for key in keys if "." in key))


def check_key(key: str, where: str, known: Collection[str], *, in_file: bool = False) -> None:
    """Raise ValueError for an unknown key. ``in_file``: from a file, whose indentation may be wrong."""
    if key in known or (key.startswith(f"{FREE_FORM}.") and not in_file):
        return
    sections = sections_of(known)
    if key in sections:
        raise ValueError(f"{where}{key} is a section: give its keys, --{key}.KEY=VALUE.")
    section, _, name = key.rpartition(".")
    near = nearest_key(key, known)
    hint = f" Did you mean {near}?" if near else " Sections are " + ", ".join(sections) + "."
    same_name = [other for other in known if other.rpartition(".")[2] == name]
    owner = same_name[0].rpartition(".")[0] if same_name else ""
    if in_file and name in sections:
        hint = f" It is a section: is it indented too far, under {section}:?"
    elif in_file and same_name:
        hint += f" Is it indented under {owner}:?" if owner else f" Is it indented too far, under {section}:?"
    raise ValueError(f"{where}{key} is not a known key.{hint}")


def check_text(name: str, value: Any) -> None:
    """Raise ValueError if a value holds text that config.yaml cannot."""
    for part in (
        value
        if isinstance(value, list)
        else [*value, *value.values()]
        if isinstance(value, dict)
        else [value]
    ):
        if isinstance(part, str) and "\0" in part:
            raise ValueError(f"{name}={part!r} holds a NUL character: write it without.")
        if isinstance(part, str) and part.encode("utf-8", "replace").decode("utf-8") != part:
            raise ValueError(
                f"{name}={part!r} holds bytes that are no UTF-8, and config.yaml could not hold them: choose another"
                " name."
            )


def convert(value: Any, kind: Any) -> Any:
    """A value, of YAML or a text of the command line, as a field's type. Raises ValueError."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        for part in sorted(parts, key=lambda part: part is str):  # text is what nothing else fits
            try:
                return convert(value, part)
            except ValueError:
                continue
        raise ValueError("no type of the union fits")
    if origin is typing.Literal:
        if isinstance(value, str) and value in parts:
            return value
    elif kind is str:
        if isinstance(value, str):
            return value
    elif isinstance(kind, type) and issubclass(kind, enum.Enum):
        if isinstance(value, str) and value in kind.__members__:
            return kind[value]
    elif kind in (int, float) and isinstance(value, str) and re.fullmatch(r"\s*[-+]?0[0-9]+\s*", value):
        return kind(value)  # a padded number, as of an array's job; YAML 1.1 reads it to base 8
    elif not isinstance(value, str) or value.strip() or kind is Any:
        parsed = load_yaml(value.encode()) if isinstance(value, str) else value
        return _convert_parsed(parsed, origin or kind, parts)
    raise ValueError("another type")


def _convert_parsed(value: Any, kind: Any, parts: tuple[Any, ...]) -> Any:
    """A value of YAML as a type that text does not have. ``parts``: the types in it. Raises ValueError."""
    if kind is float and isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            return float(value)  # YAML reads 1e-4 as text
        except OverflowError as error:
            raise ValueError("beyond float64") from error
    if kind is Any:
        try:
            return float(value) if isinstance(value, str) else value
        except ValueError:
            return value
    if kind is list and isinstance(value, list):
        return [convert(item, parts[0]) for item in value]
    if kind is tuple and isinstance(value, (list, tuple)) and len(value) == len(parts):
        return tuple(map(convert, value, parts))
    if kind is dict and isinstance(value, dict):
        return {convert(name, parts[0]): convert(item, parts[1]) for name, item in value.items()}
    if kind is types.NoneType and value is None:
        return None
    if kind in (bool, int) and type(value) is kind:
        return value
    raise ValueError("another type")


def read_config(path: str, sections: Collection[str]) -> dict[str, Any]:
    """The content of a config file by name, with ``sections`` as dicts; `model.fp8_format` gets its current name.

    Raises ValueError, with the file's name, if it is missing, too large, not YAML or empty, or has a value for a
    section.
    """
    if not path.strip():
        raise ValueError(f"--config={path!r} is empty: give a YAML file, or leave --config out.")
    if os.path.isdir(path):
        hint = path_hint(Path(path)) if is_model_directory(Path(path)) else ""
        hint = hint or f"give a YAML file, such as {path.rstrip('/')}/config.yaml"
        raise ValueError(f"--config={path} is a folder: {hint}.")
    try:
        content = read_yaml(Path(path))
    except OSError as error:
        reason = "there is no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise ValueError(f"--config={path!r}: {reason}. {config_choices(path)}") from error
    except ValueError as error:
        raise ValueError(f"--config={path} is not YAML: {error}") from error
    if content is None:
        raise ValueError(f"--config={path} is empty: it needs keys such as model and train.")
    if not isinstance(content, dict):
        raise ValueError(f"--config={path} holds no sections: it needs keys such as model and train.")
    return _checked(content, f"--config={path}", sections)


def _checked(content: dict[str, Any], where: str, sections: Collection[str]) -> dict[str, Any]:
    """A config's content, whose sections are dicts. Raises ValueError if a section has another value."""
    for name, section in content.items():
        if name in sections and not isinstance(section, dict):
            remedy = f": write {name}: {{KEY: VALUE}}, or leave it out."
            if section is None:
                remedy = f", and it is empty: are the lines below it indented under {name}:? Or leave it out."
            raise ValueError(f"{where}: {name}={format_value(section)} must be a section{remedy}")
    if "model" not in content or "model" not in sections:
        return content
    try:
        return {**content, "model": without_fp8_format(content["model"])}
    except ValueError as error:
        raise ValueError(f"{where}: model.{error}") from error


def by_dotted_key(content: dict[str, Any], sections: Collection[str]) -> dict[str, Any]:
    """The values of a config file; keys in a section become SECTION.KEY."""
    result = {}
    for name, value in content.items():
        result.update(
            {f"{name}.{key}": item for key, item in value.items()} if name in sections else {name: value}
        )
    return result
