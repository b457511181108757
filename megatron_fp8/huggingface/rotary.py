"""Converts rotary positions between config.json (rope_theta, rope_scaling, rope_parameters) and the model
section.
"""

from __future__ import annotations

from typing import Any

from .architectures import Architecture

# Llama 3.1's scaling of rotary frequencies; in Megatron-Core only the factor is configurable.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

# YaRN of latent attention: config.json's name -> ours, and the default (None: required).
_YARN: dict[str, tuple[str, float | None]] = {
    "factor": ("rotary_scaling_factor", None),
    "original_max_position_embeddings": ("original_max_position_embeddings", None),
    "beta_fast": ("beta_fast", 32.0),
    "beta_slow": ("beta_slow", 1.0),
}


_OBJECTS = ("rope_scaling", "rope_parameters")


# ------------------------------------------------------------------------------------------------ from config.json


def rotary_section(config: dict[str, Any], architecture: Architecture) -> dict[str, Any]:
    """Model section fields for the rotary positions in config.json.

    If both rope_scaling and rope_parameters are present they must agree: transformers 5 uses rope_scaling and
    ignores rope_parameters (modeling_rope_utils.py, convert_rope_params_to_dict), transformers 4 knows only
    rope_scaling and rope_theta. transformers 5 writes rope_parameters.

    Raises ValueError naming the field if Megatron-Core cannot express it, or if both differ.
    """
    names = [name for name in _OBJECTS if config.get(name)]
    found = {name: _section(dict(config[name]), config, architecture) for name in names}
    if len(found) == 2 and len(set(map(repr, found.values()))) == 2:
        raise ValueError(_contradiction(config))
    return found[names[0]] if names else _section({}, config, architecture)


def _section(rope: dict[str, Any], config: dict[str, Any], architecture: Architecture) -> dict[str, Any]:
    """Model section fields from one of the two objects; messages leave its name open."""
    if nested := next((name for name, value in rope.items() if isinstance(value, dict)), None):
        raise ValueError(
            f"config.json has rope_parameters of its own for {nested!r}: only one set for all layers can be imported."
        )
    inner, outer = rope.pop("rope_theta", None), config.get("rope_theta")
    if inner and outer and inner != outer:
        raise ValueError(
            f"config.json has rope_theta={outer}, and rope_theta={inner} in its rope_scaling (rope_parameters):"
            " transformers 4 reads the first and transformers 5 the second. Remove the one that is not meant."
        )
    theta = inner or outer or architecture.rope_theta
    if theta != int(theta):
        raise ValueError(f"config.json has rope_theta={theta}: Megatron-Core takes whole numbers only.")
    partial = rope.pop("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ValueError(f"config.json has partial_rotary_factor={partial}: only 1.0 can be imported.")
    kind = _kind(rope)
    known = "yarn" if architecture.latent else "llama3"
    if kind not in ("default", known):
        raise ValueError(
            f"config.json has a rope_scaling (rope_parameters) of type {kind!r}: 'default' and {known!r} can be"
            f" imported of {architecture.name}."
        )
    scaling = {} if kind == "default" else _yarn(rope) if architecture.latent else _llama3(rope)
    if architecture.latent and kind == "default":
        # Megatron-Core defaults to YaRN for latent attention.
        scaling = {"rope_type": "rope"}
    return {"rotary_base": int(theta), **scaling}


def _kind(rope: dict[str, Any]) -> Any:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    return kind if isinstance(kind, str) else repr(kind)


def _contradiction(config: dict[str, Any]) -> str:
    """Error text for two objects with different positions; names fields that differ, those present in both first."""
    defaults = {name: default for name, (_, default) in _YARN.items() if default is not None}
    scaling, parameters = (
        {
            **defaults,
            **{key: value for key, value in config[name].items() if value is not None and key != "type"},
            "rope_type": _kind(config[name]),
        }
        for name in _OBJECTS
    )
    names = sorted(
        dict.fromkeys([*scaling, *parameters]), key=lambda name: name not in scaling or name not in parameters
    )
    differing = [
        f"{name}={scaling.get(name)!r} in its rope_scaling and {parameters.get(name)!r} in its rope_parameters"
        for name in names
        if scaling.get(name) != parameters.get(name)
    ]
    return (
        f"config.json has {'; '.join(differing[:3])}: readers take one of the two as a whole, and not the same one."
        " Remove the one that is not meant."
    )


def _number(rope: dict[str, Any], name: str, default: float | None) -> float:
    value = default if rope.get(name) is None else rope[name]
    if value is None:
        raise ValueError(f"config.json has no {name} in its rope scaling: a number is needed.")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"config.json has {name}={value!r} in its rope scaling: a number is needed.")
    return value


