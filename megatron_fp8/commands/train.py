"""`megatron-fp8 train`: from a command line to a finished run.

usage: megatron-fp8 train --config FILE [--section.key=value ...]
                          [--data FILE ...] [--dry-run] [--debug]

Trains a GPT in FP8 (or BF16) with Megatron-Core: on CPU over gloo, on GPUs over nccl.

  one process    megatron-fp8 train --config tiny_gpt_cpu
  several        megatron-fp8 launch --ranks 2 train --config tiny_gpt_cpu
  under SLURM    srun python -m megatron_fp8 train --config llama3_8b

--config takes a file, or the name of a config that comes with the package: {SHIPPED}.
A config file has the sections model, train, optimizer, data, checkpoint and telemetry; every key is also an option:

  --model.fp8=hybrid               FP8: E4M3, and E5M2 for gradients ('e4m3': E4M3 everywhere; null: BF16)
  --model.fp8_recipe=mxfp8         scaling recipe: tensorwise (default), delayed, rowwise, blockwise, mxfp8, custom
  --model.first_last_layers_bf16=true          keep the first and the last layer in BF16
  --model.fp8_high_precision_warmup=0.1        the first tenth in BF16; ..._healing=0.05: the last twentieth
  --model.tensor_model_parallel_size=2         also pipeline_model_parallel_size, sequence_parallel, ...
  --model.fp16=true                float16 with a loss scale (docs/unstable.md) where it is not BF16
  --model.NAME=...                 any field of Megatron-Core's TransformerConfig
  --train.train_iters=300          also micro_batch_size, global_batch_size, seq_length, eval_interval, ...
  --optimizer.lr=3e-3              also lr_warmup_iters, min_lr, weight_decay, clip_grad, ...
  --data FILE ...                  text, JSONL, CSV, Parquet, folders, or .bin/.idx prefixes (else Python's)
  --data.tokenizer=tokenizer.json  a Hugging Face tokenizers file (default: bytes)
  --data.loss=assistant            of chats (messages) only what the assistant says; also column, split
  --run_dir=runs/mine              where config.yaml, report.json, metrics.jsonl and tensorboard/ go
  --checkpoint.save_interval=100   save on the way too, not at the end alone (never: nowhere); also keep_last, folder, ...
  --telemetry.every=10             statistics of tensors and codes: telemetry.jsonl; also sites, what_if, wandb, ...
  --resume=auto                    go on from the run's latest checkpoint ('never', or the path of another one)
  --dry-run                        build, report, check that the first loss is near ln(vocabulary)
  --debug                          show tracebacks of bad input
  --keys                           list every key with its default and what it does

A run saves at its end. Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP (a closed terminal) make it finish its iteration, save and
end; --resume=auto goes on from there. Ctrl-C again, a second later or more, ends it at once, unsaved.

Exit codes: 0 done, or stopped and saved; 1 training failed; 2 bad input.
"""

from __future__ import annotations

import faulthandler
import shutil
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

from ..files.records import warn_missing
from ..files.resource_limits import limit_reached
from ..files.user_paths import example_configs
from ..train.stop import AGAIN_S, EXIT_DONE, EXIT_FAILED
from .cli_common import fit_help, refuse, warn_in_lines
from .main import call_at_broken_pipe

_INTERRUPTED = (
    "SIGINT: the run finishes its iteration, {saves}ends; again, after"
    f" {AGAIN_S:g} s or later: it ends at once, unsaved"
)
_READER_LEFT = RuntimeError(
    "training failed: whoever read its output has left, as `| head` does. Send it to a file: > train.log 2>&1."
)


def main(arguments: list[str]) -> int:
    """Run `megatron-fp8 train` with `arguments`; returns the exit code."""
    if "-h" in arguments or "--help" in arguments:
        usage = (__doc__ or "").partition("\n\n")[2]
        print(fit_help(usage.replace("{SHIPPED}", ", ".join(example_configs()))))
        return EXIT_DONE
    debug = "--debug" in arguments
    from ..train.stop import StopRequest

    try:
        stop = StopRequest()
        stop.listen("SIGUSR1")  # before the imports, which take seconds
    except ValueError as error:
        return refuse(error, debug=debug)
    from ..train.launch.environment import find_launch, order_collectives

    order_collectives(arguments)  # before the first use of a GPU
    from ..train.launch import parallel

    warn_in_lines()
    if "--keys" in arguments:
        from .. import mcore

        mcore.install()  # without the compiler Megatron-Core imports in two thirds of the time
        from ..train.config.key_help import key_lines

        print("\n".join(key_lines(shutil.get_terminal_size().columns)))
        return EXIT_DONE
    try:
        launch = parallel.connect(find_launch())
    except ValueError as error:
        return refuse(error, debug=debug)
    if launch.rank:  # rank 0 prints the same warnings
        warnings.simplefilter("ignore")
    try:
        assert launch.barrier is not None
        with launch.barrier:
            return _run(arguments, launch, stop, debug)
    finally:
        parallel.leave()


