"""LoRA and DoRA of PEFT around frozen codes: trained, resumed, merged in float32, streamed, saved and loaded."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.nn.parallel import DistributedDataParallel

from benchmarks.support.compare import assert_all_same_bytes, assert_same_bytes
from megatron_fp8.inference import prepare_for_inference
from megatron_fp8.inference.calibration import calibrate
from megatron_fp8.nn import (
    Fp8Config,
    Fp8Linear,
    convert_to_fp8,
    dequantize_weights,
    fp8_state_dict,
    fp8_step,
    freeze_weights,
    load_fp8_state_dict,
    register_fp8_step,
)
from megatron_fp8.numerics import nvfp4
from megatron_fp8.params.fp8_parameter import Fp8Parameter
from megatron_fp8.quantizer import quantize
from megatron_fp8.recipe import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from megatron_fp8.serve import save_quantized, weight_stream
from megatron_fp8.serve.stream import HfWeights

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

RECIPES = ("delayed", "tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4")
LAYERS, TARGETS = 2, ["q_proj", "v_proj", "up_proj", "down_proj"]
DATA = torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(3))
GEMMS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")


def plain_base(seed: int = 0, tied: bool = False) -> Any:
    """A small Qwen3 in BF16; ``tied``: the head is the embedding."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "vocab_size": 128}
    sizes |= {"num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 4}
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model("qwen3", **sizes, tie_word_embeddings=tied)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def base(recipe: str = "mxfp8", seed: int = 0, tied: bool = False) -> Any:
    """Its linears are frozen codes."""
    return freeze_weights(convert_to_fp8(plain_base(seed, tied), recipe))


def adapted(kind: str = "lora", recipe: str = "mxfp8", **options: Any) -> Any:
    model = base(recipe)
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=TARGETS, use_dora=kind == "dora", **options)
    return peft.get_peft_model(model, config)


def trained(kind: str = "lora", recipe: str = "mxfp8") -> Any:
    """Adapters that differ from their start, without the time of training."""
    model = adapted(kind, recipe)
    generator = torch.Generator().manual_seed(4)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.05, generator=generator)
        elif "magnitude" in name:
            parameter.data *= 1 + 0.1 * torch.rand(parameter.shape, generator=generator)
    return model


def optimizer_of(model: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)


def steps(model: Any, optimizer: Any, count: int) -> list[float]:
    model.train()
    losses = []
    for _ in range(count):
        loss = model(input_ids=DATA, labels=DATA).loss
        loss.backward()
        fp8_step(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def linears(model: Any) -> dict[str, Fp8Linear]:
    """Name without PEFT's parts -> linear."""
    return {
        name.removeprefix("base_model.model.").replace(".base_layer", ""): module
        for name, module in model.named_modules()
        if isinstance(module, Fp8Linear)
    }


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=DATA).logits
    return found


# ------------------------------------------------------------------------------------------------------------ training


@pytest.mark.parametrize(
    "recipe, kind", [(recipe, ("lora", "dora")[i % 2]) for i, recipe in enumerate(RECIPES)]
)
def test_adapters_learn_around_codes_that_stay(recipe: str, kind: str) -> None:
    model = adapted(kind, recipe)
    before = {name: linear.weight.codes[0].clone() for name, linear in linears(model).items()}
    assert {codes.numel() for codes in before.values()} <= (
        {128 * 64, 256 * 64} if recipe == "nvfp4" else {128 * 128, 256 * 128}
    )
    losses = steps(model, optimizer_of(model), 3)
    assert losses[-1] < losses[0] - 0.1
    model(input_ids=DATA, labels=DATA).loss.backward()
    counts = fp8_step(model)
    # 7 linears a layer: every fprop; every dgrad but those of the three that read the embedding's normed output.
    dgrads = 7 * LAYERS - 3
    derived = dgrads if recipe in ("rowwise", "mxfp8") else 0
    assert (counts.fp8_gemms, counts.hp_gemms) == (7 * LAYERS + dgrads, 0)
    assert counts.casts == 7 * LAYERS + dgrads + derived
    for name, linear in linears(model).items():
        assert_same_bytes(linear.weight.codes[0], before[name])
        assert isinstance(linear.weight, Fp8Parameter) and linear.weight.grad is None


@pytest.mark.parametrize("recipe", ["rowwise", "nvfp4"])
def test_doras_magnitudes_are_norms_of_what_the_codes_mean(recipe: str) -> None:
    model = adapted("dora", recipe)
    for name, module in model.named_modules():
        if name.endswith("up_proj"):
            norms = torch.linalg.norm(module.base_layer.weight.dequantize(), dim=1)  # PEFT sums in BF16
            assert_same_bytes(module.lora_magnitude_vector["default"].weight.detach(), norms.float())


