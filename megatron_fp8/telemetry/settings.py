"""Telemetry settings: tensors, statistics, iterations; for config, API and TE's YAML.

Transformer Engine's debug configuration (nvdlfw-inspect) is read by ``te_settings``:

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

These two features are supported. Any other enabled feature, and any unknown field, raises an error that names it:
nothing is ignored silently. Disabled sections and features are skipped unchecked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ..files.atomic_io import as_value_error
from .stat_registry import (
    BLOCKWISE,
    DEFAULT,
    QUANTIZED,
    TE_TENSORS,
    TENSORS,
    WHAT_IF,
    Blocks,
    names_of_tensor,
    parse,
    parse_all,
)

REGEX = "re:"
"""Prefix of site patterns that are regular expressions; all others are globs."""

Window = tuple[int, int | None]


@dataclass(frozen=True)
class Selection:
    """Some statistics of some tensors at some sites, in some iterations.

    Args:
        every: measure every ``every``-th iteration; 0 measures none.
        windows: (first, last) iterations, inclusive; None for no end. Empty: all iterations.
        sites: globs over full site names or their last parts, or 're:' and a regular expression searched in
            the full name.
        tensors: of stat_registry.TENSORS.
        statistics: names as parsed by ``stat_registry.parse``. Each tensor gets those that are defined for it.
        what_if: recipes ('mxfp8', or a prefix such as 'fp8_block_scaling') for which to measure statistics of
            codes too.

    Raises:
        ValueError: an invalid value, or a statistic that is defined for none of the tensors.
    """

    every: int = 1
    windows: tuple[Window, ...] = ()
    sites: tuple[str, ...] = ("*",)
    tensors: tuple[str, ...] = TENSORS
    statistics: tuple[str, ...] = DEFAULT
    what_if: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if type(self.every) is not int or self.every < 0:
            raise ValueError(
                f"telemetry every={self.every!r}: a whole number of iterations is needed, 0 measures none"
            )
        for name in ("sites", "tensors", "statistics", "what_if"):
            object.__setattr__(self, name, _texts(name, getattr(self, name)))
        object.__setattr__(self, "windows", _windows(self.windows))
        for tensor in self.tensors:
            if tensor not in TENSORS:
                raise ValueError(f"telemetry tensors: {tensor!r} is none of {', '.join(TENSORS)}")
        for site in self.sites:
            _check_site(site)
        object.__setattr__(self, "what_if", tuple(dict.fromkeys(map(_prefix, self.what_if))))
        with as_value_error("telemetry statistics", errors=ValueError):
            names = [parsed.name for parsed in parse_all(self.statistics)]
        object.__setattr__(self, "statistics", tuple(names))
        for name in names if self.statistics != DEFAULT else ():
            if not any(names_of_tensor([name], tensor) for tensor in self.tensors):
                raise ValueError(
                    f"telemetry statistics: {name} is measured of {', '.join(parse(name).statistic.tensors)}, and tensors"
                    f" names only {', '.join(self.tensors)}"
                )

    def measures(self, iteration: int) -> bool:
        """Whether this iteration is measured."""
        if not self.every or iteration % self.every:
            return False
        return not self.windows or any(
            first <= iteration and (last is None or iteration <= last) for first, last in self.windows
        )

    def matches(self, site: str) -> bool:
        """Whether a site, by its full name, is selected."""
        return any(_matches(pattern, site) for pattern in self.sites)

    def names(self, tensor: str) -> tuple[str, ...]:
        """The statistics to measure for a tensor, in canonical spelling, with those of what-ifs last."""
        if tensor not in self.tensors:
            return ()
        own = names_of_tensor(self.statistics, tensor)
        of_codes = [w for w in parse_all(own) if w.statistic.needs == "codes" and w.variant.recipe == ""]
        more = [
            f"{recipe}_{parsed.name}"
            for recipe in self.what_if
            for parsed in of_codes
            if _has(recipe, parsed.name)
        ]
        return tuple(dict.fromkeys((*own, *more)))


@dataclass(frozen=True)
class TelemetrySettings:
    """What a run measures: one or more selections. A statistic in two selections is measured once."""

    selections: tuple[Selection, ...] = ()

    @property
    def on(self) -> bool:
        """Whether any iteration is measured."""
        return any(selection.every for selection in self.selections)

    def measures(self, iteration: int) -> bool:
        """Whether this iteration is measured."""
        return any(selection.measures(iteration) for selection in self.selections)

    def misses(self, first: int, last: int) -> bool:
        """Whether there are selections, but none covers these iterations (inclusive)."""
        return self.on and first <= last and not any(map(self.measures, range(first, last + 1)))

    def names(self, site: str, tensor: str, iteration: int | None = None) -> tuple[str, ...]:
        """The statistics to measure for a tensor of a site in an iteration (None: in any)."""
        found: dict[str, None] = {}
        for selection in self.selections:
            is_due = iteration is None or selection.measures(iteration)
            if selection.every and is_due and selection.matches(site):
                found |= dict.fromkeys(selection.names(tensor))
        return tuple(found)

    @property
    def what_if(self) -> tuple[str, ...]:
        """The what-if prefixes in use."""
        requested = [
            parse(name).variant.recipe
            for selection in self.selections
            if selection.every
            for tensor in selection.tensors
            for name in selection.names(tensor)
        ]
        return tuple(recipe for recipe in dict.fromkeys(requested) if recipe)

    def check_sites(self, sites: Iterable[str]) -> None:
        """Raises ValueError for a pattern that matches no site of the whole model, to catch typing errors."""
        sites = list(sites)
        for selection in self.selections:
            for pattern in selection.sites:
                if pattern != "*" and not any(_matches(pattern, site) for site in sites):
                    more = ", ..." if len(sites) > 6 else ""
                    raise ValueError(
                        f"telemetry sites: {pattern!r} matches no GEMM site; the sites are {', '.join(sites[:6])}{more}"
                    )


def _texts(name: str, value: Any) -> tuple[str, ...]:
    """One string or several, as a tuple; raises ValueError for anything else."""
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, (list, tuple)) or not all(isinstance(text, str) for text in value):
        raise ValueError(f"telemetry {name}={value!r}: a list of names is needed")
    if not value and name != "what_if":
        raise ValueError(f"telemetry {name} is empty: then nothing is measured; every=0 says so")
    return tuple(value)


def _windows(windows: Any) -> tuple[Window, ...]:
    if not isinstance(windows, (list, tuple)):
        raise ValueError(f"telemetry windows: {windows!r} must be a list of (first, last)")
    return tuple(map(_window, windows))


def _window(window: Any) -> Window:
    match window:
        case [int(first), int() | None as last] if 0 <= first <= (first if last is None else last):
            return first, last
    raise ValueError(
        f"telemetry windows: {window!r} must be (first, last), iterations with 0 <= first <= last, or None for no end"
    )


def _prefix(recipe: str) -> str:
    """The prefix of a what-if recipe, from either of its names."""
    by_recipe = {ours: prefix for prefix, ours in WHAT_IF.items()}
    prefix = by_recipe.get(recipe, recipe)
    if prefix not in WHAT_IF:
        raise ValueError(f"telemetry what_if: {recipe!r} is none of {', '.join(WHAT_IF.values())}")
    return prefix


def _has(recipe: str, name: str) -> bool:
    """Whether this statistic of codes is defined for a what-if recipe."""
    try:
        parse(f"{recipe}_{name}")
    except ValueError:
        return False
    return True


def _check_site(pattern: str) -> None:
    if pattern in ("", REGEX):
        raise ValueError("telemetry sites: a pattern is empty; '*' is all sites")
    if pattern.startswith(REGEX):
        with as_value_error(f"telemetry sites: {pattern!r} is no regular expression", errors=re.error):
            re.compile(pattern[len(REGEX) :])


def _matches(pattern: str, site: str) -> bool:
    if pattern.startswith(REGEX):
        return re.search(pattern[len(REGEX) :], site) is not None
    return fnmatchcase(site, pattern) or fnmatchcase(site.rpartition(".")[2], pattern)


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

    with as_value_error(f"{path} is no YAML", errors=ValueError):
        return read_yaml(path)


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
    with as_value_error(where, errors=ValueError):
        return Selection(freq, windows, sites, (tensor,), tuple(names))


def _statistic(stat: Any, feature: str, te_tensor: str, where: str) -> str:
    """Our name of a statistic: a plain name, or the blockwise range with its block."""
    if stat == BLOCKWISE or isinstance(stat, Mapping):
        options = {} if stat == BLOCKWISE else _mapping(stat, f"{where}: stats", (BLOCKWISE,))[BLOCKWISE]
        options = _mapping(options, f"{where}: {BLOCKWISE}", ("block_size", "dims"))
        size, dims = options.get("block_size", 32), options.get("dims", 1)
        # Transformer Engine takes the worse of two orientations for tensors that are read in both.
        stat = Blocks(size, dims, te_tensor in ("activation", "weight")).name
    with as_value_error(where, errors=ValueError):
        parsed = parse(stat)
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
