"""`megatron-fp8 estimate`: what a run will need, before anything is built."""

from __future__ import annotations

import argparse
import json

from .cli_common import CommandParser, refuse

HELP = """\
What a run needs, from its config alone, in seconds and without a GPU: parameters, bytes on the fullest rank by kind,
bytes sent by collective, the step's time by a roofline, the effect of FP8 on each linear, and with --device whether the
run fits, or else the nearest change that makes it fit.

  megatron-fp8 estimate --config llama3_8b --gpus 64 --device h100
  megatron-fp8 estimate --config tiny_gpt_cpu   a config that comes with the package, by name
  megatron-fp8 estimate --config my.yaml --set model.fp8_param=true --set train.micro_batch_size=2
  megatron-fp8 estimate --config my.yaml --model.fp8_param=true --json

Options of the run may follow as in `train`: --model.fp8_recipe=mxfp8. The whole config is checked by `train --dry-run`.
--device is a name, a file of figures (docs/estimates.md), or what `megatron-fp8 bench --out FILE` wrote.

Without --device, bytes are for a CPU run and times for an h100, and whether the run fits is not checked.

Parameters, weights, gradients, optimizer state and the bytes on the wire are exact; activations within 2 %; times are a
roofline from peaks and no measurement: a run is slower.

Exit codes: 0 done; 2 bad input.
"""

_ASSUMED = "h100"  # for times, without --device


def main(arguments: list[str]) -> int:
    """Print an estimate; returns the exit code."""
    parser = _parser()
    try:
        options, run_options = parser.parse_known_args(arguments)
        _run(options, run_options)
    except ValueError as error:
        return refuse(error, debug="--debug" in arguments)
    return 0


def _parser() -> CommandParser:
    parser = CommandParser("estimate", HELP)
    add = parser.add_argument
    add("--config", metavar="FILE", help="the run's config, a file or a shipped one's name")
    add("--gpus", type=int, metavar="N", help="GPUs of the run (default: one copy of the model)")
    add(
        "--device",
        metavar="NAME|FILE",
        help="h100, h100-pcie, h200, b200, mi300x, or a file of figures (default: times of an h100)",
    )
    add(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a dotted key of the config; may be given again",
    )
    add(
        "--reserve",
        type=float,
        metavar="PART",
        help="of the device's memory, left to CUDA and NCCL (default 0.1)",
    )
    add("--json", action="store_true", help="one object")
    return parser


def _run(options: argparse.Namespace, run_options: list[str]) -> None:
    from ..estimate.config_reader import read
    from ..estimate.device import device
    from ..estimate.estimate import estimate, in_bf16
    from ..estimate.memory_fit import RESERVE, fit
    from ..estimate.roofline import grouped, of_sites
    from ..estimate.text import shown, unsure
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
        if "=" not in assignment:
            raise ValueError(f"--set {assignment!r} has no value: write --set KEY=VALUE.")
        if not assignment.partition("=")[0].strip():
            raise ValueError(f"--set {assignment!r} names no key: write --set KEY=VALUE.")
        config_options.append(f"--{assignment}")
    device_given, all_options = options.device is not None, [*config_options, *run_options]
    settings = read(all_options, options.gpus)
    target = device(options.device if device_given else _ASSUMED, settings.model)
    native = native_support(settings.model, target)
    estimated = estimate(settings, target, chosen=device_given)
    sites = list(of_sites(estimated.settings, target))
    fits = fit(estimated, target, reserve) if device_given else None
    bf16 = estimate(in_bf16(settings), target, chosen=device_given) if settings.model.fp8 else None
    if options.json:
        record = {**estimated.as_dict(), "sites": [site.as_dict() for site in sites]}
        if bf16 is not None:
            record["bf16"] = {"step_seconds": bf16.time.seconds, "total": bf16.fullest.total}
        if fits is not None:
            record["fit"] = {"fits": fits.fits, **vars(fits)}
        record["native"] = None if native is None else {"runs": native.native, "reason": native.reason}
        if native is not None:
            record["notes"] += [*native.notes, *filter(None, [unsure(target, native.native, native.reason)])]
        print(json.dumps(record))
        return
    doubt = None if native is None else unsure(target, native.native, native.reason)
    print(shown(estimated, bf16, fits, grouped(iter(sites)), doubt, () if native is None else native.notes))
