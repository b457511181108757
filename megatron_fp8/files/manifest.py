"""The manifest of a checkpoint: typed keys and a checksum.

    {"format": "megatron_fp8 checkpoint", "version": 3, "sha256": "...",
     "iteration": 500, "state": {...}, "facts": {...}, "files": {"__0_0.distcp": {"bytes": 1, "sha256": "..."}, ...}}

The checksum covers the JSON of all other keys, sorted, without spaces: the file's indentation does not matter. It
reveals damage and manual edits. Anybody can compute a new one, so a manifest is trusted only for numbers, texts and
names of files beside it.

Earlier versions are read: version 1 had no checksum; in versions 1 and 2 each rank numbered its experts from 0 in
names.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .atomic_io import write_file
from .strict_json import load_json

FORMAT, VERSION = "megatron_fp8 checkpoint", 3
_WITHOUT_CHECKSUM, _LOCAL_EXPERTS = (1,), (1, 2)
MANIFEST = "manifest.json"
LARGEST = 1 << 28
"""Limit in bytes for a manifest: far more than files of 100,000 ranks need."""

_KEYS = ("iteration", "state", "facts", "files")
_COUNTS = ("optimizer_step", "fp8_iteration", "scheduler_steps", "consumed_samples")
_LAST = 2**63 - 1


class NotAManifest(ValueError):
    """The content is not a manifest, or has an unknown version; it is not damaged."""


@dataclass
class Manifest:
    """The content of manifest.json.

    Attributes:
        iteration: number of finished iterations at the save.
        state: numbers from which training continues.
        facts: layout, precision, model and versions of the run that saved it.
        files: name -> {"bytes", "sha256"} of every other file.
        checked: whether a checksum covers all of this; False for version 1, which had none.
        of_each_rank: overrides that applied to one expert on each rank (versions 1 and 2) -> today's names of those
        experts,
            which ``facts`` has.
    """

    iteration: int
    state: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    checked: bool = field(default=True, compare=False)
    of_each_rank: dict[str, list[str]] = field(default_factory=dict, compare=False)

    def text(self) -> str:
        """The text of manifest.json. Raises ValueError for values that JSON does not have: NaN, Inf, other types."""
        content = {"format": FORMAT, "version": VERSION, **{name: getattr(self, name) for name in _KEYS}}
        return json.dumps({**content, "sha256": checksum(content)}, indent=1, allow_nan=False) + "\n"

    def write(self, folder: Path) -> None:
        """Write ``<folder>/manifest.json`` and sync it."""
        write_file(folder / MANIFEST, self.text())


def parse(data: bytes) -> Manifest:
    """Parse the bytes of a manifest.

    Raises:
        NotAManifest: it is other JSON, or of an unknown version.
        ValueError: it is damaged; the message has the cause, without the file's name.
    """
    content = load_json(data, finite=True)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise NotAManifest("is not the manifest of a megatron_fp8 checkpoint: give another folder")
    version = content.get("version")
    if isinstance(version, bool) or version not in (VERSION, *_LOCAL_EXPERTS):
        raise NotAManifest(
            f"has version {version!r}, and this megatron_fp8 reads versions 1 to {VERSION}: use the version of"
            " megatron_fp8 that wrote it"
        )
    checked = version not in _WITHOUT_CHECKSUM
    required = {"format", "version", *_KEYS} | ({"sha256"} if checked else set())
    for names, words in (
        (required - set(content), "is missing"),
        (set(content) - required, "does not belong there"),
    ):
        if names:
            raise ValueError(f"{min(names)!r} {words}")
    if checked and content["sha256"] != checksum(content):
        raise ValueError("its checksum differs: it is not what was written")
    _check(content)
    renamed = _number_experts(content["state"], content["facts"]) if version in _LOCAL_EXPERTS else {}
    return Manifest(
        content["iteration"], content["state"], content["facts"], content["files"], checked, renamed
    )


def _number_experts(state: dict[str, Any], facts: dict[str, Any]) -> dict[str, list[str]]:
    """Give experts their numbers in the whole model, in the guard's moves and in the run's overrides.

    Under expert parallelism each old name meant one expert on every rank. Returns the overrides that became several.
    """
    model = facts.get("run", {}).get("model") or {}
    ranks: Any = (facts.get("layout") or {}).get("expert") or 1
    experts: Any = model.get("num_moe_experts")
    if not (_is_count(experts) and 1 < ranks <= experts < 1 << 16):
        return {}

    def names(name: str) -> list[str]:
        match = re.fullmatch(r"(.*\blocal_experts\.)(\d+)(\..*)", name)
        if match is None:
            return [name]
        return [f"{match[1]}{e}{match[3]}" for e in range(int(match[2]), experts, experts // ranks)]

    if "guard" in state:
        state["guard"] = [[name, *rest] for site, *rest in state["guard"] for name in names(site)]
    overrides = model.get("fp8_overrides")
    if not isinstance(overrides, dict):
        return {}
    model["fp8_overrides"] = {name: value for key, value in overrides.items() for name in names(key)}
    return {key: several for key in overrides if len(several := names(key)) > 1}


def checksum(content: dict[str, Any]) -> str:
    """SHA-256 of an object's keys except sha256. Raises ValueError for NaN or Inf."""
    rest = {name: value for name, value in content.items() if name != "sha256"}
    plain = json.dumps(rest, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(plain.encode("ascii")).hexdigest()


# ----------------------------------------------------------------------------------------------- rules for values

Rule = tuple[Callable[[Any], bool], str]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LAST


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


_COUNT: Rule = (_is_count, "a whole number from 0")
_SECTION: Rule = (lambda value: isinstance(value, dict), "a group of named values")
_TEXT: Rule = (lambda value: isinstance(value, str), "text")
_TEXT_OR_NULL: Rule = (lambda value: value is None or isinstance(value, str), "text or null")
_DIGEST: Rule = (
    lambda value: isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None,
    "64 hexadecimal digits",
)
_SCALER: Rule = (
    lambda value: value is None or (isinstance(value, dict) and all(map(_is_number, value.values()))),
    "null or finite numbers by name",
)
_LAYOUT: Rule = (lambda value: value is None or isinstance(value, int), "a whole number, true, false or null")


def _check(content: dict[str, Any]) -> None:
    """Raise ValueError with the first value that has a wrong type."""
    _require([("iteration", content["iteration"])], _COUNT)
    for name in _KEYS[1:]:
        _require([(name, content[name])], _SECTION)
    try:
        json.dumps(content, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("it holds text that is no text (half a surrogate pair)") from None
    state, facts = content["state"], content["facts"]
    _require(_present("state", state, _COUNTS), _COUNT)
    _require(_present("state", state, ("loss_scaler",)), _SCALER)
    for move in _list("state.guard", state.get("guard", [])):
        if not isinstance(move, list) or len(move) != 4:
            raise ValueError(
                "state.guard must hold lists of a site, what it moved to, an iteration and a reason"
            )
        _require([("state.guard", move[i]) for i in (0, 1, 3)], _TEXT)
        _require([("state.guard", move[2])], _COUNT)
    _require(_present("state", state, ("liveness",)), _SCALER)
    for record in _list("state.left_out", state.get("left_out", [])):
        if not isinstance(record, dict) or not {"first", "last"} <= set(record):
            raise ValueError("state.left_out must hold groups with first and last")
        _require(_present("state.left_out", record, ("first", "last")), _COUNT)
        if record["first"] >= record["last"]:
            raise ValueError("state.left_out has a range that ends before it begins")
    groups = _present("facts", facts, ("layout", "precision", "versions", "run"))
    _require(groups, _SECTION)
    _require(_members("facts.layout", facts.get("layout", {})), _LAYOUT)
    _require(_members("facts.versions", facts.get("versions", {})), _TEXT)
    run = facts.get("run", {})
    _require(_present("facts.run", run, ("model", "train", "optimizer", "data", "checkpoint")), _SECTION)
    _require(_present("facts.run.data", run.get("data", {}), ("tokenizer",)), _TEXT_OR_NULL)
    _require(_present("facts.run.train", run.get("train", {}), ("seq_length", "train_iters")), _COUNT)
    _require(_present("facts", facts, ("tokenizer", "job")), _TEXT)
    _require([("facts.data", digest) for digest in _list("facts.data", facts.get("data", []))], _TEXT)
    for change in _list("facts.accepted", facts.get("accepted", [])):
        if not isinstance(change, dict) or set(change) != {"iteration", "name", "there", "here"}:
            raise ValueError("facts.accepted must hold iteration, name, there and here, and nothing else")
        _require([("facts.accepted.iteration", change["iteration"])], _COUNT)
        _require([("facts.accepted.name", change["name"])], _TEXT)
    _check_files(content["files"])


def _list(name: str, value: Any) -> list[Any]:
    _require([(name, value)], (lambda value: isinstance(value, list), "a list"))
    return list(value)


def _check_files(files: dict[str, Any]) -> None:
    if not files:
        raise ValueError("'files' is empty: a checkpoint has files")
    for name, record in files.items():
        if not is_plain_name(name):
            raise ValueError(f"{name!r} in 'files' is not the name of a file beside it")
        if not isinstance(record, dict) or set(record) != {"bytes", "sha256"}:
            raise ValueError(f"files[{name!r}] must have bytes and sha256, and nothing else")
        _require([(f"files[{name!r}].bytes", record["bytes"])], _COUNT)
        _require([(f"files[{name!r}].sha256", record["sha256"])], _DIGEST)


def is_plain_name(name: Any) -> bool:
    """Whether ``name`` is a plain file name, which cannot lead out of its folder."""
    return (
        isinstance(name, str)
        and re.fullmatch(r"[\w.+\-]{1,255}", name, re.ASCII) is not None
        and name.strip(".") != ""
    )


def _present(where: str, values: dict[str, Any], names: Iterable[str]) -> list[tuple[str, Any]]:
    return [(f"{where}.{name}", values[name]) for name in names if name in values]


def _members(where: str, values: dict[str, Any]) -> list[tuple[str, Any]]:
    return _present(where, values, values)


def _require(values: Iterable[tuple[str, Any]], rule: Rule) -> None:
    holds, words = rule
    for name, value in values:
        if not holds(value):
            shown = repr(value)
            raise ValueError(
                f"{name} is {shown if len(shown) < 60 else shown[:57] + '...'}, and must be {words}"
            )
