"""`megatron-fp8 doctor`: what this machine can run, what is missing and how to get it.

Every backend that can run here quantises two matrices and multiplies them, as each recipe has it, and the result is
compared with the exact product of the same codes.
"""

from __future__ import annotations

import sys
from importlib import metadata, util

USAGE = """\
usage: megatron-fp8 doctor

Lists the packages that matter, and runs FP8 GEMMs on each backend. Exit code 1: one computes wrongly.
"""

# (package, module to find, what it is for, how to get it)
_PACKAGES = (
    ("torch", "torch", "everything", "pip install torch==2.13.0"),
    ("megatron-core", "megatron.core", "training", "pip install megatron-core==0.16.1"),
    ("triton", "triton", "FP8 kernels on GPUs", "pip install triton (needs a GPU)"),
    (
        "transformer-engine",
        "transformer_engine",
        "Transformer Engine's kernels",
        "pip install megatron_fp8[te]",
    ),
    ("tokenizers", "tokenizers", "--data.tokenizer", "pip install tokenizers"),
)


def main(arguments: list[str]) -> int:
    """Print what is here; returns 0, 1 if a backend computes wrongly, 2 for unknown arguments."""
    if "-h" in arguments or "--help" in arguments:
        print(USAGE)
        return 0
    if arguments:
        print(f"error: doctor takes no arguments, got {' '.join(arguments)!r}", file=sys.stderr)
        return 2
    from megatron_fp8.backends import BACKENDS
    from megatron_fp8.kernels import cpu
    from megatron_fp8.train.report import device_name

    print(f"{'device':<27} {device_name()}")
    why = cpu.reason()
    print(
        f"{'compiled CPU kernels':<27} {'in use' if why is None else f'not in use, torch does their work: {why}'}"
    )
    for package, module, purpose, how in _PACKAGES:
        print(f"{package:<27} {_package(package, module) or f'missing, needed for {purpose}: {how}'}")
    if "transformer_engine" not in BACKENDS:
        print(f"{'backend transformer_engine':<27} not in this release")
    wrong = [name for name in BACKENDS if not _check_backend(name)]
    if wrong:
        print(f"error: {', '.join(wrong)} computed a wrong product; please report this", file=sys.stderr)
    return 1 if wrong else 0


def _package(package: str, module: str) -> str | None:
    """The installed version; None if the package is not there."""
    try:
        if util.find_spec(module) is None:
            return None
        return metadata.version(package)
    except ModuleNotFoundError:  # from find_spec: the parent of a dotted module is absent
        return None
    except metadata.PackageNotFoundError:
        return "installed, version unknown"


def _check_backend(name: str) -> bool:
    """Run one GEMM of every recipe on backend `name` and say how it went. True unless a product is wrong."""
    import torch

    from megatron_fp8 import recipe
    from megatron_fp8.backends import BACKENDS, emulated

    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    backend = BACKENDS[name]
    label = f"{'backend ' + name:<27}"
    reason = backend.supports(device)
    if reason is not None:
        print(f"{label} cannot run here: {reason}")
        return True
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(128, 256, generator=generator).to(device) for _ in range(2))
    good = True
    for kind, made in recipe.RECIPES.items():
        if kind == "custom":
            continue
        scaling = made()
        reason = backend.supports(device, scaling)
        if reason is not None:
            print(f"{label} {kind}: cannot run here: {reason}")
            continue
        a, b = (
            backend.quantize(t, scaling.rule(role), "rowwise").tensor.rowwise
            for t, role in ((x, "input"), (w, "weight"))
        )
        found = backend.gemm(a, b, out_dtype=torch.float32)
        exact = emulated.gemm(a, b, out_dtype=torch.float64, exact=True)
        error = ((found.double() - exact).abs().max() / exact.abs().max()).item()
        good &= error < 1e-3
        verdict = "good" if error < 1e-3 else "WRONG"
        print(f"{label} {kind}: FP8 GEMM 128 x 256 x 128 {verdict}, error {error:.1e} of the largest value")
    return good
