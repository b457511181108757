"""The check of training: a GPT on Megatron-Core, native against emulated FP8 and BF16 on the same device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.gpu_common import Machine, supported
from benchmarks.gpu_models import DRY, TINY, Training
from megatron_fp8.train.launch.parallel import be_deterministic


def checks() -> dict[str, Callable[[Machine], str]]:
    """Every check by name."""
    names = ("delayed", "tensorwise", "rowwise", "blockwise", "mxfp8")
    return {f"training {name}": partial(training, name=name) for name in names}


def training(machine: Machine, name: str) -> str:
    """A GPT on Megatron-Core, one rank: losses follow the emulated backend's, and are the same twice, to the bit."""
    supported(machine, name)
    if not machine.dry:
        be_deterministic()
    steps = 2 if machine.dry else 12

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
