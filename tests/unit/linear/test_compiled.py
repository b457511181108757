"""torch.compile over the linear: no graph break, eager mode's bits, FP8 bytes saved, nothing lost or done twice."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from benchmarks.support.compare import assert_all_same_bytes, assert_same_bytes
from megatron_fp8.linear.amax_recorder import observe_high_precision
from megatron_fp8.linear.compiled import first_call, next_call
from megatron_fp8.linear.function import fp8_linear
from megatron_fp8.linear.gemm_site import GemmSite
from megatron_fp8.params.fp8_parameter import fp8_parameter
from megatron_fp8.plan.autocast_state import current_autocast_state, fp8_disabled, remember_fp8, runs_fp8
from megatron_fp8.state.fp8_state import Fp8State
from megatron_fp8.state.iteration import LATER, NOW, IterationCounts
from megatron_fp8.state.precision_schedule import PrecisionSchedule
from tests.support.long_cases import some
from tests.support.saved_tensors import saved
from tests.support.sites import data, make_site, randn

PARTITIONED = "aot_eager_decomp_partition"
"""AOT autograd with Inductor's partitioner and its merging of equal nodes; kernels stay eager."""


@pytest.fixture(autouse=True)
def fresh_compiler(one_thread: None) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def compiled(function: Callable[..., Any], backend: str = PARTITIONED, **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend=backend, fullgraph=True, **options)


