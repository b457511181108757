"""Device peaks for the roofline, from results of `megatron-fp8 bench --json`.

Rows of single GEMMs give the GEMM rates; rows of quantisation give the memory bandwidth (of the reference
copy) and the rate of casts. Each is the best value reached. FP8 rates are those of the run's recipe, so
emulated FP8 is counted as slow. Values that a benchmark does not measure come from `base`, a known device. A
file with `memory_gb` (bench writes it) and rows of both kinds needs no base; its links are unknown unless
they were added to the file.

Rejected: rates by shape. Such a roofline is a table of times and does not cover unmeasured shapes. Instead,
the error of one best rate is reported (measured.yaml).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .model import Model
from .peaks import KEYS, Device, made, near_miss, table, with_base
from .sites import reads, recipe_of

_ADDED = ("memory_gb", "link_gbs", "network_gbs", "node", "generation")
_SIZE = 2  # bytes of a BF16 value


def from_bench(name: str, content: Mapping[str, Any], model: Model | None) -> Device:
    """The device from a benchmark's file.

    Args:
        name: file name, for messages.
        content: its parsed content.
        model: selects FP8 rates of its recipe; None or a BF16 model: the best of all recipes.

    Raises:
        ValueError: rows are missing or not bench's, or the file lacks values and there is no base.
    """
    try:
        gemms, casts = (
            [row for row in content["rows"] if row.get("section", "linear") == section]
            for section in ("gemm", "quantise")
        )
        return _from_rows(name, content, gemms, casts, model)
    except (KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ValueError(
            f"--device={name} is no result of bench ({error!r} in its rows): give a file of `megatron-fp8 bench --out`."
        ) from error


def _from_rows(
    name: str,
    content: Mapping[str, Any],
    gemms: list[dict[str, Any]],
    casts: list[dict[str, Any]],
    model: Model | None,
) -> Device:
    if not gemms:
        raise ValueError(
            f"--device={name} has no rows of single GEMMs: run `megatron-fp8 bench --only quantise,gemm --out FILE`."
        )
    near_miss(content, KEYS, f"--device={name}")
    base = _base(name, content, alone=bool(casts) and "memory_gb" in content)
    rates: dict[str, Any] = {}
    if casts:
        rates["bandwidth"] = max(2 * _SIZE * _values(row) / _seconds(row, "bf16") for row in casts)
    if model is not None and model.fp8:
        recipe = str(model.fp8_recipe)
        gemms, casts = _of_recipe(name, gemms, recipe), [row for row in casts if row["contender"] == recipe]
        rule = recipe_of(model)(None).rule("input")
        if casts and rule is not None:  # bytes of a two-direction cast, as in the roofline
            bytes_per_value = _SIZE * reads(rule) + 2
            rates["casts"] = max(bytes_per_value * _values(row) / _seconds(row, "fp8") for row in casts)
    rates["bf16"] = max(_operations(row) / _seconds(row, "bf16") for row in gemms)
    rates["fp8"] = max(_operations(row) / _seconds(row, "fp8") for row in gemms)
    what = "GEMMs, casts and copies" if "bandwidth" in rates else "GEMMs"
    source = f"{what} measured on {content.get('device')} ({name})"
    if base is None:
        figures = {
            "tflops": {key: rates[key] / 1e12 for key in ("bf16", "fp8")},
            "bandwidth_gbs": rates["bandwidth"] / 1e9,
            "node": 1,
            **{key: content[key] for key in _ADDED if key in content},
        }
        found = made(name, figures, f"--device={name}", links=False)
    else:
        extra = {key: content[key] for key in _ADDED if key in content and key != "memory_gb"}
        found = made(base, with_base(name, {"base": base, **extra}, f"--device={name}"), f"--device={name}")
        source += f", the rest from {table()[base]['source']}"
    known = {key: text for key, text in found.figures.items() if key not in ("tflops", "bandwidth_gbs")}
    rates.setdefault("casts", rates.get("bandwidth", found.bandwidth))
    return replace(found, name=name, source=source, measured=True, figures=known, **rates)


def _base(name: str, content: Mapping[str, Any], *, alone: bool) -> str | None:
    """The device that supplies missing values: named in the file, or matched by the measured device's name."""
    known = table()
    if "base" in content:
        with_base(name, {"base": content["base"]}, f"--device={name}")
        return str(content["base"]).lower()
    label = str(content.get("device", "")).lower().replace(" ", "-")
    found = [key for key in known if all(part in label for part in key.split("-"))]
    if found:
        return max(found, key=len)
    if alone:
        return None
    raise ValueError(
        f"--device={name} was measured on {content.get('device')!r}, of which no memory and links are known: add"
        f" `base: NAME` to it, with one of {', '.join(known)}; or measure casts and copies too (`megatron-fp8 bench"
        " --only quantise,gemm --out FILE`)."
    )


def _of_recipe(name: str, rows: list[dict[str, Any]], recipe: str) -> list[dict[str, Any]]:
    found = [row for row in rows if row.get("contender", recipe) == recipe]
    if not found:
        measured = ", ".join(dict.fromkeys(str(row["contender"]) for row in rows))
        raise ValueError(
            f"--device={name} has GEMMs of {measured}, and the run is in {recipe}: run `megatron-fp8 bench --recipe"
            f" {recipe} --only quantise,gemm --out FILE`."
        )
    return found


def _operations(row: Mapping[str, Any]) -> int:
    count: int = 2 * row["k"] * row["n"] * row["tokens"]
    return count


def _values(row: Mapping[str, Any]) -> int:
    """Elements of the input that is cast or copied."""
    count: int = row["k"] * row["tokens"]
    return count


def _seconds(row: Mapping[str, Any], which: str) -> float:
    found: float = row[f"{which}_ms"] * 1e-3
    return found