@pytest.mark.parametrize("recipe", ["delayed", "nvfp4"])
def test_a_resumed_training_has_the_same_bits(recipe: str, tmp_path: Path) -> None:
    model = adapted("dora", recipe)
    optimizer = optimizer_of(model)
    steps(model, optimizer, 2)
    model.save_pretrained(tmp_path)
    saved = copy.deepcopy((fp8_state_dict(model), optimizer.state_dict()))
    wanted = steps(model, optimizer, 2)
    again = peft.PeftModel.from_pretrained(base(recipe), tmp_path, is_trainable=True)
    optimizer = optimizer_of(again)
    load_fp8_state_dict(again, saved[0])
    optimizer.load_state_dict(saved[1])
    assert steps(again, optimizer, 2) == wanted


def test_gradient_checkpointing_changes_no_bit() -> None:
    found = []
    for recompute in (False, True):
        model = adapted("lora", "rowwise")
        if recompute:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": False})
        found.append(steps(model, optimizer_of(model), 3))
    assert found[0] == found[1]


def ranks_case() -> tuple[bool, bool]:
    """A case for ranks: bases of different seeds become rank 0's, and adapters stay equal."""
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = peft.get_peft_model(base("blockwise", seed=rank), peft.LoraConfig(r=4, target_modules=TARGETS))
    parallel = DistributedDataParallel(model)
    optimizer = optimizer_of(model)
    register_fp8_step(optimizer, parallel)
    parallel(input_ids=(DATA + rank) % 128, labels=DATA).loss.backward()
    optimizer.step()
    adapters = torch.cat([p.detach().flatten() for n, p in model.named_parameters() if "lora_" in n])
    codes = torch.cat([linear.weight.codes[0].flatten() for linear in linears(model).values()])
    same = []
    for mine in (adapters, codes):
        first = mine.clone()
        dist.broadcast(first, 0)
        same.append(torch.equal(first, mine))
    return same[0], same[1]


def test_distributed_data_parallel(ranks: Any) -> None:
    assert ranks(2).run(ranks_case) == [(True, True)] * 2


# --------------------------------------------------------------------------------------------------- merged and streamed


def merged_by_hand(model: Any) -> dict[str, torch.Tensor]:
    """Linear -> float32 weight with its adapter, by the formulas."""
    found = {}
    with torch.no_grad():
        for name, linear in linears(model).items():
            weight = linear.weight.dequantize(torch.float32)
            layer = model.base_model.model.get_submodule(name)
            if hasattr(layer, "lora_A"):
                a, b = (part["default"].weight.float() for part in (layer.lora_A, layer.lora_B))
                weight = weight + b @ a * (layer.lora_alpha["default"] / layer.r["default"])
                if "default" in layer.lora_magnitude_vector:
                    norm = torch.linalg.vector_norm(weight, dim=1)
                    weight = (layer.lora_magnitude_vector["default"].weight / norm)[:, None] * weight
            found[name] = weight
    return found


def expected(weights: dict[str, torch.Tensor], form: str) -> dict[str, torch.Tensor]:
    """The quantized tensors that an export has of these weights."""
    recipe: Any = {
        "fp8-tensor": Float8CurrentScaling(),
        "fp8-channel": Float8RowwiseScaling(),
        "fp8-block": Float8BlockScaling(),
        "mxfp8": MXFP8BlockScaling(),
        "nvfp4": NVFP4BlockScaling(),
    }[form]
    groups = [[name] for name in weights]
    if form in ("fp8-tensor", "nvfp4"):  # the parts of a GEMM have one scale
        fused = [[f"model.layers.{i}.{part}" for part in parts] for i in range(LAYERS) for parts in GEMMS]
        inside = {name for group in fused for name in group}
        groups = fused + [[name] for name in weights if name not in inside]
    found = {}
    for group in groups:
        side = quantize(torch.cat([weights[name] for name in group]), recipe, "weight").rowwise
        row = 0
        for name in group:
            end = row + len(weights[name])
            codes, scale = side.codes[row:end], side.scale_inv
            if form == "nvfp4":
                found[f"{name}.weight_packed"] = codes.view(torch.uint8)
                found[f"{name}.weight_scale"] = scale.repeat_interleave(16, 0)[row:end]
                found[f"{name}.weight_global_scale"] = nvfp4.tensor_scale(side.tensor_amax).reshape(1)
            else:
                found[f"{name}.weight"] = codes
                scale = scale.reshape(1) if form == "fp8-tensor" else scale
                scale = scale.view(torch.uint8) if form == "mxfp8" else scale
                found[f"{name}.weight_scale{'_inv' if form == 'fp8-block' else ''}"] = scale
            row = end
    return found


