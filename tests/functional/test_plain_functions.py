"""Megatron-Core's first import on a CPU leaves torch's compiler alone and warns of nothing; uninstall undoes all."""

from __future__ import annotations

import subprocess
import sys

from tests.support.command import ROOT, environment

PROGRAM = """
import sys, types, warnings
import torch
original = torch.compile
from megatron_fp8 import mcore
mcore.install()
from megatron_fp8.mcore import spec
warnings.warn("mine")
warnings.warn("mine too", DeprecationWarning)
print("torch._inductor.compile_fx" in sys.modules, torch.compile is original)
mcore.uninstall()
from megatron.core import jit
loaded = [module for name, module in sys.modules.items() if name.startswith("megatron.core")]
bound = {vars(module)["jit_fuser"] for module in loaded if "jit_fuser" in vars(module)}
print(bound == {original} and jit.jit_fuser is original, len(loaded) > 100)
from megatron.core.fusions.fused_bias_swiglu import swiglu
print(type(swiglu) is types.FunctionType and not hasattr(swiglu, "_torchdynamo_orig_callable"))
"""


def test_nothing_is_compiled_and_torch_compile_is_itself_again() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", PROGRAM],
        capture_output=True,
        text=True,
        env=environment(),
        cwd=ROOT,
        timeout=150,
    )
    assert done.stdout.split() == ["False", "True", "True", "True", "True"], done.stdout + done.stderr
    warned = [line.split(": ", 1)[1] for line in done.stderr.splitlines() if "Warning: " in line]
    assert warned == ["UserWarning: mine", "DeprecationWarning: mine too"], done.stderr
