"""All findings of the doctor, as JSON and as text of 80 columns.

    {"schema": 1, "exit_code": 0,
     "machine":   {"device", "generation", "gpu_not_used", "cpu_kernels"},
     "versions":  [{"name", "version", "needed_for", "how"}],
     "conflicts": [{"what", "reason", "remedy", "source"}],
     "trials":    [{"backend", "recipe", "result", "error", "reason", "remedy"}],
     "matrix":    [{"backend", "recipe", "device", "supported", "known", "reason", "remedy", "note", "source"}],
     "needs":     null | {"options": [...], "missing": [{"what", "reason", "remedy"}],
                          "not_looked_at": [...]}}

Later releases may add keys and keep these; ``schema`` increases if a key changes its meaning.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any

import torch

from ..backends import BACKENDS, emulated
from ..backends import transformer_engine as engine
from ..files.terminal import wrap
from ..kernels.cpu import emulation
from ..plan.timing import unused_gpu_reason
from ..recipe import RECIPES, CustomRecipe, Recipe
from ..state.collectives import own_device
from ..train.report import device_name
from .requirements import NOT_LOOKED_AT, Conflict, Need, Part, conflicts, facts, missing_needs, parts
from .support_matrix import GENERATIONS, OURS, RECIPE_NAMES, Cell, Generation, Trial, matrix, this_device

SCHEMA = 1


@dataclass(frozen=True)
class Examination:
    """The findings.

    Attributes:
        device: this machine's, in words.
        generation: its column of the matrix; None: it has none.
        gpu_not_used: why torch does not use an existing GPU.
        cpu_kernels: why there are no compiled CPU kernels; None: there are.
        needs: missing requirements of the given config; None without a config.
        options: the given config and options.
    """

    device: str
    generation: Generation | None
    gpu_not_used: str | None
    cpu_kernels: str | None
    versions: list[Part]
    conflicts: list[Conflict]
    trials: list[Trial]
    matrix: list[Cell]
    needs: list[Need] | None
    options: list[str]

    @property
    def wrong(self) -> list[str]:
        """Backends that computed a wrong product."""
        return list(dict.fromkeys(trial.backend for trial in self.trials if trial.result == "wrong"))

    @property
    def exit_code(self) -> int:
        """0; 1 if a product is wrong or the config needs something missing."""
        return int(bool(self.wrong or self.needs))

    def as_dict(self) -> dict[str, Any]:
        """The JSON described in this module's docstring."""
        needs = None
        if self.needs is not None:
            missing_here = _plain(self.needs)
            needs = {"options": self.options, "missing": missing_here, "not_looked_at": list(NOT_LOOKED_AT)}
        return {
            "schema": SCHEMA,
            "exit_code": self.exit_code,
            "machine": {
                "device": self.device,
                "generation": self.generation.key if self.generation else None,
                "gpu_not_used": self.gpu_not_used,
                "cpu_kernels": self.cpu_kernels,
            },
            "versions": [asdict(part) for part in self.versions],
            "conflicts": _plain(self.conflicts),
            "trials": _plain(self.trials),
            "matrix": _plain(self.matrix),
            "needs": needs,
        }


def _plain(found: Iterable[Any]) -> list[dict[str, Any]]:
    """The findings as dicts. ``cure`` is an earlier name of ``remedy``."""
    return [{**asdict(one), "cure": one.remedy} for one in found]


def examine(options: list[str]) -> Examination:
    """Examines this machine, and what ``options`` (`--config=FILE` and more) need. Raises ValueError: bad options."""
    needs = missing_needs(options) if options else None
    tried, generation, found = list(trials()), this_device(), parts()
    return Examination(
        device_name(),
        generation,
        unused_gpu_reason(),
        emulation.reason(),
        found,
        conflicts(facts(found, os.environ)),
        tried,
        matrix(generation, tried),
        needs,
        options,
    )


_GEMM_TOLERANCE, _LINEAR_TOLERANCE = 1e-3, 0.1


def trials() -> Iterator[Trial]:
    """Every recipe on every backend. A backend that cannot run here yields one trial for itself and one per recipe."""
    device = own_device()
    for backend in BACKENDS.values():
        yield from _of_backend(backend, device)
    yield from _of_transformer_engine(device)


