"""Telemetry: statistics of a model's tensors and FP8 codes during training.

    telemetry = Telemetry(model, every=10, folder="runs/mine")
    ...                                   # train; fp8_step(model) or Megatron-Core's schedule ends an
    iteration
    telemetry.close()

It finds FP8 sites by the modules' ``fp8_site``, in nn models and in Megatron-Core models (one or a list of
chunks), observes their state, and sums the statistics over ranks at the end of a measured iteration. Linears
do not depend on it. Iterations that are not measured run no extra operation, except for the history of a
delayed what-if.

The first rank alone writes telemetry.jsonl, and TensorBoard or W&B if the config asks. A record is {"iteration",
"site", "tensor", then the statistics by name}. "partial": true follows the tensor if the values are terms of a sum
over tensor-parallel ranks. "went_bad" lists reasons, in the first measured iteration with a problem. A scalar's tag
is telemetry/SITE/TENSOR/STATISTIC, with TENSOR_partial for partial values.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ..files.records import EventFile, continue_file, records_until, warn_missing
from ..linear.gemm_site import GemmSite
from ..linear.tensor_parallel import ShardInfo, device_of
from ..state.collectives import checked_group
from ..state.fp8_state import Fp8State
from .collector import Collector
from .health import FirstBad, limit_line
from .replica_dedup import agree
from .settings import Selection, TelemetrySettings


class Telemetry:
    """Measures a model during training, until ``close``.

    Create it after the model is on its device and in its layout and after a checkpoint is loaded, on every
    rank. The constructor is collective over the group; so is the end of each measured iteration, with one SUM
    and one MAX.

    Args:
        model: an nn model with FP8 linears, or a Megatron-Core model, or a list of its chunks on this rank.
        settings: what to measure, and when. None: one Selection from the keywords (every, windows, sites,
            tensors, statistics, what_if).
        folder: run folder for telemetry.jsonl and tensorboard/, written by the group's first rank. None: no
            files; read ``records``.
        wandb: also write to Weights & Biases (needs a folder).
        finished: number of finished iterations; later records in the folder, from a killed run, are dropped.
            None: the model's own count.
        group: the ranks that train this model; None: all of torch.distributed, if initialised.
        say: called on the first rank with a log line when a tensor first exceeds a limit.

    Attributes:
        records: records of the last measured iteration, the same on all ranks.
        states: the observed states.
        first_bad: (site, tensor, reason) -> iteration; reasons are health.REASONS.

    Raises:
        ValueError: the model has no site with observable casts, is on the meta device, or is observed
            already; a pattern of sites matches none; a setting is wrong; wandb is requested and not
            installed.
        OSError: the folder cannot be written.
    """

    def __init__(
        self,
        model: torch.nn.Module | list[Any],
        settings: TelemetrySettings | None = None,
        *,
        folder: str | Path | None = None,
        wandb: bool = False,
        finished: int | None = None,
        group: Any = None,
        say: Callable[[str], None] = print,
        **selection: Any,
    ):
        if settings is not None and selection:
            raise ValueError(f"give settings or keywords such as {next(iter(selection))}, not both")
        if wandb and folder is None:
            raise ValueError("telemetry wandb=True keeps its files in the run's folder: give folder=...")
        self.settings = settings or TelemetrySettings((Selection(**selection),))
        self.records: list[dict[str, Any]] = []
        self.states: list[Fp8State] = []
        self._outputs: list[Output] = []
        self._say, self._first = say, True
        self._bad = FirstBad()
        if not self.settings.on:
            return
        checked_group(group)
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        by_state: dict[int, tuple[Fp8State, dict[str, Any]]] = {}
        for name, module, state in _sites(model):
            sites = by_state.setdefault(id(state), (state, {}))[1]
            if name in sites:
                raise ValueError(f"two sites are called {name}: call convert_to_fp8 on the whole model")
            sites[name] = module
        collectors = self._collectors(list(by_state.values()), group)
        self._first = group is None or dist.get_rank(group) == 0
        done = finished if finished is not None else max((c.state.iteration for c in collectors), default=0)
        if folder is not None:
            folder = Path(folder)
            self._bad = FirstBad(read_records(folder, done))
            if self._first:
                self._open(folder, done, wandb)
        for collector in collectors:
            collector.state.watch(collector)
            self.states.append(collector.state)

    @property
    def first_bad(self) -> dict[tuple[str, str, str], int]:
        """(site, tensor, reason) -> the first measured iteration with it."""
        return dict(self._bad.found)

    def close(self) -> None:
        """Stop observing and close the files. Warns in one line of data lost to a full disk."""
        warn_missing(self.close_files())

    def close_files(self) -> list[str]:
        """As ``close``, but returns the text on lost data, for callers that close other files too."""
        for state in self.states:
            state.watch(None)
        lacking = [words for output in self._outputs for words in output.close()]
        self.states, self._outputs = [], []
        return lacking

    def __enter__(self) -> Telemetry:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _collectors(self, states: list[tuple[Fp8State, dict[str, Any]]], group: Any) -> list[Collector]:
        """One collector per state. Collective: all ranks have the same number of states, some possibly without
        sites."""
        shares: list[dict[str, ShardInfo]] = [
            {name: module.fp8_share for name, module in modules.items()} for _, modules in states
        ]
        everywhere = [agree(of_state, group) for of_state in shares]
        found = [name for agreed in everywhere for name in agreed.sites]
        if not found:
            raise ValueError(
                "telemetry sees no FP8 site: call convert_to_fp8(model), or build the model with get_gpt_layer_fp8_spec;"
                " layers of Transformer Engine cast by themselves, and its own debug features measure them"
            )
        self.settings.check_sites(found)
        for state, _ in states:
            if state.watcher is not None:
                raise ValueError("this model already has telemetry: close it before creating another")
        return [
            Collector(
                state,
                {name: _site_getter(module) for name, module in modules.items()},
                agreed,
                self.settings,
                group,
                self._take,
            )
            for (state, modules), agreed in zip(states, everywhere, strict=True)
        ]

    def _open(self, folder: Path, finished: int, wandb: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if wandb:
            self._outputs.append(WandbRun(folder, finished))
        self._outputs += [Lines(folder, finished), Scalars(folder / "tensorboard", finished)]

    def _take(self, iteration: int, records: list[dict[str, Any]]) -> None:
        """Receives the records of a measured iteration."""
        first_bad_records = self._bad.check(records)
        self.records = records
        for output in self._outputs:
            output.write(iteration, records)
        if first_bad_records and self._first:
            self._say(limit_line(first_bad_records))


def _site_getter(module: Any) -> Callable[[], GemmSite]:
    """A function that returns the module's current site."""
    return lambda: module.fp8_site


