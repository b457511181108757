"""The training app's loop over made-up sentences, for rank cases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.support.ranks import Layout

STEPS = 5
_OPTIONS = [
    "--model.num_layers=2", "--model.hidden_size=64", "--model.num_attention_heads=2",
    "--model.ffn_hidden_size=128", "--model.gated_linear_unit=true", "--model.activation_func=silu",
    "--model.normalization=RMSNorm", "--model.add_bias_linear=false", "--model.hidden_dropout=0",
    "--model.attention_dropout=0", "--model.vocab_size=256", "--model.fp8=hybrid", "--model.fp8_recipe=delayed",
    "--train.micro_batch_size=1", "--train.seq_length=32",
    f"--train.train_iters={STEPS}", "--train.max_skipped_steps=3", "--train.eval_iters=0",
    "--optimizer.lr=0.01",
]  # fmt: skip


class _Sentences:
    """Samples of 32 tokens below 200: rows above are read by nobody."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Any]:
        import torch

        drawn = torch.randint(
            0, 200, (33,), generator=torch.Generator().manual_seed(index), dtype=torch.int64
        )
        ones = torch.ones(32, dtype=torch.float32)
        places = torch.arange(32, dtype=torch.int64)
        return {"tokens": drawn[:-1], "labels": drawn[1:], "loss_mask": ones, "position_ids": places}


def small_run(layout: Layout, options: list[str]) -> Any:
    """The app's own loop over made-up sentences, not begun."""
    import torch.distributed as dist

    from megatron_fp8.train import model
    from megatron_fp8.train.config import run_config
    from megatron_fp8.train.config.model_section import transformer_config
    from megatron_fp8.train.health.watchdog import Watchdog
    from megatron_fp8.train.loop import Trainer
    from megatron_fp8.train.metrics import Display
    from megatron_fp8.train.resume.checkpoints import Start
    from megatron_fp8.train.step import Stepper
    from megatron_fp8.train.stop import StopRequest

    sizes = [
        f"--model.tensor_model_parallel_size={layout.tp}",
        f"--model.pipeline_model_parallel_size={layout.pp}",
        f"--model.sequence_parallel={str(layout.sp).lower()}",
        f"--train.global_batch_size={1 if layout.tp > 1 else 2}",
    ]
    run = run_config.parse([*_OPTIONS, *sizes, *options])
    chunks = model.build_chunks(transformer_config(run.model), run, 256)
    optimizer = model.build_optimizer(chunks[0].config, run, chunks)
    scheduler = model.build_scheduler(run, optimizer)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    nobody = Watchdog(Path("stacks"), rank, ranks, least=0, limit=60, say=lambda _: None)
    stepper = Stepper(run, chunks, optimizer, scheduler, [_Sentences()], StopRequest({}), nobody)
    return Trainer(stepper, Start(), 1.0, display=Display(STEPS, 100))