def _of_backend(backend: ModuleType, device: torch.device) -> Iterator[Trial]:
    if (reason := backend.supports(device)) is not None:
        yield Trial(backend.name, None, "refused", reason=reason)
    generator = torch.Generator().manual_seed(0)
    x, w = (
        torch.randn(128, 256, generator=generator, dtype=torch.float32, device="cpu").to(device)
        for _ in range(2)
    )
    for name, made in RECIPES.items():
        if name == "custom":
            continue
        scaling = made()
        refused = reason or backend.supports(device, scaling)
        yield (
            Trial(backend.name, name, "refused", reason=refused)
            if refused is not None
            else _gemm(backend, name, scaling, x, w)
        )


def _gemm(backend: ModuleType, name: str, scaling: Recipe, x: torch.Tensor, w: torch.Tensor) -> Trial:
    rules = [scaling.rule(role) for role in ("input", "weight")]
    a, b = (
        backend.quantize(t, rule, "rowwise").tensor.rowwise for t, rule in zip((x, w), rules, strict=True)
    )
    found = backend.gemm(a, b, out_dtype=torch.float32)
    exact = emulated.gemm(a, b, out_dtype=torch.float64, exact=True)
    error = ((found.double() - exact).abs().max() / exact.abs().max()).item()
    return Trial(backend.name, name, "good" if error < _GEMM_TOLERANCE else "wrong", error)


def _of_transformer_engine(device: torch.device) -> Iterator[Trial]:
    remedy = engine.INSTALL if engine.unavailable_reason() is not None else None
    if (reason := engine.supports(device)) is not None:
        yield Trial(engine.name, None, "refused", reason=reason, remedy=remedy)
    for name, made in RECIPES.items():
        scaling = made() if name != "custom" else CustomRecipe(lambda role: None)
        refused = reason or engine.supports(device, scaling)
        if refused is not None:
            yield Trial(engine.name, name, "refused", reason=refused, remedy=remedy)
            continue
        error, differs = engine.try_linear(scaling, device)
        good = error < _LINEAR_TOLERANCE and not differs
        yield Trial(engine.name, name, "good" if good else "wrong", error, "; ".join(differs) or None)


_LABEL, _INDENT = 20, 13

_LEGEND = (
    "yes, no: from documentation. yes*, no*: tried here. yes?: it would be run, and nobody has tried. ?: not known."
    " bf16 and amx are CPUs with AVX512-BF16 and with AMX. A custom recipe has no row: where it runs depends on"
    " the rules that its function returns."
)

_UNSEEN = (
    f"Not looked at: {', '.join(NOT_LOOKED_AT)} (whether this machine has as many devices as the layout wants, what is"
    " in the data files, whether it fits, how long it takes): `megatron-fp8 estimate` says what the run needs"
)


def format_findings(found: Examination, *, with_matrix: bool) -> str:
    """The verdict, then the evidence; the support matrix of other machines only on request."""
    parts = [_verdict(found), _machine(found), _versions(found), _conflicts(found), _trials(found)]
    if with_matrix:
        parts.append(_matrix(found.matrix))
    if found.needs is not None:
        parts.append(_needs(found))
    return "\n\n".join("\n".join(lines) for lines in parts)


def _verdict(found: Examination) -> list[str]:
    good = {
        backend: [
            trial.recipe for trial in found.trials if (trial.backend, trial.result) == (backend, "good")
        ]
        for backend in dict.fromkeys(trial.backend for trial in found.trials)
    }
    ran = "; ".join(f"{backend} ({', '.join(filter(None, of))})" for backend, of in good.items() if of)
    if found.wrong:
        verdict = f"FP8 is wrong here: {', '.join(found.wrong)} computed a wrong product. Please report this."
    elif not ran:
        verdict = "FP8 cannot run here: no backend ran."
    else:
        verdict = f"FP8 works here: {ran}."
    if found.needs:
        verdict += f" The config needs {len(found.needs)} that this machine lacks: see the end."
    return [wrap(verdict, "", "  ")]


def _fact(label: str, text: str) -> str:
    """A label with wrapped text next to it."""
    after = " " * (_LABEL + 1)
    return wrap(text, f"{label:<{_LABEL}} ", after)


def _machine(found: Examination) -> list[str]:
    column = found.generation
    lines = [
        _fact("device", found.device),
        _fact("column of --matrix", f"{column.column} ({column.name})" if column else "none is for this GPU"),
    ]
    if found.gpu_not_used:
        lines.append(_fact("GPU", f"not used: {found.gpu_not_used}"))
    why = found.cpu_kernels
    kernels = "in use" if why is None else f"not in use, torch does their work: {why}"
    return [*lines, _fact("compiled CPU kernels", kernels)]


def _versions(found: Examination) -> list[str]:
    return [
        "Versions",
        *(
            _fact(f"  {part.name}", part.version or f"missing, needed for {part.needed_for}: {part.how}")
            for part in found.versions
        ),
    ]