def _sites(model: torch.nn.Module | Iterable[Any]) -> Iterator[tuple[str, Any, Fp8State]]:
    """(name, module, state) of sites with observable casts; a shared module once."""
    chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
    for chunk in chunks:
        modules = list(chunk.modules())
        named = next((module for module in modules if hasattr(module, "name_sites")), None)
        if named is not None:
            named.name_sites(chunk)
        for module in modules:
            if (dispatch := getattr(module, "fp8_dispatch", None)) is not None:  # casts without a weight
                yield dispatch.fp8_site.plan.name, dispatch, dispatch.fp8_site.state
            if not hasattr(module, "name_sites"):
                continue
            if device_of(module).type == "meta":
                raise ValueError("telemetry: the model is on the meta device: move it where it trains first")
            site = module.fp8_site
            if isinstance(site, GemmSite):
                yield site.plan.name, module, site.state


Record = dict[str, Any]
FILE = "telemetry.jsonl"
NO_STATISTICS = ("iteration", "site", "tensor", "partial", "went_bad")
"""Fields of a record that are not statistics."""


class Output(Protocol):
    """A destination of records."""

    def write(self, iteration: int, records: list[Record]) -> None:
        """Write the records of one iteration."""

    def close(self) -> list[str]:
        """Close the output. Returns text on data that a full disk has dropped for good."""


def read_records(folder: Path, finished: int) -> list[Record]:
    """The records of a run's first ``finished`` iterations; none if the file is missing. Skips invalid lines."""
    return [record for _, record in records_until(folder / FILE, finished, 1)[0]]


def scalars(records: list[Record]) -> dict[str, float]:
    """The statistics by tag."""
    found = {}
    for record in records:
        tensor = f"{record['tensor']}_partial" if record.get("partial") else record["tensor"]
        for name, value in record.items():
            if name not in NO_STATISTICS:
                found[f"telemetry/{record['site']}/{tensor}/{name}"] = value
    return found


class Lines:
    """telemetry.jsonl in a run's folder, appended after the records of the first ``finished`` iterations. Raises
    OSError in the constructor only."""

    def __init__(self, folder: Path, finished: int) -> None:
        self._file = continue_file(folder / FILE, finished, 1)

    def write(self, iteration: int, records: list[Record]) -> None:
        """Write one line per record."""
        self._file.write("".join(json.dumps(record) + "\n" for record in records).encode())

    def close(self) -> list[str]:
        """Close the file; returns text on lost data."""
        return self._file.close()


class Scalars:
    """TensorBoard events in a folder. Entries of earlier files after ``finished`` iterations are hidden."""

    def __init__(self, folder: Path, finished: int) -> None:
        self._board = EventFile(folder, finished + 1 if finished else 0)

    def write(self, iteration: int, records: list[Record]) -> None:
        """Write one step."""
        self._board.scalars(iteration, scalars(records))

    def close(self) -> list[str]:
        """Close the file; returns text on lost data."""
        return self._board.close()


def require_wandb() -> None:
    """Raises ValueError unless Weights & Biases is installed."""
    if importlib.util.find_spec("wandb") is None:
        raise ValueError(
            "telemetry wandb=True needs Weights & Biases, which is not installed: pip install wandb, or leave it out"
        )


class WandbRun:
    """A run in Weights & Biases, named after its folder. Without a network set WANDB_MODE=offline and sync
    later.

    A resumed run continues the same W&B run and repeats no step. The project is WANDB_PROJECT, or
    'megatron_fp8'.

    Raises ValueError: it is not installed.
    """

    def __init__(self, folder: Path, finished: int) -> None:
        require_wandb()
        import os

        import wandb

        saved_id = folder / "wandb-run"
        if not (finished and saved_id.is_file()):
            saved_id.write_text(os.urandom(4).hex(), encoding="utf-8")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "megatron_fp8"),
            name=folder.resolve().name,
            id=saved_id.read_text(encoding="utf-8"),
            dir=str(folder),
            resume="allow",
        )

    def write(self, iteration: int, records: list[Record]) -> None:
        """Write one step."""
        self._run.log(scalars(records), step=iteration)

    def close(self) -> list[str]:
        """Finish the W&B run."""
        self._run.finish()
        return []
