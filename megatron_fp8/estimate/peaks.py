"""What a roofline asks of a device: its peaks, and the devices known by name, from vendors' data sheets.

devices.yaml has their figures, and says of each whether it was read, is quoted, or is assumed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from ..files.strict_yaml import load_yaml

_NUMBERS = ("memory_gb", "bandwidth_gbs", "link_gbs", "network_gbs", "node")
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


def table() -> dict[str, Any]:
    """devices.yaml."""
    text = resources.files(__package__).joinpath("devices.yaml").read_bytes()
    found: dict[str, Any] = load_yaml(text)
    return found


def made(name: str, content: Mapping[str, Any], where: str, *, links: bool = True) -> Device:
    """A device of figures with devices.yaml's names.

    Args:
        where: for messages.
        links: its links have to be there; False: None is a link that is not known.

    Raises:
        ValueError: a figure is no positive number.
    """
    rates = content.get("tflops")
    if not isinstance(rates, dict):
        raise ValueError(f"{where}: tflops must be {{bf16: NUMBER, fp8: NUMBER}}, and is {rates!r}.")
    found = {
        "bf16": rates.get("bf16"),
        "fp8": rates.get("fp8"),
        **{key: content.get(key) for key in _NUMBERS},
    }
    for key, value in found.items():
        if value is None and key in _LINKS and not links:
            found[key] = 0
        elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ValueError(f"{where}: {key} must be a number above 0, and is {value!r}.")
    number: dict[str, Any] = found
    return Device(
        name=name,
        source=str(content.get("source", name)),
        measured=bool(content.get("measured", False)),
        bf16=number["bf16"] * 1e12,
        fp8=number["fp8"] * 1e12,
        memory=int(number["memory_gb"] * 1e9),
        bandwidth=number["bandwidth_gbs"] * 1e9,
        link=number["link_gbs"] * 1e9,
        network=number["network_gbs"] * 1e9,
        node=int(number["node"]),
        casts=number["bandwidth_gbs"] * 1e9,
        figures=dict(content.get("figures") or {}),
    )
