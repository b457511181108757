"""`python -m megatron_fp8 COMMAND`, which is also what torchrun starts."""

import sys

from megatron_fp8.cli import main

if __name__ == "__main__":
    sys.exit(main())
