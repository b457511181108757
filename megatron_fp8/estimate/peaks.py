"""Peak rates of devices, from vendors' data sheets.

devices.yaml has their figures, and says of each whether it was read, is quoted, or is assumed.
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
"""Between what each figure lies on any machine, wide enough for a CPU: what is outside was given in another unit."""

KEYS = {key.partition(".")[0] for key in _BOUNDS} | {"source", "generation", "figures", "measured", "base"}
_LINKS = ("link_gbs", "network_gbs")


@dataclass(frozen=True)
class Device:
    """Peaks of one GPU, per second; bytes and operations.

    Attributes:
        name: as it was asked for.
        source: where the figures are from.
        measured: whether the rates of multiplication were measured.
        bf16, fp8: operations of dense GEMMs.
        memory: bytes that it has.
        bandwidth, link, network: bytes; of its memory, to the GPUs of its node and between nodes, in one direction.
            The last two are 0 where they are not known.
        node: GPUs of a node.
        casts: bytes that casts read and write; its memory's unless it was measured.
        generation: its column in the support matrix of `megatron-fp8 doctor`; None: not known.
        figures: how each figure of devices.yaml is known: 'read: ...', 'quoted: ...' or 'assumed: ...'.
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
        """Bytes a second between ``ranks`` GPUs, of which neighbours are ``apart`` ranks from each other.

        ValueError: that link is not known.
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
    """Devices known by name."""
    return list(table())


@functools.cache
def table() -> Mapping[str, Any]:
    """devices.yaml, which is read once."""
    text = resources.files(__package__).joinpath("devices.yaml").read_bytes()
    return MappingProxyType(load_yaml(text))


def made(name: str, content: Mapping[str, Any], where: str, *, links: bool = True) -> Device:
    """A device of figures with devices.yaml's names.

    Args:
        where: for messages.
        links: its links have to be there; False: None is a link that is not known.

    Raises:
        ValueError: a key is unknown, or a figure is no number of its unit.
    """
    _check_keys(content, KEYS, where)
    rates = content.get("tflops")
    if not isinstance(rates, dict):
        raise ValueError(f"{where}: tflops must be {{bf16: NUMBER, fp8: NUMBER}}, and is {rates!r}.")
    _check_keys(rates, {"bf16", "fp8"}, f"{where}: tflops")
    given = {**content, **{f"tflops.{key}": rate for key, rate in rates.items()}}
    number: dict[str, Any] = {}
    for key in _BOUNDS:
        value = given.get(key)
        missing = value is None and key in _LINKS and not links
        number[key] = 0 if missing else _figure(key, value, where)
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
    """Figures of a file, and those that it does not have from its `base`, a device known by name.

    Raises:
        ValueError: there is no such device.
    """
    base = content["base"]
    known = table()
    if not isinstance(base, str) or base.lower() not in known:
        raise ValueError(
            f"{where}: base={base!r} must be one of {', '.join(known)}.{_near(str(base), known)}"
        )
    whole = known[base.lower()]
    own = {key: value for key, value in content.items() if key != "base"}
    if isinstance(rates := own.get("tflops"), dict):
        own["tflops"] = {**whole["tflops"], **rates}
    figures = {key: how for key, how in whole["figures"].items() if key not in own}
    source = f"{own.get('source', name)}, the rest from {whole['source']}"
    return {**whole, "figures": figures, **own, "source": source}


def near_miss(content: Mapping[str, Any], names: Iterable[str], where: str) -> None:
    """ValueError for a key that is nearly one of the names: of a file whose other keys are somebody else's."""
    known = set(names)
    for key in content:
        if key not in known and (near := difflib.get_close_matches(str(key), known, n=1, cutoff=0.8)):
            raise ValueError(f"{where}: {key} is not a known key. Did you mean {near[0]}?")


def _check_keys(content: Mapping[str, Any], known: set[str], where: str) -> None:
    for key in content:
        if key not in known:
            hint = _near(str(key), known) or f" Known are {', '.join(sorted(known))}."
            raise ValueError(f"{where}: {key} is not a known key.{hint}")


def _near(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name.lower(), list(known), n=1)
    return f" Did you mean {near[0]}?" if near else ""


def _figure(key: str, value: Any, where: str) -> float:
    low, high, unit = _BOUNDS[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        hint = ""
        if isinstance(value, str) and re.fullmatch(r"[\d.]+[eE][+-]?\d+", value.strip()):
            hint = f" YAML reads {value} as text: write it without an exponent (1000), or as 1.0e+3."
        raise ValueError(f"{where}: {key} must be a number above 0, and is {value!r}.{hint}")
    if not low <= value <= high or (key == "node" and value != int(value)):
        raise ValueError(f"{where}: {key}={value:g} must be from {low:g} to {high:g}, in {unit}.")
    return value
