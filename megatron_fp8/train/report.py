"""The start-up report: devices, packages, layout and the precision of each site. Printed, and written to report.json."""

from __future__ import annotations

import json
import os
import platform
import shlex
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..files.atomic_io import error_text, read_regular
from ..files.manifest import LARGEST
from ..files.resource_limits import usable_cores
from ..files.strict_json import load_json
from ..files.user_paths import path_hint
from ..kernels.cpu import emulation as cpu
from ..kernels.torch_products import is_replaced
from ..plan.settings import entry_format
from ..state.precision_schedule import PrecisionSchedule
from .resume.run_folder import checkpoint_folder

_PACKAGES = ("torch", "megatron-core", "numpy", "triton", "transformer-engine", "torchao")


def build_report(
    run: Any, config: Any, chunks: list[Any], parameters: dict[str, int], launcher: str
) -> dict[str, Any]:
    """All facts about a run that are known before its first step. Call it on every rank.

    'sites' has one entry for each linear-layer GEMM site of the whole model, over all pipeline stages.
    """
    from ..fp8_utils import has_fp8_params, quantizes, switch_of
    from ..mcore.params import parameter_bytes
    from ..mcore.report import own_precision, site_report
    from ..mcore.runtime import state_of

    phases = state_of(config).phases
    return {
        "device": device_name(),
        "versions": versions(),
        "cpu_kernels": None if torch.cuda.is_available() else cpu_kernels(fp16=config.fp16),
        "parallel": _parallel(config, launcher),
        "parameters": parameters,
        "precision": {
            "bf16": config.bf16,
            "fp16": config.fp16,
            "fp8": config.fp8,
            "fp8_recipe": config.fp8_recipe if config.fp8 else None,
            "fp8_param": parameter_bytes(chunks) if has_fp8_params(config) else None,
            **({"fp4": config.fp4, "fp4_recipe": config.fp4_recipe} if config.fp4 else {}),
            "phases": phases.describe(own_precision(config), switch_of(config)) if quantizes(config) else [],
        },
        "run_dir": run.run_dir,
        "checkpoints": os.path.abspath(checkpoint_folder(run)),
        "sites": site_report(chunks),
    }


def cpu_kernels(*, fp16: bool) -> str:
    """ "compiled", or why there are no CPU kernels of this package; and whether 16-bit products run in float32."""
    name, dtype = ("FP16", torch.float16) if fp16 else ("BF16", torch.bfloat16)
    instead = f"; this processor has no instructions for {name}: torch's products of it are in float32"
    return (cpu.reason() or "compiled") + (instead if is_replaced(dtype) else "")


def device_name() -> str:
    """The GPU's name, or the processor's and its core count."""
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()} (CUDA {torch.version.cuda})"
    return f"CPU {platform.processor() or platform.machine()}, {usable_cores()} cores"


