"""The device of `--device`: a known name, a file, or results of `megatron-fp8 bench`.

devices.yaml has the peaks of vendors' data sheets, and marks each as read, quoted or assumed.

Of a benchmark, rows of single GEMMs give the GEMM rates; rows of quantization give the memory bandwidth (of
the reference copy) and the rate of casts. Each is the best value reached. FP8 rates are those of the run's
recipe, so emulated FP8 is counted as slow. Values that a benchmark does not measure come from `base`, a known
device. A file with `memory_gb` (bench writes it) and rows of both kinds needs no base; its links are unknown
unless they were added to the file.

Rejected: rates by shape. Such a roofline is a table of times and does not cover unmeasured shapes. Instead,
the error of one best rate is reported (calibration.yaml).
"""

from __future__ import annotations

import difflib
import functools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..files.atomic_io import in_words, read_ordinary
from ..files.strict_yaml import load_yaml
from .fp8_weights import reads
from .model import Model, recipe_of

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


_BOUNDS = {
    "tflops.bf16": (1e-4, 1e6, "10^12 operations a second"),
    "tflops.fp8": (1e-4, 1e6, "10^12 operations a second"),
    "memory_gb": (1e-3, 1e5, "10^9 bytes"),
    "bandwidth_gbs": (1e-3, 1e6, "10^9 bytes a second"),
    "link_gbs": (1e-3, 1e5, "10^9 bytes a second"),
    "network_gbs": (1e-3, 1e5, "10^9 bytes a second"),
    "node": (1, 1e6, "a whole number of GPUs"),
}
"""Plausible limits for each value on any machine, CPUs included; values outside have a wrong unit."""

KEYS = {key.partition(".")[0] for key in _BOUNDS} | {"source", "generation", "figures", "measured", "base"}
_LINKS = ("link_gbs", "network_gbs")


@dataclass(frozen=True)
class Device:
    """Peaks of one GPU; operations and bytes per second.

    Attributes:
        name: as the user wrote it.
        source: where the values come from.
        measured: whether GEMM rates were measured.
        bf16, fp8: operations per second of dense GEMMs.
        memory: bytes.
        bandwidth, link, network: bytes per second of its memory, to GPUs of its node, and between nodes, in
            one direction. link and network are 0 if unknown.
        node: GPUs per node.
        casts: bytes per second that casts read and write; the memory bandwidth unless measured.
        generation: its column in the support matrix of `megatron-fp8 doctor`; None: unknown.
        figures: the source of each value in devices.yaml: 'read: ...', 'quoted: ...' or 'assumed: ...'.
    """

    name: str
    source: str
    measured: bool
    bf16: float
    fp8: float
    memory: int
    bandwidth: float
    link: float
    network: float
    node: int
    casts: float
    generation: str | None = None
    figures: Mapping[str, str] = field(default_factory=dict)

    def between(self, ranks: int, apart: int) -> float:
        """Bytes per second between ``ranks`` GPUs whose neighbours are ``apart`` ranks apart.

        Raises ValueError: the link's rate is unknown.
        """
        near = ranks * apart <= self.node
        found = self.link if near else self.network
        if not found:
            raise ValueError(
                f"--device={self.name} has no {'link_gbs' if near else 'network_gbs'}, and ranks of this layout send to"
                " each other: add the line to the file, in 10^9 bytes a second, or estimate one rank."
            )
        return found


def names() -> list[str]:
    """Names of the known devices."""
    return list(table())


@functools.cache
def table() -> Mapping[str, Any]:
    """devices.yaml, cached."""
    text = resources.files(__package__).joinpath("devices.yaml").read_bytes()
    return MappingProxyType(load_yaml(text))


