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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..files.atomic_io import error_text, read_regular
from ..files.strict_yaml import load_yaml
from ..fp8_utils import quantizes, recipe_name_of
from .fp8_weights import reads
from .model import Model, recipe_of

_LARGEST = 1 << 24


@dataclass(frozen=True)
class Device:
    """Peaks of one GPU; operations and bytes per second.

    Attributes:
        name: as the user wrote it.
        source: where the values come from.
        measured: whether GEMM rates were measured.
        bf16, fp8, fp4: operations per second of dense GEMMs; fp4 is None if no peak is known.
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
    fp4: float | None = None

    def rate(self, precision: str) -> float:
        """Operations per second of GEMMs in 'bf16', 'fp8' or 'fp4'; without a peak of FP4, FP8's."""
        if precision == "bf16":
            return self.bf16
        return self.fp8 if precision == "fp8" or self.fp4 is None else self.fp4

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


def device(name: str, model: Model | None = None) -> Device:
    """The device from a known name (any case) or a YAML or JSON file with the fields of devices.yaml or
    bench's rows.

    Args:
        model: selects measured rates of its recipe.

    Raises:
        ValueError: neither a name nor such a file, or a value is not a positive number.
    """
    known, where = table(), f"--device={name}"
    if (small := name.lower()) in known:
        return _build(small, known[small], where)
    path = Path(name)
    if not name or not path.exists():
        raise ValueError(
            f"--device={name or repr(name)} is neither one of {', '.join(known)} nor a file: give a name, or a file as"
            f" docs/estimates.md has it.{_did_you_mean(name, known)}"
        )
    try:
        content = load_yaml(read_regular(path, _LARGEST))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{where} cannot be read ({error_text(error)}): give another file, or a device's name."
        ) from error
    if not isinstance(content, dict):
        raise ValueError(f"{where} holds no figures: see docs/estimates.md.")
    return _from_bench(name, content, model) if "rows" in content else _from_file(name, content)


@functools.cache
def table() -> Mapping[str, Any]:
    """devices.yaml, cached: name -> values."""
    text = resources.files(__package__).joinpath("devices.yaml").read_bytes()
    return MappingProxyType(load_yaml(text))


_BOUNDS = {
    "tflops.bf16": (1e-4, 1e6, "10^12 operations a second"),
    "tflops.fp8": (1e-4, 1e6, "10^12 operations a second"),
    "tflops.fp4": (1e-4, 1e6, "10^12 operations a second"),
    "memory_gb": (1e-3, 1e5, "10^9 bytes"),
    "bandwidth_gbs": (1e-3, 1e6, "10^9 bytes a second"),
    "link_gbs": (1e-3, 1e5, "10^9 bytes a second"),
    "network_gbs": (1e-3, 1e5, "10^9 bytes a second"),
    "node": (1, 1e6, "a whole number of GPUs"),
}
"""Plausible limits for each value on any machine, CPUs included; values outside have a wrong unit."""

_KEYS = {key.partition(".")[0] for key in _BOUNDS} | {"source", "generation", "figures", "measured", "base"}
_LINKS = ("link_gbs", "network_gbs")


def _build(name: str, content: Mapping[str, Any], where: str, *, links: bool = True) -> Device:
    """Builds a device from values with devices.yaml's keys.

    Args:
        where: prefix of error messages.
        links: whether link rates are required; False: missing ones are unknown.

    Raises:
        ValueError: an unknown key, or a value out of range.
    """
    rates = content.get("tflops")
    if not isinstance(rates, dict):
        raise ValueError(f"{where}: tflops must be {{bf16: NUMBER, fp8: NUMBER}}, and is {rates!r}.")
    values = {**content, **{f"tflops.{key}": rate for key, rate in rates.items()}}
    for key in values:
        if key not in _KEYS | set(_BOUNDS):
            raise ValueError(f"{where}: {key} is not a known key.{_did_you_mean(key, _KEYS)}")
    absent = ("tflops.fp4", *(() if links else _LINKS))
    number = {
        key: 0 if values.get(key) is None and key in absent else _check_value(key, values, where)
        for key in _BOUNDS
    }
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
        fp4=number["tflops.fp4"] * 1e12 or None,
    )


def _check_value(key: str, values: Mapping[str, Any], where: str) -> float:
    """The value as a number within its limits. YAML reads 1e3 as text."""
    low, high, unit = _BOUNDS[key]
    given = values.get(key)
    try:
        value = math.nan if isinstance(given, bool) else float(given or "")
    except (TypeError, ValueError):
        value = math.nan
    if not low <= value <= high or (key == "node" and value != int(value)):
        raise ValueError(f"{where}: {key}={given!r} must be from {low:g} to {high:g}, in {unit}.")
    return value


def _from_file(name: str, content: Mapping[str, Any]) -> Device:
    """The device of a file; values that it lacks are those of its `base`, a known device."""
    where = f"--device={name}"
    if "base" not in content:
        return _build(name, content, where)
    base = table()[_known_base(content["base"], where)]
    own = {key: value for key, value in content.items() if key != "base"}
    if isinstance(rates := own.get("tflops"), dict):
        own["tflops"] = {**base["tflops"], **rates}
    figures = {key: how for key, how in base["figures"].items() if key not in own}
    source = f"{own.get('source', name)}, the rest from {base['source']}"
    return _build(name, {**base, "figures": figures, **own, "source": source}, where)


