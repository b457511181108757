"""Which linears an inference engine quantizes, by the engine's own matching rules.

An engine reads a directory's ignore list, and each engine matches its names in its own way, against the names of its own
modules: vLLM and SGLang multiply q, k and v as `qkv_proj`, gate and up as `gate_up_proj`, and all experts of a layer as
`experts`. So a list that leaves a linear in high precision for one engine may not for another.

    quant_method, engine             rule, and where it was read
    fp8, vllm                        exact names, of a fused linear all parts; one expert leaves its layer's experts
                                     (quant_utils, is_layer_skipped, commit 01693a61)
    fp8, sglang                      a name, or a path of it between dots (is_layer_skipped after pull request 23467)
    fp8, transformers                a regular expression up to a dot, or a name's end (5.23, should_convert_module)
    compressed-tensors, vllm/sglang  exact names or `re:`; experts as `experts.0.gate_proj`, `up_proj`, `down_proj`
                                     (should_ignore_layer and get_moe_method, commit 008014e8)
    compressed-tensors, transformers exact names or `re:` (compressed-tensors 0.20, is_match)
    modelopt, vllm                   exact names, then part of a name, then a wildcard (is_layer_excluded)

Read in November 2026. Embedding and output head are high precision everywhere: exports say so, and engines do not
quantize them by these configs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatch
from typing import Any

from ..numerics.formats import E4M3, E5M2, FloatFormat

_QKV = ("q_proj", "k_proj", "v_proj")
_FUSED = {"qkv_proj": _QKV, "gate_up_proj": ("gate_proj", "up_proj")}
_LATENTS = ("q_a_proj", "kv_a_proj_with_mqa")
_FUSED_LATENTS = {"vllm": "fused_qkv_a_proj", "sglang": "fused_qkv_a_proj_with_mqa"}
_EXPERT = re.compile(r"(.*\.experts)\.\d+\.\w+$")


class EngineRefusal(ValueError):
    """The engine refuses the directory."""


def fused_names(engine: str, linears: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Name of a fused linear in the engine's layers -> the names of its parts."""
    if engine == "transformers":
        return {}
    mapping = dict(_FUSED)
    if any(name.endswith(f".{_LATENTS[0]}") for name in linears):
        mapping[_FUSED_LATENTS[engine]] = _LATENTS
    return mapping


def module_of(engine: str, linear: str, fused: Mapping[str, tuple[str, ...]]) -> str:
    """The engine's module that multiplies a Hugging Face linear."""
    if expert := _EXPERT.match(linear):
        experts = expert[1]
        return experts.replace(".block_sparse_moe.", ".mlp.") if engine == "transformers" else experts
    path, _, last = linear.rpartition(".")
    return next((f"{path}.{name}" for name, parts in fused.items() if last in parts), linear)


def quantized_linears(engine: str, config: Mapping[str, Any], linears: Sequence[str]) -> dict[str, bool]:
    """Hugging Face linear of the layers -> whether the engine quantizes it.

    Args:
        config: config.json's quantization_config; empty: a directory in high precision.

    Raises EngineRefusal where the engine raises an error, and ValueError for a config without rules here.
    """
    if not config:
        return dict.fromkeys(linears, False)
    method = str(config.get("quant_method"))
    rule = _RULES.get((method, engine))
    if rule is None:
        raise ValueError(f"there are no rules for quant_method={method!r} in {engine}.")
    fused, ignored = fused_names(engine, linears), ignore_list(engine, config)
    known: dict[str, bool] = {}
    found = {}
    for linear in linears:
        module = module_of(engine, linear, fused)
        if module not in known:
            known[module] = not rule(module, ignored, fused)
        found[linear] = known[module]
    return found


def ignore_list(engine: str, config: Mapping[str, Any]) -> list[str]:
    """The names that a config leaves in high precision, under the key that the engine reads first."""
    keys = ["ignored_layers", "modules_to_not_convert", "ignore", "exclude_modules"]
    for key in keys[1:] if engine == "transformers" else keys:
        if config.get(key) is not None:
            return list(config[key])
    return []


def input_rule(engine: str, config: Mapping[str, Any]) -> str | None:
    """How the engine quantizes the inputs of a quantized linear, in the words of a run's report; None: not at all."""
    if config.get("quant_method") == "fp8":
        return f"e4m3 1x128 {'pow2' if config.get('scale_fmt') == 'ue8m0' else 'fp32'}"
    group: dict[str, Any] = next(iter((config.get("config_groups") or {}).values()), {})
    inputs = group.get("input_activations")
    if not inputs:
        return None
    if inputs.get("num_bits") == 4:
        return "e2m1 1x16 e4m3"
    if inputs.get("group_size") == 32:
        return "e4m3 1x32 e8m0"
    if not inputs.get("dynamic"):
        return "e4m3 tensor static"
    # vLLM and SGLang quantize token by token also where a config has one dynamic scale for the tensor.
    if not computes_in_bf16(engine, config):
        return "e4m3 row fp32"
    return f"e4m3 {'tensor' if inputs.get('strategy') == 'tensor' else 'row'} bf16"


def computes_in_bf16(engine: str, config: Mapping[str, Any]) -> bool:
    """Whether scales and decoded values are rounded to the model's dtype (compressed-tensors 0.20 in transformers)."""
    return engine == "transformers" and config.get("quant_method") == "compressed-tensors"