def made(name: str, content: Mapping[str, Any], where: str, *, links: bool = True) -> Device:
    """Builds a device from values with devices.yaml's keys.

    Args:
        where: prefix of error messages.
        links: whether link rates are required; False: None means unknown.

    Raises:
        ValueError: an unknown key, or a value out of range.
    """
    _check_keys(content, KEYS, where)
    rates = content.get("tflops")
    if not isinstance(rates, dict):
        raise ValueError(f"{where}: tflops must be {{bf16: NUMBER, fp8: NUMBER}}, and is {rates!r}.")
    _check_keys(rates, {"bf16", "fp8"}, f"{where}: tflops")
    values = {**content, **{f"tflops.{key}": rate for key, rate in rates.items()}}
    number: dict[str, Any] = {}
    for key in _BOUNDS:
        value = values.get(key)
        missing = value is None and key in _LINKS and not links
        number[key] = 0 if missing else _checked_value(key, value, where)
    generation = content.get("generation")
    return Device(
        name=name,
        source=str(content.get("source", name)),
        measured=bool(content.get("measured", False)),
        bf16=number["tflops.bf16"] * 1e12,
        fp8=number["tflops.fp8"] * 1e12,
        memory=int(number["memory_gb"] * 1e9),
        bandwidth=number["bandwidth_gbs"] * 1e9,
        link=number["link_gbs"] * 1e9,
        network=number["network_gbs"] * 1e9,
        node=int(number["node"]),
        casts=number["bandwidth_gbs"] * 1e9,
        generation=None if generation is None else str(generation),
        figures=dict(content.get("figures") or {}),
    )


