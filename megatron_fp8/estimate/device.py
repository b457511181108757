"""What a roofline asks of a device: peaks, by name from data sheets, or from a file of the user's.

A file is YAML or JSON. It has the fields of devices.yaml; or it is what `megatron-fp8 bench --out FILE` wrote, and then
gives the rates at which this machine multiplied, in place of a data sheet's; `base` names the device of which the rest
is taken.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from ..files.disk import read_ordinary
from ..files.strict_yaml import load_yaml

_LARGEST = 1 << 24
_NUMBERS = ("memory_gb", "bandwidth_gbs", "link_gbs", "network_gbs", "node")


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
        node: GPUs of a node.
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

    def between(self, ranks: int, apart: int) -> float:
        """Bytes a second between ``ranks`` GPUs, of which neighbours are ``apart`` ranks from each other."""
        return self.link if ranks * apart <= self.node else self.network


def names() -> list[str]:
    """Devices known by name."""
    return list(_table())


def device(name: str) -> Device:
    """The device of a name (in any case) or a file. ValueError: neither, or a figure is no positive number."""
    known = _table()
    if (small := name.lower()) in known:
        return _made(small, known[small], f"--device={name}")
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
        raise ValueError(f"--device={name} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"--device={name} holds no figures: see docs/estimates.md.")
    if "rows" in content:
        return _benched(name, content, known)
    return _made(name, content, f"--device={name}")


def _table() -> dict[str, Any]:
    text = resources.files(__package__).joinpath("devices.yaml").read_bytes()
    table: dict[str, Any] = load_yaml(text)
    return table


def _made(name: str, content: dict[str, Any], where: str) -> Device:
    rates = content.get("tflops")
    if not isinstance(rates, dict):
        raise ValueError(f"{where}: tflops must be {{bf16: NUMBER, fp8: NUMBER}}, and is {rates!r}.")
    found = {
        "bf16": rates.get("bf16"),
        "fp8": rates.get("fp8"),
        **{key: content.get(key) for key in _NUMBERS},
    }
    for key, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
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
    )


def _benched(name: str, content: dict[str, Any], known: dict[str, Any]) -> Device:
    """A data sheet's device with the best rates that a benchmark's GEMMs reached."""
    base = str(content.get("base", ""))
    if base not in known:
        base = next((key for key in known if key in str(content.get("device", "")).lower()), "")
    if not base:
        raise ValueError(
            f"--device={name} was measured on {content.get('device')!r}, of which no memory and links are known: add"
            f" `base: NAME` to it, with one of {', '.join(known)}."
        )
    rows = [row for row in content["rows"] if row.get("section", "linear") == "gemm"]
    if not rows:
        raise ValueError(
            f"--device={name} has no rows of single GEMMs: run `megatron-fp8 bench --only gemm --out FILE`."
        )
    rates = {
        key: max(2 * row["k"] * row["n"] * row["tokens"] / (row[f"{key}_ms"] * 1e-3) for row in rows)
        for key in ("bf16", "fp8")
    }
    made = _made(base, known[base], f"--device={name}")
    source = f"GEMMs measured on {content.get('device')} ({name}), the rest from {made.source}"
    return replace(made, name=name, source=source, measured=True, **rates)