FORMS = ("fp8-tensor", "fp8-channel", "fp8-block", "mxfp8", "nvfp4")


@pytest.mark.parametrize("form, kind", [*((form, "dora") for form in FORMS), ("fp8-tensor", "lora")])
def test_a_stream_quantizes_the_float32_sum(form: str, kind: str) -> None:
    """Byte for byte; the model keeps its codes and adapters. A base of another recipe than the format's."""
    model = trained(kind, "rowwise" if form != "fp8-channel" else "blockwise")
    before = logits(model)
    stream = dict(weight_stream(model, form))
    wanted = expected(merged_by_hand(model), form)
    assert wanted.keys() <= stream.keys()
    for name, tensor in wanted.items():
        assert_same_bytes(stream[name], tensor.contiguous())
    assert_same_bytes(logits(model), before)


def test_pefts_merge_of_dequantized_weights_is_the_same() -> None:
    model = trained("lora", "rowwise")
    wanted, plain = dict(weight_stream(model, "fp8-tensor")), dict(weight_stream(model, "bf16"))
    merged = dequantize_weights(model, torch.float32).merge_and_unload()
    assert_all_same_bytes(list(dict(weight_stream(merged, "fp8-tensor")).values()), list(wanted.values()))
    for name, weight in merged.state_dict().items():
        assert_same_bytes(weight.bfloat16(), plain[name])


def test_models_inside_a_prepared_one_are_saved_in_high_precision(tmp_path: Path) -> None:
    """What merge_and_unload returns is the model inside PEFT's, which was prepared; its layers are a model too."""
    model = prepare_for_inference(
        peft.get_peft_model(convert_to_fp8(plain_base(), "rowwise"), peft.LoraConfig(r=4))
    )
    with pytest.warns(UserWarning, match="loses most of a small update"):
        merged = model.merge_and_unload()
    for name, each in (("whole", merged), ("layers", merged.model)):
        each.save_pretrained(tmp_path / name)
        loaded = transformers.AutoModel.from_pretrained(tmp_path / name, dtype=torch.bfloat16)
        assert_same_bytes(
            loaded.layers[0].mlp.up_proj.weight, merged.model.layers[0].mlp.up_proj.weight.dequantize()
        )


def test_a_merge_into_codes_warns_and_loses_most_of_a_small_update() -> None:
    model = trained("lora", "tensorwise")
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data *= 0.02
    wanted = merged_by_hand(model)
    start = {name: linear.weight.dequantize(torch.float32) for name, linear in linears(model).items()}
    with pytest.warns(UserWarning, match="loses most of a small update"):
        merged = model.merge_and_unload()
    name = "model.layers.0.mlp.up_proj"
    update = wanted[name] - start[name]
    kept = linears(merged)[name].weight.dequantize(torch.float32) - start[name]
    assert (kept - update).norm() > 0.5 * update.norm()


def test_a_directory_has_the_streams_bytes_and_transformers_reads_it(tmp_path: Path) -> None:
    model = trained("dora")
    save_quantized(model, tmp_path / "out", "fp8-channel")
    assert_all_same(
        load_file(tmp_path / "out" / "model.safetensors"), dict(weight_stream(model, "fp8-channel"))
    )
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert (logits(loaded) - logits(model)).norm() < 0.1 * logits(model).norm()
    with pytest.raises(ValueError, match="is there already"):
        save_quantized(model, tmp_path / "out", "fp8-channel")
    with pytest.raises(ValueError, match="format='lora'"):
        save_quantized(model, tmp_path / "other", "lora")


def assert_all_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert_same_bytes(found[name], tensor)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_adapters_alone_have_the_names_and_bytes_of_pefts_file(kind: str, tmp_path: Path) -> None:
    model = trained(kind)
    model.save_pretrained(tmp_path)
    file = load_file(tmp_path / "adapter_model.safetensors")
    assert all(name.startswith("base_model.model.model.layers.") for name in file)
    assert_all_same(dict(HfWeights("lora").export_weights(model)), file)
    again = peft.PeftModel.from_pretrained(base(), tmp_path)
    assert_same_bytes(logits(again), logits(model))


def test_a_calibration_of_the_model_itself_gives_input_scales() -> None:
    """Also of one in adapters, whose linears have other names; a GEMM's parts share the largest amax."""
    model = trained("lora", "rowwise")
    calibration = calibrate(model, [DATA])
    stream = dict(weight_stream(model, "fp8-tensor", calibration=calibration))
    for name, linear in linears(model).items():
        scale = calibration.input_scale_inv(linear.fp8_site.plan.name)
        assert_same_bytes(stream[f"{name}.input_scale"], scale.reshape(1))
    del calibration.ranges[f"{linears(model)['model.layers.1.self_attn.k_proj'].fp8_site.plan.name}.input"]
    with pytest.raises(
        ValueError, match=r"layers.1.self_attention.linear_qkv is .* here, and nothing of it there"
    ):
        weight_stream(model, "fp8-tensor", calibration=calibration)


