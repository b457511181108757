"""A table of measured GEMM times: which shapes are too small for FP8.

FP8 speeds up the multiplications, K * N * tokens, and adds quantization, one pass over each operand; below some size
it costs more than it saves. That size depends on the GPU, the recipe and all versions, so it is measured
(``megatron-fp8 bench --tune --out FILE``) and not built in.

Rejected: a fixed threshold of rows and columns, as torchao has, or a required speed-up with a built-in model of GPUs:
both describe another machine.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..files.atomic_io import read_regular
from ..files.strict_json import load_json
from ..recipe import Recipe, recipe_name

_LARGEST = 1 << 26  # bytes of a table

FORMAT = "megatron_fp8 size filter, 1"


class Gemm(NamedTuple):
    """A linear layer's size on one rank: in features, out features, tokens of a microbatch."""

    k: int
    n: int
    tokens: int

    def __str__(self) -> str:
        return f"K {self.k} x N {self.n} at {self.tokens} tokens"

    @property
    def volume(self) -> int:
        """Multiplications of one GEMM."""
        return self.k * self.n * self.tokens

    def within(self, other: Gemm) -> bool:
        """Whether it is no larger than the other in any dimension."""
        return all(size <= limit for size, limit in zip(self, other, strict=True))


class Ratio(NamedTuple):
    """FP8's time over BF16's: the median, and the interquartile range as a fraction of it."""

    median: float
    spread: float

    @property
    def pays(self) -> bool:
        """Whether FP8 is faster by more than the noise: in most repetitions, not in half of them."""
        return self.median * (1 + self.spread / 2) < 1

    def __str__(self) -> str:
        return f"{self.median:.2f} x BF16's time (spread {self.spread:.0%})"


@dataclass(frozen=True)
class Verdict:
    """Whether FP8 is faster for a shape, and the measurement as text."""

    pays: bool
    reason: str


@dataclass(frozen=True)
class SizeTable:
    """Time ratios of FP8 to BF16, of fprop + dgrad + wgrad with all quantization, by shape; FP8 is faster below 1.

    Attributes:
        path: the file, for messages.
        device: as timing.device_label gives it.
        backend, recipe, roles: what was measured; roles maps each role to its Rule as text.
        date: of the measurement.
        ratios: shape -> time of FP8 over that of BF16.
    """

    path: str
    device: str
    backend: str
    recipe: str
    roles: dict[str, str | None]
    date: str
    ratios: dict[Gemm, Ratio]

    def check(self, device: str, backend: str, recipe: Recipe) -> None:
        """Raises ValueError if the table was measured with another device, backend or recipe."""
        here = {"device": device, "backend": backend, "recipe": recipe_name(recipe)}
        for what, value in here.items():
            measured = getattr(self, what)
            if measured != value:
                raise ValueError(
                    f"fp8_size_filter={self.path!r} was measured with {what} {measured!r}, and this is {value!r}: times"
                    f" do not carry over. {_remedy(self.path)}"
                )
        if self.roles != roles_of(recipe):
            raise ValueError(
                f"fp8_size_filter={self.path!r} was measured with recipe {self.recipe} as {self.roles}, and this one is"
                f" {roles_of(recipe)}. {_remedy(self.path)}"
            )
        if not any(ratio.pays for ratio in self.ratios.values()):
            best = min(self.ratios, key=self.ratios.__getitem__)
            raise ValueError(
                f"fp8_size_filter={self.path!r} leaves no GEMM in FP8: on {self.device} with {self.recipe} the best that"
                f" was measured, {best}, takes {self.ratios[best]}. Drop fp8_size_filter to"
                " train in FP8 all the same, or set fp8=None to train in BF16."
            )

    def tokens(self, given: int | None) -> int:
        """Returns the given token count, else the table's if it has only one. ValueError if it has several."""
        counts = sorted({gemm.tokens for gemm in self.ratios})
        if given is not None:
            return given
        if len(counts) > 1:
            raise ValueError(
                f"fp8_size_filter={self.path!r} was measured at {', '.join(map(str, counts))} tokens, and"
                " fp8_size_filter_tokens is None: set it to the tokens of a microbatch (micro batch size x sequence"
                " length / context parallel size)."
            )
        return counts[0]

    def verdict(self, gemm: Gemm) -> Verdict:
        """Returns whether FP8 is faster for the shape.

        For a shape without a measurement the nearest measured one decides that is no larger in any dimension: larger
        GEMMs gain more, so FP8 runs only if it was faster for a smaller GEMM. Without such a measurement: no FP8.
        """
        when = f"on {self.device}, {self.date}"
        if gemm in self.ratios:
            ratio = self.ratios[gemm]
            return Verdict(ratio.pays, f"{gemm} takes {ratio}, measured {when}")
        smaller = [measured for measured in self.ratios if measured.within(gemm)]
        if not smaller:
            return Verdict(False, f"{gemm} was not measured, nor any as small in every dimension, {when}")
        nearest = max(smaller, key=lambda measured: (measured.volume, self.ratios[measured].median))
        ratio = self.ratios[nearest]
        return Verdict(
            ratio.pays, f"{gemm} was not measured; the nearest below, {nearest}, takes {ratio} {when}"
        )


