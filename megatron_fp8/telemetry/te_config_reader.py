"""Reads Transformer Engine's debug configuration (nvdlfw-inspect YAML) as telemetry settings.

    SECTION:
      enabled: True
      layers: {layer_name_regex_pattern: .*fc1}          # or layer_types: [fc1], or exact_layer_names: [...]
      transformer_engine:
        LogTensorStats:                                   # or LogFp8TensorStats
          enabled: True
          tensors: [activation, gradient]                 # or tensors_struct, each with settings of its own
          stats: [mean, {max_blockwise_dynamic_range: {block_size: 32, dims: 1}}]
          freq: 10
          start_step: 100                                 # and end_step, both included; or start_end_list

These two features are supported. Any other enabled feature, and any unknown field, raises an error that names
it: nothing is ignored silently. Disabled sections and features are skipped unchecked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .settings import REGEX, Selection, TelemetrySettings
from .stat_registry import BLOCKWISE, QUANTIZED, TE_TENSORS, Blocks, parse

FEATURES = {"LogTensorStats": "values", "LogFp8TensorStats": "codes"}
"""Supported features -> what their statistics need (Statistic.needs)."""

_LAYERS = ("layer_name_regex_pattern", "layer_types", "exact_layer_names")
_FIELDS = (
    *("enabled", "tensors", "tensors_struct", "stats", "freq"),
    *("start_step", "end_step", "start_end_list"),
)


def te_settings(source: Mapping[str, Any] | str | Path) -> TelemetrySettings:
    """Telemetry settings equivalent to Transformer Engine's debug features.

    Args:
        source: the YAML file's path, or its content.

    Raises:
        ValueError: not such a configuration, or it uses an unsupported feature; the message names section,
            feature and field.
        OSError: the file cannot be read.
    """
    where = "the configuration" if isinstance(source, Mapping) else str(source)
    sections = _mapping(source if isinstance(source, Mapping) else _load(Path(source)), where)
    selections = [s for name, section in sections.items() for s in _section(section, f"section {name}")]
    if not selections:
        raise ValueError(f"{where} enables no {' or '.join(FEATURES)}: nothing would be measured")
    return TelemetrySettings(tuple(selections))


def _load(path: Path) -> Any:
    from ..files.strict_yaml import read_yaml  # PyYAML is needed here only

    try:
        return read_yaml(path)
    except ValueError as error:
        raise ValueError(f"{path} is no YAML: {error}") from error


def _section(section: Any, where: str) -> Iterator[Selection]:
    if not _enabled(section, where):
        return
    _mapping(section, where, ("enabled", "layers", "transformer_engine"))
    sites = _sites(_mapping(section.get("layers", {}), f"{where}, layers", _LAYERS), f"{where}, layers")
    features = _mapping(section.get("transformer_engine", {}), f"{where}, transformer_engine")
    enabled = {name: value for name, value in features.items() if _enabled(value, f"{where}, {name}")}
    for name, feature in _mapping(enabled, where, tuple(FEATURES)).items():
        for tensor, fields in _tensors(feature, f"{where}, {name}"):
            yield _selection(name, tensor, fields, sites, f"{where}, {name}, {tensor}")


def _sites(layers: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """The layers as patterns for Selection.sites."""
    if len(layers) != 1:
        raise ValueError(f"{where} needs exactly one of {', '.join(_LAYERS)}, and has {len(layers)}")
    ((field, value),) = layers.items()
    if field == "layer_name_regex_pattern":
        if not isinstance(value, str):
            raise ValueError(f"{where}: {field}={_short(value)} must be a regular expression")
        return (REGEX + value,)
    names = _list(value, f"{where}: {field}")
    if field == "exact_layer_names":
        return tuple(f"{REGEX}^{re.escape(name)}$" for name in map(str, names))
    return ("*",) if "all" in names else tuple(REGEX + re.escape(name) for name in map(str, names))


def _tensors(feature: Mapping[str, Any], where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each tensor, by Transformer Engine's name, with its fields: the feature's, overridden by those of
    tensors_struct."""
    shared = {key: value for key, value in feature.items() if key not in ("tensors", "tensors_struct")}
    if ("tensors" in feature) == ("tensors_struct" in feature):
        raise ValueError(f"{where} needs tensors or tensors_struct, one of the two")
    if "tensors" in feature:
        own_fields = [{"tensor": tensor} for tensor in _list(feature["tensors"], f"{where}: tensors")]
    else:
        structs = _list(feature["tensors_struct"], f"{where}: tensors_struct")
        own_fields = [dict(_mapping(struct, f"{where}, tensors_struct")) for struct in structs]
    for struct in own_fields:
        tensor = struct.pop("tensor", None)
        if not isinstance(tensor, str) or tensor not in TE_TENSORS:
            raise ValueError(f"{where}: tensor {_short(tensor)} is none of {', '.join(TE_TENSORS)}")
        yield tensor, _mapping({**shared, **struct}, where, _FIELDS)


def _selection(
    feature: str, te_tensor: str, fields: Mapping[str, Any], sites: tuple[str, ...], where: str
) -> Selection:
    tensor = TE_TENSORS[te_tensor]
    if FEATURES[feature] == "codes" and tensor not in QUANTIZED:
        raise ValueError(f"{where}: {te_tensor} has no codes; LogTensorStats has the figures of its values")
    windows: Any = fields.get("start_end_list")
    if windows is None:
        first, last = fields.get("start_step"), fields.get("end_step")
        windows = [] if first is None and last is None else [(first or 0, last)]
    freq = fields.get("freq", 1)
    if type(freq) is not int or freq < 1:
        raise ValueError(f"{where}: freq={_short(freq)} must be a whole number of iterations, 1 or more")
    names = [
        _statistic(stat, feature, te_tensor, where) for stat in _list(fields.get("stats"), f"{where}: stats")
    ]
    try:
        return Selection(freq, windows, sites, (tensor,), tuple(names))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _statistic(stat: Any, feature: str, te_tensor: str, where: str) -> str:
    """Our name of a statistic: a plain name, or the blockwise range with its block."""
    if stat == BLOCKWISE or isinstance(stat, Mapping):
        options = {} if stat == BLOCKWISE else _mapping(stat, f"{where}: stats", (BLOCKWISE,))[BLOCKWISE]
        options = _mapping(options, f"{where}: {BLOCKWISE}", ("block_size", "dims"))
        size, dims = options.get("block_size", 32), options.get("dims", 1)
        # Transformer Engine takes the worse of two orientations for tensors that are read in both.
        stat = Blocks(size, dims, te_tensor in ("activation", "weight")).name
    try:
        parsed = parse(stat)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    if parsed.statistic.needs != FEATURES[feature]:
        other = next(name for name, needs in FEATURES.items() if needs == parsed.statistic.needs)
        raise ValueError(f"{where}: {stat} belongs to {other}")
    return parsed.name


def _enabled(value: Any, where: str) -> bool:
    enabled = _mapping(value, where).get("enabled")
    if not isinstance(enabled, bool):
        raise ValueError(f"{where}: enabled={_short(enabled)} must be True or False")
    return enabled


def _mapping(value: Any, where: str, known: Sequence[str] = ()) -> Mapping[str, Any]:
    """The value, if it is a mapping with no key but the known ones (all, if none are given)."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"{where} must map names to values, and is {_short(value)}")
    for key in value if known else ():
        if key not in known:
            raise ValueError(f"{where}: {key} is not supported, only {', '.join(known)} are.")
    return value


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{where}={_short(value)} must be a list")
    return value


def _short(value: Any) -> str:
    return repr(value)[:100]
