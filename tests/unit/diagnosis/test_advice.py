"""Advice: each rule finds its evidence and nothing else, and gives a line that train takes."""

import json
import shlex
from pathlib import Path

import pytest

from megatron_fp8.diagnosis.advice import RULES, advise
from megatron_fp8.train.config.run_config import parse as parse_run

SITE = "decoder.layers.1.mlp.linear_fc1"
HEALTHY = {
    "underflows%": 0.01, "overflows%": 0.0, "sqnr_db": 31.5, "cur_amax": 1.0, "scale_inv_max": 1e-5, "kurtosis": 3.0,
    "dynamic_range": 20.0, "std": 0.1, "nonfinite": 0.0,
}  # fmt: skip
WORDS = {
    "tensorwise": "tensor fp32",
    "rowwise": "row fp32",
    "delayed": "tensor delayed fp32",
    "blockwise": "1x128 pow2",
    "mxfp8": "1x32 e8m0",
}


def report(recipe, *, fp8="hybrid", sites=(SITE,)):
    grads = "e5m2" if fp8 == "hybrid" else "e4m3"
    roles = {
        role: f"{'e4m3' if role != 'grad_output' else grads} {WORDS[recipe]}"
        for role in ("input", "weight", "grad_output")
    }
    plans = [{"name": name, "precision": "fp8", "recipe": recipe, "roles": roles} for name in sites]
    return {"precision": {"fp8": fp8, "fp8_recipe": recipe}, "sites": plans}


def records(tensor="input", *, iterations=(10, 20, 30), site=SITE, **figures):
    return [{"iteration": i, "site": site, "tensor": tensor, **HEALTHY, **figures} for i in iterations]


@pytest.mark.parametrize("recipe", WORDS)
@pytest.mark.parametrize("tensor", ["input", "grad_output"])
def test_healthy_figures_need_no_advice(recipe, tensor):
    sqnr = 25.5 if tensor == "grad_output" else 31.5
    assert (
        advise(records(tensor, sqnr_db=sqnr), report(recipe, fp8="e4m3" if recipe == "mxfp8" else "hybrid"))
        == []
    )


_LARGE = {"underflows%": 9.0, "scale_inv_max": 0.01}
"""A scale that was made from more than the tensor's amax of 1."""


@pytest.mark.parametrize(
    ("recipe", "fp8", "tensor", "figures", "title", "line"),
    [
        ("delayed", "hybrid", "input", {"overflows%": 2.0}, "delayed scale too small", "--model.fp8_margin=1"),
        ("delayed", "hybrid", "weight", _LARGE, "delayed scale too large", '"tensorwise"'),
        ("tensorwise", "hybrid", "weight", _LARGE, "margin too large", "_margin=0"),
        ("blockwise", "e4m3", "input", _LARGE, "margin too large", "_margin=0"),
        ("tensorwise", "hybrid", "input", {"underflows%": 9.0}, "one scale for too much", '"blockwise"'),
        ("tensorwise", "e4m3", "grad_output", {"underflows%": 9.0}, "gradients too small", "--model.fp8=hybrid"),
        ("tensorwise", "hybrid", "grad_output", {"underflows%": 9.0}, "one scale for too much", '"blockwise"'),
        ("tensorwise", "hybrid", "input", {"sqnr_db": 12.0}, "outliers take the precision", '"blockwise"'),
        ("tensorwise", "hybrid", "grad_output", {"sqnr_db": 12.0}, "outliers take", '"blockwise"'),
        ("mxfp8", "e4m3", "input", {"underflows%": 9.0}, "values lost inside blocks", '"bf16"'),
        ("blockwise", "hybrid", "input", {"sqnr_db": 12.0}, "outliers take the precision", '"bf16"'),
        (
            "tensorwise", "hybrid", "input",
            {"sqnr_db": 12.0, "mxfp8_sqnr_db": 30.0, "fp8_block_scaling_sqnr_db": 25.0}, "outliers", '"mxfp8"',
        ),
        (
            "tensorwise", "hybrid", "input",
            {"sqnr_db": 12.0, "mxfp8_sqnr_db": 12.2, "fp8_block_scaling_sqnr_db": 12.1}, "outliers", '"bf16"',
        ),
    ],
)  # fmt: skip
def test_evidence_to_line(recipe, fp8, tensor, figures, title, line):
    (found,) = advise(records(tensor, **figures), report(recipe, fp8=fp8))
    assert found.title.startswith(title) and line in found.line, found
    assert (found.sites, found.tensor, found.iterations) == ((SITE,), tensor, (10, 30))
    (statistic,) = [name for name in figures if not name.startswith(("mxfp8", "fp8_", "scale_"))]
    assert found.figures[statistic] == figures[statistic]
    assert SITE in str(found) and found.line in str(found)
    assert json.loads(json.dumps(found.as_dict()))["sites"] == [SITE]


