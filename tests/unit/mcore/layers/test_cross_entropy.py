"""Cross entropy of Liger Kernel: refusals, what it is given, and its real kernels (installed by the long test)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.support.gpt import gpt_config, train
from benchmarks.support.ranks import Layout, RankPool, model_parallel
from megatron_fp8.mcore.layers import cross_entropy

LIGER = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "liger"}
FLOAT32: dict[str, Any] = {"bf16": False, "params_dtype": torch.float32}


def trained(layout: Layout, fields: dict[str, Any], stand_in: bool = False) -> list[tuple[float, float]]:
    """Losses and gradient norms of a small GPT, and the losses of tokens; `stand_in`: Liger's are PyTorch's."""
    from megatron_fp8.mcore.runtime import unwrap

    shapes = []

    def loss(logits: Tensor, labels: Tensor, tp_group: Any) -> Tensor:
        shapes.append((logits.shape, labels.shape, labels.is_contiguous(), tp_group.size()))
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), reduction="none"
        ).view(labels.shape)

    with model_parallel(layout), pytest.MonkeyPatch.context() as patch:
        if stand_in:
            patch.setattr(cross_entropy, "_liger", lambda: loss)
        run = train(
            gpt_config(layout, **FLOAT32, **fields), steps=2, sequence=16, micro_batch=2, global_batch=2
        )
        generator = torch.Generator().manual_seed(5)
        logits = torch.randn(16, 2, 512, generator=generator).chunk(layout.tp, -1)[dist.get_rank()]
        labels = torch.randint(512, (2, 16), generator=generator)
        tokens = unwrap(run.chunks[0]).compute_language_model_loss(labels, logits)
    assert set(shapes) == ({((16, 2, 512), (16, 2), True, 1)} if stand_in else set())
    return [*zip(run.losses, run.grad_norms, strict=True), *enumerate(tokens.flatten().tolist())]


def test_the_named_loss_gets_logits_labels_and_group(ranks: RankPool) -> None:
    want = ranks(1).run(trained, Layout(), {})[0]
    found = ranks(1).run(trained, Layout(), LIGER, stand_in=True)[0]
    for one, other in zip(found, want, strict=True):
        assert one == pytest.approx(other, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "interpreted", "reason"),
    [
        ("liger", "0", "its Triton kernels run on GPUs"),
        ("liger", "1", "pip install 'liger-kernel>=0.8.5'"),
        ("ligre", "0", "must be one of 'native', 'te', 'liger'"),
    ],
)
def test_a_loss_that_cannot_run_is_refused_before_the_model_is_built(
    ranks: RankPool, name: str, interpreted: str, reason: str
) -> None:
    assert reason in ranks(1).run(refusal, name, interpreted)[0]


def refusal(name: str, interpreted: str) -> str:
    with model_parallel() as layout, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", interpreted)
        patch.setitem(sys.modules, "liger_kernel.megatron", None)
        with pytest.raises(ValueError, match="cross_entropy_fusion_impl") as caught:
            train(gpt_config(layout, **{**LIGER, "cross_entropy_fusion_impl": name}), steps=1)
    return str(caught.value)


@pytest.mark.long
def test_ligers_kernels_compute_megatrons_loss(ranks: RankPool, tmp_path: Path) -> None:
    """The published package, by Triton's interpreter, alone and over tensor-parallel ranks."""
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path), "liger-kernel==0.8.5"],
        check=True, timeout=300,
    )  # fmt: skip
    for world in (1, 2):
        layout = Layout(tp=world)
        want = ranks(world).run(trained, layout, {})
        found = ranks(world).run(with_package, str(tmp_path), layout)
        for mine, theirs in zip(found, want, strict=True):
            assert mine == [pytest.approx(pair, rel=1e-6) for pair in theirs]


def with_package(folder: str, layout: Layout) -> list[tuple[float, float]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setattr(sys, "path", [folder, *sys.path])
        found = trained(layout, LIGER)
        assert sys.modules["liger_kernel"].__file__.startswith(folder)  # type: ignore[union-attr]
    return found
