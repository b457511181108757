"""Our Adam has torch's bits and FusedAdam's contract: the step is the group's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_fp8.mcore.optimizer.adam import Adam

SHAPES = [(1,), (7, 3), (129,), (64, 33)]


def parameters():
    generator = torch.Generator().manual_seed(3)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def set_gradients(params, step):
    generator = torch.Generator().manual_seed(100 + step)
    for index, p in enumerate(params):
        p.grad = torch.randn(p.shape, generator=generator) * 10.0 ** (-index * 3)


def groups(params):
    return [{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:], "weight_decay": 0.0}]


@pytest.mark.parametrize("decoupled", [True, False])
def test_every_bit_is_torchs(decoupled):
    theirs_params, ours_params = parameters(), parameters()
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    settings = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8}
    theirs = kind(groups(theirs_params), **settings)
    ours = Adam(groups(ours_params), **settings, adam_w_mode=decoupled)
    for step in range(25):
        for params, optimizer in ((theirs_params, theirs), (ours_params, ours)):
            set_gradients(params, step)
            for group in optimizer.param_groups:
                group["lr"] = 3e-3 / (1 + step)
            optimizer.step()
        for a, b in zip(theirs_params, ours_params, strict=True):
            assert torch.equal(a, b), step
            for name in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(theirs.state[a][name], ours.state[b][name]), (step, name)


def test_the_step_is_the_groups_and_survives_a_state_dict():
    params = parameters()
    optimizer = Adam([*groups(params), {"params": []}])
    assert "step" not in optimizer.param_groups[0]
    for step in range(3):
        set_gradients(params, step)
        optimizer.step()
    assert [group.get("step") for group in optimizer.param_groups] == [3, 3, None]
    assert all(set(state) == {"exp_avg", "exp_avg_sq"} for state in optimizer.state.values())

    others = [torch.nn.Parameter(p.detach().clone()) for p in params]
    again = Adam([*groups(others), {"params": []}])
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for some, its in ((params, optimizer), (others, again)):
        set_gradients(some, 3)
        its.step()
    for a, b in zip(params, others, strict=True):
        assert torch.equal(a, b)


def test_a_parameter_without_a_gradient_stays():
    params = parameters()
    before = [p.detach().clone() for p in params]
    optimizer = Adam(params)
    set_gradients(params, 0)
    params[1].grad = None
    optimizer.step()
    assert [torch.equal(p, b) for p, b in zip(params, before, strict=True)] == [False, True, False, False]
    assert params[1] not in optimizer.state


def test_on_a_gpu_it_is_one_pass(monkeypatch):
    """torch's fused function, with steps where it wants them; run on a CPU it gives the same numbers."""
    from megatron_fp8.mcore.optimizer import adam as module

    calls = []
    torchs = module.adam

    def recorded(params, grads, averages, squares, maxima, steps, **options):
        calls.append((options["fused"], options["foreach"], {step.device.type for step in steps}))
        options |= {"fused": True, "foreach": False}
        torchs(params, grads, averages, squares, maxima, steps, **options)

    def stepped(device: str) -> list[torch.Tensor]:
        params = [torch.linspace(-3, 3, n, device=device) for n in (5, 7)]
        optimizer = Adam(params, lr=0.1, weight_decay=0.1)
        for _ in range(3):
            for p in params:
                p.grad = torch.full_like(p, 0.5)
            optimizer.step()
        return params

    plain = stepped("cpu")
    monkeypatch.setattr(module, "adam", recorded)
    torch.testing.assert_close(stepped("cpu"), plain)
    with FakeTensorMode():
        stepped("cuda")
    assert calls == [(None, None, {"cpu"})] * 3 + [(True, False, {"cuda"})] * 3
