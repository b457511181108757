"""Fp8Linear among what looks at operations or replaces tensors: each works, or one line says what to do."""

from __future__ import annotations

import copy
import functools
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.support.compare import assert_all_same_bytes, assert_same_bytes
from megatron_fp8.nn import Fp8Linear, convert_from_fp8, fp8_autocast, fp8_matmul, fp8_step


def tower(recipe: str = "tensorwise") -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Fp8Linear(32, 64, recipe=recipe), nn.GELU(), Fp8Linear(64, 32, recipe=recipe))


def tokens(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, 32, generator=torch.Generator().manual_seed(1), requires_grad=True)


# ------------------------------------------------------------------------------------- selective checkpointing

POLICIES = {
    "products": [torch.ops.aten.mm.default, torch.ops.aten.addmm.default],
    "everything": lambda context, op, *args, **kwargs: CheckpointPolicy.MUST_SAVE,
    "nothing": lambda context, op, *args, **kwargs: CheckpointPolicy.PREFER_RECOMPUTE,
}


@pytest.mark.parametrize(
    ("recipe", "policy", "mutation"),
    [*(("delayed", policy, False) for policy in POLICIES), ("mxfp8", "products", True)],
)
def test_selective_checkpointing_changes_no_bit(recipe, policy, mutation):
    contexts = functools.partial(
        create_selective_checkpoint_contexts, POLICIES[policy], allow_cache_entry_mutation=mutation
    )
    outcomes = []
    for selective in (False, True):
        model, x = tower(recipe), tokens(8)
        for _ in range(2):
            y = checkpoint(model, x, use_reentrant=False, context_fn=contexts) if selective else model(x)
            y.square().sum().backward()
            counts = fp8_step(model)
        assert counts.nonfinite == 0
        outcomes.append([y.detach(), x.grad, *(p.grad for p in model.parameters())])
    assert_all_same_bytes(*reversed(outcomes))


def test_selective_checkpointing_can_save_the_linears():
    """Their name for a policy; what was saved is not computed again."""
    import megatron_fp8.linear.compiled  # noqa: F401

    saved = [torch.ops.megatron_fp8.linear.default]
    model = tower()
    contexts = functools.partial(create_selective_checkpoint_contexts, saved)
    checkpoint(model, tokens(8), use_reentrant=False, context_fn=contexts).sum().backward()
    assert fp8_step(model).fp8_gemms == 6


def test_selective_checkpointing_of_one_product():
    a, b = tokens(4), torch.randn(32, 16, requires_grad=True)
    contexts = functools.partial(create_selective_checkpoint_contexts, POLICIES["products"])
    outcomes = []
    for options in ({}, {"context_fn": contexts}):
        y = checkpoint(lambda a: torch.relu(fp8_matmul(a, b)), a, use_reentrant=False, **options)
        outcomes.append(torch.autograd.grad(y.sum(), [a, b]))
    assert_all_same_bytes(*outcomes)


@pytest.mark.parametrize(("recipe", "around"), [("delayed", "forward"), ("mxfp8", "backward")])
def test_a_recomputation_goes_as_its_forward_did(recipe, around):
    """A mode that is on around one of them only: what both save has to match."""
    model, plain, x, other = tower(recipe), tower(recipe), tokens(4), tokens(4)
    with FlopCounterMode(display=False) if around == "forward" else nullcontext():
        y = checkpoint(model, x, use_reentrant=False)
    with FlopCounterMode(display=False) if around == "backward" else nullcontext():
        y.sum().backward()
    plain(other).sum().backward()
    assert_same_bytes(x.grad, other.grad)
    contexts = functools.partial(create_selective_checkpoint_contexts, POLICIES["products"])
    fp8_step(model), fp8_step(plain)
    x.grad = other.grad = None
    inner = functools.partial(checkpoint, model, use_reentrant=False)
    checkpoint(inner, x, use_reentrant=False, context_fn=contexts).sum().backward()
    plain(other).sum().backward()
    assert_same_bytes(x.grad, other.grad)


def test_flops_are_counted():
    model = tower()
    with FlopCounterMode(display=False) as counter:
        model(tokens(4)).sum().backward()
    assert counter.get_total_flops() == 2 * 3 * (2 * 4 * 32 * 64)


# ------------------------------------------------------------------------------------------- no memory behind


def test_fake_tensors():
    with FakeTensorMode():
        model, x = tower(), tokens(4)
        y = model(x)
        y.sum().backward()
    assert y.shape == (4, 32) and x.grad.shape == (4, 32)