def with_base(name: str, content: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A file's values, completed from its `base`, a known device.

    Raises:
        ValueError: there is no such device.
    """
    base = content["base"]
    known = table()
    if not isinstance(base, str) or base.lower() not in known:
        raise ValueError(
            f"{where}: base={base!r} must be one of {', '.join(known)}.{_suggestion(str(base), known)}"
        )
    base_values = known[base.lower()]
    own_values = {key: value for key, value in content.items() if key != "base"}
    if isinstance(rates := own_values.get("tflops"), dict):
        own_values["tflops"] = {**base_values["tflops"], **rates}
    figures = {key: how for key, how in base_values["figures"].items() if key not in own_values}
    source = f"{own_values.get('source', name)}, the rest from {base_values['source']}"
    return {**base_values, "figures": figures, **own_values, "source": source}


def near_miss(content: Mapping[str, Any], names: Iterable[str], where: str) -> None:
    """Raises ValueError for a key similar to one of the names, in a file that may have unrelated keys too."""
    known = set(names)
    for key in content:
        if key not in known and (near := difflib.get_close_matches(str(key), known, n=1, cutoff=0.8)):
            raise ValueError(f"{where}: {key} is not a known key. Did you mean {near[0]}?")


def _check_keys(content: Mapping[str, Any], known: set[str], where: str) -> None:
    for key in content:
        if key not in known:
            hint = _suggestion(str(key), known) or f" Known are {', '.join(sorted(known))}."
            raise ValueError(f"{where}: {key} is not a known key.{hint}")


def _suggestion(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name.lower(), list(known), n=1)
    return f" Did you mean {near[0]}?" if near else ""


def _checked_value(key: str, value: Any, where: str) -> float:
    low, high, unit = _BOUNDS[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        hint = ""
        if isinstance(value, str) and re.fullmatch(r"[\d.]+[eE][+-]?\d+", value.strip()):
            hint = f" YAML reads {value} as text: write it without an exponent (1000), or as 1.0e+3."
        raise ValueError(f"{where}: {key} must be a number above 0, and is {value!r}.{hint}")
    if not low <= value <= high or (key == "node" and value != int(value)):
        raise ValueError(f"{where}: {key}={value:g} must be from {low:g} to {high:g}, in {unit}.")
    return value


_ADDED = ("memory_gb", "link_gbs", "network_gbs", "node", "generation")
_SIZE = 2  # bytes of a BF16 value


def from_bench(name: str, content: Mapping[str, Any], model: Model | None) -> Device:
    """The device from a benchmark's file.

    Args:
        name: file name, for messages.
        content: its parsed content.
        model: selects FP8 rates of its recipe; None or a BF16 model: the best of all recipes.

    Raises:
        ValueError: rows are missing or not bench's, or the file lacks values and there is no base.
    """
    try:
        gemms, casts = (
            [row for row in content["rows"] if row.get("section", "linear") == section]
            for section in ("gemm", "quantise")
        )
        return _from_rows(name, content, gemms, casts, model)
    except (KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ValueError(
            f"--device={name} is no result of bench ({error!r} in its rows): give a file of `megatron-fp8 bench --out`."
        ) from error


def _from_rows(
    name: str,
    content: Mapping[str, Any],
    gemms: list[dict[str, Any]],
    casts: list[dict[str, Any]],
    model: Model | None,
) -> Device:
    if not gemms:
        raise ValueError(
            f"--device={name} has no rows of single GEMMs: run `megatron-fp8 bench --only quantise,gemm --out FILE`."
        )
    near_miss(content, KEYS, f"--device={name}")
    base = _base(name, content, alone=bool(casts) and "memory_gb" in content)
    rates: dict[str, Any] = {}
    if casts:
        rates["bandwidth"] = max(2 * _SIZE * _values(row) / _seconds(row, "bf16") for row in casts)
    if model is not None and model.fp8:
        recipe = str(model.fp8_recipe)
        gemms, casts = _of_recipe(name, gemms, recipe), [row for row in casts if row["contender"] == recipe]
        rule = recipe_of(model)(None).rule("input")
        if casts and rule is not None:  # bytes of a two-direction cast, as in the roofline
            bytes_per_value = _SIZE * reads(rule) + 2
            rates["casts"] = max(bytes_per_value * _values(row) / _seconds(row, "fp8") for row in casts)
    rates["bf16"] = max(_operations(row) / _seconds(row, "bf16") for row in gemms)
    rates["fp8"] = max(_operations(row) / _seconds(row, "fp8") for row in gemms)
    what = "GEMMs, casts and copies" if "bandwidth" in rates else "GEMMs"
    source = f"{what} measured on {content.get('device')} ({name})"
    if base is None:
        figures = {
            "tflops": {key: rates[key] / 1e12 for key in ("bf16", "fp8")},
            "bandwidth_gbs": rates["bandwidth"] / 1e9,
            "node": 1,
            **{key: content[key] for key in _ADDED if key in content},
        }
        found = made(name, figures, f"--device={name}", links=False)
    else:
        extra = {key: content[key] for key in _ADDED if key in content and key != "memory_gb"}
        found = made(base, with_base(name, {"base": base, **extra}, f"--device={name}"), f"--device={name}")
        source += f", the rest from {table()[base]['source']}"
    known = {key: text for key, text in found.figures.items() if key not in ("tflops", "bandwidth_gbs")}
    rates.setdefault("casts", rates.get("bandwidth", found.bandwidth))
    return replace(found, name=name, source=source, measured=True, figures=known, **rates)


def _base(name: str, content: Mapping[str, Any], *, alone: bool) -> str | None:
    """The device that supplies missing values: named in the file, or matched by the measured device's name."""
    known = table()
    if "base" in content:
        with_base(name, {"base": content["base"]}, f"--device={name}")
        return str(content["base"]).lower()
    label = str(content.get("device", "")).lower().replace(" ", "-")
    found = [key for key in known if all(part in label for part in key.split("-"))]
    if found:
        return max(found, key=len)
    if alone:
        return None
    raise ValueError(
        f"--device={name} was measured on {content.get('device')!r}, of which no memory and links are known: add"
        f" `base: NAME` to it, with one of {', '.join(known)}; or measure casts and copies too (`megatron-fp8 bench"
        " --only quantise,gemm --out FILE`)."
    )


def _of_recipe(name: str, rows: list[dict[str, Any]], recipe: str) -> list[dict[str, Any]]:
    found = [row for row in rows if row.get("contender", recipe) == recipe]
    if not found:
        measured = ", ".join(dict.fromkeys(str(row["contender"]) for row in rows))
        raise ValueError(
            f"--device={name} has GEMMs of {measured}, and the run is in {recipe}: run `megatron-fp8 bench --recipe"
            f" {recipe} --only quantise,gemm --out FILE`."
        )
    return found


def _operations(row: Mapping[str, Any]) -> int:
    count: int = 2 * row["k"] * row["n"] * row["tokens"]
    return count


def _values(row: Mapping[str, Any]) -> int:
    """Elements of the input that is cast or copied."""
    count: int = row["k"] * row["tokens"]
    return count


def _seconds(row: Mapping[str, Any], which: str) -> float:
    found: float = row[f"{which}_ms"] * 1e-3
    return found
