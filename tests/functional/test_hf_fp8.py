"""Quantized directories and what reads them: compressed-tensors, transformers, and vLLM's rules by key and dtype."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from benchmarks.support.ranks import Layout, model_parallel
from megatron_fp8 import quantize
from megatron_fp8.commands.export import main as export_main
from megatron_fp8.commands.import_ import main as import_main
from megatron_fp8.files.checkpoint import Manifest, find_checkpoint, read_manifest, read_metadata, read_tensor
from megatron_fp8.huggingface.architectures import ARCHITECTURES, entries, gemms
from megatron_fp8.huggingface.formats import FORMATS
from megatron_fp8.huggingface.qkv_layout import Heads, split_qkv
from megatron_fp8.inference.calibration import Calibration, Range
from megatron_fp8.numerics.nvfp4 import tensor_scale
from megatron_fp8.numerics.scaling import e8m0_to_scale_inv
from tests.support.hf import VOCAB, build, hf_logits, hf_model, megatron_logits, token_ids

HEADS = Heads(4, 2, 128)
LAYERS = 2
GEMMS = gemms(list(entries(ARCHITECTURES["LlamaForCausalLM"], {"num_layers": LAYERS})))
LINEARS = [part for parts in GEMMS.values() for part in parts]
RECIPES = {name: ("--model.fp8=hybrid", f"--model.fp8_format={recipe}", "--model.fp8_param=true") for name, recipe in (
    ("fp8-tensor", "tensorwise"), ("fp8-channel", "rowwise"), ("fp8-block", "blockwise"), ("mxfp8", "mxfp8"),
)} | {"nvfp4": ("--model.fp4=e2m1",)}  # fmt: skip
FROM_TRANSFORMERS = [name for name in FORMATS if not name.endswith("-modelopt")]


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a directory, read by the safetensors library alone."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as handle:
            found |= {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    return found


def first_difference(a: torch.Tensor, b: torch.Tensor) -> str:
    """'' if all bytes are equal, else where not."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"{a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}"
    differ = (a.contiguous().view(torch.uint8) != b.contiguous().view(torch.uint8)).nonzero()
    return (
        f"byte {differ[0].tolist()} of {list(a.shape)}, and {len(differ) - 1} others" if len(differ) else ""
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """hf: a BF16 Llama of transformers; run: imported from it; each format's name: exported from the run."""
    folder = tmp_path_factory.mktemp("fp8")
    hf_model("llama", torch.bfloat16).save_pretrained(folder / "hf")
    assert import_main([str(folder / "hf"), str(folder / "run")]) == 0
    for name in ("bf16", *FORMATS):
        assert export_main([str(folder / "run"), str(folder / name), f"--format={name}"]) == 0
    return folder


@pytest.fixture(scope="module")
def expected(folder) -> dict[str, dict[str, torch.Tensor]]:
    """By format: float32 weights of every linear, made by this package's public quantize and dequantize."""
    weights, found = tensors_of(folder / "hf"), {}
    for name, form in FORMATS.items():
        values = {}
        for parts in GEMMS.values():
            # Per tensor the whole GEMM has one scale, whatever the order of its rows.
            per_gemm = name in ("fp8-tensor", "nvfp4", "nvfp4-modelopt")
            groups = [parts] if per_gemm else [(part,) for part in parts]
            for group in groups:
                whole = torch.cat([weights[f"{part}.weight"] for part in group])
                back = quantize(whole, form.recipe, "weight").dequantize(torch.float32)
                rows = [len(weights[f"{part}.weight"]) for part in group]
                values |= dict(zip(group, back.split(rows), strict=True))
        found[name] = values
    return found


# ------------------------------------------------------------------------------------------------------------ BF16


def test_bf16_comes_back_byte_for_byte(folder):
    before, after = tensors_of(folder / "hf"), tensors_of(folder / "bf16")
    assert before.keys() == after.keys() and before["lm_head.weight"].shape[0] == VOCAB
    for name, tensor in before.items():
        assert not first_difference(tensor, after[name]), name


def test_like_keeps_what_only_the_directory_says(folder, tmp_path):
    (folder / "hf" / "tokenizer_config.json").write_text("{}\n")
    arguments = [str(folder / "run"), str(tmp_path / "out"), f"--like={folder / 'hf'}"]
    assert export_main(arguments) == 0
    before, after = (
        json.loads((path / "config.json").read_text()) for path in (folder / "hf", tmp_path / "out")
    )
    assert after["bos_token_id"] == 1 and after["eos_token_id"] == 2 and after["torch_dtype"] == "bfloat16"
    assert {name: after.get(name) for name in before if name != "dtype"} == {
        name: value for name, value in before.items() if name != "dtype"
    }
    for name in ("generation_config.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / "hf" / name).read_bytes()


# ------------------------------------------------------------------------------------------------------ transformers


@pytest.mark.parametrize("name", FROM_TRANSFORMERS)
def test_transformers_dequantizes_to_our_weights(folder, expected, name):
    import transformers

    if name == "fp8-block":
        wanted: Any = transformers.FineGrainedFP8Config(dequantize=True)
    else:
        wanted = transformers.CompressedTensorsConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / name, quantization_config=wanted)
    reference, bf16_model = (
        transformers.AutoModelForCausalLM.from_pretrained(folder / "bf16") for _ in range(2)
    )
    with torch.no_grad():
        for linear, weight in expected[name].items():
            assert not first_difference(model.get_parameter(f"{linear}.weight"), weight.bfloat16()), linear
            reference.get_parameter(f"{linear}.weight").copy_(weight)
    ids = token_ids()
    logits, bf16 = hf_logits(model, ids), hf_logits(bf16_model, ids)
    assert torch.equal(logits, hf_logits(reference, ids))
    # E4M3 keeps 4 bits: each weight is off by up to 2**-4 of itself. E2M1 keeps 2.
    low, high = (0.1, 0.6) if name == "nvfp4" else (0.005, 0.15)
    assert low < float((logits - bf16).norm() / bf16.norm()) < high


@pytest.mark.parametrize("name", ["fp8-tensor", "fp8-channel"])
def test_transformers_runs_compressed_weights_and_quantized_inputs(folder, expected, name):
    """Its default: FP8 until the first forward pass, inputs quantized in each linear as config.json says."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32)
    linears = {linear: model.get_submodule(linear) for linear in LINEARS}
    assert all(linear.weight.dtype == torch.float8_e4m3fn for linear in linears.values())
    ids = token_ids()
    unquantized = transformers.AutoModelForCausalLM.from_pretrained(folder / "bf16", dtype=torch.float32)
    logits, plain = hf_logits(model, ids), hf_logits(unquantized, ids)
    for linear, module in linears.items():
        assert not first_difference(module.weight.data, expected[name][linear]), linear
    assert 0.005 < float((logits - plain).norm() / plain.norm()) < 0.2


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_transformers_decodes_blocks_at_the_first_pass(folder, expected, name):
    """Its default, in BF16: MXFP8 quantizes inputs too; NVFP4 without a calibration has weights alone."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.bfloat16)
    linears = {linear: model.get_submodule(linear) for linear in LINEARS}
    stored = "weight" if name == "mxfp8" else "weight_packed"
    assert {getattr(linear, stored).dtype for linear in linears.values()} == {
        torch.float8_e4m3fn if name == "mxfp8" else torch.uint8
    }
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder / "bf16", dtype=torch.bfloat16)
    ids = token_ids()
    logits = hf_logits(model, ids)
    with torch.no_grad():
        for linear, module in linears.items():
            assert not first_difference(module.weight.data, expected[name][linear].bfloat16()), linear
            reference.get_parameter(f"{linear}.weight").copy_(expected[name][linear])
    off = float((logits - hf_logits(reference, ids)).norm() / logits.norm())
    assert off == 0 if name == "nvfp4" else 0 < off < 0.1, off


