"""What a process of this package ends with. torchrun passes it on, and batch scripts start again after 1 alone."""

EXIT_DONE = 0
EXIT_FAILED = 1
"""Training failed, or a peer did: the same input may succeed another time."""
EXIT_BAD_INPUT = 2
"""The input is wrong, and would be the next time."""