def _run(arguments: list[str], launch: Any, stop: Any, debug: bool) -> int:
    """Prepare and train; return the exit code. One rank reports bad input or a failed save."""
    from ..train.launch.parallel import exit_code, name_deterministic_setting

    try:
        trainer = prepare(arguments, launch, stop)
    except BrokenPipeError:
        return refuse(_READER_LEFT, tell=launch.barrier.tell, code=EXIT_FAILED)
    except (ValueError, RuntimeError, OSError, MemoryError) as error:
        lost = None
        if launch.world_size > 1:
            from ..train.health.stack_dump import explain_lost_rank_at_start

            lost = explain_lost_rank_at_start(error)
        code = EXIT_FAILED if lost else exit_code(error)
        return refuse(
            lost or name_deterministic_setting(error), debug=debug, tell=launch.barrier.tell, code=code
        )
    from ..mcore.checkpoint.saver import SaveError
    from ..train.health.stack_dump import explain_lost_rank
    from ..train.resume.checkpoints import checkpoint_before
    from ..train.stop import TrainingFailed

    try:
        if trainer is None:
            return EXIT_DONE
        return _train(trainer)
    except (SaveError, TrainingFailed) as error:
        return refuse(error, debug=debug, tell=launch.barrier.tell, code=EXIT_FAILED)
    except Exception as error:
        explained = name_deterministic_setting(error)
        if explained is error:
            watchdog, run = trainer.stepper.watchdog, trainer.run
            saved = checkpoint_before(run, 2**31, trainer.started)
            explained = explain_lost_rank(error, watchdog.phase, watchdog.differing_ranks(), saved) or error
        if explained is not error or limit_reached(error):
            return refuse(explained, debug=debug, tell=launch.barrier.tell, code=EXIT_FAILED)
        traceback.print_exc()
        launch.barrier.tell(EXIT_FAILED, f"rank {launch.rank} failed: {type(error).__name__}: {error}")
        return EXIT_FAILED


def prepare(arguments: list[str], launch: Any, stop: Any) -> Any:
    """Do all work before the first step. Return the trainer; None after a dry run."""
    from .. import mcore

    mcore.install()
    from ..train import startup

    return startup.prepare(arguments, launch, stop)


def _train(trainer: Any) -> int:
    from ..train.launch.parallel import on_first_rank
    from ..train.report import next_commands, summary_line
    from ..train.stop import TrainingFailed

    start = time.perf_counter()
    if sys.__stderr__ is not None:
        # SIGBUS (a mapped file that became shorter) and SIGSEGV then print a stack.
        faulthandler.enable(sys.__stderr__)
    stop, line = trainer.stepper.stop, ""
    stop.listen("SIGTERM")
    stop.listen("SIGHUP")
    saves = "saves and " if trainer.run.checkpoint.saves else "does not save, and "
    stop.listen("SIGINT", _INTERRUPTED.replace("{saves}", saves) if trainer.display else "")
    with call_at_broken_pipe(stop.reader_left):
        try:
            summary = trainer.train()
        except BaseException:
            warn_missing(_close(trainer))
            raise
        stop.ended()
        closed = _close(trainer)
        if trainer.display:
            line = summary_line(trainer, summary, time.perf_counter() - start)
            print("\n".join([line, *next_commands(trainer, summary)]), flush=True)
    lacking, unread = on_first_rank(lambda: (closed, line if stop.unread else ""))  # rank 0 writes them
    if unread:
        raise TrainingFailed(f"whoever read its output has left: {unread}")
    if lacking:
        raise TrainingFailed(
            f"records are lost: {', '.join(lacking)}. Training itself is as the line above says, and its checkpoints are"
            " complete. To have the records too, free disk space, leave the files in place and go on from an earlier"
            " checkpoint with --resume=PATH."
        )
    stopped = summary["iteration"] < trainer.run.train.train_iters
    return int(stop.exit_code) if stopped else EXIT_DONE


def _close(trainer: Any) -> list[str]:
    """Close all of a run's files; return a line for each loss of data."""
    lacking: list[str] = trainer.telemetry.close_files()
    if trainer.display:
        trainer.display.close()
        lacking += trainer.writer.close()
        paths = (Path(trainer.run.run_dir) / name for name in ("config.yaml", "report.json"))
        lacking += [f"{str(path)!r}, which is gone" for path in paths if not path.is_file()]
    return lacking
