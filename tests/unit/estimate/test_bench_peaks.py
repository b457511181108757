"""A device of what `megatron-fp8 bench` wrote: measured rates in place of a data sheet's, or a machine of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_fp8.estimate.config_reader import read
from megatron_fp8.estimate.device import device
from megatron_fp8.estimate.estimate import estimate
from megatron_fp8.estimate.fp8_weights import reads
from megatron_fp8.estimate.model import recipe_of

ONE = ["--config=tiny_gpt_cpu", "--model.tensor_model_parallel_size=1", "--model.sequence_parallel=false"]
SHAPE = {"k": 1000, "n": 1000, "tokens": 1000}


def row(section: str, contender: str, bf16: float, fp8: float) -> dict[str, Any]:
    return {"section": section, **SHAPE, "contender": contender, "bf16_ms": bf16, "fp8_ms": fp8}


CPU = {
    "device": "some processor",
    "memory_gb": 16,
    "rows": [
        row("gemm", "tensorwise", 4.0, 5.0),
        row("gemm", "mxfp8", 5.0, 10.0),
        row("quantise", "tensorwise", 1.0, 2.0),
        row("quantise", "mxfp8", 2.0, 4.0),
    ],
}


def written(folder: Path, content: Any) -> str:
    path = folder / "bench.json"
    path.write_text(json.dumps(content))
    return str(path)


def test_rates_that_a_benchmark_found_replace_the_data_sheets(tmp_path: Path) -> None:
    rows = [row("gemm", "tensorwise", 4.0, 2.5), row("gemm", "tensorwise", 8.0, 2.5)]
    found = device(written(tmp_path, {"device": "NVIDIA H100 80GB HBM3", "rows": rows}))
    assert found.measured and found.bf16 == pytest.approx(5e11) and found.fp8 == pytest.approx(8e11)
    assert (found.memory, found.bandwidth) == (device("h100").memory, device("h100").bandwidth)
    assert "tflops" not in found.figures and found.figures["network_gbs"].startswith("assumed")
    card = device(written(tmp_path, {"device": "NVIDIA H100 PCIe", "rows": rows}))
    assert card.link == device("h100-pcie").link


def test_a_benchmark_of_nvfp4_gives_the_rate_of_fp4(tmp_path: Path) -> None:
    path = written(tmp_path, {"device": "NVIDIA B200", "rows": [row("gemm", "nvfp4", 4.0, 2.0)]})
    found = device(path, read([*ONE, "--model.fp8=null", "--model.fp4=e2m1"], gpus=1).model)
    assert found.fp4 == pytest.approx(1e12)
    rows = [row("gemm", "tensorwise", 4.0, 2.0)]
    found = device(written(tmp_path, {"device": "NVIDIA B200", "rows": rows}))
    assert found.fp4 == device("b200").fp4, "not measured: the data sheet's"


def test_a_machine_of_no_name_is_what_was_measured_of_it(tmp_path: Path) -> None:
    path = written(tmp_path, CPU)
    settings = read([*ONE, "--model.fp8_format=mxfp8"], gpus=1)
    found = device(path, settings.model)
    assert found.memory == 16_000_000_000
    assert found.bf16 == pytest.approx(2e9 / 5e-3) and found.fp8 == pytest.approx(2e9 / 10e-3), (
        "of its recipe"
    )
    assert found.bandwidth == pytest.approx(4e6 / 1e-3), "a copy reads and writes two bytes a value"
    rule = recipe_of(settings.model)(None).rule("input")
    assert rule is not None
    assert found.casts == pytest.approx((2 * reads(rule) + 2) * 1e6 / 4e-3)
    assert estimate(settings, found, has_device=False).time.seconds > 0


def test_ranks_need_a_link(tmp_path: Path) -> None:
    settings = read(["--config=tiny_gpt_cpu"], gpus=2)
    found = device(written(tmp_path, CPU), settings.model)
    with pytest.raises(ValueError, match="has no network_gbs"):
        estimate(settings, found)
    linked = device(written(tmp_path, {**CPU, "link_gbs": 2, "node": 2}), settings.model)
    assert estimate(settings, linked).time.stage.exchange > 0


@pytest.mark.parametrize(
    "change, words",
    [
        ({"rows": CPU["rows"][:2]}, "add `base: NAME`"),
        ({"rows": [{**one, "contender": "rowwise"} for one in CPU["rows"]]}, "--recipe tensorwise"),
        ({"rows": 3}, "is no result of bench"),
        ({"network_gb": 3}, "network_gb is not a known key. Did you mean network_gbs?"),
    ],
)
def test_a_file_that_is_not_enough_is_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        device(written(tmp_path, {**CPU, **change}), read(ONE, gpus=1).model)
