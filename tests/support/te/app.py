"""`megatron-fp8 ARGUMENTS` in a process with the Transformer Engine of the folder $TRANSFORMER_ENGINE."""

from __future__ import annotations

import os
import sys
from unittest import mock

from tests.support.te import engine as installed


def main() -> int:
    """The command's exit code."""
    extension = installed.install(os.environ["TRANSFORMER_ENGINE"])
    from megatron_fp8.backends import transformer_engine as engine
    from megatron_fp8.commands.main import main as command
    from tests.support.te import products

    products.compute(extension)
    with mock.patch.object(engine, "device_reason", lambda device: None):
        return command(sys.argv[1:])


if __name__ == "__main__":
    raise SystemExit(main())