def norm_rounds_twice(engine: str) -> bool:
    """Whether an RMSNorm rounds to the model's dtype before it multiplies by its weight, and again after.

    So do vLLM's kernel (layernorm_kernels.cu) and transformers' models; FlashInfer's kernel, which SGLang calls, rounds
    once, as training's norms do.
    """
    return engine != "sglang"


def kv_cache_format(config: Mapping[str, Any], dtype: str) -> FloatFormat | None:
    """The format of keys and values in the cache; None: the model's dtype.

    Args:
        config: config.json's quantization_config; with `auto`, compressed-tensors' and modelopt's entries count.
        dtype: of serve.KV_CACHE_DTYPES.

    Raises ValueError for an entry that is not FP8 with a scale per tensor.
    """
    if dtype != "auto":
        return {"bfloat16": None, "fp8_e5m2": E5M2}.get(dtype, E4M3)
    scheme, algorithm = config.get("kv_cache_scheme"), config.get("kv_cache_quant_algo")
    if not scheme and not algorithm:
        return None
    per_tensor = not scheme or (
        scheme.get("num_bits") == 8
        and scheme.get("type") == "float"
        and scheme.get("strategy") in (None, "tensor")
    )
    if not per_tensor or algorithm not in (None, "FP8"):
        raise ValueError(
            f"config.json has kv_cache_scheme={scheme!r}, kv_cache_quant_algo={algorithm!r}: there are rules for FP8 with"
            " one scale for keys and one for values."
        )
    return E4M3


def router_dtype(engine: str, family: str) -> str | None:
    """The dtype of router logits, as `moe_router_dtype`; None: the model's.

    Routers are plain linears in vLLM and SGLang, and in transformers 5.23 except for DeepSeek-V3's.
    """
    return "fp32" if (engine, family) == ("transformers", "DeepseekV3ForCausalLM") else None


# ---------------------------------------------------------------------------------------------------------------- rules

Fused = Mapping[str, tuple[str, ...]]
Matches = Callable[[str], bool]


def _parts_agree(module: str, parts: Sequence[str], matches: Matches) -> bool:
    """Whether all parts of a fused linear match. Raises EngineRefusal if only some do."""
    path = module.rpartition(".")[0]
    found = {matches(f"{path}.{part}") for part in parts}
    if len(found) > 1:
        raise EngineRefusal(
            f"{module}: some of {', '.join(parts)} are in high precision and some are not, which the engine refuses."
        )
    return found.pop()


def _last(module: str) -> str:
    return module.rpartition(".")[2]


def _vllm_fp8(module: str, ignored: list[str], fused: Fused) -> bool:
    if _last(module) in fused:
        return _parts_agree(module, fused[_last(module)], lambda name: name in ignored)
    if "experts" in module:
        return any(module in name for name in ignored if "experts" in name)
    return module in ignored


def _sglang_fp8(module: str, ignored: list[str], fused: Fused) -> bool:
    def matches(name: str) -> bool:
        return any(f".{entry.rstrip('.')}." in f".{name}." for entry in ignored)

    if _last(module) in fused:
        return _parts_agree(module, fused[_last(module)], matches)
    experts = "experts" in module and any(module in name for name in ignored if "experts" in name)
    return matches(module) or experts


def _transformers_fp8(module: str, ignored: list[str], fused: Fused) -> bool:
    boundary = r"(?:(?<=\.)|(?=\.|$))"
    return any(re.match(f"(?:{entry}){boundary}", module) or module.endswith(entry) for entry in ignored)


def _equal_or_regex(ignored: list[str]) -> Matches:
    return lambda name: any(
        re.match(entry[3:], name) is not None if entry.startswith("re:") else entry == name
        for entry in ignored
    )


def _compressed_tensors(module: str, ignored: list[str], fused: Fused) -> bool:
    matches = _equal_or_regex(ignored)
    if _last(module) == "experts":
        return _parts_agree(f"{module}.0.experts", ("gate_proj", "up_proj", "down_proj"), matches)
    if _last(module) in fused and module not in ignored:
        return _parts_agree(module, fused[_last(module)], matches)
    return matches(module)


def _compressed_in_transformers(module: str, ignored: list[str], fused: Fused) -> bool:
    if _last(module) == "experts":
        raise ValueError(f"there are no rules for experts in compressed-tensors in transformers ({module}).")
    return _equal_or_regex(ignored)(module)


def _vllm_modelopt(module: str, ignored: list[str], fused: Fused) -> bool:
    return bool(ignored) and (
        _vllm_fp8(module, ignored, fused)
        or any(entry != module and entry in module for entry in ignored)
        or any(fnmatch(module, entry) for entry in ignored)
    )


_RULES: dict[tuple[str, str], Callable[[str, list[str], Fused], bool]] = {
    ("fp8", "vllm"): _vllm_fp8,
    ("fp8", "sglang"): _sglang_fp8,
    ("fp8", "transformers"): _transformers_fp8,
    ("compressed-tensors", "vllm"): _compressed_tensors,
    ("compressed-tensors", "sglang"): _compressed_tensors,
    ("compressed-tensors", "transformers"): _compressed_in_transformers,
    ("modelopt", "vllm"): _vllm_modelopt,
}
