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

import difflib
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..files.atomic_io import read_ordinary
from .settings import REGEX, Selection, TelemetrySettings
from .stat_registry import BLOCKWISE, QUANTIZED, TE_TENSORS, Blocks, parse

FEATURES = {"LogTensorStats": "values", "LogFp8TensorStats": "codes"}
"""Supported features -> what their statistics need (Statistic.needs)."""

_LARGEST = 1 << 22  # bytes; far above any real configuration
_TIMES = ("freq", "start_step", "end_step", "start_end_list")
_LAYERS = ("layer_name_regex_pattern", "layer_types", "exact_layer_names")


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
    content = source if isinstance(source, Mapping) else _load(Path(source))
    sections = _mapping(content, where)
    selections = [
        selection
        for name, section in sections.items()
        for selection in _section(_mapping(section, f"section {name}"), f"section {name}")
    ]
    if not selections:
        raise ValueError(f"{where} enables no {' or '.join(FEATURES)}: nothing would be measured")
    return TelemetrySettings(tuple(selections))


def _load(path: Path) -> Any:
    from ..files.strict_yaml import load_yaml  # PyYAML is needed here only

    content = read_ordinary(path, _LARGEST)
    try:
        return load_yaml(content)
    except ValueError as error:
        raise ValueError(f"{path} is no YAML: {error}") from error


def _section(section: Mapping[str, Any], where: str) -> Iterator[Selection]:
    if not _enabled(section, where):
        return
    for field in section:
        if field not in ("enabled", "layers", "transformer_engine"):
            raise ValueError(
                f"{where}: {field} is not supported; a section holds enabled, layers and transformer_engine, and of the"
                f" features {' and '.join(FEATURES)} below transformer_engine"
            )
    if "layers" not in section:
        raise ValueError(f"{where} names no layers: give layers with one of {', '.join(_LAYERS)}")
    sites = _sites(_mapping(section["layers"], f"{where}, layers"), f"{where}, layers")
    features = _mapping(section.get("transformer_engine", {}), f"{where}, transformer_engine")
    for name, feature in features.items():
        place = f"{where}, {name}"
        feature = _mapping(feature, place)
        if not _enabled(feature, place):
            continue
        if name not in FEATURES:
            raise ValueError(
                f"{place}: this feature is not supported, only {' and '.join(FEATURES)} are.{_hint(name, FEATURES)}"
            )
        for tensor, fields in _tensors(feature, place):
            yield _selection(name, tensor, fields, sites, f"{place}, {tensor}")


