"""`megatron-fp8 inspect`: the contents of a checkpoint, without ranks, model or Megatron-Core.

Prints what a checkpoint holds: iteration, layout, recipe; every tensor with shape, dtype and size; scales and amax
histories of delayed scaling.

  megatron-fp8 inspect RUN_DIR                           its latest checkpoint
  megatron-fp8 inspect RUN_DIR/checkpoints/iter_0000100 --check

Exit codes: 0 done, whether or not all of it is finite; 2 bad input, or a damaged checkpoint.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ..files.strict_json import nonfinite_as_text
from ..files.terminal import printable
from .cli_common import CommandParser, run

_KINDS = {"optimizer.": "optimizer", "rng.": "random streams"}


def main(arguments: list[str]) -> int:
    """Print the checkpoint in `arguments`; returns the exit code."""
    return run(_parser(), arguments, _inspect)


def _parser() -> CommandParser:
    parser = CommandParser("inspect", __doc__)
    add = parser.add_argument
    add("checkpoint", help="a run's folder, a folder of checkpoints, or a checkpoint")
    add("--json", action="store_true", help='one object, with "NaN" and "Infinity" as texts')
    add("--check", action="store_true", help="compare checksums, and look for NaN and Inf in tensors")
    return parser


def _inspect(options: argparse.Namespace) -> None:
    from ..files.checkpoint import check_files, find_checkpoint, read_manifest
    from ..train.run_record import later_training_note

    folder = find_checkpoint(Path(options.checkpoint))
    if options.check:
        check_files(folder, read_manifest(folder))
    description = describe(folder)
    description["notes"] += later_training_note(Path(options.checkpoint), folder)
    if options.check:
        description["not_finite"] = _not_finite(folder) or description["not_finite"]
    if options.json:
        print(json.dumps(nonfinite_as_text(description), indent=1, allow_nan=False))
    else:
        print(printable(format_description(description)))


def describe(folder: Path) -> dict[str, Any]:
    """A checkpoint as plain values.

    'tensors': name, kind, shape, dtype, bytes and shards of each. 'not_finite': tensors in which the save found NaN or
    Inf. 'delayed_scaling': for each quantized tensor its scale (a list if data-parallel ranks have several), whether it
    is warm, and the latest, largest and number of recorded amaxes.

    Raises ValueError if it is damaged, or not a checkpoint.
    """
    from ..files.checkpoint import METADATA, check_files, missing_checksum_note, read_manifest, read_metadata

    manifest = read_manifest(folder)
    check_files(folder, manifest, [METADATA] if METADATA in manifest.files else [])
    metadata = read_metadata(folder)
    tensors = []
    for name, entry in sorted(metadata.state_dict_metadata.items()):
        dtype = entry.properties.dtype
        tensors.append(
            {
                "name": name,
                "kind": _kind(name),
                "shape": list(entry.size),
                "dtype": str(dtype).removeprefix("torch."),
                "bytes": entry.size.numel() * dtype.itemsize,
                "shards": len(entry.chunks),
            }
        )
    return {
        "folder": str(folder),
        "iteration": manifest.iteration,
        "state": manifest.state,
        "layout": manifest.facts.get("layout"),
        "precision": manifest.facts.get("precision"),
        "versions": manifest.facts.get("versions"),
        "tokenizer": manifest.facts.get("tokenizer"),
        "accepted": manifest.facts.get("accepted", []),
        "not_finite": [manifest.facts["not_finite"]] if "not_finite" in manifest.facts else [],
        "notes": missing_checksum_note(manifest),
        "files": {name: record["bytes"] for name, record in manifest.files.items()},
        "tensors": tensors,
        "delayed_scaling": _delayed(folder, metadata),
    }


def _kind(name: str) -> str:
    from ..state.arena import is_slot_key

    if is_slot_key(name):
        return "scales of FP8 weights" if name.endswith(".block_scale_inv") else "delayed scaling"
    return next((kind for start, kind in _KINDS.items() if name.startswith(start)), "weights")


def _not_finite(folder: Path) -> list[str]:
    """Names of tensors with forbidden NaN or Inf; reads all tensors."""
    from ..files.checkpoint import read_metadata, read_tensor
    from ..state.arena import must_be_finite

    metadata = read_metadata(folder)
    tensors = ((name, read_tensor(folder, metadata, name)) for name in sorted(metadata.state_dict_metadata))
    return [name for name, tensor in tensors if not bool(must_be_finite(name, tensor).isfinite().all())]


def _delayed(folder: Path, metadata: Any) -> list[dict[str, Any]]:
    from ..files.checkpoint import read_tensor
    from ..state.arena import PREFIX, is_slot_key

    names = sorted(n for n in metadata.state_dict_metadata if is_slot_key(n) and n.endswith(".scale"))
    entries = []
    for name in names:
        stem = name.removesuffix("scale")
        scale, history, warm = (
            read_tensor(folder, metadata, stem + part) for part in ("scale", "amax_history", "warm")
        )
        rows = history.reshape(-1, history.shape[-1])
        scales = scale.reshape(-1).tolist()
        entries.append(
            {
                "name": stem.replace(f".{PREFIX}.", ".").removesuffix("."),
                "warm": bool(warm.all()),
                "scale": scales[0] if len(scales) == 1 else scales,
                # A history of length one stores only the scale between iterations.
                "latest_amax": float(rows[:, -1].max()) if rows.shape[1] > 1 else None,
                "largest_amax": float(rows.max()) if rows.shape[1] > 1 else None,
                "running_amax": float(rows[:, 0].max()),
                "recorded": int((rows != 0).sum(1).max()),
                "history_length": rows.shape[1],
            }
        )
    return entries


def format_description(found: dict[str, Any]) -> str:
    """The result of `describe` as text."""
    from ..plan.settings import entry_format

    layout, precision = found["layout"] or {}, found["precision"] or {}
    sizes = ", ".join(f"{name} {size}" for name, size in layout.items() if size is not None)
    fp8 = ", ".join(entry_format(precision) or ("no FP8",))
    if precision.get("fp8_param"):
        fp8 += ", FP8 parameters"
    if precision.get("fp4_param"):
        fp8 += ", FP4 parameters"
    state = ", ".join(f"{name} {value}" for name, value in found["state"].items() if value is not None)
    lines = [
        f"checkpoint  {found['folder']}",
        f"iteration   {found['iteration']} ({state})",
        f"layout      {sizes}",
        f"precision   {precision.get('params_dtype')}, {fp8}",
        f"versions    {', '.join(f'{name} {version}' for name, version in (found['versions'] or {}).items())}",
        f"files       {len(found['files'])}, {sum(found['files'].values()):,} bytes",
        *(
            f"accepted    {change['name']}: {change['there']!r} -> {change['here']!r} at iteration {change['iteration']}"
            for change in found["accepted"]
        ),
        *([f"not finite  {', '.join(found['not_finite'])}"] if found["not_finite"] else []),
        *(f"            {note}" for note in found["notes"]),
    ]
    for kind in ("weights", "scales of FP8 weights", "delayed scaling", "optimizer", "random streams"):
        of_kind = [tensor for tensor in found["tensors"] if tensor["kind"] == kind]
        if of_kind:
            lines += ["", f"{kind}: {len(of_kind)} tensors, {sum(t['bytes'] for t in of_kind):,} bytes"]
            delayed = found["delayed_scaling"] if kind == "delayed scaling" else []
            lines.append(_delayed_table(delayed) if delayed else _tensor_table(of_kind))
    return "\n".join(lines)


def _tensor_table(tensors: list[dict[str, Any]]) -> str:
    from ..plan.timing import table

    rows = [(t["name"], t["dtype"], str(t["shape"]), str(t["shards"])) for t in tensors]
    return table(("tensor", "dtype", "shape", "shards"), rows)


def _delayed_table(delayed: list[dict[str, Any]]) -> str:
    from ..plan.timing import table

    rows = []
    for row in delayed:
        scales = row["scale"] if isinstance(row["scale"], list) else [row["scale"]]
        scale = f"{scales[0]:.6g}" + (f" (+{len(scales) - 1})" if len(scales) > 1 else "")
        amaxes = [
            "-" if (amax := row[name]) is None else f"{amax:.6g}" for name in ("latest_amax", "largest_amax")
        ]
        history = f"{row['recorded']} of {row['history_length']}" + ("" if row["warm"] else ", cold")
        rows.append((row["name"], scale, *amaxes, history))
    return table(("of", "scale", "latest amax", "largest", "history"), rows)
