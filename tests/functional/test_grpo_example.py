"""examples/grpo.py, shorter: the engine gets training's codes, log-probabilities differ where the numerics do."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch

from benchmarks.support.ranks import model_parallel
from megatron_fp8.huggingface.qkv_layout import Heads, split_qkv
from megatron_fp8.quantizer import quantize
from megatron_fp8.recipe import MXFP8BlockScaling
from tests.support.command import ROOT, lines, run

RUNS = ("mxfp8:mxfp8", "bf16:bf16+norm", "bf16:mxfp8", "bf16:nvfp4")


def engine_tensors(engine: Any) -> dict[str, torch.Tensor]:
    """Codes and scales of the second layer's linears, under the stream's names."""
    start = "model.layers.1."
    return {
        name.removeprefix(start): tensor.view(torch.uint8).clone()
        for name, tensor in engine.model.state_dict().items()
        if name.startswith(start) and "norm" not in name
    }


def training_tensors(policy: Any) -> dict[str, torch.Tensor]:
    """The same from training's weights, by the recipe's own cast."""
    layer = policy.model.module.module.decoder.layers[1]
    weights = dict(
        zip("qkv", split_qkv(layer.self_attention.linear_qkv.weight, Heads(4, 4, 32)), strict=True)
    )
    named = {f"self_attn.{letter}_proj": weight for letter, weight in weights.items()}
    named["self_attn.o_proj"] = layer.self_attention.linear_proj.weight
    named["mlp.gate_proj"], named["mlp.up_proj"] = layer.mlp.linear_fc1.weight.chunk(2)
    named["mlp.down_proj"] = layer.mlp.linear_fc2.weight
    found = {}
    for name, weight in named.items():
        side = quantize(weight, MXFP8BlockScaling(), "weight").rowwise
        found[f"{name}.weight"] = side.codes.view(torch.uint8)
        found[f"{name}.weight_scale"] = side.scale_inv.view(torch.uint8)
    return found


def engine_case() -> dict[str, tuple[bool, bool]]:
    """A case for ranks. Name -> whether training changed the tensor in two steps, and whether the engine has it then."""
    from examples import grpo

    options = Namespace(seed=3, prompts=4, group=8, lr=1e-2)
    with model_parallel():
        both = grpo.Run("mxfp8:mxfp8", grpo.warm_start(12, options.seed), options)
        before = engine_tensors(both.engine)
        rewards = [both.step()["reward"] for _ in range(3)]
        assert max(rewards) > 0, "without a reward no weight changes"
        trained, after = training_tensors(both.policy), engine_tensors(both.engine)
        assert before.keys() == trained.keys()
        return {
            name: (not torch.equal(before[name], codes), torch.equal(after[name], codes))
            for name, codes in trained.items()
        }


def test_after_each_step_the_engine_has_trainings_codes_and_scales(ranks):
    (found,) = ranks(1).run(engine_case)
    assert len(found) == 14 and all(same for _, same in found.values()), found
    assert all(changed for name, (changed, _) in found.items() if name.endswith(".weight")), found


def test_log_probabilities_differ_as_the_numerics_do_and_a_seed_repeats_to_the_bit(tmp_path):
    """With matched numerics they differ by less than two ways of rounding one norm in BF16 do."""
    records = []
    for out in ("first", "again"):
        done = run(
            ROOT / "examples" / "grpo.py", *(f"--run={name}" for name in RUNS), "--steps=2", "--prompts=4", "--group=8",
            "--warm-start=12", f"--out={tmp_path / out}",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        records.append(lines(tmp_path / out / "grpo.jsonl"))
    assert records[0] == records[1]
    assert [(record["run"], record["step"]) for record in records[0]] == [
        (r, s) for r in RUNS for s in (1, 2)
    ]
    difference = {name: max(r["difference"] for r in records[0] if r["run"] == name) for name in RUNS}
    k3 = {name: max(r["k3"] for r in records[0] if r["run"] == name) for name in RUNS}
    for values in (difference, k3):
        matched, bf16_norms, bf16_training, four_bits = values.values()
        assert matched < bf16_norms < bf16_training < four_bits, values
    assert all(f"| `{name}` | " in done.stdout for name in RUNS)
    assert (tmp_path / "again" / "grpo.png").stat().st_size > 10_000


def test_bad_input_is_one_line(tmp_path):
    (tmp_path / "grpo.jsonl").touch()
    for option, words in {
        "--run=mxfp8": "--run=mxfp8: give one of bf16, tensorwise",
        "--group=1": "--group=1: at least 2 is needed",
        f"--out={tmp_path}": "has grpo.jsonl: give another folder",
    }.items():
        done = run(ROOT / "examples" / "grpo.py", option)
        assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr, done.stderr
