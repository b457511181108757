"""megatron-fp8 parity --numbers: parts add up, each planted mismatch is named, and transformers' engine is computed."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.support.command import run_each
from tests.support.parity import CONFIG, edit_config, edit_tensors

MOE = {
    "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 128, "moe_token_dispatcher_type": "alltoall",
    "moe_grouped_gemm": True, "moe_router_dtype": "fp32", "fp8_recipe": "mxfp8", "fp8_overrides": {},
}  # fmt: skip
FORMATS = {"dense": "fp8-channel", "moe": "mxfp8"}
TOKENS = 128
Tensors = dict[str, torch.Tensor]
Plant = Callable[[Path], None]


def tensors(change: Callable[[Tensors], Any]) -> Plant:
    return lambda served: edit_tensors(served, change)


def config(**fields: Any) -> Plant:
    return lambda served: edit_config(served, **fields)


ATTENTION = "model.layers.0.self_attn"
EXPERT = "model.layers.0.block_sparse_moe.experts.1.w2"
QKV = [f"{ATTENTION}.{part}_proj" for part in "qkv"]


def scale_again(found: Tensors) -> None:
    found[f"{EXPERT}.weight_scale"].add_(1)  # an exponent


def one_bit_less(found: Tensors) -> None:
    found[f"{ATTENTION}.o_proj.weight"].view(torch.uint8).bitwise_and_(0xFE)


def decoded(found: Tensors) -> None:
    for name in QKV:
        scale = found.pop(f"{name}.weight_scale").view(torch.float8_e8m0fnu).float()
        values = found[f"{name}.weight"].float() * scale.repeat_interleave(32, 1)
        found[f"{name}.weight"] = values.bfloat16()


def other_experts(found: Tensors) -> None:
    gate = "model.layers.0.block_sparse_moe.gate.weight"
    found[gate] = found[gate].roll(1, 0).contiguous()


def static_inputs(served: Path) -> None:
    def add(found: Tensors) -> None:
        scales = [name for name in found if name.endswith("weight_scale")]
        found.update({name.replace("weight_scale", "input_scale"): torch.full([1], 0.05) for name in scales})

    edit_tensors(served, add)
    quantization = json.loads((served / "config.json").read_text())["quantization_config"]
    inputs = quantization["config_groups"]["group_0"]["input_activations"]
    inputs.update(strategy="tensor", dynamic=False, group_size=None)
    edit_config(served, config_groups=quantization["config_groups"])


def cache_scales(served: Path) -> None:
    """Scales far too large: keys and values lose all but their largest."""
    names = [f"model.layers.{layer}.self_attn.{letter}_scale" for layer in (0, 1) for letter in "kv"]
    edit_tensors(served, lambda found: found.update({name: torch.tensor(500.0) for name in names}))
    edit_config(
        served, kv_cache_scheme={"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    )


def no_biases(served: Path) -> None:
    """A Qwen2 served as a Llama."""
    edit_tensors(served, lambda found: [found.pop(name) for name in list(found) if name.endswith(".bias")])
    edit_config(served, architectures=["LlamaForCausalLM"], model_type="llama")


def tied(served: Path) -> None:
    edit_tensors(served, lambda found: found.pop("lm_head.weight"))
    edit_config(served, tie_word_embeddings=True)


# What is planted -> (the run, how, options, what a line says, the cause whose part grows most; None: no numbers).
CASES: dict[str, tuple[str, Plant, list[str], str, str | None]] = {
    "codes read as values, by a matching rule": (
        "moe", config(ignore=["lm_head", *QKV]), [], "^weights: training stored as codes.*q_proj", "weight cast",
    ),
    "matrices left in BF16": (
        "moe", lambda p: (tensors(decoded)(p), config(ignore=["lm_head", *QKV])(p))[0], [],
        "^precision: training e4m3 1x32 e8m0, engine high precision: .*q_proj", "activation cast",
    ),
    "a scale twice off": ("moe", tensors(scale_again), [], f"^weights: .*{EXPERT}.weight_scale", "weight cast"),
    "a conversion with loss": (
        "moe", tensors(one_bit_less), [], f"^weights: .*{ATTENTION}.o_proj.weight", "weight cast",
    ),
    "the activation rule": (
        "moe", static_inputs, [], "^inputs: training e4m3 1x32 e8m0, engine e4m3 tensor static", "activation cast",
    ),
    "the kind of scale": (
        "dense", config(), [], "^inputs: training e4m3 row pow2, engine e4m3 row fp32", "activation cast",
    ),
    "the KV cache": (
        "moe", config(), ["--kv-cache-dtype=fp8"], "^cache: training high precision, engine e4m3", "KV cache",
    ),
    "scales of the KV cache": (
        "moe", cache_scales, [], "^cache: training high precision, engine e4m3", "KV cache",
    ),
    "rotary positions": ("moe", config(rope_theta=5.0), [], "^config: .*engine 5.0: rope_theta", "config"),
    "the router's order": (
        "moe", tensors(other_experts), [], "^weights: .*block_sparse_moe.gate.weight", "router flips",
    ),
    "special tokens": ("moe", config(eos_token_id=7), [], "^tokenizer: training 256, engine 7", None),
    "biases left out": ("dense", no_biases, [], f"^weights: .*engine missing: .*{QKV[0]}.bias", "config"),
    "tied embeddings": ("moe", tied, [], "^config: training false, engine true: tie_word_embeddings", "config"),
    "NaN": (
        "moe", tensors(lambda t: t["model.norm.weight"].fill_(torch.nan)), [],
        "^no numbers: .*engine is not: model.norm.weight holds NaN", None,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Runs, exports, and planted copies of these: NAME/served, NAME/numbers.json."""
    folder = tmp_path_factory.mktemp("numbers")
    (folder / "text.txt").write_text("a quick brown fox jumps over the lazy dog and on " * 100)
    data = {"paths": [str(folder / "text.txt")], "split": "1,0,0", "cache_dir": str(folder / "cache")}
    commands: dict[str, list[Any]] = {}
    for name, more in (("dense", {"add_qkv_bias": True}), ("moe", MOE)):
        # Norms whose weights are not 1: their rounding shows.
        content = {**CONFIG, "model": {**CONFIG["model"], **more}, "data": data, "optimizer": {"lr": 0.02}}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content))
        commands[f"train {name}"] = [
            "train",
            "--config",
            folder / f"{name}.yaml",
            f"--run_dir={folder / name}",
        ]
        commands[f"export {name}"] = [
            "export",
            folder / name,
            folder / f"{name}-served",
            f"--format={FORMATS[name]}",
        ]
    for name, (code, err, out) in run_each(folder, commands).items():
        assert code == 0, (name, err, out)
    return folder