def _known_base(base: Any, where: str) -> str:
    known = table()
    if not isinstance(base, str) or base.lower() not in known:
        raise ValueError(
            f"{where}: base={base!r} must be one of {', '.join(known)}.{_did_you_mean(str(base), known)}"
        )
    return base.lower()


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(str(name).lower(), list(known), n=1)
    return f" Did you mean {near[0]}?" if near else ""


_ADDED = (*_LINKS, "node", "generation")
"""Values that a user may add to a benchmark's file."""
_SIZE = 2  # bytes of a BF16 value


def _from_bench(name: str, content: Mapping[str, Any], model: Model | None) -> Device:
    """The device from a benchmark's file.

    Args:
        name: file name, for messages.
        content: its parsed content.
        model: selects FP8 rates of its recipe; None or a BF16 model: the best of all recipes.

    Raises:
        ValueError: rows are missing or not bench's, or the file lacks values and there is no base.
    """
    try:
        return _from_rows(name, content, model)
    except (KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ValueError(
            f"--device={name} is no result of bench ({error!r} in its rows): give a file of `megatron-fp8 bench --out`."
        ) from error


def _from_rows(name: str, content: Mapping[str, Any], model: Model | None) -> Device:
    where, rates = f"--device={name}", dict[str, Any]()
    gemms, casts = (
        [row for row in content["rows"] if row.get("section", "linear") == section]
        for section in ("gemm", "quantise")
    )
    base = _base(name, content, complete=bool(casts) and "memory_gb" in content)
    if casts:
        rates["bandwidth"] = max(2 * _SIZE * _values(row) / _seconds(row, "bf16") for row in casts)
    recipe = None
    if model is not None and quantizes(model):
        recipe = recipe_name_of(model)
        gemms, casts = ([row for row in rows if row["contender"] == recipe] for rows in (gemms, casts))
        rule = recipe_of(model)(None).rule("input")
        if casts and rule is not None:  # bytes of a two-direction cast, as in the roofline
            bytes_per_value = _SIZE * reads(rule) + 2
            rates["casts"] = max(bytes_per_value * _values(row) / _seconds(row, "fp8") for row in casts)
    if not gemms:
        option = f" --recipe {recipe}" if recipe else ""
        raise ValueError(
            f"{where} has no GEMMs of {recipe or 'any recipe'}: run `megatron-fp8 bench{option} --only"
            " quantise,gemm --out FILE`."
        )
    for key in ("bf16", "fp8"):
        rates[key] = max(2 * row["k"] * row["n"] * row["tokens"] / _seconds(row, key) for row in gemms)
    if recipe == "nvfp4":
        rates["fp4"] = rates["fp8"]
    for key in content:  # a benchmark writes others too
        if key not in _KEYS and difflib.get_close_matches(str(key), _ADDED, cutoff=0.8):
            raise ValueError(f"{where}: {key} is not a known key.{_did_you_mean(key, _ADDED)}")
    own = {key: content[key] for key in _ADDED if key in content}
    source = f"rates measured on {content.get('device')} ({name})"
    if base is None:
        tflops = {key: rates[key] / 1e12 for key in ("bf16", "fp8")}
        own = {"node": 1, "memory_gb": content["memory_gb"], **own}
        found = _build(
            name, {"tflops": tflops, "bandwidth_gbs": rates["bandwidth"] / 1e9, **own}, where, links=False
        )
    else:
        found = _from_file(name, {"base": base, **own})
        source += f", the rest from {table()[base]['source']}"
    figures = {key: how for key, how in found.figures.items() if key not in ("tflops", "bandwidth_gbs")}
    rates.setdefault("casts", rates.get("bandwidth", found.bandwidth))
    return replace(found, name=name, source=source, measured=True, figures=figures, **rates)


def _base(name: str, content: Mapping[str, Any], *, complete: bool) -> str | None:
    """The known device that supplies missing values: named in the file, or matched by the measured device's name. None
    if the file is complete."""
    known = table()
    if "base" in content:
        return _known_base(content["base"], f"--device={name}")
    label = str(content.get("device", "")).lower().replace(" ", "-")
    found = [key for key in known if all(part in label for part in key.split("-"))]
    if not found and not complete:
        raise ValueError(
            f"--device={name} was measured on {content.get('device')!r}, of which no memory and links are known: add"
            f" `base: NAME` to it, with one of {', '.join(known)}; or measure casts and copies too (`megatron-fp8 bench"
            " --only quantise,gemm --out FILE`)."
        )
    return max(found, key=len, default=None)


def _values(row: Mapping[str, Any]) -> int:
    """Elements of the input that is cast or copied."""
    count: int = row["k"] * row["tokens"]
    return count


def _seconds(row: Mapping[str, Any], which: str) -> float:
    found: float = row[f"{which}_ms"] * 1e-3
    return found