def test_a_delayed_scale_is_too_large_only_where_its_figures_say_so():
    """A scale made from the tensor's own amax cannot be cured by another one for the whole tensor."""
    own, lost = 2.0**24 / 448, {"underflows%": 90.0, "cur_amax": 2.0**24}
    for scale_inv, title, recipe in (
        (own, "one scale for too much", "blockwise"),
        (1.9 * own, "one scale for too much", "blockwise"),
        (3.0 * own, "delayed scale too large", "tensorwise"),
    ):
        (found,) = advise(records(**lost, scale_inv_max=scale_inv), report("delayed"))
        assert found.title == title and f'"{recipe}"' in found.line, found
    mixed = records(**lost, scale_inv_max=own) + records(iterations=(40, 50), **lost, scale_inv_max=9.0 * own)
    assert [one.title for one in advise(mixed, report("delayed"))] == ["one scale for too much"]
    unknown = [{k: v for k, v in row.items() if k != "scale_inv_max"} for row in records(**lost)]
    assert [one.title for one in advise(unknown, report("delayed"))] == ["one scale for too much"]


def test_once_is_no_evidence():
    rows = records() + records(iterations=(40,), **{"underflows%": 60.0})
    assert advise(rows, report("tensorwise")) == []
    # All there is.
    assert advise(records(iterations=(40,), **{"underflows%": 60.0}), report("tensorwise")) != []


def test_sites_with_one_cure_are_one_piece_the_worst_first():
    other = SITE.replace("fc1", "fc2")
    rows = records(**{"underflows%": 9.0}) + records(site=other, **{"underflows%": 19.0})
    (found,) = advise(rows, report("tensorwise", sites=(SITE, other)))
    assert found.sites == (other, SITE) and found.figures["underflows%"] == 19.0


@pytest.mark.parametrize("tensor", ["weight", "input"])
def test_not_finite_is_the_first_iteration_and_no_other_advice(tensor):
    rows = records() + records(tensor, iterations=(40,), nonfinite=3.0, **{"underflows%": 60.0})
    rows += records("input", iterations=(50, 60), nonfinite=9000.0, **{"underflows%": 60.0})
    (found,) = advise(rows, report("tensorwise"))
    assert found.title == "not finite" and found.iterations == (40, 40) and found.tensor == tensor
    assert ("optimizer step" in found.cause) == (tensor == "weight")
    assert "diagnose RUN --iteration 40" in found.line


LAST = SITE.replace("layers.1", "layers.3")


def test_gradients_that_are_not_finite_come_from_the_last_layer_of_one_batch():
    rows = records(iterations=(40,)) + records("grad_output", iterations=(40,), nonfinite=3.0)
    rows += records("dgrad", iterations=(40,), nonfinite=3.0)
    rows += records("grad_output", iterations=(40,), site=LAST, nonfinite=5.0)
    metrics = [
        {"iteration": i, "lm_loss": 2.0, "skipped": 0, "nonfinite": 0, "loss_scale": None}
        for i in range(1, 60)
    ]
    for bad in (36, 40):
        metrics[bad - 1] |= {"lm_loss": None, "skipped": 1, "nonfinite": 8}
    (found,) = advise(rows, report("tensorwise"), metrics)
    assert found.sites == (LAST, SITE) and found.tensor == "grad_output" and "loss mask" in found.cause
    assert "iteration 36" in found.cause and found.line.endswith("diagnose RUN --iteration 36")
    assert "--optimizer.lr" not in found.line  # training went on
    (found,) = advise(rows, report("tensorwise"), metrics[:40])
    assert "--optimizer.lr" in found.line
    scaled = [{**step, "loss_scale": 65536.0} for step in metrics]
    assert advise(rows, report("tensorwise"), scaled) == []  # how loss scaling finds its scale