@pytest.mark.parametrize("form", ["fp8-tensor", "nvfp4"])
def test_transformers_quantizes_inputs_with_our_static_scales(folder, tmp_path, form):
    """One site's range is far too narrow: its inputs saturate, which the logits show."""
    import transformers

    ranges, weights = {}, tensors_of(folder / "bf16")
    for number, (site, parts) in enumerate(GEMMS.items()):
        amax = torch.tensor([4.0 + number])
        rows, cols = torch.cat([weights[f"{part}.weight"] for part in parts]).shape
        ranges[f"{site}.input"] = Range(float(amax), amax, (rows, cols), {})
    site = "decoder.layers.1.mlp.linear_fc1.input"
    narrow = {**ranges, site: replace(ranges[site], amax=0.01)}
    logits = {}
    for name, used in {"wide": ranges, "narrow": narrow}.items():
        Calibration(used).save(tmp_path / f"{name} ranges")
        arguments = [f"--format={form}", f"--calibration={tmp_path / f'{name} ranges'}"]
        assert export_main([str(folder / "run"), str(tmp_path / name), *arguments]) == 0
        dtype = torch.float32 if form == "fp8-tensor" else torch.bfloat16
        if form == "nvfp4":
            config = json.loads((tmp_path / name / "config.json").read_text())["quantization_config"]
            check_preset(config, "nvfp4-pack-quantized", "NVFP4")
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=dtype)
        for site, parts in GEMMS.items():
            amax = torch.tensor(used[f"{site}.input"].amax)
            for part in parts:
                linear = model.get_submodule(part)
                if form == "fp8-tensor":
                    assert linear.input_scale.item() == (1 / (torch.tensor(448.0) / amax)).item(), part
                else:
                    assert linear.input_global_scale.tolist() == [(torch.tensor(2688.0) / amax).item()], part
        logits[name] = hf_logits(model, token_ids())
    plain = hf_logits(transformers.AutoModelForCausalLM.from_pretrained(folder / "bf16"), token_ids())
    off = {name: float((value - plain).norm() / plain.norm()) for name, value in logits.items()}
    fine, coarse = (0.2, 0.4) if form == "fp8-tensor" else (0.5, 0.55)
    assert off["wide"] < fine < coarse < off["narrow"], off


