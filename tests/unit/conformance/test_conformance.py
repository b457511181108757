"""The conformance kit: its golden file, the libraries, and faults that it has to find."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from safetensors.torch import save_file

from benchmarks import conformance as writer
from megatron_fp8.conformance import differences, load
from megatron_fp8.conformance.__main__ import main
from megatron_fp8.conformance.adapters import of_megatron_fp8, of_ml_dtypes, of_torchao
from megatron_fp8.numerics import nvfp4
from megatron_fp8.numerics.cast import cast
from megatron_fp8.numerics.formats import E4M3
from megatron_fp8.numerics.scaling import e8m0_to_scale

CASES = load()


def test_the_file_is_what_the_written_out_rules_give():
    assert writer.RESULT.read_bytes() == writer.golden_file()
    assert len({case.name for case in CASES}) == len(CASES) > 50


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_this_package(case):
    assert differences(case, of_megatron_fp8(case)) == []


def test_torchao_agrees_where_it_has_the_rule_and_nothing_is_special():
    usual = [case for case in CASES if case.name.endswith((", normal", ", odd"))]
    found = [(case, of_torchao(case)) for case in usual]
    compared = [differences(case, tensors) for case, tensors in found if tensors is not None]
    assert len(compared) > 8 and not any(compared)


def test_ml_dtypes_differs_in_nan_alone():
    for case in CASES:
        if (found := of_ml_dtypes(case)) is not None and case.fmt != "e2m1":
            differ = found["codes"] != case.expected["codes"]
            assert bool(case.x[differ].isnan().all())


def mutated(case, fault: str) -> dict[str, torch.Tensor]:
    """A library with one fault."""
    found = dict(of_megatron_fp8(case))
    x = case.x.float()
    if fault == "floor of MX scales":
        amax = x.nan_to_num(0.0, 0.0, 0.0).unflatten(1, (-1, 32)).abs().amax(2)
        exponent = (torch.floor(torch.log2(amax)) - 8 + 127).clamp(0, 254).to(torch.uint8)
        scale = e8m0_to_scale(exponent).repeat_interleave(32, 1)
        return {"codes": cast(x, scale, E4M3), "scale_inv": exponent}
    if fault == "division by 6":
        amax = found["amax"]
        blocks = nvfp4.pad(x).unflatten(1, (-1, 16)).abs().amax(2)
        found["scale_inv"] = cast(blocks / 6 * nvfp4.tensor_scale(amax), None, E4M3)
    elif fault == "nibbles swapped":
        codes = found["codes"].view(torch.uint8)
        found["codes"] = codes << 4 | codes >> 4
    elif fault == "scale for scale_inv":
        found["scale_inv"] = 1 / found["scale_inv"]
    elif fault == "one code":
        codes = found["codes"].view(torch.uint8).clone()
        codes[-1, -1] ^= 1
        found["codes"] = codes
    elif fault == "tiles in another order":
        found["scale_inv"] = found["scale_inv"].view(-1, 512).roll(1, 0).flatten()
    elif fault == "no tiles":
        plain = dataclasses.replace(case, tiled=False)
        found["scale_inv"] = of_megatron_fp8(plain)["scale_inv"].flatten()
    elif fault == "no transform":
        return dict(of_megatron_fp8(dataclasses.replace(case, hadamard=False)))
    return found


@pytest.mark.parametrize(
    "fault, name",
    [
        ("floor of MX scales", "e4m3 1x32 e8m0, normal"),
        ("division by 6", "e2m1 1x16 e4m3, boundaries"),
        ("floor of MX scales", "e4m3 1x32 e8m0, boundaries"),
        ("nibbles swapped", "e2m1 16x16 e4m3, odd"),
        ("scale for scale_inv", "e4m3 tensor fp32, normal"),
        ("one code", "e5m2 1x32 e8m0, special"),
        ("tiles in another order", "e4m3 1x32 e8m0, tiles"),
        ("no tiles", "e2m1 1x16 e4m3, tiles"),
        ("no transform", "e2m1 1x16 e4m3 transformed, normal"),
    ],
)
def test_planted_faults_are_found(fault, name):
    case = next(case for case in CASES if case.name == name)
    assert differences(case, mutated(case, fault))


def test_a_missing_tensor_a_shape_and_a_place():
    case = next(case for case in CASES if case.name == "e2m1 1x16 e4m3, odd")
    found = dict(of_megatron_fp8(case))
    codes = found["codes"].view(torch.uint8).clone()
    codes[2, 3] ^= 0x10
    lines = differences(case, {"codes": codes, "scale_inv": found["scale_inv"][:, :2]})
    assert lines[0].startswith("codes at [2, 3]: 0x") and lines[0].endswith("(1 differ)")
    assert "not torch.uint8 [33, 5]" in lines[1] and lines[2] == "amax missing"


def fails(case):
    raise RuntimeError("not here")


def test_the_command(capsys, tmp_path):
    assert main(["--cases", "e2m1 1x16"]) == 0
    out = capsys.readouterr().out
    assert "torchao: e2m1 1x16 e4m3, outliers: codes at" in out and "| megatron_fp8 " in out
    assert main(["--library", f"{__name__}.fails", "--cases", "e4m3 cast"]) == 1
    assert "e4m3 cast: RuntimeError: not here" in capsys.readouterr().out
    assert main(["--cases", "e3m4"]) == 2
    assert capsys.readouterr().err == "error: --cases=e3m4: no case's name contains it\n"
    save_file({"x": torch.zeros(1)}, str(tmp_path / "other.safetensors"))
    assert main(["--golden", str(tmp_path / "other.safetensors")]) == 2
    assert "it is not a golden file" in capsys.readouterr().err