def test_a_weight_that_outgrows_the_others_is_no_fault_of_fp8():
    """Its codes suffer too, and a finer recipe would not stop it."""
    sites = [f"decoder.layers.{layer}.mlp.linear_fc1" for layer in range(4)]
    rows = [row for site in sites for row in records("weight", site=site, l2_norm=6.0)]
    rows += records("weight", iterations=(20, 30), site=SITE, l2_norm=900.0, **{"underflows%": 60.0})
    first, second = advise(rows, report("tensorwise", sites=sites))
    assert (first.title, first.sites, first.iterations) == ("a weight outgrows the others", (SITE,), (20, 30))
    assert "parameter group" in first.cause and "before iteration 20" in first.line
    assert second.title == "one scale for too much" and second.sites == (SITE,)


def test_a_nan_hides_no_fault_of_other_iterations():
    rows = records(**{"underflows%": 60.0}) + records(iterations=(40,), nonfinite=3.0, sqnr_db=0.0)
    first, second = advise(rows, report("tensorwise"))
    assert (first.title, second.title) == ("not finite", "one scale for too much")
    assert second.iterations == (10, 30)


def steps(spikes):
    return [{"iteration": i, "grad_norm": 30.0 if i in spikes else 1.0 + i % 3 / 10} for i in range(1, 201)]


def test_gradient_spikes_without_bad_codes_are_not_fp8():
    (found,) = advise(records(), report("tensorwise"), steps({50, 100, 150, 200}))
    assert (
        found.title == "gradient spikes" and found.figures["spikes"] == 4 and "--optimizer.lr" in found.line
    )
    assert advise(records(), report("tensorwise"), steps({50, 100})) == []
    assert advise(records(), report("tensorwise"), steps(range(1, 12))) == []  # the warm-up's
    found = advise(records(**{"underflows%": 9.0}), report("tensorwise"), steps({50, 100, 150}))
    assert [one.title for one in found] == ["one scale for too much"]


def test_hybrid_mx_is_said_without_any_figure():
    (found,) = advise([], report("mxfp8"))
    assert found.line == "--model.fp8=e4m3" and found.sites == ()
    assert advise([], report("mxfp8", fp8="e4m3")) == [] and advise([], report("blockwise")) == []
    assert advise([], {}) == []


def test_lines_are_options_that_train_takes():
    for rule in RULES:
        tensor = rule.tensors[-1]
        for recipe in rule.recipes or ("tensorwise",):
            fp8 = "hybrid" if rule.formats == ("e5m2",) else "e4m3"
            bad = rule.limit - 1 if rule.below else rule.limit + 1
            (found, *_) = advise(records(tensor, **{rule.statistic: bad}), report(recipe, fp8=fp8))
            run = parse_run(["--config=examples/configs/tiny_gpt_cpu.yaml", *shlex.split(found.line)])
            assert run.model.fp8 in ("hybrid", "e4m3")


def test_figures_that_are_no_numbers_are_left_out():
    odd = {"nonfinite": None, "sqnr_db": float("nan"), "cur_amax": "NaN"}
    rows = [{**row, **odd} for row in records(**{"underflows%": 9.0})]
    (found,) = advise(rows, report("tensorwise"), [{"iteration": i, "grad_norm": None} for i in range(50)])
    assert found.title == "one scale for too much"
    assert set(found.figures) == {"underflows%", "dynamic_range", "kurtosis"}