def versions() -> dict[str, str]:
    """Versions of Python and of packages that affect results and speed; missing packages are omitted."""
    result = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            result[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return result


def _parallel(config: Any, launcher: str) -> dict[str, Any]:
    from ..mcore.report import parallel_layout

    return {
        "launcher": launcher,
        "world_size": dist.get_world_size(),
        "backend": dist.get_backend(),
        **parallel_layout(config),
        "threads_per_rank": torch.get_num_threads(),
    }


def write_report(report: dict[str, Any], folder: Path) -> None:
    """Write `<folder>/report.json`."""
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def read_report(folder: Path) -> dict[str, Any]:
    """The report of a run. Raises ValueError if the folder has none, or it is not readable."""
    path = folder / "report.json" if folder.is_dir() else folder
    try:
        return load_json(read_regular(path, LARGEST))
    except OSError as error:
        raise ValueError(
            f"{str(path)!r} cannot be read ({error_text(error)}): {path_hint(folder) or 'give the folder of a run'}."
        ) from error
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is not a report ({error}): give the folder of a run.") from error


def format_report(report: dict[str, Any]) -> str:
    """`report` as text: some lines of facts, then the precision map by layer."""
    precision, parallel = report["precision"], report["parallel"]
    own = "FP16" if precision.get("fp16") else "BF16" if precision["bf16"] else "float32"
    if named := entry_format(precision):
        what = ", recipe ".join(named)
        what += " over FP16, with a loss scale" if own == "FP16" else ""
    else:
        what = f"{own} (fp8 is off)"
    sizes = ", ".join(
        f"{name} {parallel[name]}"
        for name in ("tensor", "pipeline", "virtual_pipeline", "context", "expert", "data")
        if (parallel[name] or 1) > 1
    )
    lines = [
        f"device      {report['device']}",
        *([f"kernels     {report['cpu_kernels']}"] if report.get("cpu_kernels") else []),
        f"versions    {', '.join(f'{name} {version}' for name, version in report['versions'].items())}",
        f"ranks       {parallel['world_size']} ({parallel['launcher']}, {parallel['backend']}), "
        f"{sizes or 'no model parallelism'}"
        + (", sequence parallel" if parallel["sequence_parallel"] else "")
        + f", {parallel['threads_per_rank']} CPU threads each",
        f"parameters  {_parameters(report['parameters'])}",
        f"precision   {what}",
        *_weights(precision.get("fp8_param")),
        *([f"phases      {_phases(precision['phases'])}"] if precision.get("phases") else []),
    ]
    return "\n".join([*lines, *_precision_map(report["sites"])])


def _parameters(counts: dict[str, int]) -> str:
    """Number of parameters, and with experts the number that one token uses."""
    text = f"{counts['total']:,} total, {counts['non_embedding']:,} without embeddings and output projection"
    return text + (f", of which a token meets {counts['active']:,}" if "active" in counts else "")


def _weights(fp8_param: dict[str, Any] | None) -> list[str]:
    """Storage of the first rank's GEMM weights with fp8_param, and a warning if it saves nothing."""
    if fp8_param is None:
        return []
    per_value = fp8_param["bytes"] / max(fp8_param["values"], 1)
    line = f"weights     {fp8_param['weights']} live as codes on each rank, {per_value:.4f} bytes a value (BF16: 2)"
    return [line, *([f"warning     {fp8_param['warning']}"] if fp8_param["warning"] else [])]


def _phases(phases: list[dict[str, Any]]) -> str:
    return ", ".join(
        f"{PrecisionSchedule.precision_in_words(phase)} in iterations {phase['first']}-{phase['last']}"
        + (f" ({phase['phase']})" if phase["phase"] != "fp8" else "")
        for phase in phases
    )


def format_notes(sites: list[dict[str, Any]]) -> str:
    """Notes about sites from the first step, one line each; empty if there are none."""
    notes: dict[str, list[str]] = {}
    for site in sites:
        for note in site["notes"]:
            notes.setdefault(note, []).append(site["name"])
    return "\n".join(
        f"note        {note} ({len(names)} sites, such as {names[0]})" for note, names in notes.items()
    )


def _precision_map(sites: list[dict[str, Any]]) -> list[str]:
    """One line for each range of layers with equal entries."""
    by_layer: dict[Any, list[str]] = {}
    for site in sites:
        by_layer.setdefault(site.get("layer"), []).append(_one_site(site))
    groups: list[tuple[Any, Any, list[str]]] = []
    for layer, texts in by_layer.items():
        if groups and layer is not None and groups[-1][2] == texts and groups[-1][1] == layer - 1:
            groups[-1] = (groups[-1][0], layer, texts)
        else:
            groups.append((layer, layer, texts))
    lines = []
    for first, last, texts in groups:
        title = (
            "outside the layers"
            if first is None
            else f"layer {first}" + (f"-{last}" if last != first else "")
        )
        for text, count in Counter(texts).items():
            lines.append(f"  {title:<18} {text}" + (f"  ({count} sites)" if count > 1 else ""))
            title = ""
    return lines


def _one_site(site: dict[str, Any]) -> str:
    """Precision, recipe and backend of one site."""
    parts = [str(site[key]) for key in ("precision", "recipe", "backend") if site.get(key)]
    return ", ".join(parts) + (f": {site['reason']}" if site.get("reason") else "")


def summary_line(trainer: Any, summary: dict[str, float], seconds: float) -> str:
    """For a run that is done or was stopped: its work in ``seconds``, its result and its folders."""
    run = trainer.run
    done, total = int(summary["iteration"]), run.train.train_iters
    if done < total:
        saved = ", saved" if run.checkpoint.saves else ""
        parts = [f"stopped by {trainer.stepper.stop.reason} after {done} of {total} iterations{saved}"]
    elif trainer.finished >= total:
        parts = [f"done: all {total} iterations were done before"]
    else:
        here = f", {total - trainer.finished} of them" if trainer.finished else ""
        parts = [f"done: {total} iterations{here} in {seconds:.0f} s"]
    monitor = trainer.monitor
    if "last_loss" in summary:
        parts.append(f"loss {summary['first_loss']:.4f} -> {summary['last_loss']:.4f}")
    elif monitor.skipped + monitor.taken:
        parts.append("no finite loss")
    if "validation_loss" in summary:
        parts.append(f"validation loss {summary['validation_loss']:.4f}")
    if monitor.skipped + monitor.taken:
        parts.append(f"skipped {monitor.skipped} of {monitor.skipped + monitor.taken} steps")
    if monitor.spike:
        parts.append(monitor.spike)
    model = f"; the model is {trainer.started}" if trainer.finished >= total else ""
    did = ", ".join(parts)
    if not run.checkpoint.saves and done > trainer.finished:
        return (
            f"{did}; the trained weights are gone, as checkpoint.save_interval=never asks: {run.run_dir} has the records"
            f" alone; next: megatron-fp8 report {shlex.quote(run.run_dir)}"
        )
    elsewhere = f", its checkpoints in {run.checkpoint.folder}" if run.checkpoint.folder else ""
    more = "; --resume=auto goes on from there" if done < total else ""
    return f"{did}{model}; everything is in {run.run_dir}{elsewhere}{more}"


def next_commands(trainer: Any, summary: dict[str, float]) -> list[str]:
    """Lines with commands for a run that is done: its curves and its text; none if its weights are not saved."""
    run = trainer.run
    own = trainer.finished < run.train.train_iters
    if summary["iteration"] < run.train.train_iters or (own and not run.checkpoint.saves):
        return []
    saved_in = (run.checkpoint.folder or run.run_dir) if own else trainer.started
    # Transformer Engine quantizes its linears' weights itself, so inference takes other linears.
    backend = " --model.fp8_backend=auto" if run.model.fp8_backend == "transformer_engine" else ""
    prompt = "Once upon a time" if run.data.paths else "def "  # without paths it learned Python
    return [
        f"next: megatron-fp8 report {shlex.quote(run.run_dir)} --html report.html",
        f'      megatron-fp8 generate {shlex.quote(str(saved_in))} --prompt "{prompt}"{backend}',
    ]


def no_iterations_left(run: Any, start: Path) -> str:
    """For a run whose starting checkpoint ``start`` (another run's) already has all iterations."""
    return (
        f"done: all {run.train.train_iters} iterations were done before; the model is {start}, which is not"
        f" this run's own. Nothing was trained, and nothing in {run.run_dir} was moved: to train on, give a larger"
        " train.train_iters"
    )