def _llama3(rope: dict[str, Any]) -> dict[str, Any]:
    factor = _number(rope, "factor", None)
    for name, known in _LLAMA3.items():
        if rope.get(name) != known:
            has = f"no {name}" if rope.get(name) is None else f"{name}={rope[name]!r}"
            raise ValueError(
                f"config.json has {has} in its rope scaling: Megatron-Core's is fixed at {known}."
            )
    return {"rope_scaling": True, "rope_scaling_factor": float(factor)}


def _yarn(rope: dict[str, Any]) -> dict[str, Any]:
    """YaRN multiplies sines and cosines by m(mscale) / m(mscale_all_dim) and scores by m(mscale_all_dim)^2, in both
    libraries, with m(x) = 0.1 x ln(factor) + 1. If one of the two is missing, transformers multiplies sines and cosines
    by m(1)."""
    for name, known in {"attention_factor": None, "truncate": True}.items():
        if rope.get(name, known) not in (None, known):
            raise ValueError(
                f"config.json has {name}={rope[name]!r} in its rope scaling: only {name}={known!r} can be imported."
            )
    section: dict[str, Any] = {"rope_type": "yarn"}
    for theirs, (ours, default) in _YARN.items():
        value = _number(rope, theirs, default)
        section[ours] = int(value) if ours.startswith("original") else float(value)
    mscale, all_dim = rope.get("mscale") or 0, rope.get("mscale_all_dim") or 0
    if all_dim and not mscale:
        raise ValueError(
            f"config.json has mscale_all_dim={all_dim!r} without mscale in its rope scaling: Megatron-Core needs both."
        )
    return {**section, "mscale": float(mscale) if all_dim else 1.0, "mscale_all_dim": float(all_dim)}


# ------------------------------------------------------------------------------------------------ from a model section


def rotary_config(section: dict[str, Any]) -> dict[str, Any]:
    """rope_theta and rope_scaling for a model section, readable by old and new transformers.

    Raises ValueError naming a field that config.json cannot express.
    """
    theta = {"rope_theta": float(section.get("rotary_base", 10000))}
    if not section.get("multi_latent_attention"):
        scaling = None
        if section.get("rope_scaling"):
            factor = float(section.get("rope_scaling_factor", 8.0))
            scaling = {"rope_type": "llama3", "factor": factor, **_LLAMA3}
        return {**theta, "rope_scaling": scaling}
    mscale, all_dim = section.get("mscale", 1.0), section.get("mscale_all_dim", 0.0)
    if section.get("rope_type", "yarn") == "rope":
        if all_dim:
            raise ValueError(
                f"model.mscale_all_dim={all_dim!r} with model.rope_type='rope' has no counterpart: it must be 0."
            )
        return {**theta, "rope_scaling": None}
    if not mscale or (not all_dim and mscale != 1.0):
        raise ValueError(
            f"model.mscale={mscale!r} with model.mscale_all_dim={all_dim!r} has no counterpart: readers take an mscale"
            " of 1 where mscale_all_dim is 0."
        )
    filled = _yarn_fields(section)
    both = {"mscale": float(mscale), "mscale_all_dim": float(all_dim)} if all_dim else {}
    return {**theta, "rope_scaling": {"type": "yarn", "rope_type": "yarn", **filled, **both}}


def stretched_length(section: dict[str, Any]) -> int | None:
    """Number of positions that YaRN stretches to; None without YaRN. transformers 4 computes the factor as
    max_position_embeddings over the original length."""
    if not section.get("multi_latent_attention") or section.get("rope_type", "yarn") != "yarn":
        return None
    filled = _yarn_fields(section)
    return int(filled["factor"] * filled["original_max_position_embeddings"])


def _yarn_fields(section: dict[str, Any]) -> dict[str, Any]:
    defaults = {"rotary_scaling_factor": 40.0, "original_max_position_embeddings": 4096}  # Megatron-Core's
    return {name: section.get(ours, default or defaults.get(ours)) for name, (ours, default) in _YARN.items()}
