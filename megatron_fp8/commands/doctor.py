"""`megatron-fp8 doctor`: what this machine can run, what is missing and how to get it.

Every backend that can run here quantises two matrices and multiplies them, as each recipe has it, and the result is
compared with the exact product of the same codes.
"""

from __future__ import annotations

import sys
from importlib import metadata, util

from ..backends.transformer_engine import INSTALL, NEEDS

USAGE = """\
usage: megatron-fp8 doctor

Lists the packages that matter, and runs FP8 GEMMs on each backend. Exit code 1: one computes wrongly.
"""

# (package, module to find, what it is for, how to get it)
_PACKAGES = (
    ("torch", "torch", "everything", "pip install torch==2.13.0"),
    ("megatron-core", "megatron.core", "training", "pip install megatron-core==0.16.1 (wheels for Linux)"),
    ("triton", "triton", "FP8 kernels on GPUs", "pip install triton (needs a GPU)"),
    ("transformer-engine", "transformer_engine", "fp8_backend='transformer_engine'", f"{INSTALL} ({NEEDS})"),
    (
        "apex",
        "apex",
        "Megatron-Core's fused Adam, clipping, LayerNorm and weight gradients",
        "build https://github.com/NVIDIA/apex with its C++ and CUDA extensions",
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
    from ..backends import BACKENDS
    from ..kernels.cpu import loops as cpu
    from ..plan.timing import unused_gpu
    from ..train.report import device_name

    print(f"{'device':<27} {device_name()}")
    if unused := unused_gpu():
        print(f"{'GPU':<27} not used: {unused}")
    why = cpu.reason()
    print(
        f"{'compiled CPU kernels':<27} {'in use' if why is None else f'not in use, torch does their work: {why}'}"
    )
    for package, module, purpose, how in _PACKAGES:
        print(f"{package:<27} {_package(package, module) or f'missing, needed for {purpose}: {how}'}")
    wrong = [name for name in BACKENDS if not _check_backend(name)]
    if not _check_transformer_engine():
        wrong.append("transformer_engine")
    if wrong:
        print(f"error: {', '.join(wrong)} computed a wrong product; please report this", file=sys.stderr)
    return 1 if wrong else 0


def _package(package: str, module: str) -> str | None:
    """The installed version; None if the package is not there."""
    try:
        if util.find_spec(module) is None:
            return None
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # a ModuleNotFoundError too, so it comes first
        return "installed, version unknown"
    except ModuleNotFoundError:  # from find_spec: the parent of a dotted module is absent
        return None


def _check_backend(name: str) -> bool:
    """Run one GEMM of every recipe on backend `name` and say how it went. True unless a product is wrong."""
    import torch

    from .. import recipe
    from ..backends import BACKENDS, emulated

    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    backend = BACKENDS[name]
    label = f"{'backend ' + name:<27}"
    reason = backend.supports(device)
    if reason is not None:
        print(f"{label} cannot run here: {reason}")
        return True
    generator = torch.Generator().manual_seed(0)
    x, w = (
        torch.randn(128, 256, generator=generator, dtype=torch.float32, device="cpu").to(device)
        for _ in range(2)
    )
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


def _check_transformer_engine() -> bool:
    """Run one of its linears in every recipe and say how it went. False if one did not run as asked."""
    import torch

    from .. import recipe
    from ..backends import transformer_engine as engine

    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    label = f"{'backend ' + engine.name:<27}"
    reason = engine.supports(device)
    if reason is not None:
        print(f"{label} cannot run here: {reason}")
        return True
    good = True
    for kind, made in recipe.RECIPES.items():
        scaling = made() if kind != "custom" else recipe.CustomRecipe(lambda role: None)
        reason = engine.supports(device, scaling)
        if reason is not None:
            print(f"{label} {kind}: cannot run here: {reason}")
            continue
        error, wrong = engine.try_linear(scaling, device)
        good &= error < 0.1 and not wrong
        verdict = f"{'WRONG' if wrong or error >= 0.1 else 'good'}, {error:.1e} from the unquantised product"
        print("; ".join([f"{label} {kind}: FP8 linear 128 x 256 x 128 {verdict}", *wrong]))
    return good
