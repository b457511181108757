"""torch.compile over a layer's experts: one graph for any numbers of tokens, eager mode's bits, no effect twice."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.support.compare import assert_all_same_bytes, assert_same_bytes
from megatron_fp8.linear.function import grouped_linear
from megatron_fp8.linear.gemm_site import GemmSite
from megatron_fp8.state.fp8_state import Fp8State
from megatron_fp8.state.iteration import LATER, NOW
from tests.support.saved_tensors import saved
from tests.support.sites import make_site, randn

PARTITIONED = "aot_eager_decomp_partition"
"""AOT autograd with Inductor's partitioner and its merging of equal nodes; kernels stay eager."""
K, N = 160, 136
NUMBERS = [(70, 0, 40, 17), (17, 40, 0, 70), (0, 0, 200, 1)]  # two of one sum, one of another


@pytest.fixture(autouse=True)
def fresh_compiler(one_thread: None) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def compiled(function: Callable[..., Any], backend: str = PARTITIONED) -> Callable[..., Any]:
    return torch.compile(function, backend=backend, fullgraph=True, dynamic=True)


def graphs() -> int:
    """How many were made."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def experts(recipe: str, **options: Any) -> list[GemmSite]:
    """Sites that share a state."""
    state = options.pop("state", None) or Fp8State()
    names = [f"experts.{e}.fc1" for e in range(4)]
    return [make_site(recipe, state=state, name=name, recording=False, **options)[0] for name in names]


def parameters(*, main_grad: bool = False) -> list[Any]:
    made: list[Any] = [torch.nn.Parameter(randn(N, K, seed=10 + e)) for e in range(4)]
    for parameter in made if main_grad else ():
        parameter.main_grad, parameter.grad_added_to_main_grad = torch.ones(N, K), False
    return made


def step(
    run: Callable[..., torch.Tensor], sites: list[GemmSite], weights: Sequence[Any], numbers: tuple[int, ...]
) -> list[torch.Tensor]:
    """The result and all gradients of one forward and backward; the first token holds an Inf."""
    x = randn(sum(numbers), K, seed=sum(numbers))
    x[:1, 0] = torch.inf
    x.requires_grad_()
    for weight in weights:
        weight.grad = None
    y = run(x, weights, torch.tensor(numbers), sites)
    y.backward(randn(sum(numbers), N, seed=3))
    return [y.detach(), x.grad, *(getattr(weight, "main_grad", weight.grad).clone() for weight in weights)]  # type: ignore[list-item]


def assert_alike(eager: list[GemmSite], traced: list[GemmSite], *, more_casts: int = 0) -> None:
    """The same was recorded and counted, but for so many casts; ends the iteration of both."""
    (mine,), (theirs,) = traced[0].state.arenas, eager[0].state.arenas
    found, wanted = (sites[0].state.finish_iteration() for sites in (traced, eager))
    assert found == replace(wanted, casts=wanted.casts + more_casts)
    for what in ("last_amax", "last_nonfinite", "scale"):
        assert_same_bytes(getattr(mine, what), getattr(theirs, what), what)


def compare(
    recipe: str,
    *,
    backend: str = PARTITIONED,
    form: Callable[..., torch.Tensor] = grouped_linear,
    numbers: Sequence[tuple[int, ...]] = NUMBERS,
    main_grad: bool = False,
    **options: Any,
) -> None:
    """Iterations of experts and of their twins that are compiled: the same bits, amaxes and counts."""
    eager, traced = experts(recipe, **options), experts(recipe, **options)
    mine, theirs = parameters(main_grad=main_grad), parameters(main_grad=main_grad)
    function = compiled(form, backend)
    for iteration, each in enumerate(numbers):
        wanted, found = step(form, eager, theirs, each), step(function, traced, mine, each)
        assert_all_same_bytes(found, wanted, f"{recipe}, iteration {iteration}")
        assert_alike(eager, traced)


@pytest.mark.parametrize(
    ("recipe", "main_grad"), [("delayed", True), ("blockwise-fp32", False), ("no-input", False)]
)
def test_bits_counts_and_amaxes_are_eager_modes(recipe: str, main_grad: bool) -> None:
    """A history without and with values, kept weights; one graph for all numbers of tokens, and all sums."""
    compare(recipe, main_grad=main_grad)
    assert graphs() == 1


def test_inductor_gives_the_same_bits() -> None:
    compare("mxfp8", backend="inductor")
    assert graphs() == 1


@pytest.mark.parametrize(
    ("options", "more_casts"),
    [
        ({"overrides": {"experts.2.*": "rowwise"}}, (3, 3, 2)),
        ({"overrides": {"experts.0.*:wgrad": "bf16"}}, (2, 2, 2)),
        ({"keeps_columnwise": False}, (0, 0, 0)),
    ],
    ids=["another recipe", "a wgrad in high precision", "weights that backward makes again"],
)
def test_experts_that_are_not_alike(options: dict[str, Any], more_casts: tuple[int, ...]) -> None:
    """They stay in the graph. Where layouts differ the tokens themselves are saved, and cast again in the backward."""
    keeps = options.pop("keeps_columnwise", True)
    eager, traced = (
        experts("blockwise", state=Fp8State(keeps_columnwise=keeps), **options) for _ in range(2)
    )
    function = compiled(grouped_linear, "eager")
    for numbers, more in zip(NUMBERS, more_casts, strict=True):
        found = step(function, traced, parameters(), numbers)
        assert_all_same_bytes(found, step(grouped_linear, eager, parameters(), numbers))
        assert_alike(eager, traced, more_casts=more)
    assert graphs() == 1


@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
def test_a_rank_that_no_token_came_to(recipe: str) -> None:
    """Nor one token: sizes of which torch makes graphs of their own."""
    compare(recipe, numbers=[(0, 0, 0, 0), (0, 1, 0, 0), NUMBERS[0], (0, 0, 0, 0)], main_grad=True)
    assert graphs() == 3


def test_what_needs_no_gradient_costs_none() -> None:
    x, weights = randn(127, K, seed=1), parameters()
    for weight in weights[:2]:
        weight.requires_grad_(False)
    found, function = [], compiled(grouped_linear)
    for run in (grouped_linear, function):
        sites = experts("blockwise")
        run(x, weights, torch.tensor(NUMBERS[0]), sites).sum().backward()
        assert weights[0].grad is None
        found.append(([weight.grad for weight in weights[2:]], sites[0].state.finish_iteration()))
        weights[2].grad = weights[3].grad = None
    assert found[0][1] == found[1][1]
    assert_all_same_bytes(found[1][0], found[0][0])


def test_numbers_that_do_not_fit_are_refused_as_the_graph_runs() -> None:
    x, weights, sites = randn(127, K, seed=1), parameters(), experts("blockwise")
    function = compiled(grouped_linear, "eager")
    function(x, weights, torch.tensor(NUMBERS[0]), sites)
    with pytest.raises(ValueError, match=r"experts\.0\.fc1: numbers .* sum to 128, and the input has 127"):
        function(x, weights, torch.tensor([70, 1, 40, 17]), sites)
    assert graphs() == 1


# ---------------------------------------------------------------------------------------------- what is saved


def test_one_byte_a_value_is_saved() -> None:
    x, weights = randn(127, K, seed=1).requires_grad_(), parameters()
    sites, numbers = experts("blockwise"), torch.tensor(NUMBERS[0])
    kept = saved(lambda: compiled(grouped_linear)(x, weights, numbers, sites))
    others = [t for t in kept if t.shape != (N, K)]
    # of each expert: its number of tokens and its site's, how its weight was quantized
    few = 4 * (8 + 8 + 2 * 8 + 4)
    # 127 tokens of 4 experts are 4 blocks of 128, if each has a token in another one.
    assert sum(t.nbytes for t in others) <= 127 * K + 4 * 4 * K + few
    assert not any(t.dtype == torch.bfloat16 for t in others)


# ----------------------------------------------------------------------------------------------------- operators


@pytest.mark.parametrize(
    ("recipe", "training", "when"), [("delayed", True, NOW), ("mxfp8", False, LATER), ("no-input", True, NOW)]
)
def test_operators_are_what_their_descriptions_say(recipe: str, training: bool, when: str) -> None:
    """Shapes, strides and dtypes before there are values; no aliases; nothing written that the schema does not name."""
    operators = torch.ops.megatron_fp8
    x, weights, sites = randn(127, K, seed=1).requires_grad_(), parameters(), experts(recipe)
    handles, layout = [site.handle for site in sites], sites[0].saved_layout
    counts, keeps = torch.tensor(NUMBERS[0]), recipe != "no-input"
    arguments: Any = (x, weights, None, counts, handles, layout, "", keeps, training, when, 0)
    torch.library.opcheck(operators.grouped_linear.default, arguments)
    with torch.no_grad():
        _, codes, scales, *about_forward = operators.grouped_linear(*arguments)
        plain = [weight.detach() for weight in weights]
        arguments = (
            randn(127, N, seed=3),
            [codes, scales] if keeps else [x.detach()],
            plain,
            counts,
            *about_forward,
            handles,
        )
        torch.library.opcheck(
            operators.grouped_linear_backward.default,
            (*arguments, layout, "", 0, True, [True, False, True, True], None),
        )


def test_a_dispatch_mode_sees_one_operator() -> None:
    """With eager mode's bits; what counts operations counts the products of all tokens."""
    wanted = step(grouped_linear, experts("blockwise"), parameters(), NUMBERS[0])
    with FlopCounterMode(display=False) as counter:
        found = step(grouped_linear, experts("blockwise"), parameters(), NUMBERS[0])
    assert_all_same_bytes(found, wanted)
    assert counter.get_total_flops() == 3 * (2 * 127 * K * N)


def test_a_policy_keeps_experts_results_by_the_operators_name() -> None:
    """Selective checkpointing hands them out again, and nothing is multiplied or recorded twice."""
    import megatron_fp8.linear.compiled  # noqa: F401 its operators' names

    operator = torch.ops.megatron_fp8.grouped_linear.default

    def policy(_: Any, of: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if of is operator else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)

    def selective(*args: Any) -> torch.Tensor:
        return checkpoint(
            lambda *given: grouped_linear(*given).relu(), *args, use_reentrant=False, context_fn=contexts
        )

    found = []
    for run in (lambda *args: grouped_linear(*args).relu(), selective):
        sites = experts("delayed")
        found.append((step(run, sites, parameters(), NUMBERS[0]), sites[0].state.finish_iteration()))
    assert_all_same_bytes(found[0][0], found[1][0])
    assert found[1][1] == found[0][1]
