"""What Megatron-Core's import warns of where apex and Transformer Engine are not installed."""

import subprocess
import sys

SCRIPT = """
from megatron_fp8 import TransformerConfig
from megatron_fp8.mcore import spec
import warnings
warnings.warn("mine")
warnings.warn("mine too", DeprecationWarning)
"""


def test_nothing_is_said_before_our_first_line():
    run = [sys.executable, "-W", "always", "-c", SCRIPT]
    said = subprocess.run(run, capture_output=True, text=True, check=True).stderr
    warned = [line.split(": ", 1)[1] for line in said.splitlines() if "Warning: " in line]
    assert warned == ["UserWarning: mine", "DeprecationWarning: mine too"], said