@pytest.fixture(scope="module")
def heard(folder) -> dict[str, tuple[int, list[str], dict[str, Any] | None]]:
    """Exit code, lines, and numbers of each case, of both clean directories, and of transformers' engine."""
    commands = {}

    def add(name: str, which: str, served: Path, *options: str) -> None:
        output = folder / f"{len(commands)}.json"
        commands[name] = [
            "parity",
            folder / which,
            served,
            "--numbers",
            f"--tokens={TOKENS}",
            f"--json={output}",
            *options,
        ]

    for which in ("dense", "moe"):
        add(which, which, folder / f"{which}-served", "--accept=inputs", "--max-kl=1")
    add("transformers", "dense", folder / "dense-served", "--engine=transformers", "--max-kl=0")
    for number, (name, (which, plant, options, _, _)) in enumerate(CASES.items()):
        served = folder / f"served-{number}"
        shutil.copytree(folder / f"{which}-served", served)
        plant(served)
        add(name, which, served, *options)
    found = {}
    for number, (name, (code, err, out)) in enumerate(run_each(folder, commands).items()):
        assert code in (0, 1), (name, err)
        found[name] = code, out.splitlines(), json.loads((folder / f"{number}.json").read_text())["numbers"]
    return found


QUANTITIES = ("kl", "k3", "absolute", "difference")


