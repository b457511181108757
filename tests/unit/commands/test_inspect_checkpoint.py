"""`megatron-fp8 inspect` on checkpoints written without a run: its options, and what its check names."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from megatron_fp8.commands.main import main
from tests.support.checkpoint_files import write_checkpoint

SLOT = "decoder.layers.0.mlp.linear_fc1.fp8_state.weight"
GOOD = {
    "decoder.layers.0.mlp.linear_fc1.weight": torch.ones(4, 4),
    "optimizer.state.exp_avg.decoder.layers.0.mlp.linear_fc1.weight": torch.ones(4, 4),
    f"{SLOT}.scale": torch.ones(1),
    f"{SLOT}.amax_history": torch.tensor([0.0, 1.0, 2.0]),
    f"{SLOT}.warm": torch.ones(1, dtype=torch.uint8),
    f"{SLOT}.block_scale_inv": torch.ones(1, 1),
    "rng.cpu": torch.zeros(1, 8, dtype=torch.uint8),
}


def changed(name: str, index: int, value: float) -> dict[str, torch.Tensor]:
    tensor = GOOD[name].clone()
    tensor.view(-1)[index] = value
    return {**GOOD, name: tensor}


@pytest.mark.parametrize(
    ("name", "value"),
    [("decoder.layers.0.mlp.linear_fc1.weight", math.nan), (f"{SLOT}.amax_history", math.inf)],
    ids=lambda n: str(n)[-20:],
)
def test_every_tensor_that_is_not_finite_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, value: float
) -> None:
    folder = write_checkpoint(tmp_path, 3, changed(name, -1, value))
    assert main(["inspect", str(folder), "--check", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["not_finite"] == [name]
    assert main(["inspect", str(folder), "--check"]) == 0
    assert f"not finite  {name}\n" in capsys.readouterr().out
    assert main(["inspect", str(folder)]) == 0
    assert "not finite" not in capsys.readouterr().out, "tensors are looked at when that is asked for"


def test_a_running_amax_may_be_infinite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is never made a scale, and a save with one is a good one."""
    folder = write_checkpoint(tmp_path, 3, changed(f"{SLOT}.amax_history", 0, math.inf))
    assert main(["inspect", str(folder), "--check"]) == 0
    assert "not finite" not in capsys.readouterr().out


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_number_that_json_has_not_is_a_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: float
) -> None:
    folder = write_checkpoint(tmp_path, 3, changed(f"{SLOT}.scale", 0, value))
    assert main(["inspect", str(folder), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["delayed_scaling"]
    assert isinstance(row["scale"], str) and repr(float(row["scale"])) == repr(value)
    assert (row["latest_amax"], row["running_amax"], row["warm"]) == (2.0, 0.0, True)


def test_options_are_those_of_every_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_checkpoint(tmp_path, 3, GOOD)
    assert main(["inspect", "--debug", str(folder)]) == 0 and "iteration   3" in capsys.readouterr().out
    for arguments, words in {
        ("-j", str(folder)): "unrecognized arguments: -j",
        (str(folder), str(folder)): "unrecognized arguments",
        ("--debug", str(tmp_path / "nothing")): "is not a checkpoint",
    }.items():
        assert main(["inspect", *arguments]) == 2
        said = capsys.readouterr().err
        assert words in said.splitlines()[-1] and ("Traceback" in said) == ("--debug" in arguments)
    with pytest.raises(SystemExit) as ended:
        main(["inspect", "--help"])
    assert ended.value.code == 0 and "Exit codes: 0 done" in capsys.readouterr().out
