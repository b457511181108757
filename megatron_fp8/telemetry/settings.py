"""Telemetry settings: tensors, statistics, iterations; for config, API and TE's YAML."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from .stat_registry import DEFAULT, TENSORS, WHAT_IF, of_tensor, parse, parse_all

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
        try:
            names = [parsed.name for parsed in parse_all(self.statistics)]
        except ValueError as error:
            raise ValueError(f"telemetry statistics: {error}") from error
        object.__setattr__(self, "statistics", tuple(names))
        for name in names if self.statistics != DEFAULT else ():
            if not any(of_tensor([name], tensor) for tensor in self.tensors):
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
        own = of_tensor(self.statistics, tensor)
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
        try:
            re.compile(pattern[len(REGEX) :])
        except re.error as error:
            raise ValueError(f"telemetry sites: {pattern!r} is no regular expression: {error}") from error


def _matches(pattern: str, site: str) -> bool:
    if pattern.startswith(REGEX):
        return re.search(pattern[len(REGEX) :], site) is not None
    return fnmatchcase(site, pattern) or fnmatchcase(site.rpartition(".")[2], pattern)
