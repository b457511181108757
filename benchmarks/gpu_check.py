"""Is native FP8 right on this GPU? `python -m benchmarks.gpu_check` (or `make gpu-check`): a table of PASS and FAIL.

    python -m benchmarks.gpu_check --only gemm     # checks whose name contains the word; all take under nine minutes
    python -m benchmarks.gpu_check --dry-run       # the same code on a CPU, small, with the emulated backend

Codes and scales must be the specified ones to the bit; GEMMs are held to bounds of their accumulation; training must
follow the emulated backend's on the same device. Exit code 1 if a check fails. Results: benchmarks/results/gpu_check.*
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_fused, gpu_graph, gpu_te
from benchmarks.common import table
from benchmarks.gpu_common import (
    EXIT_FAILED,
    ROOT,
    Machine,
    NotRun,
    describe,
    environment,
    graphed,
    no_synchronisation,
    open_machine,
    relative_error,
    write,
)
from megatron_fp8 import Format, recipe
from megatron_fp8.backends import emulated
from megatron_fp8.linear import fp8_linear
from megatron_fp8.plan import fp8_site
from megatron_fp8.site import GemmSite
from megatron_fp8.state import Fp8State

HYBRID = Format.HYBRID
RECIPES: dict[str, Any] = {
    "delayed": recipe.DelayedScaling(amax_history_len=4),
    "tensorwise": recipe.Float8CurrentScaling(),
    "rowwise": recipe.Float8RowwiseScaling(fp8_format=HYBRID),
    "blockwise": recipe.Float8BlockScaling(),
    "blockwise-fp32": recipe.Float8BlockScaling(use_f32_scales=True),
    "mxfp8": recipe.MXFP8BlockScaling(),
}
LIMIT_SECONDS = 520
# Of |a| |b|: Hopper keeps about 14 bits of a partial sum with fast accumulation, more where it promotes.
GEMM_BOUND = {True: 2.0**-9, False: 2.0**-11}
ROLES = {"fprop": ("input", "weight"), "dgrad": ("grad_output", "weight"), "wgrad": ("grad_output", "input")}


@dataclass
class Result:
    """One line of the table."""

    check: str
    verdict: str
    detail: str
    seconds: float


def supported(machine: Machine, name: str) -> Any:
    """The recipe; NotRun if the backend under test does not do it on this device."""
    reason = machine.backend.supports(machine.device, RECIPES[name])
    if reason is not None:
        raise NotRun(reason)
    return RECIPES[name]


def random(machine: Machine, *shape: int, seed: int) -> torch.Tensor:
    """bfloat16 normal numbers whose rows differ in size; the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.exp2(torch.randint(-4, 5, (shape[0], 1), generator=generator).float())
    return (torch.randn(shape, generator=generator) * rows).to(torch.bfloat16).to(machine.device)


# ---------------------------------------------------------------------------------------------------------- checks


def digests(machine: Machine) -> str:
    """Codes and scales for fixed seeds against digests made on a CPU and kept with the code."""
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_digests"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
    )
    lines = (run.stdout + run.stderr).strip().splitlines() or ["equal"]
    assert run.returncode == 0, "\n".join(lines[-12:])
    return lines[-1]


def codes(machine: Machine, name: str) -> str:
    """Codes, scales, amax and health on the device against the CPU's, both directions, odd sizes, NaN and Inf."""
    chosen, count = supported(machine, name), 0
    sizes = [(1, 5), (70, 200), (129, 257), *([] if machine.dry else [(1000, 4100), (4096, 4096)])]
    for shape in sizes:
        x = random(machine, *shape, seed=3)
        x[0, 0], x[-1, -1] = torch.nan, -torch.inf
        for role in ("input", "weight", "grad_output"):
            found = machine.backend.quantize(x, chosen.rule(role), "both")
            expected = emulated.quantize(x.cpu(), chosen.rule(role), "both")
            for side in ("rowwise", "columnwise"):
                mine, theirs = getattr(found.tensor, side), getattr(expected.tensor, side)
                for what in ("codes", "scale_inv"):
                    same_bytes(getattr(mine, what), getattr(theirs, what), f"{role} {shape} {side} {what}")
                    count += getattr(mine, what).numel()
            same_bytes(found.amax, expected.amax, f"{role} {shape} amax")
            assert float(found.nonfinite or 0) == float(expected.nonfinite or 0), (
                f"{role} {shape}: non-finite count"
            )
    return f"{count:,} codes and scales, all equal"