@pytest.mark.parametrize("which", ["dense", "moe"])
def test_the_parts_add_up_to_the_whole(heard, which):
    code, out, numbers = heard[which]
    assert code == 0, out
    assert numbers["tokens"] == sum(map(len, numbers["engine"])) == TOKENS // 32 * 31
    for quantity in QUANTITIES:
        total = sum(part[quantity] for part in numbers["parts"])
        assert total == pytest.approx(numbers["whole"][quantity], rel=1e-9)
    training, engine = (torch.tensor(numbers[side], dtype=torch.float64) for side in ("training", "engine"))
    difference = engine - training
    assert numbers["whole"]["difference"] == pytest.approx(float(difference.mean()), rel=1e-9)
    assert numbers["whole"]["absolute"] == pytest.approx(float(difference.abs().mean()), rel=1e-9)
    assert numbers["whole"]["k3"] == pytest.approx(
        float((difference + (-difference).exp() - 1).mean()), rel=1e-6
    )
    assert numbers["largest"] == pytest.approx(float(difference.abs().max()), rel=1e-9)
    assert 0 < numbers["whole"]["kl"] < 1e-3


def parts(numbers: dict[str, Any]) -> dict[str, float]:
    return {part["cause"]: part["kl"] for part in numbers["parts"]}


def test_causes_that_are_not_there_have_no_part(heard):
    """Weights of the export are training's; these runs have no difference in config, cache and, densely, no router."""
    dense, moe = (heard[which][2] for which in ("dense", "moe"))
    for numbers in (dense, moe):
        found = parts(numbers)
        assert found["config"] == found["weight cast"] == found["KV cache"] == 0
        assert found["order of sums"] < 1e-6
    assert parts(dense)["router flips"] == dense["choices"] == 0
    assert parts(moe)["activation cast"] == 0 and moe["choices"] == 2 * TOKENS


def test_scales_of_the_kv_cache_are_the_directorys(heard):
    own, stored = (parts(heard[case][2])["KV cache"] for case in ("the KV cache", "scales of the KV cache"))
    assert stored > 10 * own > 0


@pytest.mark.parametrize("case", CASES)
def test_a_planted_mismatch_is_named(heard, case):
    which, _, _, words, cause = CASES[case]
    code, out, numbers = heard[case]
    assert code == 1 and any(re.search(words, line) for line in out), out
    if cause is None:
        return
    clean = parts(heard[which][2])
    # The kind of scale is what the dense run's clean directory has.
    grown = {
        name: kl - (0 if case == "the kind of scale" else clean[name]) for name, kl in parts(numbers).items()
    }
    assert max(grown, key=lambda name: grown[name]) == cause, grown
    assert grown[cause] > 1e-6, grown


def test_the_engines_log_probabilities_are_those_of_transformers(heard, folder):
    """To the bit: compressed-tensors quantizes each token's input. A bound of 0 is exceeded."""
    from transformers import AutoModelForCausalLM

    code, out, numbers = heard["transformers"]
    assert code == 1 and any(
        line.startswith("numbers: training asks for at most 0, engine has KL") for line in out
    ), out
    model = AutoModelForCausalLM.from_pretrained(folder / "dense-served", dtype=torch.bfloat16).eval()
    for ids, ours in zip(numbers["ids"], numbers["engine"], strict=True):
        tokens = torch.tensor(ids)
        with torch.no_grad():
            log_probs = model(tokens[None]).logits[0, :-1].double().log_softmax(-1)
        theirs = log_probs.gather(1, tokens[1:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(ours, dtype=torch.float64), theirs, rtol=0, atol=1e-9)
