"""Peak rates of devices, from vendors' data sheets.

devices.yaml has the values, and marks each as read, quoted or assumed.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from types import MappingProxyType
from typing import Any

from ..files.strict_yaml import load_yaml

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
