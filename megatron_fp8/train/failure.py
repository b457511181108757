"""Exit codes of commands, and the error of a training that cannot continue.

torchrun passes exit codes on; batch scripts should restart only after 1.
"""

EXIT_DONE = 0
EXIT_FAILED = 1
"""Training failed, here or on another rank: the same input may succeed later."""
EXIT_BAD_INPUT = 2
"""The input is wrong: another attempt would fail too."""


class TrainingFailed(RuntimeError):
    """Training cannot continue. The message is one line: what happened, and what to do."""
