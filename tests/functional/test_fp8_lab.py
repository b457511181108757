"""examples/fp8_lab.ipynb runs from top to bottom, its checks tell right answers from wrong ones, and it is kept clean."""

from __future__ import annotations

import copy
import re
from typing import Any

import nbformat
import pytest

from tests.support.command import ROOT
from tests.support.notebook import definition, execute, read, said, shown, tagged, words

PATH = ROOT / "examples" / "fp8_lab.ipynb"
LAB = read(PATH)
CODE = [cell for cell in LAB.cells if cell.cell_type == "code"]
LINES, LINES_OF_A_CHECK = 15, 20

# Exercise, a wrong answer (the body of its function), and what the check says of it.
WRONG = [
    ("1", "return (-1) ** (code >> 7) * 2.0 ** ((code >> 3 & 15) - 7) * (1 + (code & 7) / 8)", "subnormal"),
    (
        "1",
        "return torch.tensor(code, dtype=torch.uint8).view(torch.float8_e4m3fn).nan_to_num().item()",
        "fails with",
    ),
    (
        "1",
        "return torch.tensor(code, dtype=torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num().item()",
        "NaN",
    ),
    ("2", "return x.abs().max().item() / largest", "that is scale_inv"),
    ("2", "return largest / x.max().item()", "you have 149.3"),
    ("2", "return 448 / x.abs().max().item()", "in E5M2"),
    ("2", "return (largest / x.abs().max()).item()", "a tensor of zeros has the scale 1, you have inf"),
    ("2", "return (largest / x.abs().max()).item() if x.any() else 1.0", "one NaN must not spoil"),
    ("3", "return (block.abs().max() / 448).item()", "it is no power of two"),
    ("3", "return 2.0 ** (torch.frexp(block.abs().max() / 448)[1].item() - 1)", "a value saturates"),
    ("3", "return 2.0 ** torch.frexp(block.abs().max() / 448)[1].item()", "half of it would do"),
    ("4", "return dy.t() @ x", "nothing was quantized"),
    ("3", "return 0.0", "it is no power of two"),
    ("4", "return torch.full((32, 64), float('nan'))", "this is another product"),
    (
        "4",
        "a, b = x.clone().requires_grad_(), torch.zeros(64, 32, requires_grad=True);"
        " fp8_matmul(a, b, chosen).backward(dy); return 2 * b.grad.t()",
        "differs from the right one by 1 times",
    ),
    ("4", "return x.t() @ dy", "dw is (32, 64), you have (64, 32)"),
    (
        "4",
        "return quantize(dy, chosen, 'grad_output').dequantize().t() @ quantize(x, chosen, 'input').dequantize()",
        "the blocks lie along the wrong dimension",
    ),
    ("5", "return recipe.DelayedScaling(amax_history_len=1)", "iterations saturate"),
    ("5", "return recipe.DelayedScaling(amax_history_len=12, margin=14)", "too much room"),
    ("6", "fp8_step(model)", "the good batch did not change the weights"),
    (
        "6",
        "optimizer.zero_grad(); loss_of(model, batch).backward(); fp8_step(model); optimizer.step()",
        "the batch with infinite pixels changed the weights",
    ),
    (
        "6",
        "loss_of(model, batch).backward(); _ = fp8_step(model).nonfinite or optimizer.step()",
        "are the gradients of the bad one cleared?",
    ),
    (
        "6",
        "optimizer.zero_grad(); loss_of(model, batch).backward(); optimizer.step()",
        "fails with RuntimeError: the optimizer stepped and fp8_step was not called",
    ),
    ("6", "return step.undefined", "fails with AttributeError"),
    ("7", "return {'fc2': 'bf16'}", "look at the longest bar"),
    ("7", "return {'fc*': 'bf16'}", "fails with ValueError"),
    ("7", "return {'fc1': 'bf16'}", "one operand is enough"),
    ("8", "return torch.full((128, 64), float('nan'))", "these are other weights"),
    ("8", "return tensors[name + '.weight']", "a float32 (128, 64) is needed"),
    (
        "8",
        "return tensors[name + '.weight'].float()",
        "these are the codes: they are multiplied by weight_scale",
    ),
    (
        "8",
        "return tensors[name + '.weight'].float() / tensors[name + '.weight_scale']",
        "these are other weights",
    ),
]


