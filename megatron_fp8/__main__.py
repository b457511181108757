"""`python -m megatron_fp8 COMMAND`, which is also what torchrun starts."""

import sys

from .commands.main import main

if __name__ == "__main__":
    sys.exit(main())