def test_of_parts_of_one_gemm_none_is_quantized_if_training_kept_one_in_high_precision() -> None:
    model = convert_to_fp8(
        plain_base(), config=Fp8Config(recipe="rowwise", overrides={"*.0.mlp.gate_proj": "bf16"})
    )
    names = {
        name
        for name in dict(weight_stream(model, "fp8-channel"))
        if name.endswith("mlp.gate_proj.weight_scale")
    }
    assert names == {"model.layers.1.mlp.gate_proj.weight_scale"}


@pytest.mark.parametrize(
    "options",
    [
        {"modules_to_save": ["lm_head"]},
        {"modules_to_save": ["embed_tokens"]},
        {"target_modules": [*TARGETS, "lm_head"]},
    ],
)
def test_a_head_that_is_no_longer_the_embedding_is_written_or_refused(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """Such as LoRA of a tied head, whose weight is the embedding's and whose value is not."""
    torch.manual_seed(2)
    config = peft.LoraConfig(r=4, init_lora_weights=False, **{"target_modules": TARGETS, **options})
    model = peft.get_peft_model(base(tied=True), config)
    for name, parameter in model.named_parameters():
        if "modules_to_save" in name:
            parameter.data += 0.1
    with pytest.raises(
        ValueError, match=r"lm_head.weight is not the embedding's.*tie_word_embeddings = False"
    ):
        weight_stream(model, "bf16")
    model.config.tie_word_embeddings = False
    save_quantized(model, tmp_path / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert (logits(loaded) - logits(model)).norm() < 0.1 * logits(model).norm()


def test_several_adapters_and_none(tmp_path: Path) -> None:
    """The active adapters are what a stream merges; with none it has the base; two are added."""
    model = trained()
    model.save_pretrained(tmp_path)
    plain = logits(base())
    with model.disable_adapter():
        assert_same_bytes(logits(model), plain)
        of_base = dict(weight_stream(model, "fp8-tensor"))
    assert_all_same(of_base, dict(weight_stream(base(), "fp8-tensor")))
    one = dict(weight_stream(model, "bf16"))
    model.load_adapter(tmp_path, adapter_name="second")
    model.set_adapter("second")
    assert_all_same(dict(weight_stream(model, "bf16")), one)
    model.base_model.set_adapter(["default", "second"])
    both, name = dict(weight_stream(model, "bf16")), "model.layers.1.mlp.up_proj.weight"
    update = one[name].float() - of_base_value(name)
    assert (both[name].float() - of_base_value(name) - 2 * update).norm() < 0.02 * update.norm()
    with pytest.raises(ValueError, match="one active adapter is needed"):
        weight_stream(model, "lora")


def test_a_frozen_model_has_a_pickle() -> None:
    """Its weights are what the codes mean: the same codes again."""
    model = base()
    assert_same_bytes(logits(pickle.loads(pickle.dumps(model))), logits(model))


def of_base_value(name: str) -> torch.Tensor:
    value: torch.Tensor = base().get_parameter(name).dequantize(torch.float32)
    return value


def test_refused_adapters() -> None:
    model = adapted()
    model.base_model.model.model.layers[0].mlp.up_proj.lora_bias["default"] = True
    with pytest.raises(ValueError, match=r"up_proj has the adapter 'default'.*merge_and_unload"):
        weight_stream(model, "bf16")
    scaled = peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    tokens = peft.LoraConfig(r=4, target_modules=["embed_tokens"])
    for config in (scaled, tokens):  # not left out without a word
        with pytest.raises(ValueError, match=r"has the adapter 'default'.*merge_and_unload"):
            weight_stream(peft.get_peft_model(base(), config), "bf16")
    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(ValueError, match="there is nothing to merge"):
        weight_stream(peft.get_peft_model(base(), prompt), "bf16")
    inside = base()
    inside.add_adapter(peft.LoraConfig(r=4, target_modules=TARGETS))
    for model in (base(), inside):
        with pytest.raises(ValueError, match="format='lora' of Qwen3ForCausalLM with active adapters None"):
            weight_stream(model, "lora")
    disabled = adapted()
    disabled.base_model.disable_adapter_layers()
    with pytest.raises(ValueError, match="'default' is merged or disabled"):
        weight_stream(disabled, "lora")