def wrong_cell(exercise: str, body: str) -> Any:
    """The exercise with a wrong answer filled in, and its check."""
    head = definition(tagged(LAB, "exercise")[exercise].source).replace("raise NotImplementedError", body)
    check = tagged(LAB, "check")[exercise].source.splitlines()[-1]
    return nbformat.v4.new_code_cell(f"{head}\n\n\n{check}")


@pytest.fixture(scope="module")
def run() -> Any:
    """The notebook as a student leaves it who found all answers, and then tried all wrong ones at the end."""
    filled = copy.deepcopy(LAB)
    (training,) = (cell for cell in filled.cells if "steps=300" in cell.source)
    training.source = training.source.replace("steps=300", "steps=60")
    answers = tagged(LAB, "answer")
    for number, cell in tagged(filled, "exercise").items():
        cell.source = definition(answers[number].source)
    filled.cells += [wrong_cell(exercise, body) for exercise, body, _ in WRONG]
    return execute(filled)


def test_every_exercise_has_its_check_and_its_answer():
    numbers = [str(number) for number in range(1, 9)]
    assert [list(tagged(LAB, kind)) for kind in ("exercise", "check", "answer")] == [numbers] * 3
    assert {exercise for exercise, _, _ in WRONG} == set(numbers)


def test_it_runs_and_the_answers_are_right(run):
    for kind in ("check", "answer"):
        for number, cell in tagged(run, kind).items():
            assert said(cell) == "Right.\n", f"{kind} {number}"


def test_a_wrong_answer_is_told_what_is_wrong(run):
    tried = run.cells[-len(WRONG) :]
    for cell, (exercise, body, message) in zip(tried, WRONG, strict=True):
        found = said(cell)
        assert found.startswith("Not yet: ") and message in found, f"exercise {exercise}: {body}\n{found}"


def test_what_is_kept_is_what_a_run_shows(run):
    """Kinds of outputs everywhere; the words where they are not a machine's or a training's."""
    for kept, now in zip(LAB.cells, run.cells, strict=False):
        tags = kept.metadata.get("tags", [])
        if kept.cell_type == "code" and not any(tag.startswith(("exercise", "check")) for tag in tags):
            assert shown(kept) == shown(now), kept.source
            assert "varies" in tags or words(said(kept)) == words(said(now)), kept.source


def test_it_is_clean():
    assert PATH.stat().st_size < 500_000
    assert [cell.execution_count for cell in CODE] == list(range(1, len(CODE) + 1)), "run it in one go"
    assert set(LAB.metadata) == {"kernelspec", "language_info"} and set(LAB.metadata.language_info) == {
        "name"
    }
    for cell in LAB.cells:
        assert set(cell.metadata) <= {"tags", "jupyter"}
    for cell in CODE:
        assert set(shown(cell)) <= {"stdout", "image/png"}, f"warnings or errors:\n{cell.source}"
        trouble = re.search(r"(?<![\w.])/\w+/\w|\w:\\|site-packages|Traceback| at 0x|Warning", said(cell))
        assert trouble is None, f"{trouble}\n{cell.source}"
    for number, cell in tagged(LAB, "check").items():
        assert re.fullmatch(r"Not yet: \w+ is not filled in yet\.\n", said(cell)), (
            f"exercise {number} is filled in"
        )


@pytest.mark.parametrize("cell", CODE, ids=lambda cell: cell.id)
def test_a_cell_is_short_and_a_plot_names_its_axes(cell):
    check = any(tag.startswith("check") for tag in cell.metadata.get("tags", []))
    lines = sum(bool(line.strip()) for line in cell.source.splitlines())
    assert lines <= (LINES_OF_A_CHECK if check else LINES)
    if "image/png" in shown(cell):
        needed = ["xlabel", "title", "legend"] + ["ylabel"] * ("barh" not in cell.source)
        assert [name for name in needed if f"plt.{name}(" not in cell.source] == []