def same_bytes(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """AssertionError naming the first element that differs."""
    view = torch.int32 if found.element_size() == 4 else torch.uint8
    assert found.shape == expected.shape, (
        f"{what}: shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
    )
    mine, theirs = (t.detach().cpu().contiguous().view(view) for t in (found, expected))
    differ = (mine != theirs).nonzero()
    if len(differ):
        at = tuple(differ[0].tolist())
        raise AssertionError(
            f"{what}: {len(differ)} differ, first at {at}: {mine[at]:#x}, expected {theirs[at]:#x}"
        )


def gemms(machine: Machine, name: str) -> str:
    """All three GEMMs against float64, sizes aligned and odd, results in three dtypes, with and without bias."""
    chosen, worst = supported(machine, name), {True: 0.0, False: 0.0}
    sizes = [(33, 17, 70), (64, 48, 200)] if machine.dry else [
        *((1, 1, 1), (33, 17, 70), (127, 1000, 641), (1000, 513, 8), (512, 2752, 1024), (2048, 4096, 4096)),
    ]  # fmt: skip
    for m, n, k in sizes:
        tensors = {"input": (m, k), "weight": (n, k), "grad_output": (m, n)}
        sides = {
            role: machine.backend.quantize(random(machine, *shape, seed=5), chosen.rule(role), "both").tensor
            for role, shape in tensors.items()
        }
        pairs = {
            "fprop": (sides["input"].rowwise, sides["weight"].rowwise),
            "dgrad": (sides["grad_output"].rowwise, sides["weight"].columnwise),
            "wgrad": (sides["grad_output"].columnwise, sides["input"].columnwise),
        }
        for which, (a, b) in pairs.items():
            exact, size = product64(a, b)
            turned = replace(b, codes=b.codes.t().contiguous().t())
            first, second = (machine.backend.gemm(a, side, out_dtype=torch.float32) for side in (b, turned))
            same_bytes(second, first, f"{which} {m} x {n} x {k} of codes in the other order")
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                bias = torch.randn(b.codes.shape[0], device=machine.device).to(dtype)
                for added in (None, bias):
                    fast = which == "fprop"
                    found = machine.backend.gemm(a, b, out_dtype=dtype, bias=added, fast_accumulation=fast)
                    wanted = exact if added is None else exact + added.double()
                    unit = torch.finfo(dtype).eps
                    overflow = dtype == torch.float16 and bool((wanted.abs() > 65000).any())
                    error = (found.double() - wanted).abs() - unit * wanted.abs()
                    off = 0.0 if overflow else float((error / size.clamp(min=1e-30)).max())
                    assert off <= GEMM_BOUND[fast], f"{which} {m} x {n} x {k} {dtype}: {off:.1e} of |a| |b|"
                    worst[fast] = max(worst[fast], off)
    return f"off by at most {worst[True]:.1e} (fprop), {worst[False]:.1e} (others) of |a| |b|"


def product64(a: Any, b: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(float64 product of the codes and scales, the product of their magnitudes)."""
    values = [emulated._values64(side) for side in (a, b)]
    return values[0] @ values[1].t(), values[0].abs() @ values[1].abs().t()


def gradients(machine: Machine, name: str) -> str:
    """y, dx, dw and dbias of the linear against the emulated backend's on this device, three iterations."""
    chosen = supported(machine, name)
    m, k, n = (70, 96, 136) if machine.dry else (1000, 1024, 2752)
    x, w, dy = (random(machine, *s, seed=i) for i, s in enumerate(((m, k), (n, k), (m, n))))
    bias = random(machine, 1, n, seed=9)[0]
    outcomes = []
    for backend in (machine.backend.name, "emulated"):
        state = Fp8State(machine.device)
        site = GemmSite(fp8_site("layers.0.linear", 0, chosen, backend, "check"), state, None)
        for _ in range(3):  # delayed scaling: the first without a history, the others with
            leaves = [t.clone().requires_grad_() for t in (x, w, bias)]
            y = fp8_linear(leaves[0], leaves[1], leaves[2], site)
            y.backward(dy)
            state.finish_iteration()
        outcomes.append((y.detach(), *(t.grad for t in leaves)))
    errors = [relative_error(found, wanted) for found, wanted in zip(*outcomes, strict=True)]
    assert max(errors) < 4e-3, f"y, dx, dw, dbias off by {', '.join(f'{e:.1e}' for e in errors)} (RMS)"
    assert errors[3] == 0, "dbias is the float32 sum of dy: bits"
    return f"y {errors[0]:.1e}, dx {errors[1]:.1e}, dw {errors[2]:.1e} from the emulated (RMS)"


def no_waiting(machine: Machine, name: str) -> str:
    """A linear's forward and backward never wait for the GPU, once its kinds of product were tried and weights cached."""
    chosen = supported(machine, name)
    state = Fp8State(machine.device)
    site = GemmSite(fp8_site("layers.0.linear", 0, chosen, machine.backend.name, "check"), state, None)
    x, w, dy = (random(machine, *s, seed=i) for i, s in enumerate(((64, 128), (256, 128), (64, 256))))
    for iteration in range(3):
        leaves = [t.clone().requires_grad_() for t in (x, w)]
        machine.synchronize()
        if iteration < 2:
            fp8_linear(leaves[0], leaves[1], None, site).backward(dy)
        else:
            with no_synchronisation(machine):
                fp8_linear(leaves[0], leaves[1], None, site).backward(dy)
        state.finish_iteration()
    return "no synchronisation in forward and backward"


def cuda_graph(machine: Machine, name: str) -> str:
    """Quantise and multiply inside a captured graph: the replay gives the bits of the eager run on new numbers."""
    if machine.dry:
        raise NotRun("needs a GPU")
    chosen = supported(machine, name)
    x, w = random(machine, 256, 512, seed=1), random(machine, 384, 512, seed=2)
    out = torch.empty(256, 384, dtype=torch.bfloat16, device=machine.device)

    def forward() -> None:
        a = machine.backend.quantize(x, chosen.rule("input"), "rowwise").tensor.rowwise
        b = machine.backend.quantize(w, chosen.rule("weight"), "rowwise").tensor.rowwise
        out.copy_(machine.backend.gemm(a, b, out_dtype=torch.bfloat16, fast_accumulation=True))

    replay = graphed(machine, forward)
    x.copy_(random(machine, 256, 512, seed=7))
    forward()
    eager = out.clone()
    out.zero_()
    replay()
    same_bytes(out.view(torch.uint8), eager.view(torch.uint8), "replayed result")
    return "captured and replayed"


def training(machine: Machine, name: str) -> str:
    """A GPT on Megatron-Core, one rank: losses follow the emulated backend's, and are the same twice, to the bit."""
    from benchmarks.gpu_models import DRY, TINY, Training

    supported(machine, name)
    steps = 3 if machine.dry else 12

    def losses(backend: str) -> list[float]:
        run = Training(DRY if machine.dry else TINY, name, backend)
        found = torch.stack([run.step() for _ in range(steps)]).tolist()
        sites = [s for s in run.report() if s["layer"] is not None]
        assert sites and {(s["precision"], s["backend"]) for s in sites} == {("fp8", backend)}, sites[0][
            "reason"
        ]
        return found

    native, again, emulation = (losses(b) for b in (machine.backend.name, machine.backend.name, "emulated"))
    bf16 = Training(DRY if machine.dry else TINY, None, "auto")
    plain = torch.stack([bf16.step() for _ in range(steps)]).tolist()
    apart = max(abs(a - b) / b for a, b in zip(native, emulation, strict=True))
    from_bf16 = max(abs(a - b) / b for a, b in zip(native, plain, strict=True))
    assert native == again, "two runs of the same seed differ"
    assert apart < 5e-3, f"losses {apart:.1e} from the emulated backend's"
    assert native[-1] < native[0] or machine.dry, f"the loss does not fall: {native}"
    return f"{native[0]:.3f} -> {native[-1]:.3f}; {apart:.1e} from the emulated, {from_bf16:.1e} from BF16"


def sanitiser(machine: Machine) -> str:
    """compute-sanitizer's memcheck over the kernels and products of every recipe."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if machine.dry or not Path(tool).exists():
        raise NotRun("needs a GPU" if machine.dry else "compute-sanitizer is not installed")
    run = subprocess.run(
        [
            tool,
            "--tool",
            "memcheck",
            "--error-exitcode",
            "9",
            sys.executable,
            "-m",
            "benchmarks.gpu_check",
            "--small",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        timeout=max(30.0, min(150.0, machine.left)),
    )
    lines = (run.stdout + run.stderr).strip().splitlines()
    errors = [line for line in lines if "ERROR SUMMARY" in line]
    assert run.returncode == 0, "\n".join([line for line in lines if "=====" in line][:12] or lines[-12:])
    return errors[-1].strip("= ") if errors else "clean"


def small(machine: Machine) -> None:
    """What runs under the sanitiser: each kernel and each kind of product, on small odd matrices."""
    x = random(machine, 70, 200, seed=1)
    for chosen in RECIPES.values():
        if machine.backend.supports(machine.device, chosen) is None:
            for roles in ROLES.values():
                a, b = (machine.backend.quantize(x, chosen.rule(role), "both").tensor for role in roles)
                machine.backend.gemm(a.rowwise, b.rowwise, out_dtype=torch.bfloat16)
                machine.backend.gemm(a.columnwise, b.columnwise)
    if not machine.dry:
        gpu_fused.small(machine)
    machine.synchronize()


# ------------------------------------------------------------------------------------------------------------ run


def all_checks() -> dict[str, Callable[[Machine], str]]:
    """Every check by name, in order."""
    found: dict[str, Callable[[Machine], str]] = {"digests": digests}
    for what, check in (("codes", codes), ("gemm", gemms), ("gradients", gradients), ("no waiting", no_waiting),
                        ("graph", cuda_graph)):  # fmt: skip
        for name in RECIPES:
            found[f"{what} {name}"] = lambda machine, check=check, name=name: check(machine, name)  # type: ignore[misc]
    for name in ("delayed", "tensorwise", "rowwise", "blockwise", "mxfp8"):
        found[f"training {name}"] = lambda machine, name=name: training(machine, name)  # type: ignore[misc]
    found |= gpu_fused.checks(RECIPES) | gpu_graph.checks(RECIPES) | gpu_te.checks()
    found["sanitiser"] = sanitiser
    return found


def run_check(name: str, check: Callable[[Machine], str], machine: Machine) -> Result:
    """Its verdict: PASS, FAIL, or 'not run' with the reason."""
    start = time.monotonic()
    if machine.left < 5:
        return Result(name, "not run", "out of time", 0.0)
    try:
        verdict, detail = "PASS", check(machine)
    except NotRun as reason:
        verdict, detail = "not run", str(reason)
    except subprocess.TimeoutExpired as error:
        verdict, detail = "not run", f"took more than {error.timeout:.0f} s"
    except Exception as error:
        verdict, detail = "FAIL", f"{type(error).__name__}: {error}".strip()
        if not isinstance(error, AssertionError):
            print("".join(traceback.format_exception(error)[-6:]), file=sys.stderr)
    return Result(name, verdict, detail, time.monotonic() - start)


def main(arguments: list[str] | None = None) -> int:
    """Run the checks, print and write the table; 1 if one failed, 3 without a GPU."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with the emulated backend")
    parser.add_argument("--only", default="", help="checks whose name contains this")
    parser.add_argument("--out", type=Path, help="folder of the result files (default: benchmarks/results)")
    parser.add_argument(
        "--small", action="store_true", help="run each kernel once and stop: for the sanitiser"
    )
    wanted = parser.parse_args(arguments)
    machine = open_machine(wanted.dry_run, LIMIT_SECONDS)
    if wanted.small:
        small(machine)
        return 0
    record = environment(machine)
    print(describe(record), flush=True)
    checks = {name: check for name, check in all_checks().items() if wanted.only in name}
    from benchmarks.gpu_models import leave_megatron, start_megatron

    if any(name.startswith(("training", "fused")) for name in checks):
        start_megatron()
    results = []
    for name, check in checks.items():
        result = run_check(name, check, machine)
        results.append(result)
        first, *rest = result.detail.splitlines() or [""]
        print(f"{result.verdict:<8} {name:<26} {result.seconds:6.1f} s  {first}", flush=True)
        for line in rest:
            print(f"{'':<46}{line}")
        machine.empty()
    leave_megatron()
    failed = [r.check for r in results if r.verdict == "FAIL"]
    rows = [(r.check, r.verdict, f"{r.seconds:.1f}", r.detail.partition("\n")[0]) for r in results]
    body = table(("check", "verdict", "seconds", "detail"), rows)
    verdict = ", ".join(f"{sum(r.verdict == v for r in results)} {v}" for v in ("PASS", "FAIL", "not run"))
    write("gpu_check", "GPU check", record, f"{body}\n\n{verdict}", [asdict(r) for r in results], wanted.out)
    print(verdict + (f": {', '.join(failed)}" if failed else ""))
    return EXIT_FAILED if failed or not results else 0


if __name__ == "__main__":
    raise SystemExit(main())
