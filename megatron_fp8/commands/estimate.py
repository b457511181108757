"""`megatron-fp8 estimate`: what a run will need, before anything is built.

What a run needs, from its config alone, in seconds and without a GPU: parameters, bytes on the fullest rank by kind,
bytes sent by collective, the step's time by a roofline, the effect of FP8 on each linear, and with --device whether the
run fits, or else the nearest change that makes it fit.

  megatron-fp8 estimate --config llama3_8b --gpus 64 --device h100
  megatron-fp8 estimate --config my.yaml --set model.fp8_param=true --json

Options of the run may follow as in `train`: --model.fp8_recipe=mxfp8. --device is a name, a file of figures
(docs/estimates.md), or what `megatron-fp8 bench --out FILE` wrote; without it, bytes are for a CPU run and times for an
h100.

Parameters, weights, gradients, optimizer state and the bytes on the wire are exact; activations within 2 %; times are a
roofline from peaks and no measurement: a run is slower.

Exit codes: 0 done; 2 bad input.
"""

from __future__ import annotations

import argparse
import json

from .cli_common import CommandParser, run

_ASSUMED = "h100"  # for times, without --device


def main(arguments: list[str]) -> int:
    """Print an estimate; returns the exit code."""
    return run(_parser(), arguments, _estimate, run_options=True)


def _parser() -> CommandParser:
    parser = CommandParser("estimate", __doc__)
    add = parser.add_argument
    add("--config", metavar="FILE", help="the run's config, a file or a shipped one's name")
    add("--gpus", type=int, metavar="N", help="GPUs of the run (default: one copy of the model)")
    add("--device", metavar="NAME|FILE", help="h100, h100-pcie, h200, b200, mi300x, or a file of figures")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="a key of the config; repeatable")
    add("--reserve", type=float, metavar="PART", help="of memory, for CUDA and NCCL (default 0.1)")
    add("--json", action="store_true", help="one object")
    return parser


def _estimate(options: argparse.Namespace, run_options: list[str]) -> None:
    from ..estimate.config_reader import read
    from ..estimate.device import device
    from ..estimate.estimate import estimate, in_bf16
    from ..estimate.fp8_speedup import fp4_note, group_sites, site_speedups
    from ..estimate.memory_fit import RESERVE, check_fit
    from ..estimate.text import format_estimate, unsure
    from ..fp8_utils import quantizes
    from ..study.support_matrix import native_support

    reserve = RESERVE if options.reserve is None else options.reserve
    if not 0 <= reserve < 1:
        raise ValueError(
            f"--reserve={reserve:g} must be at least 0 and below 1: give a part of the device's memory."
        )
    if options.reserve is not None and options.device is None:
        raise ValueError(
            f"--reserve={reserve:g} without --device: it is a part of a device's memory. Give one, or drop it."
        )
    config_options = [f"--config={options.config}"] if options.config is not None else []
    for assignment in options.set:
        key, equals, _ = assignment.partition("=")
        if not key.strip() or not equals:
            raise ValueError(f"--set {assignment!r}: write --set KEY=VALUE.")
        config_options.append(f"--{assignment}")
    has_device = options.device is not None
    settings = read([*config_options, *run_options], options.gpus)
    target = device(options.device if has_device else _ASSUMED, settings.model)
    native = native_support(settings.model, target)
    doubt = None if native is None else unsure(target, native.native, native.reason)
    notes = (*fp4_note(settings.model, target), *(() if native is None else native.notes))
    estimated = estimate(settings, target, has_device=has_device)
    sites = list(site_speedups(estimated.settings, target))
    fits = check_fit(estimated, target, reserve) if has_device else None
    bf16 = estimate(in_bf16(settings), target, has_device=has_device) if quantizes(settings.model) else None
    if not options.json:
        print(format_estimate(estimated, bf16, fits, group_sites(sites), doubt, notes))
        return
    record = {**estimated.as_dict(), "sites": [site.as_dict() for site in sites]}
    if bf16 is not None:
        record["bf16"] = {"step_seconds": bf16.time.seconds, "total": bf16.fullest.total}
    if fits is not None:
        record["fit"] = {"fits": fits.fits, **vars(fits)}
    record["native"] = None if native is None else {"runs": native.native, "reason": native.reason}
    record["notes"] += [*notes, *filter(None, [doubt])]
    print(json.dumps(record))
