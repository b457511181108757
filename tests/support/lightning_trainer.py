"""Lightning's Trainer, for tests: on a CPU, without files and output."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def quiet_trainer(folder: Path, **options: Any) -> Any:
    """A Trainer with Fp8Callback that writes nothing but into ``folder``."""
    from pytorch_lightning import Trainer

    from megatron_fp8.integrations.lightning import Fp8Callback

    silent = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    return Trainer(accelerator="cpu", callbacks=Fp8Callback(), default_root_dir=folder, **silent, **options)