def roles_of(recipe: Recipe) -> dict[str, str | None]:
    """Returns each role's rule as text, None for a role that stays in high precision."""
    rules = {role: recipe.rule(role) for role in ("input", "weight", "grad_output")}
    return {role: None if rule is None else str(rule) for role, rule in rules.items()}


def load_table(path: str) -> SizeTable:
    """Loads a table that ``megatron-fp8 bench --tune`` wrote.

    Raises:
        ValueError: the file does not exist or is no such table; the message names the fault.
    """
    try:
        changed = Path(path).stat().st_mtime_ns
    except OSError as error:
        raise _error(path, f"it cannot be read ({error.strerror})") from error
    return _load(path, changed)


@functools.lru_cache(maxsize=8)
def _load(path: str, changed: int) -> SizeTable:
    try:
        content = load_json(read_regular(Path(path), _LARGEST))
    except OSError as error:
        raise _error(path, f"it cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise _error(path, f"it is not JSON ({error})") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else content
        raise _error(path, f"its format is {str(found)[:60]!r} and must be {FORMAT!r}")
    for key in ("device", "backend", "recipe", "date"):
        if not isinstance(content.get(key), str) or not content[key]:
            raise _error(path, f"{key}={content.get(key)!r} must be a text")
    if not isinstance(content.get("roles"), dict):
        raise _error(path, f"roles={content.get('roles')!r} must say how each role is quantized")
    rows = content.get("rows")
    if not isinstance(rows, list) or not rows:
        raise _error(path, f"rows={str(rows)[:60]} must be a list of measured shapes")
    ratios: dict[Gemm, Ratio] = {}
    for number, row in enumerate(rows):
        gemm, ratio = _row(path, f"rows[{number}]", row)
        if gemm in ratios:
            raise _error(path, f"rows[{number}] measures {gemm} a second time")
        ratios[gemm] = ratio
    texts = {key: content[key] for key in ("device", "backend", "recipe", "date")}
    return SizeTable(path, roles=content["roles"], ratios=ratios, **texts)


def _row(path: str, where: str, row: Any) -> tuple[Gemm, Ratio]:
    if not isinstance(row, dict):
        raise _error(path, f"{where}={row!r} must have k, n, tokens, ratio and spread")
    for key in Gemm._fields:
        value = row.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise _error(path, f"{where}.{key}={value!r} must be a positive integer")
    for key, least in (("ratio", "above 0"), ("spread", "of at least 0")):
        number: Any = row.get(key)
        good = isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number)
        if not good or number < 0 or (number == 0 and key == "ratio"):
            raise _error(
                path, f"{where}.{key}={number!r} must be a number {least}, of FP8's time over BF16's"
            )
    return Gemm(row["k"], row["n"], row["tokens"]), Ratio(float(row["ratio"]), float(row["spread"]))


def _error(path: str, why: str) -> ValueError:
    return ValueError(f"fp8_size_filter={path!r} is not a table of measured GEMMs: {why}. {_remedy(path)}")


def _remedy(path: str) -> str:
    return f"Measure one here: megatron-fp8 bench --tune --out {path}; or drop fp8_size_filter."
