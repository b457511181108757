"""Differences between Megatron-Core set-ups: the groups that it has no getter for."""

from __future__ import annotations

import sys
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron.core.parallel_state import RankGenerator

from megatron_fp8.mcore import environment
from megatron_fp8.mcore.environment import product_ranks


def test_the_fused_kernels_that_are_missing(monkeypatch):
    def missing(cuda: bool, packages: set[str], **fields: object) -> dict[str, object]:
        monkeypatch.setattr(environment, "has_cuda", lambda: cuda)
        monkeypatch.setattr(environment, "has_te", lambda: "te" in packages)
        monkeypatch.setattr(environment, "uses_apex", lambda extension: cuda and extension in packages)
        monkeypatch.setattr(environment.util, "find_spec", lambda name: name if name in packages else None)
        found = environment.missing_fusions(SimpleNamespace(**fields))
        return {name: without for name, (without, _) in found.items()}

    asked = {
        "masked_softmax_fusion": True,
        "apply_rope_fusion": True,
        "moe_permute_fusion": True,
        "cross_entropy_fusion_impl": "te",
        "gradient_accumulation_fusion": True,
    }
    off = {name: "native" if value == "te" else False for name, value in asked.items()}
    softmax = {"scaled_masked_softmax_cuda", "scaled_upper_triang_masked_softmax_cuda"}
    everything = {"te", "fused_weight_gradient_mlp_cuda", *softmax}
    assert missing(True, everything, **asked) == {}
    assert missing(False, everything, **asked) == missing(True, set(), **asked) == off, "they are for GPUs"
    assert missing(False, set()) == missing(False, set(), **off) == {}
    assert missing(True, {"scaled_masked_softmax_cuda"}, masked_softmax_fusion=True) != {}, (
        "causal masks need the other"
    )
    latent = {"multi_latent_attention": True, "apply_rope_fusion": True}
    assert missing(True, set(), **latent) == {} and missing(False, set(), **latent) != {}


def test_megatron_bridge_of_another_series(monkeypatch):
    def of(version: str | None) -> None:
        package = None if version is None else SimpleNamespace(__version__=version)
        monkeypatch.setitem(sys.modules, "megatron.bridge", package)
        monkeypatch.setitem(sys.modules, "megatron.bridge.package_info", package)
        environment.require_bridge()

    of("0.3.1")
    for version, found in (("0.4.0", "0.4.0"), ("0.30.0", "0.30.0"), (None, "none")):
        with pytest.raises(RuntimeError, match=f"needs megatron-bridge 0.3.x, found: {found}"):
            of(version)


@pytest.mark.parametrize("order", ["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"])
@pytest.mark.parametrize("etp, ep, edp, pp", [(2, 1, 2, 1), (2, 2, 2, 2), (4, 2, 3, 1), (2, 3, 4, 2)])
def test_the_ranks_that_hold_parts_of_the_same_experts(etp, ep, edp, pp, order):
    """Expert TP x expert DP, as Megatron-Core's own generator would make them."""
    experts = RankGenerator(etp, ep, edp, pp, 1, order)
    expected = {rank: sorted(group) for group in experts.get_ranks("tp-dp") for rank in group}
    tensor, data = (
        {rank: group for group in experts.get_ranks(kind) for rank in group} for kind in ("tp", "dp")
    )
    assert {rank: product_ranks(tensor[rank], data[rank], rank) for rank in expected} == expected
    assert len(expected) == etp * ep * edp * pp


def product_of_two():
    """A rank case: the ranks of the group over two groups of two, and its timeout in seconds."""
    rank, limit = dist.get_rank(), timedelta(minutes=7)
    tensor = [dist.new_group(pair, timeout=limit) for pair in ((0, 1), (2, 3))][rank // 2]
    data = [dist.new_group(pair, timeout=limit) for pair in ((0, 2), (1, 3))][rank % 2]
    found = environment._product(tensor, data)
    options = found._get_backend(torch.device("cpu")).options
    return dist.get_process_group_ranks(found), options._timeout.total_seconds()


def test_a_group_over_two_waits_as_long_as_they_do(ranks):
    assert ranks(4).run(product_of_two) == [([0, 1, 2, 3], 420)] * 4