def graphs() -> int:
    """How many were made."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def leaves(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [None if t is None else t.detach().clone().requires_grad_() for t in tensors]


def alike(eager: GemmSite, traced: GemmSite) -> None:
    """The same was recorded and counted; ends the iteration of both."""
    (mine,), (theirs,) = traced.state.arenas, eager.state.arenas
    assert traced.state.finish_iteration() == eager.state.finish_iteration()
    for what in ("last_amax", "last_nonfinite", "scale"):
        assert_same_bytes(getattr(mine, what), getattr(theirs, what), what)


@pytest.mark.parametrize(
    "name",
    some(["delayed", "rowwise", "blockwise-fp32", "mxfp8", "no-input"], "delayed", "mxfp8", "no-input"),
)
def test_bits_counts_and_amaxes_are_eager_modes(name):
    """Three iterations: delayed scaling without and with a history, the kept weight, health."""
    x, w, dy = data(2 * 35, 96, 72)
    x[0, 0] = torch.inf
    bias = randn(1, 72, seed=9)[0]
    eager, traced = make_site(name)[0], make_site(name)[0]
    function = compiled(fp8_linear)
    for iteration in range(3):
        outcomes = []
        for run, site in ((fp8_linear, eager), (function, traced)):
            mine = leaves(x.view(35, 2, 96), w, bias)
            y = run(*mine, site)
            y.backward(dy.view(35, 2, 72))
            outcomes.append((y, *(t.grad for t in mine)))
        for what, expected, found in zip(("y", "dx", "dw", "dbias"), *outcomes, strict=True):
            assert_same_bytes(found, expected, f"{name} {iteration} {what}")
        alike(eager, traced)
    assert graphs() == 1


def test_inductor_gives_the_same_bits():
    x, w, dy = data(40, 64, 48)
    eager, traced = make_site("blockwise")[0], make_site("blockwise")[0]
    found = []
    for run, site in ((fp8_linear, eager), (compiled(fp8_linear, "inductor"), traced)):
        mine = leaves(x, w)
        y = run(mine[0], mine[1], None, site)
        y.backward(dy)
        found.append((y, *(t.grad for t in mine)))
    assert_all_same_bytes(*found)
    alike(eager, traced)


@pytest.mark.parametrize("frozen", ["x", "w", "both"])
def test_what_needs_no_gradient_costs_none(frozen):
    x, w, dy = data(40, 64, 48)
    eager, traced = make_site("tensorwise")[0], make_site("tensorwise")[0]
    found = []
    for run, site in ((fp8_linear, eager), (compiled(fp8_linear), traced)):
        mine = [x.clone().requires_grad_(frozen == "w"), w.clone().requires_grad_(frozen == "x")]
        y = run(*mine, None, site)
        if frozen != "both":
            y.backward(dy)
        found.append((y, *(t.grad for t in mine)))
    for expected, mine in zip(*found, strict=True):
        assert (mine is None) == (expected is None)
        if mine is not None:
            assert_same_bytes(mine, expected)
    alike(eager, traced)


@pytest.mark.parametrize("how", ["traced", "FP8 weight", "FP8 weight, traced"])
def test_evaluation_records_and_counts_nothing(how):
    x, w, _ = data(40, 64, 48)
    site = make_site("delayed")[0]
    expected = fp8_linear(x, w, None, make_site("delayed")[0])
    if "FP8" in how:
        w = fp8_parameter(w, site.quantizers["weight"])
        site.state.arenas[0].rows.zero_(), vars(site.state.counts).update(vars(IterationCounts()))
    run = fp8_linear if "traced" not in how else torch.compile(fp8_linear, backend="aot_eager")
    with torch.no_grad():
        y = run(x, w, None, site, training=False)
    assert_same_bytes(y, expected)
    assert site.state.counts == IterationCounts() and not site.state.arenas[0].rows.any()


# ---------------------------------------------------------------------------------------------- what is saved


def test_one_byte_a_value_is_saved():
    """Of activations: codes, and scales; 2 x 64 x 256 values in between and no BF16 of them."""
    x, _, _ = data(64, 128, 1)
    weights = [torch.nn.Parameter(randn(256, 128, seed=1)), torch.nn.Parameter(randn(32, 256, seed=2))]
    sites = [make_site("mxfp8")[0] for _ in weights]

    def layers(x: torch.Tensor) -> torch.Tensor:
        for weight, site in zip(weights, sites, strict=True):
            x = fp8_linear(x, weight, None, site)
        return x

    sizes = {tuple(w.shape) for w in weights}
    kept = [
        t
        for t in saved(lambda: compiled(layers, "inductor")(x.requires_grad_()))
        if tuple(t.shape) not in sizes
    ]
    values = 64 * 128 + 64 * 256
    codes = [t for t in kept if t.dtype == torch.uint8 and t.shape[0] in (128, 256) and t.shape[1] == 64]
    assert sum(t.nbytes for t in codes) == values, [(t.shape, t.dtype) for t in kept]
    others = sum(t.nbytes for t in kept) - values
    few = 8 + 2 * 8 + 4  # a site's number, and how its weight was quantized
    assert others == values // 32 + 2 * few, "scales of 32 values each, and little else"


def test_offloaded_activations_come_back_the_same():
    """save_on_cpu, eager and compiled: other tensors with the same values, also of the weight; main_grad is found."""
    x, w, dy = data(64, 96, 48)
    outcomes = []
    for run in (fp8_linear, compiled(fp8_linear)):
        for offload in (False, True):
            site = make_site("tensorwise")[0]
            mine, weight = x.clone().requires_grad_(), torch.nn.Parameter(w.clone())
            weight.main_grad, weight.grad_added_to_main_grad = torch.ones(w.shape), False
            layer = torch.nn.ParameterDict({"weight": weight})
            site.layer = weakref.ref(layer)
            with torch.autograd.graph.saved_tensors_hooks(
                lambda t: t.clone() if offload else t,  # noqa: B023
                lambda t: t.clone() if offload else t,  # noqa: B023
            ):
                y = run(mine, weight, None, site)
            y.backward(dy)
            assert weight.grad_added_to_main_grad and not weakref.getweakrefs(weight)
            outcomes.append((y, mine.grad, weight.main_grad))
    for found in outcomes[1:]:
        assert_all_same_bytes(found, outcomes[0])


# ---------------------------------------------------------------------------------- neither merged nor done twice


def test_graphs_that_other_sources_left_on_disk_are_not_taken(tmp_path):
    """Inductor finds a graph by its code, in which calls are numbered: each state of the sources has its own numbers."""
    (tmp_path / "compiled.py").write_text("shape = (sites, 2)")
    before = first_call(tmp_path)
    (tmp_path / "compiled.py").write_text("shape = (sites, 2, 2)")
    assert first_call(tmp_path) != before and first_call(tmp_path) == first_call(tmp_path)
    assert 0 <= next_call() - first_call(Path(inspect.getfile(GemmSite)).parent) < 2**24


def test_two_calls_on_one_input_are_two_gradients():
    """A compiler that merges equal nodes would add to main_grad once."""
    x, w, dy = data(40, 64, 48)

    def twice(x: torch.Tensor, w: torch.Tensor, site: GemmSite) -> torch.Tensor:
        return fp8_linear(x, w, None, site) + fp8_linear(x, w, None, site)

    found = []
    for run in (twice, compiled(twice)):
        site, weight = make_site("tensorwise")[0], torch.nn.Parameter(w.clone())
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(w.shape), False
        run(x, weight, site).backward(dy)
        found.append((weight.main_grad, site.state.counts))
    assert_same_bytes(found[1][0], found[0][0])
    assert found[0][1] == found[1][1]


@pytest.mark.parametrize("again", [False, True], ids=["step", "step and forward"])
def test_backward_uses_the_weights_scale_of_its_forward(again):
    """fp8_step between a forward and its backward changes the delayed scale, and another forward the kept codes."""
    x, w, dy = data(64, 32, 48)
    outcomes = []
    for how in (lambda f: f, compiled):
        site, _ = make_site("delayed")
        weight = torch.nn.Parameter(w.clone())
        call = how(lambda x, weight=weight, site=site: fp8_linear(x, weight, None, site))
        for _ in range(2):
            call(x.clone().requires_grad_()).backward(dy)
            site.state.finish_iteration()
            with torch.no_grad():
                weight.mul_(3.3)
        leaf = x.clone().requires_grad_()
        y = call(leaf)
        site.state.finish_iteration()
        if again:
            call(x.clone().requires_grad_())
        y.backward(dy)
        outcomes.append(leaf.grad)
    assert_same_bytes(*outcomes)


def test_a_recomputed_forward_records_as_in_eager_mode():
    x, w, dy = data(40, 64, 48)
    x[0, 0] = torch.nan

    def recomputed(x: torch.Tensor, w: torch.Tensor, site: GemmSite) -> torch.Tensor:
        return checkpoint(lambda x: fp8_linear(x, w, None, site).relu(), x, use_reentrant=False)

    eager, traced = make_site("delayed")[0], make_site("delayed")[0]
    found = []
    for run, site in ((recomputed, eager), (compiled(recomputed), traced)):
        mine = leaves(x, w)
        y = run(*mine, site)
        assert y.isnan().any()
        y.backward(dy)
        found.append((y, *(t.grad for t in mine)))
    assert_all_same_bytes(*found)
    alike(eager, traced)
    assert traced.state.last.nonfinite == eager.state.last.nonfinite == 2


def test_layers_of_one_recipe_share_a_graph_and_others_do_not():
    """Compiled block by block: one graph for all blocks; another recipe, or another size, makes its own."""
    x, w, dy = data(40, 64, 64)
    function = compiled(fp8_linear)
    for recipe in ("rowwise", "rowwise", "rowwise", "mxfp8", "mxfp8"):
        eager, traced = make_site(recipe)[0], make_site(recipe)[0]
        for run, site in ((fp8_linear, eager), (function, traced)):
            run(*leaves(x, w), None, site).backward(dy)
        alike(eager, traced)
    assert graphs() == 2


def test_any_number_of_tokens_is_one_graph():
    _, w, _ = data(1, 64, 48)
    eager, traced = make_site("blockwise")[0], make_site("blockwise")[0]
    function = compiled(fp8_linear, dynamic=True)
    for tokens in (130, 257, 300):  # of one block scales have one column, which is another layout
        x, dy = randn(tokens, 64, seed=tokens), randn(tokens, 48, seed=tokens + 1)
        found = []
        for run, site in ((fp8_linear, eager), (function, traced)):
            mine = leaves(x, w)
            y = run(*mine, None, site)
            y.backward(dy)
            found.append((y, *(t.grad for t in mine)))
        assert_all_same_bytes(*found)
    assert graphs() == 1


# ------------------------------------------------------------------------------------------------------- ambient


def test_switches_and_phases_are_guarded():
    """Warm-up in high precision fills histories; FP8 is switched off around a call, and inside the traced code."""
    x, w, dy = data(40, 64, 48)

    def linear(x: torch.Tensor, w: torch.Tensor, site: GemmSite, inside: bool) -> torch.Tensor:
        with fp8_disabled("inside" if inside else None):
            if runs_fp8(site, current_autocast_state()):
                return fp8_linear(x, w, None, site)
            return observe_high_precision(x, w, torch.nn.functional.linear(x, w), site, training=True)

    sites = [
        make_site("delayed", state=Fp8State(phases=PrecisionSchedule(0.5, length=8)))[0] for _ in range(2)
    ]
    runs = (linear, compiled(linear))
    for iteration in range(8):
        inside, outside = iteration == 5, "outside" if iteration == 6 else None
        found = []
        for run, site in zip(runs, sites, strict=True):
            mine = leaves(x * (iteration + 1), w)
            with fp8_disabled(outside):
                y = run(*mine, site, inside)
            y.backward(dy)
            assert (site.state.counts.fp8_gemms == 3) == (iteration in (4, 7)), iteration
            found.append((y, *(t.grad for t in mine)))
        assert_all_same_bytes(*found, what=str(iteration))
        assert sites[1].state.arenas[0].rows[0, :3].all()
        alike(*sites)
    assert graphs() <= 4


def test_a_compiled_function_that_is_checkpointed_needs_to_be_told():
    """Its recomputation looks at the switch of the backward: in FP8 what had run without is an error, not a gradient."""
    x, w, dy = data(40, 64, 48)

    def linear(x: torch.Tensor, w: torch.Tensor, site: GemmSite) -> torch.Tensor:
        return fp8_linear(x, w, None, site) if runs_fp8(site, current_autocast_state()) else x @ w.t()

    function, (x, w) = compiled(linear), leaves(x, w)
    with fp8_disabled("around the forward"):
        guessed = checkpoint(function, x, w, make_site("rowwise")[0], use_reentrant=True)
        told = checkpoint(remember_fp8(function), x, w, make_site("rowwise")[0], use_reentrant=True)
    with pytest.raises(RuntimeError, match=r"switched off, or .* around a compiled forward.*remember_fp8"):
        guessed.backward(dy)
    told.backward(dy)
    assert_same_bytes(x.grad, dy @ w.detach())


def test_weights_that_live_as_fp8_break_the_graph_and_keep_their_bits():
    x, w, dy = data(40, 64, 48)
    found = []

    def scaled(x: torch.Tensor, w: torch.Tensor, site: GemmSite) -> torch.Tensor:
        return fp8_linear(x * 2, w, None, site) * 2

    for run in (scaled, torch.compile(scaled, backend="aot_eager")):
        site = make_site("tensorwise")[0]
        weight = fp8_parameter(w.clone().requires_grad_(), site.quantizers["weight"])
        mine = x.clone().requires_grad_()
        y = run(mine, weight, site)
        y.backward(dy)
        found.append((y, mine.grad, weight.grad))
    assert_all_same_bytes(*found)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"weight that lives as FP8.*without fullgraph"):
        compiled(scaled)(x, weight, site)


# ----------------------------------------------------------------------------------------------------- operators


@pytest.mark.parametrize(
    ("name", "training", "when"),
    [("delayed", False, LATER), ("mxfp8", True, NOW), ("no-input", False, LATER)],
)
def test_operators_are_what_their_descriptions_say(name, training, when):
    """Shapes, strides and dtypes before there are values; no aliases; nothing written that the schema does not name."""
    x, w, dy = leaves(*data(40, 64, 48))
    site = make_site(name)[0]
    keeps = name != "no-input"
    operators = torch.ops.megatron_fp8
    handles, layout = [site.handle], site.saved_layout
    arguments = (x, [w], None, None, handles, layout, "", keeps, training, when, 0)
    torch.library.opcheck(operators.linear.default, arguments)
    with torch.no_grad():
        _, codes, scales, *about_forward = operators.linear(*arguments)
        given = [codes, scales] if keeps else [x.detach()]
        arguments = (
            dy.detach(),
            given,
            [w.detach()],
            None,
            *about_forward,
            handles,
            layout,
            "",
            0,
            True,
            [True],
            dy.dtype,
        )
        torch.library.opcheck(operators.linear_backward.default, arguments)
    torch.library.opcheck(operators.observe.default, (x, w, dy, site.handle, training, 0))


def test_graphs_of_a_torch_that_would_capture_operators_are_refused(monkeypatch):
    from megatron_fp8.linear import compiled as linear_op

    x, w, _ = data(40, 64, 48)
    site = make_site("rowwise")[0]
    handles, layout = [site.handle], site.saved_layout
    arguments = (x, [w], None, None, handles, layout, "", False, True, NOW, 0)
    for name in ("is_available", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, lambda: True)
    linear_op.linear(*arguments)
    monkeypatch.setattr(linear_op, "_KEPT_OUT_OF_GRAPHS", False)
    with pytest.raises(RuntimeError, match=r"compile without that mode, or capture the step"):
        linear_op.linear(*arguments)
    site.state.begin_capture()
    linear_op.linear(*arguments)
