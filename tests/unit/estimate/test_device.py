"""Devices by name, from a file, and from what a benchmark wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_fp8.estimate.device import device, table


def test_devices_by_name_say_where_their_figures_are_from() -> None:
    assert list(table()) == ["h100", "h100-pcie", "h200", "b200", "mi300x"]
    for name in list(table()):
        found = device(name)
        assert "data sheet" in found.source and not found.measured
        assert found.fp8 == pytest.approx(2 * found.bf16, rel=1e-3)
        assert found.fp4 == (9e15 if name == "b200" else None)  # 18 PFLOPS with sparsity, 1,000 W
        assert found.casts == found.bandwidth
        entry = table()[name]
        assert entry["figures"].keys() == entry.keys() - {"source", "generation", "figures"}
        for how in entry["figures"].values():
            assert how.partition(": ")[0] in ("read", "quoted", "assumed") and how.partition(": ")[2]
        # No data sheet of a GPU says what network a cluster has.
        assert found.figures["network_gbs"].startswith("assumed")


def test_a_file_of_figures(tmp_path: Path) -> None:
    path = tmp_path / "ours.yaml"
    path.write_text(
        "{source: ours, tflops: {bf16: 700, fp8: 1200}, memory_gb: 80, bandwidth_gbs: 3000, link_gbs: 350,"
        " network_gbs: 40, node: 4}"
    )
    found = device(str(path))
    assert (found.bf16, found.memory, found.source) == (7e14, 80_000_000_000, "ours")
    assert found.between(2, 2) == found.link and found.between(2, 4) == found.network
    path.write_text(path.read_text().replace("fp8: 1200", "fp8: -1"))
    with pytest.raises(ValueError, match=r"tflops\.fp8=-1 must be from"):
        device(str(path))


def test_what_is_neither_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot be read \(Is a directory\): give another"):
        device(str(tmp_path))
    with pytest.raises(ValueError, match="neither one of h100, h100-pcie, h200, b200, mi300x nor a file"):
        device("h1000")


OURS = {
    "tflops": {"bf16": 700, "fp8": 1200}, "memory_gb": 80, "bandwidth_gbs": 3000, "link_gbs": 350, "network_gbs": 40,
    "node": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    "change, words",
    [
        ({"bandwith_gbs": 3000}, "bandwith_gbs is not a known key. Did you mean bandwidth_gbs?"),
        ({"tflops": {"bf16": 700, "fp8": 1200, "fp6": 1}}, "tflops.fp6 is not a known key"),
        ({"memory_gb": 8e10}, "memory_gb=80000000000.0 must be from 0.001 to 100000, in 10.9 bytes"),
        ({"memory_gb": True}, "memory_gb=True must be from"),
        ({"base": "h10"}, "base='h10' must be one of h100.* Did you mean h100?"),
    ],
)
def test_a_slip_in_a_file_is_refused(tmp_path: Path, change: dict[str, object], words: str) -> None:
    path = tmp_path / "ours.yaml"
    path.write_text(json.dumps({**OURS, **change}))
    with pytest.raises(ValueError, match=words):
        device(str(path))


def test_a_file_may_say_what_differs_from_a_device_known_by_name(tmp_path: Path) -> None:
    path = tmp_path / "ours.yaml"
    path.write_text("{base: H100, network_gbs: 12, tflops: {fp8: 1.2e3}}")  # text to YAML
    found, h100 = device(str(path)), device("h100")
    assert (found.network, found.fp8, found.bf16, found.link) == (12e9, 1.2e15, h100.bf16, h100.link)
    assert found.generation == "sm90" and "the rest from NVIDIA H100" in found.source
    assert "network_gbs" not in found.figures and "link_gbs" in found.figures