def _conflicts(found: Examination) -> list[str]:
    if not found.conflicts:
        return ["Known not to work together, or to be slow: nothing here"]
    lines = ["Known not to work together, or to be slow"]
    for conflict in found.conflicts:
        lines.append(wrap(f"{conflict.what}: {conflict.reason} ({conflict.source})", "  ", "    "))
        lines.append(wrap(conflict.remedy, "    -> ", "       "))
    return lines


def _trials(found: Examination) -> list[str]:
    lines, closed = ["Tried here"], set()
    for trial in found.trials:
        if trial.recipe is None:
            closed.add(trial.backend)
            lines.append(_fact(f"  {trial.backend}", f"cannot run here: {trial.reason}"))
        elif trial.backend not in closed:
            lines.append(_fact(f"  {trial.backend}", f"{trial.recipe}: {_result(trial)}"))
    return lines


def _result(trial: Trial) -> str:
    if trial.result == "refused":
        return f"cannot run here: {trial.reason}"
    verdict = "good" if trial.result == "good" else "WRONG"
    if trial.backend == "transformer_engine":
        what = f"FP8 linear {verdict}, {trial.error:.1e} from the unquantized product"
    else:
        what = f"FP8 GEMM {verdict}, error {trial.error:.1e} of the largest value"
    return "; ".join(filter(None, [what, trial.reason]))


def _matrix(cells: list[Cell]) -> list[str]:
    marks = {(cell.backend, cell.recipe, cell.device): cell.mark for cell in cells}
    columns = [(generation.key, generation.column) for generation in GENERATIONS]
    lines = ["What runs where", *wrap(_LEGEND, "  ", "  ").splitlines(), "", _heads()]
    lines.append(_row("", [column for _, column in columns]))
    for backend in dict.fromkeys(cell.backend for cell in cells):
        lines.append(backend)
        lines += [
            _row(f"  {recipe}", [marks[backend, recipe, key] for key, _ in columns])
            for recipe in RECIPE_NAMES
        ]
    for title, kinds in (("No, because", False), ("Yes, but", True), ("Not known, because", None)):
        footnotes = list(_footnotes(cell for cell in cells if cell.supported is kinds))
        lines += ["", title, *footnotes] if footnotes else []
    return lines


def _heads() -> str:
    """The vendors, above their columns."""
    line = ""
    for title, first in (("NVIDIA, by compute capability", "sm80"), ("AMD", "mi300x"), ("CPU", "cpu")):
        at = _INDENT + 5 * [generation.key for generation in GENERATIONS].index(first)
        line = f"{line:<{at}}{title}"
    return line


def _row(label: str, marks: Iterable[str]) -> str:
    return f"{label:<{_INDENT}}{''.join(f'{mark:<5}' for mark in marks)}".rstrip()


def _footnotes(cells: Iterable[Cell]) -> Iterator[str]:
    """Notes on cells, each once, with the cells that it applies to."""
    columns = {generation.key: generation.column for generation in GENERATIONS}
    notes: dict[tuple[str, str, str | None], list[Cell]] = {}
    for cell in cells:
        if text := cell.reason or cell.note:
            notes.setdefault((cell.backend, text, cell.remedy), []).append(cell)
    for (backend, text, remedy), noted_cells in notes.items():
        recipes = list(dict.fromkeys(cell.recipe for cell in noted_cells))
        kinds = "" if len(recipes) == len(RECIPE_NAMES) else f" {', '.join(recipes)}"
        devices = list(dict.fromkeys(columns[cell.device] for cell in noted_cells))
        on = "everywhere" if len(devices) == len(columns) else f"on {', '.join(devices)}"
        sources = dict.fromkeys(cell.source for cell in noted_cells if cell.source not in (None, OURS))
        origin = "".join(f" ({source})" for source in sources)
        yield wrap(f"{backend}{kinds} {on}: {text}{origin}", "  ", "    ")
        if remedy:
            yield wrap(remedy, "    -> ", "       ")


def _needs(found: Examination) -> list[str]:
    options = " ".join(found.options)
    if not found.needs:
        present = "versions, backends, packages, files and folders that it names are here"
        return [wrap(f"{options}: {present}. {_UNSEEN}", "", "  ")]
    lines = [wrap(f"{options} needs what is not here:", "", "  ")]
    lines += [wrap(f"{n.what}: {n.reason} -> {n.remedy}", "  ", "    ") for n in found.needs]
    return [*lines, wrap(_UNSEEN, "  ", "    ")]
