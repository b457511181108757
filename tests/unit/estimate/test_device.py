"""Devices by name, from a file, and from what a benchmark wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_fp8.estimate.device import device
from megatron_fp8.estimate.peaks import names, table


def test_devices_by_name_say_where_their_figures_are_from() -> None:
    assert names() == ["h100", "h100-pcie", "h200", "b200", "mi300x"]
    for name in names():
        found = device(name)
        assert "data sheet" in found.source and not found.measured
        assert found.fp8 == pytest.approx(2 * found.bf16, rel=1e-3)
        assert found.casts == found.bandwidth


@pytest.mark.parametrize("name", names())
def test_each_figure_says_how_it_is_known(name: str) -> None:
    entry = table()[name]
    figures = entry.keys() - {"source", "figures"}
    assert entry["figures"].keys() == figures
    for how in entry["figures"].values():
        assert how.partition(": ")[0] in ("read", "quoted", "assumed") and how.partition(": ")[2]
    # No data sheet of a GPU says what network a cluster has.
    assert device(name).figures["network_gbs"].startswith("assumed")


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
    with pytest.raises(ValueError, match="fp8 must be a number above 0"):
        device(str(path))


def test_what_is_neither_is_refused() -> None:
    with pytest.raises(ValueError, match="neither one of h100, h100-pcie, h200, b200, mi300x nor a file"):
        device("h1000")
