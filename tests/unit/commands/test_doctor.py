"""`megatron-fp8 doctor` from the command line: text of 80 columns, JSON of schema 1, exit codes."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch

from megatron_fp8 import mcore
from megatron_fp8.commands.main import main
from megatron_fp8.study import doctor as examination
from megatron_fp8.study import requirements
from megatron_fp8.study.requirements import RULES, Conflict
from megatron_fp8.study.support_matrix import Trial
from megatron_fp8.train.startup import settings

SCHEMA: dict[str, set[str]] = {
    "versions": {"name", "version", "needed_for", "how"},
    "conflicts": {"what", "reason", "remedy", "cure", "source"},
    "trials": {"backend", "recipe", "result", "error", "reason", "remedy", "cure"},
    "matrix": {
        "backend",
        "recipe",
        "device",
        "supported",
        "known",
        "reason",
        "remedy",
        "cure",
        "note",
        "source",
    },
}


@pytest.fixture(autouse=True)
def a_cpu(monkeypatch: pytest.MonkeyPatch):
    """And what the command changes in its process is as it was."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    yield
    mcore.uninstall()


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["doctor", *arguments])
    found = capsys.readouterr()
    return code, found.out, found.err


def test_text_fits_a_terminal_without_colour(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(examination, "conflicts", lambda facts: [Conflict(*fields) for _, *fields in RULES])
    code, out, err = run(capsys, "--config=tiny_gpt_cpu", "--model.fp8_backend=native", "--matrix")
    assert max(map(len, out.splitlines())) <= 80 and "\x1b" not in out and not err
    assert code == 1 and "fp8_backend=native: " in out
    first = " ".join(out.split())
    assert first.startswith(
        "FP8 works here: emulated (delayed, tensorwise, rowwise, blockwise, mxfp8, nvfp4)."
    )
    for words in (
        "Versions",
        "not to work together",
        "emulated",
        "12.1 300X 355X CPU",
        "No, because",
        "Yes, but",
        "A custom recipe has no row",
    ):
        assert words in out
    rows = [line.split() for line in out.splitlines() if line.startswith("  mxfp8 ")]
    assert [len(row) for row in rows] == [14, 14, 14] and "no*" in rows[0] and "yes*" in rows[1]


def test_json_of_schema_1(capsys: pytest.CaptureFixture[str]):
    code, out, _ = run(capsys, "--config=tiny_gpt_cpu", "--json")
    found = json.loads(out)
    assert (code, found["schema"], found["exit_code"]) == (0, 1, 0)
    assert set(found) == {"schema", "exit_code", "machine", "needs", *SCHEMA}
    assert set(found["machine"]) == {"device", "generation", "gpu_not_used", "cpu_kernels"}
    for part, keys in SCHEMA.items():
        for item in found[part]:
            assert set(item) == keys
    assert found["needs"] == {
        "options": ["--config=tiny_gpt_cpu"],
        "missing": [],
        "not_looked_at": ["ranks", "data", "memory", "speed"],
    }
    assert {cell["known"] for cell in found["matrix"]} == {"tried here", "documentation", "not known"}
    good = [trial["recipe"] for trial in found["trials"] if trial["result"] == "good"]
    assert good == ["delayed", "tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4"], (
        "emulated runs all of them"
    )
    assert all(0 <= trial["error"] < 1e-3 for trial in found["trials"] if trial["result"] == "good")
    documented = (Path(__file__).parents[3] / "docs" / "doctor.md").read_text()
    for names in SCHEMA.values():
        assert all(f"`{name}`" in documented for name in names)


def test_what_was_not_looked_at_is_said_and_data_may_follow(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(examination, "trials", lambda: iter(()))
    monkeypatch.setattr(requirements, "megatron", lambda: "0.16.1")
    code, out, _ = run(capsys, "--config=llama3_70b", "--data.tokenizer=bytes", "--data", __file__)
    said = " ".join(out.split())
    assert (
        code == 0 and "Not looked at: ranks, data, memory, speed" in said and "all that it needs" not in said
    )
    code, out, _ = run(capsys, "--config=llama3_70b", "--data", __file__, "none.txt")
    assert code == 1 and "data.paths=none.txt: there is no such file" in " ".join(out.split())


def test_exit_codes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(examination, "trials", lambda: iter([Trial("emulated", "delayed", "wrong", 0.5)]))
    code, out, err = run(capsys, "--matrix")
    assert code == 1 and "WRONG" in out and "no*" in out and "emulated computed a wrong product" in err
    assert out.startswith("FP8 is wrong here: emulated computed a wrong product.")
    monkeypatch.setattr(examination, "trials", lambda: iter(()))
    code, out, _ = run(capsys)
    assert code == 0 and out.startswith("FP8 cannot run here") and "What runs where" not in out
    monkeypatch.setattr(requirements, "megatron", lambda: None)
    code, out, _ = run(capsys, "--config=tiny_gpt_cpu")
    assert code == 1 and "megatron-core 0.16: it is not installed ->" in out
    for bad in (
        ["--config=none.yaml"],
        ["--config=tiny_gpt_cpu", "--model.fp9=1"],
        ["x"],
        ["--model.fp8=null"],
    ):
        code, out, err = run(capsys, *bad)
        assert code == 2 and not out and err.startswith("error: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--model.fp8_recipe=mxfp8", "--model.fp8_margin=1"], "fp8_margin"),
        (["--data.paths=[README.md]", "--data.tokenizer=null", "--model.vocab_size=50000"], "data.tokenizer"),
    ],
)
def test_a_config_that_train_refuses_is_refused_in_its_words(capsys, monkeypatch, options, said):
    """No machine could run it, so that exit code 0 would send a user to a queue for nothing."""
    monkeypatch.setattr(examination, "trials", lambda: iter(()))
    code, out, err = run(capsys, "--config=tiny_gpt_cpu", *options)
    assert code == 2 and not out and err.startswith("error: ") and said in err
    with pytest.raises(ValueError) as refused:
        settings(["--config=tiny_gpt_cpu", *options], ranks=1)
    assert err == f"error: {refused.value}\n"
