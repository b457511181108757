"""What a process with Transformer Engine or apex does, one JSON object a case on stdout.

python -m tests.support.te.cases FOLDER parity doctor     # Transformer Engine's wheel, installed there
python -m tests.support.te.cases apex
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron_fp8 import recipe
from megatron_fp8.numerics.formats import Format

MAPPED: list[Any] = [
    recipe.DelayedScaling(),
    recipe.DelayedScaling(margin=2, amax_history_len=7, fp8_format=Format.E4M3),
    recipe.Float8CurrentScaling(),
    recipe.Float8CurrentScaling(use_power_2_scales=True, amax_epsilon=1e-3),
    recipe.Float8BlockScaling(),
    recipe.Float8BlockScaling(use_f32_scales=True, amax_epsilon=1e-3, fp8_format=Format.HYBRID),
    recipe.MXFP8BlockScaling(),
    recipe.MXFP8BlockScaling(fp8_format=Format.HYBRID),
]

SMALL = {"hidden_size": 128, "ffn_hidden_size": 128, "num_attention_heads": 2}
SHORT = {"sequence": 128, "micro_batch": 1, "global_batch": 2, "vocab": 128}
# Norms that are layers of their own here are part of Transformer Engine's next linear.
RENAMED = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


def config_of(backend: str | None, recipe_name: str | None, **fields: Any) -> Any:
    """This package's config of the small GPT."""
    from benchmarks.support.gpt import gpt_config
    from megatron_fp8 import TransformerConfig

    fp8 = {"fp8": "hybrid", "fp8_format": recipe_name, "fp8_backend": backend} if recipe_name else {}
    return gpt_config(cls=TransformerConfig, **{**SMALL, **fp8, **fields})


def build(config: Any) -> Any:
    """Its one chunk, with the weights that the emulated backend's model has."""
    from benchmarks.support.gpt import build_chunks
    from megatron_fp8.mcore.spec import get_gpt_layer_fp8_spec

    (chunk,) = build_chunks(
        config, spec=get_gpt_layer_fp8_spec, sequence=SHORT["sequence"], vocab=SHORT["vocab"]
    )
    if any(name.endswith("layer_norm_weight") for name, _ in chunk.named_parameters()):
        values = emulated_weights(config.normalization, config.add_bias_linear, config.gated_linear_unit)
        with torch.no_grad():
            for name, parameter in chunk.named_parameters():
                parameter.copy_(values[name])
    return chunk


@functools.cache
def emulated_weights(normalization: str, bias: bool, gated: bool) -> dict[str, torch.Tensor]:
    """By Transformer Engine's names, what the emulated backend's model of this kind begins with."""
    from benchmarks.support.gpt import build_chunks
    from megatron_fp8.mcore.spec import get_gpt_layer_fp8_spec

    (source,) = build_chunks(
        config_of("emulated", "tensorwise", normalization=normalization, add_bias_linear=bias,
                  gated_linear_unit=gated),
        spec=get_gpt_layer_fp8_spec, sequence=SHORT["sequence"], vocab=SHORT["vocab"],
    )  # fmt: skip
    return {te_name(name): value.detach().clone() for name, value in source.named_parameters()}


def te_name(name: str) -> str:
    """A parameter's name in a model of Transformer Engine's layers."""
    for ours, theirs in RENAMED.items():
        name = name.replace(ours, theirs)
    return name


def trained(
    backend: str | None, recipe_name: str | None, steps: int = 2, look: Any = None, **fields: Any
) -> dict[str, Any]:
    """Losses of a short training, the counts of its last iteration, its sites, and what contexts were entered."""
    from benchmarks.support.gpt import build_optimizer, train_step
    from benchmarks.support.ranks import model_parallel
    from megatron_fp8.mcore.iteration import iteration_counts
    from megatron_fp8.mcore.report import site_report
    from tests.support.te import products

    for seen in (products.entered, products.updates, products.multiplied):
        seen.clear()  # type: ignore[attr-defined]
    with model_parallel():
        config = config_of(backend, recipe_name, **fields)
        chunk = build(config)
        optimizer = build_optimizer(config, [chunk])
        losses = [train_step(config, [chunk], optimizer, step, **SHORT)[0] for step in range(steps)]
        if look is not None:
            look(config, chunk)
        return {
            "losses": losses,
            "counts": iteration_counts(),
            "sites": site_report([chunk]),
            "entered": list(products.entered),
            "updates": len(products.updates),
            "fp8_calls": len(products.multiplied),
        }


