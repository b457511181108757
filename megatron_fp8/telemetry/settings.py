"""Telemetry settings: tensors, statistics, iterations; for config, API and TE's YAML."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from .names import DEFAULT, TENSORS, WHAT_IF, of_tensor, parse, parse_all

REGEX = "re:"
"""Patterns of sites that begin so are regular expressions; all others are globs."""

Window = tuple[int, int | None]


@dataclass(frozen=True)
class Selection:
    """Some statistics of some tensors of some sites, in some iterations.

    Args:
        every: measure the iterations that this divides; 0 measures none.
        windows: (first, last) iterations, both included, None for no end; without any, all iterations.
        sites: globs over full names of sites or their last parts, or 're:' and a regular expression that is found in
            the full name.
        tensors: of names.TENSORS.
        statistics: names as ``names.parse`` reads them. Each tensor gets those that it can have.
        what_if: recipes ('mxfp8', or a prefix such as 'fp8_block_scaling'): the statistics of codes for these as well.

    Raises:
        ValueError: a value that is none of these, or a statistic that none of the tensors can have.
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
            names = [wanted.name for wanted in parse_all(self.statistics)]
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
        """Whether a site, by its full name, is one of its sites."""
        return any(_matches(pattern, site) for pattern in self.sites)

    def names(self, tensor: str) -> tuple[str, ...]:
        """The statistics to measure of a tensor, in canonical spelling, those of its what-ifs last."""
        if tensor not in self.tensors:
            return ()
        own = of_tensor(self.statistics, tensor)
        of_codes = [w for w in parse_all(own) if w.statistic.needs == "codes" and w.variant.recipe == ""]
        more = [
            f"{recipe}_{wanted.name}"
            for recipe in self.what_if
            for wanted in of_codes
            if _has(recipe, wanted.name)
        ]
        return tuple(dict.fromkeys((*own, *more)))


@dataclass(frozen=True)
class TelemetrySettings:
    """All that is measured in a run: one selection, or several; what two of them ask of a tensor is measured once."""

    selections: tuple[Selection, ...] = ()

    @property
    def on(self) -> bool:
        """Whether anything can be measured at all."""
        return any(selection.every for selection in self.selections)

    def measures(self, iteration: int) -> bool:
        """Whether anything is measured in this iteration."""
        return any(selection.measures(iteration) for selection in self.selections)

    def misses(self, first: int, last: int) -> bool:
        """Whether something is asked for, and none of these iterations (both included) is measured."""
        return self.on and first <= last and not any(map(self.measures, range(first, last + 1)))

    def names(self, site: str, tensor: str, iteration: int | None = None) -> tuple[str, ...]:
        """The statistics to measure of a tensor of a site in an iteration (None: in any)."""
        found: dict[str, None] = {}
        for selection in self.selections:
            asked = iteration is None or selection.measures(iteration)
            if selection.every and asked and selection.matches(site):
                found |= dict.fromkeys(selection.names(tensor))
        return tuple(found)

    @property
    def what_if(self) -> tuple[str, ...]:
        """The what-if prefixes that anything asks for."""
        asked = [
            parse(name).variant.recipe
            for selection in self.selections
            if selection.every
            for tensor in selection.tensors
            for name in selection.names(tensor)
        ]
        return tuple(recipe for recipe in dict.fromkeys(asked) if recipe)

    def check_sites(self, sites: Iterable[str]) -> None:
        """ValueError for a pattern that none of the whole model's sites matches: a typing error must not pass."""
        sites = list(sites)
        for selection in self.selections:
            for pattern in selection.sites:
                if pattern != "*" and not any(_matches(pattern, site) for site in sites):
                    more = ", ..." if len(sites) > 6 else ""
                    raise ValueError(
                        f"telemetry sites: {pattern!r} matches no GEMM site; the sites are {', '.join(sites[:6])}{more}"
                    )


def _texts(name: str, value: Any) -> tuple[str, ...]:
    """One text, or several, as a tuple; ValueError for anything else."""
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
    try:
        first, last = window
    except (TypeError, ValueError):
        first = last = "?"
    whole = type(first) is int and (last is None or type(last) is int)
    if not whole or first < 0 or (last is not None and last < first):
        raise ValueError(
            f"telemetry windows: {window!r} must be (first, last), iterations with 0 <= first <= last, or None for no end"
        )
    return first, last


def _prefix(recipe: str) -> str:
    """The prefix of a what-if recipe, given by either of its names."""
    by_recipe = {ours: prefix for prefix, ours in WHAT_IF.items()}
    prefix = by_recipe.get(recipe, recipe)
    if prefix not in WHAT_IF:
        raise ValueError(f"telemetry what_if: {recipe!r} is none of {', '.join(WHAT_IF.values())}")
    return prefix


def _has(recipe: str, name: str) -> bool:
    """Whether a what-if recipe has this statistic of codes."""
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