def _sites(layers: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """The layers as patterns for Selection.sites."""
    for field in layers:
        if field not in _LAYERS:
            raise ValueError(
                f"{where}: {field} is not supported, only {', '.join(_LAYERS)} are.{_hint(field, _LAYERS)}"
            )
    if len(layers) != 1:
        raise ValueError(f"{where} needs exactly one of {', '.join(_LAYERS)}, and has {len(layers)}")
    ((field, value),) = layers.items()
    if field == "layer_name_regex_pattern":
        if not isinstance(value, str):
            raise ValueError(f"{where}: {field}={_short(value)} must be a regular expression")
        return (REGEX + value,)
    names = _texts(value, f"{where}: {field}")
    if field == "exact_layer_names":
        return tuple(f"{REGEX}^{re.escape(name)}$" for name in names)
    return ("*",) if "all" in names else tuple(REGEX + re.escape(name) for name in names)


def _tensors(feature: Mapping[str, Any], where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each tensor, by Transformer Engine's name, with its fields: the feature's, overridden by those of
    tensors_struct."""
    shared = {
        key: value for key, value in feature.items() if key not in ("enabled", "tensors", "tensors_struct")
    }
    if ("tensors" in feature) == ("tensors_struct" in feature):
        raise ValueError(f"{where} needs tensors or tensors_struct, one of the two")
    if "tensors" in feature:
        own_fields = [{"tensor": tensor} for tensor in _texts(feature["tensors"], f"{where}: tensors")]
    else:
        structs = feature["tensors_struct"]
        if not isinstance(structs, list):
            raise ValueError(
                f"{where}: tensors_struct={_short(structs)} must be a list, of a tensor and its fields each"
            )
        own_fields = [dict(_mapping(struct, f"{where}, tensors_struct")) for struct in structs]
    seen: set[str] = set()
    for struct in own_fields:
        tensor = struct.pop("tensor", None)
        if not isinstance(tensor, str) or tensor not in TE_TENSORS:
            raise ValueError(f"{where}: tensor {_short(tensor)} is none of {', '.join(TE_TENSORS)}")
        if tensor in seen:
            raise ValueError(f"{where}: tensor {tensor} is named twice")
        seen.add(tensor)
        yield tensor, {**shared, **struct}


def _selection(
    feature: str, te_tensor: str, fields: Mapping[str, Any], sites: tuple[str, ...], where: str
) -> Selection:
    for field in fields:
        if field not in ("stats", *_TIMES):
            known = ("enabled", "tensors", "tensors_struct", "stats", *_TIMES)
            raise ValueError(
                f"{where}: {field} is not supported, {feature} has {', '.join(known)}.{_hint(field, known)}"
            )
    tensor = TE_TENSORS[te_tensor]
    if FEATURES[feature] == "codes" and tensor not in QUANTIZED:
        raise ValueError(f"{where}: {te_tensor} has no codes; LogTensorStats has the figures of its values")
    stats = fields.get("stats")
    if not isinstance(stats, list) or not stats:
        raise ValueError(f"{where}: stats={_short(stats)} must be a list of statistics")
    names = tuple(_statistic(stat, feature, te_tensor, where) for stat in stats)
    freq = fields.get("freq", 1)
    if type(freq) is not int or freq < 1:
        raise ValueError(f"{where}: freq={_short(freq)} must be a whole number of iterations, 1 or more")
    try:
        return Selection(freq, _windows(fields), sites, (tensor,), names)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _statistic(stat: Any, feature: str, te_tensor: str, where: str) -> str:
    """Our name of a statistic: a plain name, or the blockwise range with its block."""
    if isinstance(stat, Mapping):
        return _blockwise(stat, te_tensor, where)
    if stat == BLOCKWISE:
        return _blockwise({BLOCKWISE: {}}, te_tensor, where)
    try:
        parsed = parse(stat)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    if parsed.statistic.needs != FEATURES[feature]:
        other = next(name for name, needs in FEATURES.items() if needs == parsed.statistic.needs)
        raise ValueError(f"{where}: {stat} belongs to {other}")
    return parsed.name


def _blockwise(stat: Mapping[str, Any], te_tensor: str, where: str) -> str:
    """Transformer Engine takes the worse of two orientations for tensors that are read in both."""
    options = stat.get(BLOCKWISE)
    if len(stat) != 1 or not isinstance(options, Mapping) or set(options) - {"block_size", "dims"}:
        raise ValueError(
            f"{where}: stats has {_short(dict(stat))}, and only {BLOCKWISE} takes options: block_size and dims"
        )
    size, dims = options.get("block_size", 32), options.get("dims", 1)
    if type(size) is not int or size < 1 or dims not in (1, 2) or type(dims) is not int:
        raise ValueError(
            f"{where}: {BLOCKWISE} needs a block_size of 1 or more and dims of 1 or 2, got {_short(dict(options))}"
        )
    return Blocks(size, dims, te_tensor in ("activation", "weight")).name


def _windows(fields: Mapping[str, Any]) -> tuple[Any, ...]:
    """(first, last) of start_end_list, else of start_step and end_step; Selection checks them."""
    listed = fields.get("start_end_list")
    if listed is not None:
        if not isinstance(listed, list) or not all(isinstance(window, list) for window in listed):
            raise ValueError(f"start_end_list={_short(listed)} must be a list of [start, end]")
        return tuple(tuple(window) for window in listed)
    first, last = fields.get("start_step"), fields.get("end_step")
    return () if first is None and last is None else ((0 if first is None else first, last),)


_SHORT = reprlib.Repr()  # YAML aliases can expand a few lines to billions of values
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 2, 100, 100


def _short(value: Any) -> str:
    return _SHORT.repr(value)


def _enabled(of: Mapping[str, Any], where: str) -> bool:
    if not isinstance(of.get("enabled"), bool):
        raise ValueError(f"{where}: enabled={_short(of.get('enabled'))} must be True or False")
    return bool(of["enabled"])


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"{where} must map names to values, and is {_short(value)}")
    return value


def _texts(value: Any, where: str) -> list[str]:
    if not isinstance(value, list) or not value or not all(isinstance(text, str) and text for text in value):
        raise ValueError(f"{where}={_short(value)} must be a list of names")
    return value


def _hint(name: str, choices: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(choices), n=1)
    return f" Did you mean {near[0]}?" if near else ""
