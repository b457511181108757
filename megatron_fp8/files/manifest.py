"""The manifest of a checkpoint: typed fields and a checksum.

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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .atomic_io import read_regular, refuse_link_out, write_file
from .strict_json import COUNT, Kind, check_shape, is_count, load_json

FORMAT, VERSION = "megatron_fp8 checkpoint", 3
_WITHOUT_CHECKSUM, _LOCAL_EXPERTS = (1,), (1, 2)
MANIFEST = "manifest.json"
LARGEST = 1 << 28
"""Limit in bytes for a manifest: far more than files of 100,000 ranks need."""

_KEYS = ("iteration", "state", "facts", "files")


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
        return with_checksum(
            {"format": FORMAT, "version": VERSION, **{name: getattr(self, name) for name in _KEYS}}
        )

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
    checked = version not in _WITHOUT_CHECKSUM or "sha256" in content
    if checked and content.get("sha256") != checksum(content):
        raise ValueError(_DIFFERS)
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
    if not (is_count(experts) and 1 < ranks <= experts < 1 << 16):
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


def with_checksum(content: dict[str, Any]) -> str:
    """The text of a JSON file with these keys and their checksum."""
    return json.dumps({**content, "sha256": checksum(content)}, indent=1, allow_nan=False) + "\n"


def read_with_checksum(path: Path, largest: int) -> Any:
    """The JSON of a file beside the checkpoints.

    Raises OSError; ValueError if it is a link out of its folder, no JSON, or an object whose checksum differs.
    """
    refuse_link_out(path)
    content = load_json(read_regular(path, largest))
    if isinstance(content, dict) and content.get("sha256") != checksum(content):
        raise ValueError(_DIFFERS)
    return content


_DIFFERS = "its checksum differs: it is not what was written"


# ----------------------------------------------------------------------------------------------------- shape


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_move(value: Any) -> bool:
    texts = isinstance(value, list) and len(value) == 4 and all(isinstance(value[i], str) for i in (0, 1, 3))
    return texts and is_count(value[2])


def _is_row(value: Any) -> bool:
    texts = isinstance(value, list) and len(value) == 3 and all(isinstance(value[i], str) for i in (0, 1))
    return texts and is_count(value[2])


_NUMBERS = ({"*": Kind(_is_number, "a finite number")}, None)
_DIGEST = Kind(
    lambda value: isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None,
    "64 hexadecimal digits",
)
_SHAPE = {
    "iteration": COUNT,
    "state": {
        **dict.fromkeys(
            ("optimizer_step?", "fp8_iteration?", "scheduler_steps?", "consumed_samples?"), COUNT
        ),
        "loss_scaler?": _NUMBERS,
        "guard?": [Kind(_is_move, "a site, what it moved to, an iteration and a reason")],
        "guard_rows?": [Kind(_is_row, "a tensor, its illness and a number of iterations")],
        "liveness?": _NUMBERS,
        "left_out?": [{"first": COUNT, "last": COUNT}],
    },
    "facts": {
        "layout?": {"*": (int, bool, None)},
        "precision?": dict,
        "versions?": {"*": str},
        "run?": {
            **dict.fromkeys(("model?", "optimizer?", "checkpoint?"), dict),
            "train?": {"seq_length?": COUNT, "train_iters?": COUNT},
            "data?": {"tokenizer?": (str, None)},
        },
        "tokenizer?": str,
        "job?": str,
        "data?": [str],
        "accepted?": [{"iteration": COUNT, "name": str, "there": object, "here": object}],
    },
    "files": {"*": {"bytes": COUNT, "sha256": _DIGEST}},
}


def _check(content: dict[str, Any]) -> None:
    """Raise ValueError with the first value that is missing or of a wrong type."""
    check_shape(content, _SHAPE)
    try:
        json.dumps(content, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("it holds text that is no text (half a surrogate pair)") from None
    if any(one["first"] >= one["last"] for one in content["state"].get("left_out", [])):
        raise ValueError("state.left_out has a range that ends before it begins")
    if not content["files"]:
        raise ValueError("'files' is empty: a checkpoint has files")
    for name in content["files"]:
        if not is_plain_name(name):
            raise ValueError(f"{name!r} in 'files' is not the name of a file beside it")


def is_plain_name(name: Any) -> bool:
    """Whether ``name`` is a plain file name, which cannot lead out of its folder."""
    return (
        isinstance(name, str)
        and re.fullmatch(r"[\w.+\-]{1,255}", name, re.ASCII) is not None
        and name.strip(".") != ""
    )