def parity(*names: str) -> dict[str, Any]:
    """Both backends' trainings, by recipe and options."""
    options: dict[str, dict[str, Any]] = {
        "tensorwise": {},
        "tensorwise pow2": {"fp8_pow2_scales": True, "fp8_amax_epsilon": 0.5},
        "blockwise fp32": {"fp8_pow2_scales": False, "fp8": "e4m3"},
        "mxfp8": {},
        "tensorwise gpt": {"llama": False},
    }
    return {
        name: {
            backend: trained(backend, name.split()[0], **fields)
            for backend in ("transformer_engine", "emulated")
        }
        for name, fields in options.items()
    }


def delayed() -> dict[str, Any]:
    """Delayed scaling with the first layer in BF16, and recomputed; tensorwise recomputed, and with an override."""
    bf16 = {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 0}
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    te = "transformer_engine"
    return {
        "first": trained(te, "delayed", 1, fp8_amax_history_len=4, **bf16),
        "recomputed": trained(te, "delayed", 1, fp8_amax_history_len=4, **full),
        "tensorwise recomputed": trained(te, "tensorwise", 1, **full),
        "override": trained(te, "tensorwise", 1, fp8_overrides={"*.linear_proj": "bf16"}),
    }


def refusals() -> dict[str, str]:
    """What is refused, and with which words."""
    from benchmarks.support.gpt import build_chunks, build_optimizer, train_step
    from benchmarks.support.ranks import model_parallel
    from megatron_fp8.backends import transformer_engine as engine
    from megatron_fp8.mcore.spec import get_gpt_layer_fp8_spec
    from megatron_fp8.mcore.te.context import get_fp8_context

    te, found = "transformer_engine", {}

    def train(config: Any, chunk: Any) -> None:
        train_step(config, [chunk], build_optimizer(config, [chunk]), 0, **SHORT)

    def case(name: str, run: Any) -> None:
        with model_parallel():
            try:
                run()
            except (ValueError, RuntimeError) as error:
                found[name] = f"{type(error).__name__}: {error}"

    def megatrons_te_spec() -> None:
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

        from megatron_fp8.mcore.layers.attention import CoreAttention

        def spec(config: Any) -> Any:
            made = get_gpt_layer_with_transformer_engine_spec()
            made.submodules.self_attention.submodules.core_attention = CoreAttention
            return made

        config = config_of("emulated", "tensorwise")
        (chunk,) = build_chunks(config, spec=spec, sequence=128, vocab=128)
        train(config, chunk)

    def our_layers() -> None:
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

        config = config_of(te, "tensorwise")
        (chunk,) = build_chunks(
            config, spec=lambda c: get_gpt_layer_local_spec(normalization="RMSNorm"), sequence=128, vocab=128
        )
        train(config, chunk)

    def te_layers_of_another_backend() -> None:
        config = config_of("emulated", "tensorwise")
        made = get_gpt_layer_fp8_spec(config_of(te, "tensorwise"))
        (chunk,) = build_chunks(config, spec=lambda _: made, sequence=128, vocab=128)
        train(config, chunk)

    def outside_the_context() -> None:
        chunk = build(config_of(te, "tensorwise"))
        layer = chunk.module.module.decoder.layers[0]
        layer.mlp.linear_fc1(torch.zeros(128, 1, SMALL["hidden_size"], dtype=torch.bfloat16))

    def another_recipe() -> None:
        chunk = build(config_of(te, "tensorwise"))
        layer = chunk.module.module.decoder.layers[0]
        with get_fp8_context(config_of(te, "mxfp8"), 0):
            layer.mlp.linear_fc1(torch.zeros(128, 1, SMALL["hidden_size"], dtype=torch.bfloat16))

    def quantizers_that_disobey() -> None:
        from transformer_engine.pytorch import Linear

        name = "_customize_quantizers_float8_current_scaling"
        original = getattr(Linear, name)

        def rounding_on_its_own(self: Any, fwd: bool, recipe: Any) -> None:
            original(self, fwd, recipe)
            if not fwd:
                self.quantizers["scaling_bwd"][0].force_pow_2_scales = True

        with mock.patch.object(Linear, name, rounding_on_its_own):
            config = config_of(te, "tensorwise")
            train(config, build(config))

    def no_gpu() -> None:
        reason = "Transformer Engine needs a CUDA device, this is cpu"
        with mock.patch.object(engine, "device_reason", lambda device: reason):
            build(config_of(te, "tensorwise"))

    for run in (megatrons_te_spec, our_layers, te_layers_of_another_backend, outside_the_context, another_recipe,
                quantizers_that_disobey, no_gpu):  # fmt: skip
        case(run.__name__, run)
    return found


