"""All findings of the doctor, as one object and as JSON.

    {"schema": 1, "exit_code": 0,
     "machine":   {"device", "generation", "gpu_not_used", "cpu_kernels"},
     "versions":  [{"name", "version", "needed_for", "how"}],
     "conflicts": [{"what", "reason", "cure", "source"}],
     "trials":    [{"backend", "recipe", "result", "error", "reason", "cure"}],
     "matrix":    [{"backend", "recipe", "device", "supported", "known", "reason", "cure", "note", "source"}],
     "needs":     null | {"options": [...], "missing": [{"what", "reason", "cure"}],
                          "not_looked_at": [...]}}

Later releases may add keys and keep these; ``schema`` increases if a key changes its meaning.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any

from ...kernels.cpu import emulation
from ...plan.timing import unused_gpu
from ...train.report import device_name
from .generations import Generation, here
from .matrix import Cell, matrix
from .requirements import NOT_LOOKED_AT, Need, missing
from .trials import Trial, trials
from .versions import Conflict, Part, conflicts, facts, parts

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
            "conflicts": [asdict(conflict) for conflict in self.conflicts],
            "trials": [asdict(trial) for trial in self.trials],
            "matrix": [asdict(cell) for cell in self.matrix],
            "needs": None
            if self.needs is None
            else {
                "options": self.options,
                "missing": [asdict(need) for need in self.needs],
                "not_looked_at": list(NOT_LOOKED_AT),
            },
        }


def examine(options: list[str]) -> Examination:
    """Examines this machine, and what ``options`` (`--config=FILE` and more) need. Raises ValueError: bad options."""
    needs = missing(options) if options else None
    tried, generation, found = list(trials()), here(), parts()
    return Examination(
        device_name(),
        generation,
        unused_gpu(),
        emulation.reason(),
        found,
        conflicts(facts(found, os.environ)),
        tried,
        matrix(generation, tried),
        needs,
        options,
    )
