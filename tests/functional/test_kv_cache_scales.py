"""Scales of an FP8 KV cache: measured as transformers caches keys and values, exported under engines' names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.support.ranks import Layout, RankPool, model_parallel
from megatron_fp8.commands.export import main as export_main
from megatron_fp8.commands.import_ import main as import_main
from megatron_fp8.files.checkpoint import find_checkpoint, read_manifest
from megatron_fp8.huggingface.formats import FORMATS
from megatron_fp8.inference.calibration import Calibration, calibrate, load_calibration
from megatron_fp8.serve import weight_stream
from tests.support.hf import VOCAB, build, hf_model, megatron_logits, token_ids

LAYERS = 2
FIELDS = (
    "--model.fp8=hybrid",
    "--model.fp8_format=tensorwise",
    "--model.bf16=false",
    "--model.params_dtype=float32",
)
ATTENTION = "decoder.layers.{}.self_attention.core_attention"


def calibrated(config_file: str, layout: Layout) -> Calibration:
    """A rank case: the calibration of an imported run on ``token_ids``."""
    import torch.distributed as dist

    from megatron_fp8.mcore import checkpoint as checkpoints

    with model_parallel(layout):
        _, chunks, optimizer = build(config_file, layout, *FIELDS)
        folder = find_checkpoint(Path(config_file).parent)
        checkpoints.load(folder, read_manifest(folder), chunks, optimizer)
        ids = token_ids()
        run = lambda batch: megatron_logits(chunks[0], batch)  # noqa: E731
        return calibrate(chunks[0], [ids[:1], ids[1:]], run, group=dist.group.WORLD)


def streamed(config_file: str, layout: Layout, ranges: str) -> dict[str, bytes]:
    """A rank case: the stream's bytes of an imported run's model, with the calibration in ``ranges``."""
    from megatron_fp8.mcore import checkpoint as checkpoints

    with model_parallel(layout):
        _, chunks, optimizer = build(config_file, layout)
        folder = find_checkpoint(Path(config_file).parent)
        checkpoints.load(folder, read_manifest(folder), chunks, optimizer)
        options: dict[str, Any] = {"calibration": load_calibration(Path(ranges)), "kv_cache": True}
        stream = weight_stream(chunks, "fp8-tensor", vocab_size=VOCAB, **options)
        return {name: bytes_of(tensor) for name, tensor in stream}


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """hf: a float32 Qwen3 of transformers, with norms of keys; run: imported from it."""
    folder = tmp_path_factory.mktemp("kv")
    hf_model("qwen3").save_pretrained(folder / "hf")
    assert import_main([str(folder / "hf"), str(folder / "run")]) == 0
    return folder


@pytest.fixture(scope="module")
def calibration(folder: Path, ranks: RankPool) -> Calibration:
    (found,) = ranks(1).run(calibrated, str(folder / "run" / "config.yaml"), Layout())
    found.save(folder / "ranges")
    return load_calibration(folder / "ranges")


def test_ranges_are_those_of_transformers_cache(
    folder: Path, calibration: Calibration, ranks: RankPool
) -> None:
    cache = hf_model("qwen3")(token_ids(), use_cache=True).past_key_values
    halves = ranks(2).run(calibrated, str(folder / "run" / "config.yaml"), Layout(tp=2))
    for number in range(LAYERS):
        for role in ("key", "value"):
            held = getattr(cache.layers[number], f"{role}s").detach()  # [b, heads, s, head]
            name = f"{ATTENTION.format(number)}.{role}"
            for found in (calibration, *halves):
                assert found.ranges[name].shape == (held.shape[1], held.shape[3]) == (2, 128)
                torch.testing.assert_close(
                    found.ranges[name].amaxes, held.abs().amax((1, 2, 3)), rtol=1e-5, atol=0
                )
                assert found.ranges[name].statistics["values"] == held.numel()


@pytest.mark.parametrize("form", FORMATS)
def test_each_format_has_the_scales_where_engines_look(
    folder: Path, calibration: Calibration, form: str
) -> None:
    """vLLM: weight_utils.maybe_remap_kv_scale_name, one value each; compressed-tensors' and modelopt's config entries."""
    out = folder / form
    arguments = [f"--format={form}", f"--calibration={folder / 'ranges'}", "--kv-cache=fp8"]
    assert export_main([str(folder / "run"), str(out), *arguments]) == 0
    tensors, modelopt = load_file(next(out.glob("*.safetensors"))), form.endswith("-modelopt")
    for number in range(LAYERS):
        for role in ("key", "value"):
            letter, attention = role[0], f"model.layers.{number}.self_attn"
            name = f"{attention}.{letter}_proj.{letter}_scale" if modelopt else f"{attention}.{letter}_scale"
            scale, amax = tensors.pop(name), calibration.ranges[f"{ATTENTION.format(number)}.{role}"].amax
            assert scale.dtype == torch.float32 and list(scale.shape) == ([] if modelopt else [1])
            assert scale.item() == (1 / (torch.tensor(448.0) / torch.tensor(amax))).item()
    assert not any(name.endswith((".k_scale", ".v_scale")) for name in tensors)
    inputs = [
        name
        for name in tensors
        if FORMATS[form].input_scale and name.endswith(f".{FORMATS[form].input_scale}")
    ]
    assert len(inputs) == (7 * LAYERS if FORMATS[form].input_scale else 0)
    check_config(json.loads((out / "config.json").read_text())["quantization_config"], form)
    if modelopt:
        legacy = json.loads((out / "hf_quant_config.json").read_text())["quantization"]
        assert legacy["kv_cache_quant_algo"] == "FP8"


@pytest.mark.usefixtures("calibration")
def test_a_stream_has_the_exports_scales(folder: Path, ranks: RankPool) -> None:
    arguments = [f"--calibration={folder / 'ranges'}", "--kv-cache=fp8", "--format=fp8-tensor"]
    assert export_main([str(folder / "run"), str(folder / "same"), *arguments]) == 0
    exported = load_file(next((folder / "same").glob("*.safetensors")))
    for found in ranks(2).run(
        streamed, str(folder / "run" / "config.yaml"), Layout(tp=2), str(folder / "ranges")
    ):
        assert found.keys() == exported.keys() and sum(name.endswith(".k_scale") for name in found) == LAYERS
        assert [name for name, tensor in exported.items() if found[name] != bytes_of(tensor)] == []


def check_config(config: dict[str, Any], form: str) -> None:
    from compressed_tensors.quantization import QuantizationConfig

    if form == "fp8-block":
        assert "kv_cache_scheme" not in config, "transformers passes unknown entries on"
    elif form.endswith("-modelopt"):
        assert config["kv_cache_scheme"] == {"dynamic": False, "num_bits": 8, "type": "float"}
    else:
        scheme = QuantizationConfig.model_validate(config).kv_cache_scheme
        assert scheme is not None and (scheme.num_bits, scheme.type, scheme.strategy) == (
            8,
            "float",
            "tensor",
        )
        assert scheme.symmetric and scheme.dynamic is False


def test_parity_reads_the_same_scales(folder: Path, calibration: Calibration) -> None:
    """The reader of engines' directories finds what the export wrote, under both forms' names."""
    from types import SimpleNamespace

    from megatron_fp8.numerics.formats import E4M3
    from megatron_fp8.serve.engine_model import _cache
    from megatron_fp8.serve.parity import Parity, _compare_weights

    for form in ("fp8-tensor", "nvfp4-modelopt"):
        out = folder / f"parity-{form}"
        arguments = [f"--format={form}", f"--calibration={folder / 'ranges'}", "--kv-cache=fp8"]
        assert export_main([str(folder / "run"), str(out), *arguments]) == 0
        tensors = load_file(next(out.glob("*.safetensors")))
        source = SimpleNamespace(section={"num_layers": LAYERS})
        reader = type("Reader", (dict,), {"names": lambda self: set(self)})(tensors)
        cache = _cache(source, E4M3, reader)
        assert cache is not None
        result, plan = Parity("vllm", form), SimpleNamespace(tensors=lambda progress: iter(()))
        only = type("Reader", (dict,), {"names": lambda self: {n for n in self if n.endswith("_scale")}})(
            tensors
        )
        _compare_weights(result, plan, only, "run", None)  # type: ignore[arg-type]
        assert "4 scales of the KV cache are not compared: training has none" in result.notes
        assert not any(
            difference.name.endswith((".k_scale", ".v_scale")) for difference in result.differences
        )
        assert cache.scales == [
            tuple(calibration.kv_scale_inv(ATTENTION.format(n), role).item() for role in ("key", "value"))
            for n in range(LAYERS)
        ]
        name = next(name for name in tensors if name.endswith(".k_scale"))
        for value, words in ((-1.0, "not one finite number"), (None, "of keys or of values alone")):
            damaged = type(reader)({**tensors, name: torch.tensor(value or 1.0)})
            if value is None:
                del damaged[name]
            with pytest.raises(ValueError, match=words):
                _cache(source, E4M3, damaged)


@pytest.mark.parametrize("form", ["mxfp8", "nvfp4-modelopt"])
def test_an_import_drops_them_and_says_so(
    folder: Path, calibration: Calibration, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    out, run = folder / f"again-{form}", folder / f"run-{form}"
    arguments = [f"--format={form}", f"--calibration={folder / 'ranges'}", "--kv-cache=fp8"]
    assert export_main([str(folder / "run"), str(out), *arguments]) == 0
    assert import_main([str(out), str(run)]) == 0
    assert "of an FP8 cache are left out (4 tensor(s)" in capsys.readouterr().out
    assert export_main([str(run), str(folder / f"back-{form}"), *arguments]) == 0
    first, again = (
        load_file(next((folder / f"{kind}-{form}").glob("*.safetensors"))) for kind in ("again", "back")
    )
    cached = [name for name in first if name.endswith((".k_scale", ".v_scale"))]
    assert len(cached) == 4 and all(torch.equal(first[name], again[name]) for name in cached)


def test_what_has_no_scales_is_refused(
    folder: Path, calibration: Calibration, capsys: pytest.CaptureFixture[str]
) -> None:
    ranges = {name: one for name, one in calibration.ranges.items() if not name.endswith((".key", ".value"))}
    Calibration(ranges).save(folder / "without")
    zeros = {
        **calibration.ranges,
        f"{ATTENTION.format(1)}.value": calibration.ranges[f"{ATTENTION.format(1)}.key"],
    }
    object.__setattr__(zeros[f"{ATTENTION.format(1)}.value"], "amax", 0.0)
    Calibration(zeros).save(folder / "zeros")
    cases = {
        "--kv-cache=fp8 needs a quantized --format": ["--kv-cache=fp8", "--format=fp8-tensor"],
        "and --calibration=DIR": ["--kv-cache=fp8", f"--calibration={folder / 'ranges'}"],
        "has no keys of decoder.layers.0": [
            "--kv-cache=fp8", "--format=mxfp8", f"--calibration={folder / 'without'}"
        ],
        "nothing but zeros as": ["--kv-cache=fp8", "--format=nvfp4", f"--calibration={folder / 'zeros'}"],
        "static input scales are of": ["--format=mxfp8", f"--calibration={folder / 'ranges'}"],
    }  # fmt: skip
    for words, arguments in cases.items():
        assert export_main([str(folder / "run"), str(folder / "refused"), *arguments]) == 2, words
        assert words in capsys.readouterr().err
        assert not (folder / "refused").exists()


def test_a_cache_of_transformers_is_emulated_in_bf16() -> None:
    """compressed-tensors holds scales, divides and multiplies in the dtype of keys."""
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize

    from megatron_fp8.numerics.formats import E4M3
    from megatron_fp8.serve.engine_model import KvCache, _rounded

    x, scale = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(0)).bfloat16() * 9, 0.0123
    arguments = QuantizationArgs(num_bits=8, type="float", strategy="tensor")
    theirs = fake_quantize(x, torch.tensor([scale]).bfloat16(), torch.zeros(1).bfloat16(), arguments)
    assert torch.equal(_rounded(x, KvCache(E4M3, [], in_bf16=True), scale), theirs)
    assert not torch.equal(_rounded(x, KvCache(E4M3, []), scale), theirs)