def checkpoints() -> dict[str, Any]:
    """Names of what a checkpoint of a trained model holds; whether the run and another backend's model read it."""
    from benchmarks.support.gpt import build_optimizer, train_step
    from benchmarks.support.ranks import model_parallel
    from megatron_fp8.files.checkpoint import Manifest, latest_checkpoint, read_manifest
    from megatron_fp8.mcore import checkpoint
    from megatron_fp8.mcore.checkpoint.loader import load_weights
    from megatron_fp8.mcore.checkpoint.saver import Saver

    def made(backend: str) -> Any:
        config = config_of(backend, "delayed")
        chunk = build(config)
        return config, chunk, build_optimizer(config, [chunk])

    def weights(chunk: Any) -> dict[str, torch.Tensor]:
        return {te_name(name): value.detach().clone() for name, value in chunk.named_parameters()}

    with model_parallel(), tempfile.TemporaryDirectory() as folder:
        config, chunk, optimizer = made("transformer_engine")
        train_step(config, [chunk], optimizer, 0, **SHORT)
        state, saved = checkpoint.sharded_state([chunk], optimizer), weights(chunk)
        saver = Saver(Path(folder))
        saver.save(
            state, Manifest(1, checkpoint.numbers([chunk], optimizer), checkpoint.layout_facts([chunk]))
        )
        saver.close()
        found = latest_checkpoint(Path(folder))
        assert found is not None
        _, resumed, optimizer = made("transformer_engine")
        checkpoint.load(found, read_manifest(found), [resumed], optimizer)
        _, other, _ = made("emulated")
        load_weights(found, other)
        same = [
            all(torch.equal(value, saved[name]) for name, value in weights(model).items())
            for model in (resumed, other)
        ]
        return {"keys": sorted(state["model0"]), "resumed": same[0], "read by emulated": same[1]}


def doctor() -> dict[str, Any]:
    """What `megatron-fp8 doctor --json` says of this backend: its version, its trials, its cells of this machine."""
    from megatron_fp8.commands import doctor as command

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = command.main(["--json"])
    found = json.loads(out.getvalue())
    (version,) = (part["version"] for part in found["versions"] if part["name"] == "transformer-engine")
    trials, cells = (
        [item for item in found[part] if item["backend"] == "transformer_engine"]
        for part in ("trials", "matrix")
    )
    tried = {cell["recipe"]: cell["supported"] for cell in cells if cell["known"] == "tried here"}
    return {"code": code, "version": version, "trials": trials, "cells": tried}


def without_te() -> dict[str, Any]:
    """Transformer Engine asked for where it is not: the error, and the sites of a fallback that was opted into."""
    from megatron_fp8.mcore import install
    from megatron_fp8.mcore.spec import get_gpt_layer_fp8_spec

    install()
    try:
        get_gpt_layer_fp8_spec(config_of("transformer_engine", "tensorwise"))
        refused = ""
    except ValueError as error:
        refused = str(error)
    fallen = trained("transformer_engine", "tensorwise", 1, fp8_fallback="warn")
    return {"refused": refused, "sites": fallen["sites"], "counts": fallen["counts"]}


def apex() -> dict[str, Any]:
    """Trainings with apex: what was called of it, and losses beside those without it."""
    from importlib.util import find_spec

    from megatron_fp8.mcore import environment as compat
    from tests.support.te import apex_standin

    def with_apex(**fields: Any) -> dict[str, Any]:
        apex_standin.calls.clear()
        seen = trained("emulated", "tensorwise", 1, **fields)
        return {"losses": seen["losses"], "calls": dict(apex_standin.calls)}

    bf16 = {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 0}
    on_cpu = with_apex()
    from megatron_fp8 import mcore
    from megatron_fp8.mcore.patches import missing_packages

    with (  # as if there were a GPU
        mock.patch.object(compat, "uses_apex", lambda extension: find_spec(extension) is not None),
        mock.patch.object(missing_packages, "on_cpu", list),
    ):
        mcore.uninstall()  # patches are chosen when they are installed
        fused = with_apex(llama=False, gradient_accumulation_fusion=True, **bf16)
        plain = with_apex(llama=False, **bf16)
        rms_norm = with_apex()
    return {"on_cpu": on_cpu, "fused": fused, "plain": plain, "rms_norm": rms_norm}


CASES = {case.__name__: case for case in (parity, delayed, refusals, checkpoints, doctor)}


def main() -> None:
    """Install Transformer Engine or apex, run the cases that are its."""
    engine_folder, *names = sys.argv[1:]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if engine_folder == "apex":
        from tests.support.te import apex_standin

        apex_standin.install()
        print(json.dumps({"apex": apex(), "without_te": without_te()}), flush=True)
    else:
        from megatron_fp8.backends import transformer_engine as engine
        from tests.support.te import engine as installed

        extension = installed.install(engine_folder)
        from tests.support.te import products

        products.compute(extension)
        # The products run on a CPU; the reason that this takes away is tested with it.
        with mock.patch.object(engine, "device_reason", lambda device: None):
            for name in names:
                print(json.dumps({name: CASES[name]()}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