# ---------------------------------------------------------------------------------------------------------------- vLLM


@pytest.mark.parametrize("name", FORMATS)
def test_names_shapes_and_types_are_those_that_vllm_reads(folder, name):
    """Those that vLLM makes for a linear (compressed_tensors_w8a8_fp8.py, ..._w8a8_mxfp8.py, ..._w4a4_nvfp4.py with
    use_a16, fp8.py, modelopt.py); nothing else may be there."""
    tensors, plain = tensors_of(folder / name), tensors_of(folder / "hf")
    quantization = json.loads((folder / name / "config.json").read_text())["quantization_config"]
    for linear in LINEARS:
        rows, cols = plain[f"{linear}.weight"].shape
        there = {
            key.rpartition(".")[2]: (tensor.dtype, list(tensor.shape))
            for key, tensor in tensors.items()
            if key.startswith(f"{linear}.")
        }
        e4m3, blocks = (torch.float8_e4m3fn, [rows, cols]), (torch.float8_e4m3fn, [rows, cols // 16])
        bytes_ = torch.uint8, [rows, cols // 2]
        assert there == {
            "fp8-tensor": {"weight": e4m3, "weight_scale": (torch.float32, [1])},
            "fp8-channel": {"weight": e4m3, "weight_scale": (torch.float32, [rows, 1])},
            "fp8-block": {"weight": e4m3, "weight_scale_inv": (torch.float32, [rows // 128, cols // 128])},
            "mxfp8": {"weight": e4m3, "weight_scale": (torch.uint8, [rows, cols // 32])},
            "mxfp8-modelopt": {"weight": e4m3, "weight_scale": (torch.uint8, [rows, cols // 32])},
            "nvfp4": {
                "weight_packed": bytes_, "weight_scale": blocks, "weight_global_scale": (torch.float32, [1]),
            },
            "nvfp4-modelopt": {
                "weight": bytes_, "weight_scale": blocks, "weight_scale_2": (torch.float32, []),
            },
        }[name]  # fmt: skip
    rest = {key: tensor for key, tensor in tensors.items() if key.rpartition(".")[0] not in LINEARS}
    assert rest.keys() == {key for key in plain if key.rpartition(".")[0] not in LINEARS}
    assert {tensor.dtype for tensor in rest.values()} == {torch.bfloat16}
    if name == "fp8-block":
        assert quantization == {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head"], "ignored_layers": ["lm_head"],
        }  # fmt: skip
    elif name.endswith("-modelopt"):
        algorithm, size = {"nvfp4-modelopt": ("W4A16_NVFP4", 16), "mxfp8-modelopt": ("MXFP8", 32)}[name]
        legacy = json.loads((folder / name / "hf_quant_config.json").read_text())["quantization"]
        assert (quantization["quant_method"], quantization["quant_algo"]) == ("modelopt", algorithm)
        assert legacy == {
            "quant_algo": algorithm, "kv_cache_quant_algo": None, "group_size": size, "exclude_modules": ["lm_head"],
        }  # fmt: skip
        if name == "mxfp8-modelopt":
            assert tensors.keys() == (same := tensors_of(folder / "mxfp8")).keys()
            assert all(
                torch.equal(tensor.view(torch.uint8), same[key].view(torch.uint8))
                for key, tensor in tensors.items()
            )
    elif name in ("mxfp8", "nvfp4"):
        form, preset = {"mxfp8": ("mxfp8-quantized", "MXFP8"), "nvfp4": ("nvfp4-pack-quantized", "NVFP4A16")}[
            name
        ]
        check_preset(quantization, form, preset)
    else:
        assert (quantization["quant_method"], quantization["format"]) == (
            "compressed-tensors",
            "float-quantized",
        )
        (group,) = quantization["config_groups"].values()
        assert group["targets"] == ["Linear"] and quantization["ignore"] == ["lm_head"]
        number = {"num_bits": 8, "type": "float", "symmetric": True}
        strategy, inputs = {"fp8-tensor": ("tensor", "tensor"), "fp8-channel": ("channel", "token")}[name]
        assert group["weights"] == {**number, "strategy": strategy, "dynamic": False}
        assert group["input_activations"] == {**number, "strategy": inputs, "dynamic": True}
    shared = {
        "fp8-tensor": "weight_scale",
        "nvfp4": "weight_global_scale",
        "nvfp4-modelopt": "weight_scale_2",
    }
    if name in shared:  # vLLM fuses these, and takes one scale
        for parts in GEMMS.values():
            assert len({float(tensors[f"{part}.{shared[name]}"]) for part in parts}) == 1, parts


def check_preset(quantization: dict[str, Any], form: str, preset: str) -> None:
    """config.json has compressed-tensors' preset scheme."""
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme

    ours = QuantizationConfig.model_validate(quantization)
    assert ours.format == form and ours.ignore == ["lm_head"]
    theirs = QuantizationConfig(config_groups={"group_0": preset_name_to_scheme(preset, ["Linear"])})
    assert ours.model_dump()["config_groups"] == theirs.model_dump()["config_groups"]


# ------------------------------------------------------------------------------------------------- back from codes


@pytest.mark.parametrize("name", FORMATS)
def test_a_quantized_directory_is_imported_to_the_bit(folder, expected, tmp_path, name):
    """Codes times scales, as float32: the fused matrices hold exactly what quantize and dequantize give."""
    assert import_main([str(folder / name), str(tmp_path / "run")]) == 0
    checkpoint = find_checkpoint(tmp_path / "run")
    metadata = read_metadata(checkpoint)
    for number in range(LAYERS):
        layer = f"decoder.layers.{number}"
        fused = read_tensor(checkpoint, metadata, f"{layer}.self_attention.linear_qkv.weight")
        parts = dict(zip("qkv", split_qkv(fused, HEADS), strict=True))
        for part, value in parts.items():
            linear = f"model.layers.{number}.self_attn.{part}_proj"
            assert not first_difference(value, expected[name][linear]), linear
        for ours, theirs in {"fc1.weight_w": "gate", "fc1.weight_v": "up", "fc2.weight": "down"}.items():
            value = read_tensor(checkpoint, metadata, f"{layer}.mlp.linear_{ours}")
            assert not first_difference(value, expected[name][f"model.layers.{number}.mlp.{theirs}_proj"]), (
                theirs
            )
    assert read_tensor(checkpoint, metadata, "decoder.final_layernorm.weight").dtype == torch.bfloat16


# --------------------------------------------------------------------------------------------------- codes of training


def trained_codes(
    config_file: str, source: str, out: str, fields: tuple[str, ...]
) -> dict[str, tuple[Any, Any, Any]]:
    """A case for ranks: weights take one optimizer step and are saved. By site, codes and scales that a forward reads,
    and NVFP4's tensor scale."""
    from megatron_fp8.mcore import checkpoint
    from megatron_fp8.mcore.checkpoint.saver import Saver
    from megatron_fp8.params.fp8_parameter import Fp8Parameter

    with model_parallel(Layout()):
        run, chunks, optimizer = build(config_file, Layout(), *fields)
        checkpoint.load(
            find_checkpoint(Path(source)), read_manifest(find_checkpoint(Path(source))), chunks, optimizer
        )
        torch.manual_seed(1)
        for parameter in chunks[0].parameters():
            parameter.main_grad.copy_(torch.randn(parameter.shape))
        assert optimizer.step()[0]
        facts = {**checkpoint.layout_facts(chunks), "run": run.to_dict()}
        saver = Saver(Path(out))
        numbers = checkpoint.numbers(chunks, optimizer)
        saver.save(checkpoint.sharded_state(chunks, optimizer), Manifest(1, numbers, facts))
        saver.close()
        megatron_logits(chunks[0], token_ids())
        found = {}
        for module in chunks[0].modules():
            if (site := getattr(module, "fp8_site", None)) is None:
                continue
            live = isinstance(module.weight, Fp8Parameter)
            side = (module.weight.quantized if live else site.weights.entry.quantized).rowwise
            scale, amax = side.float_scale_inv(), side.tensor_amax
            if amax is not None:
                scale, amax = scale.repeat_interleave(16, 0), tensor_scale(amax)
            found[site.plan.name] = (side.codes.view(torch.uint8).clone(), scale.clone(), amax)
        return found


@pytest.mark.parametrize("name", RECIPES)
def test_exported_codes_are_those_that_training_multiplied(folder, ranks, tmp_path, name):
    """The live weights' codes and scales after a step, and the exported ones, which were made from the checkpoint."""
    config, saved = folder / "run" / "config.yaml", tmp_path / "saved"
    (trained,) = ranks(1).run(trained_codes, str(config), str(folder / "run"), str(saved), RECIPES[name])
    assert trained.keys() == GEMMS.keys()
    assert export_main([str(saved), str(tmp_path / "out"), f"--format={name}"]) == 0
    tensors, form = tensors_of(tmp_path / "out"), FORMATS[name]
    started = tensors_of(folder / name)
    changed = 0
    for site, parts in GEMMS.items():
        codes, scales, whole = trained[site]
        per_row = {"fp8-tensor": None, "fp8-block": Heads(4, 2, 1)}.get(name, HEADS)
        if site.endswith("linear_qkv"):
            split_codes = split_qkv(codes, HEADS)
            split_scales = [scales] * 3 if per_row is None else split_qkv(scales, per_row)
        else:
            split_codes = codes.chunk(len(parts))
            split_scales = [scales] * len(parts) if per_row is None else scales.chunk(len(parts))
        for part, own_codes, own_scales in zip(parts, split_codes, split_scales, strict=True):
            exported = tensors[f"{part}.{form.codes}"].view(torch.uint8)
            assert not first_difference(exported, own_codes), part
            scale = tensors[f"{part}.{form.scale}"]
            scale = e8m0_to_scale_inv(scale) if name == "mxfp8" else scale.float()
            assert not first_difference(scale, own_scales.reshape(scale.shape)), part
            assert whole is None or tensors[f"{part}.weight_global_scale"].item() == whole.item(), part
            changed += int((exported != started[f"{part}.{form.codes}"].view(torch.uint8)).sum())
    assert changed > 1000


def masters_case(config_file: str, source: str, layout: Layout, distributed: bool) -> dict[str, torch.Tensor]:
    """A case for ranks: this rank's masters by name after loading weights alone; a step from there changes them."""
    from megatron_fp8.mcore import checkpoint
    from megatron_fp8.mcore.checkpoint.training_state import shards_in

    with model_parallel(layout):
        option = f"--optimizer.use_distributed_optimizer={str(distributed).lower()}"
        _, chunks, optimizer = build(config_file, layout, option)
        folder = find_checkpoint(Path(source))
        notes = checkpoint.load(folder, read_manifest(folder), chunks, optimizer).notes
        assert any("weights alone" in note for note in notes), notes
        state = checkpoint.sharded_state(chunks, optimizer)
        found = {}
        for shard in shards_in(state["optimizer"]):
            kind, _, name = shard.key.removeprefix("optimizer.state.").partition(".")
            if kind.endswith("param"):
                found[name] = shard.data.clone()
            else:
                assert kind in ("exp_avg", "exp_avg_sq") and not shard.data.any(), shard.key
        for name in [
            name.removesuffix("_w") for name in found if name.endswith("_w")
        ]:  # two halves, stored apart
            found[name] = torch.cat([found.pop(f"{name}_w"), found.pop(f"{name}_v")])
        for parameter in chunks[0].parameters():
            parameter.main_grad.fill_(1.0)
        assert optimizer.step()[0]
        return found


@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])
def test_masters_start_from_the_imported_float32(folder, expected, ranks, tmp_path, distributed):
    """Codes times float32 scales are no BF16 numbers: a master made from the BF16 weight would differ."""
    assert import_main([str(folder / "fp8-tensor"), str(tmp_path / "run")]) == 0
    config = str(tmp_path / "run" / "config.yaml")
    found = ranks(2).run(masters_case, config, str(tmp_path / "run"), Layout(tp=2, sp=True), distributed)
    weights = expected["fp8-tensor"]
    for rank, masters in enumerate(found):
        for number in range(LAYERS):
            layer = f"model.layers.{number}"
            down = weights[f"{layer}.mlp.down_proj"].chunk(2, dim=1)[rank]
            assert not torch.equal(down, down.bfloat16().float())
            assert not first_difference(masters[f"decoder.layers.{number}.mlp.linear_fc2.weight"], down)
            halves = [weights[f"{layer}.mlp.{name}_proj"].chunk(2)[rank] for name in ("gate", "up")]
            assert not first_difference(
                masters[f"decoder.layers.{number}.mlp.linear_fc1.weight"], torch.cat(halves)
            )