def test_a_finer_recipe_is_one_whose_what_if_does_not_show_the_same():
    """A huge channel leaves the SQNR as it is, in recipes that lose everything else too."""
    what_ifs = {"fp8_block_scaling_sqnr_db": 31.0, "mxfp8_sqnr_db": 31.5, "fp8_current_scaling_sqnr_db": 31.5}
    for blocks, mx, line in ((40.0, 0.1, '"mxfp8"'), (40.0, 30.0, '"bf16"'), (0.1, 0.0, '"blockwise"')):
        shares = {"fp8_block_scaling_underflows%": blocks, "mxfp8_underflows%": mx}
        (found,) = advise(records(**{"underflows%": 40.0}, **shares, **what_ifs), report("tensorwise"))
        assert line in found.line, found
    shares = dict.fromkeys(shares, 40.0) | {"fp8_current_scaling_underflows%": 40.0, "mxfp8_underflows%": 0.0}
    (found,) = advise(records(**{"underflows%": 40.0}, **shares, **what_ifs), report("delayed"))
    assert '"mxfp8"' in found.line


def test_a_loss_that_rose_before_codes_were_bad_is_no_fault_of_fp8():
    bad = records(iterations=(30, 40), **{"underflows%": 40.0})
    losses = [{"iteration": i, "lm_loss": 5.0 - i / 100 if i < 30 else 20.0} for i in range(1, 41)]
    first, second = advise(bad, report("tensorwise"), losses)
    assert (first.title, first.iterations) == ("the loss rose first", (30, 30))
    assert "--optimizer.lr" in first.line and second.title == "one scale for too much"
    earlier = records(iterations=(20, 30, 40), **{"underflows%": 40.0})
    assert [one.title for one in advise(earlier, report("tensorwise"), losses)] == ["one scale for too much"]
    assert advise(records(), report("tensorwise"), losses[:29]) == []


def test_a_loss_that_rose_by_little_is_the_model_s_only_where_codes_were_good_then():
    """Codes that were not measured in between may have been bad first."""
    losses = [
        {"iteration": i, "lm_loss": (5.0 - i / 100 if i < 30 else 6.0) + i % 2 / 50} for i in range(1, 61)
    ]
    (found,) = advise(records(iterations=range(1, 61)), report("tensorwise"), losses)
    assert (found.title, found.iterations) == ("the loss rose first", (30, 30))
    assert found.figures["noise of lm_loss"] == pytest.approx(0.02, abs=0.02)
    for measured, bad, titles in (
        ((10, 20, 30, 40, 50), 40, ["the loss rose first", "one scale for too much"]),
        ((10, 20, 40, 50), 40, ["one scale for too much"]),
        ((10, 20, 30, 40, 50), 30, ["one scale for too much"]),
    ):
        rows = [
            row
            for i in measured
            for row in records(iterations=[i], **({"underflows%": 40.0} if i >= bad else {}))
        ]
        assert [one.title for one in advise(rows, report("tensorwise"), losses)] == titles, (measured, bad)


def test_the_documentation_has_every_rule():
    text = (Path(__file__).parents[3] / "docs" / "telemetry.md").read_text()
    for rule in RULES:
        assert row(rule) in text, f"docs/telemetry.md lacks this row:\n{row(rule)}"
    title = "| what | evidence | where |"
    assert len(text.split(title)[1].split("\n\n")[0].splitlines()) == 2 + len(RULES)
    words = " ".join(text.split())
    assert all(f"**{one}**" in words for one in OTHERS)


OTHERS = (
    "not finite",
    "the loss rose first",
    "a weight outgrows the others",
    "gradient spikes",
    "gradients lose a bit for nothing",
)


def row(rule):
    tensors = () if len(rule.tensors) == 3 else rule.tensors
    where = (
        ", ".join([*tensors, *rule.recipes, *(f"{name.upper()} codes" for name in rule.formats)])
        or "everywhere"
    )
    return f"| {rule.name} | `{rule.statistic}` {'<' if rule.below else '>'} {rule.limit:g} | {where} |"
