"""The device of `--device`: a known name, a file, or results of `megatron-fp8 bench`."""

from __future__ import annotations

import difflib
from pathlib import Path

from ..files.atomic_io import in_words, read_ordinary
from ..files.strict_yaml import load_yaml
from .bench_peaks import from_bench
from .model import Model
from .peaks import Device, made, table, with_base

_LARGEST = 1 << 24


def device(name: str, model: Model | None = None) -> Device:
    """The device from a known name (any case) or a YAML or JSON file with the fields of devices.yaml or
    bench's rows.

    Args:
        model: selects measured rates of its recipe.

    Raises:
        ValueError: neither a name nor such a file, or a value is not a positive number.
    """
    known = table()
    if (small := name.lower()) in known:
        return made(small, known[small], f"--device={name}")
    path = Path(name)
    if not name or not path.exists():
        near = difflib.get_close_matches(small, known, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ValueError(
            f"--device={name or repr(name)} is neither one of {', '.join(known)} nor a file: give a name, or a file as"
            f" docs/estimates.md has it.{hint}"
        )
    try:
        content = load_yaml(read_ordinary(path, _LARGEST))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--device={name} cannot be read ({in_words(error)}): give another file, or a device's name."
        ) from error
    if not isinstance(content, dict):
        raise ValueError(f"--device={name} holds no figures: see docs/estimates.md.")
    if "rows" in content:
        return from_bench(name, content, model)
    where = f"--device={name}"
    return made(name, with_base(name, content, where) if "base" in content else content, where)