def test_a_model_that_was_traced_by_fake_tensors_first_trains():
    model, plain = tower("delayed"), tower("delayed")
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        model(mode.from_tensor(torch.empty(4, 32)))
    for _ in range(2):
        outputs = [m(tokens(4)) for m in (model, plain)]
        assert_same_bytes(*outputs)
        outputs[0].sum().backward()
        fp8_step(model), fp8_step(plain)


def test_meta_device():
    model, x = tower().to("meta"), torch.empty(4, 32, device="meta", requires_grad=True)
    y = model(x)
    y.sum().backward()
    assert y.shape == x.grad.shape == (4, 32)
    model = model.to_empty(device="cpu")
    model.load_state_dict(tower().state_dict())
    assert_same_bytes(model(tokens(4)), tower()(tokens(4)))


# ------------------------------------------------------------------------------------------- torch.fx, torch.nested


def test_symbolic_trace_takes_it_as_a_leaf():
    model = tower()
    traced = torch.fx.symbolic_trace(model)
    assert [node.op for node in traced.graph.nodes].count("call_module") == 3
    assert_same_bytes(traced(tokens(4)), model(tokens(4)))
    with pytest.raises(ValueError, match="put it into a module"):
        torch.fx.symbolic_trace(model[0])


def test_jagged_batches():
    model, values = tower(), tokens(10)
    batch = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 3, 4, 10]))
    y = model(batch) + batch
    y.values().sum().backward()
    plain = tokens(10)
    expected = model(plain) + plain
    expected.sum().backward()
    assert_same_bytes(y.values(), expected)
    assert_same_bytes(values.grad, plain.grad)
    with pytest.warns(UserWarning), pytest.raises(ValueError, match=r"layout=torch\.jagged"):
        model(torch.nested.nested_tensor([torch.ones(3, 32), torch.ones(5, 32)]))


# ---------------------------------------------------------------------------------------- copies and conversions


def test_copies_of_parametrized_linears():
    linear = Fp8Linear(32, 32)
    linear(tokens(4))
    parametrizations.weight_norm(linear)
    copied = copy.deepcopy(linear)
    assert_same_bytes(copied(tokens(4)), linear(tokens(4)))
    assert copied.fp8_group is not linear.fp8_group and copied.fp8_site is not linear.fp8_site


# ------------------------------------------------------------------------------------------------------ refused


def test_export_says_what_to_do(tmp_path):
    model, x = tower().eval(), tokens(4).detach()
    for strict in (False, True):
        with pytest.raises(Exception, match=r"export inside fp8_autocast\(enabled=False\)"):
            torch.export.export(model, (x,), strict=strict)
    with fp8_autocast(enabled=False):
        program = torch.export.export(model, (x,))
        reference = model(x)
    torch.export.save(program, tmp_path / "program.pt2")
    assert_same_bytes(torch.export.load(tmp_path / "program.pt2").module()(x), reference)
    assert not torch.equal(reference, model(x))
    program = torch.export.export(convert_from_fp8(model), (x,))
    assert_same_bytes(program.module()(x), reference)


def test_other_tracers_and_transforms_say_what_to_do():
    model, x = tower(), tokens(4).detach()
    with pytest.raises(RuntimeError, match=r"torch\.jit\.trace does not see through"):
        torch.jit.trace(model, (x,), check_trace=False)
    for transform in (torch.func.vmap(model), torch.func.grad(lambda x: model(x).sum())):
        with pytest.raises(RuntimeError, match=r"transforms of torch\.func"):
            transform(x)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward-mode"):
        model(torch.autograd.forward_ad.make_dual(x, x))


# ----------------------------------------------------------------------------- inputs and programs that are refused


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda x: x[0, 0], r"the input is a number without dimensions.*reshape\(1\)"),
        (torch.Tensor.to_sparse, r"dense inputs.*layout is torch.sparse_coo.*to_dense\(\)"),
        (torch.Tensor.to_sparse_csr, r"layout is torch.sparse_csr"),
        (torch.Tensor.to_mkldnn, r"layout is torch._mkldnn"),
    ],
)
def test_inputs_that_are_no_dense_matrix_are_refused_in_words(make, words):
    with pytest.raises(ValueError, match=words):
        tower()(make(tokens(4).detach()))


def test_a_sparse_input_in_high_precision_is_nn_linears():
    model, x = tower(), tokens(4).detach()
    with fp8_autocast(enabled=False):
        y = model[0](x.to_sparse())
    assert torch.equal(y, nn.functional.linear(x.to_sparse(), model[0].weight, model[0].bias))


def test_torch_jit_script_is_refused_in_words():
    with pytest.raises(
        RuntimeError, match=r"torch.jit.script does not compile an FP8 linear: .*convert_from_fp8"
    ):
        torch.jit.script(tower())
    torch.jit.script(convert_from_fp8(tower()))
