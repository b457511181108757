"""`megatron-fp8 train`: from a command line to a finished run.

All input errors are found before the first step and raised as ValueError.
"""

from __future__ import annotations

import faulthandler
import math
import os
import shutil
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

from ..files.example_configs import example_configs
from ..files.record_writer import warn_missing
from ..files.resource_limits import limit_reached
from ..files.terminal import printable
from ..train.failure import EXIT_DONE, EXIT_FAILED
from ..train.stop import AGAIN_S
from .cli_common import refuse, warn_in_lines
from .help_format import fit_help
from .output import reader_may_leave

USAGE = """\
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
        print(fit_help(USAGE.replace("{SHIPPED}", ", ".join(example_configs()))))
        return EXIT_DONE
    debug = "--debug" in arguments
    # Before the first use of a GPU. With one queue a collective starts before the GEMM that overlaps it.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    from ..train.stop import StopRequest

    try:
        stop = StopRequest()
        stop.listen("SIGUSR1")  # before the imports, which take seconds
    except ValueError as error:
        return refuse(error, debug=debug)
    from ..train.launch import parallel
    from ..train.launch.environment import find_launch

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
        warnings.filterwarnings("ignore", module="megatron_fp8")
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
            from ..train.health.stack_dump import lost_before_training

            lost = lost_before_training(error)
        code = EXIT_FAILED if lost else exit_code(error)
        return refuse(
            lost or name_deterministic_setting(error), debug=debug, tell=launch.barrier.tell, code=code
        )
    from ..mcore.checkpoint.saver import SaveError
    from ..train.failure import TrainingFailed
    from ..train.health.stack_dump import lost_rank
    from ..train.resume.checkpoints import checkpoint_before

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
            explained = lost_rank(error, watchdog.doing, watchdog.who(), saved) or error
        if explained is not error or limit_reached(error):
            return refuse(explained, debug=debug, tell=launch.barrier.tell, code=EXIT_FAILED)
        traceback.print_exc()
        launch.barrier.tell(EXIT_FAILED, f"rank {launch.rank} failed: {type(error).__name__}: {error}")
        return EXIT_FAILED


def settings(arguments: list[str], ranks: int) -> tuple[Any, Any, Any, int]:
    """Return (the run's config, Megatron-Core's config, tokenizer, vocabulary size), checked; writes nothing.

    Raises:
        ValueError: `train` would refuse these options on any machine.
    """
    from .. import mcore

    mcore.install()
    from ..train.config import run_config
    from ..train.config.model_section import padded_vocab_size, transformer_config
    from ..train.data.datasets import check_tokenizer
    from ..train.data.tokenizers import load_tokenizer

    run = run_config.parse(arguments, ranks)
    config = transformer_config(run.model)
    tokenizer = load_tokenizer(run.data.tokenizer)
    vocab_size = padded_vocab_size(run.model, tokenizer.vocab_size)
    check_tokenizer(run.data, tokenizer, run.model.vocab_size or run.model.padded_vocab_size or 0)
    return run, config, tokenizer, vocab_size


def prepare(arguments: list[str], launch: Any, stop: Any) -> Any:
    """Do all work before the first step: config, ranks, data, model, report. Return the trainer; None after a dry run."""
    run, config, tokenizer, vocab_size = settings(arguments, launch.world_size)
    from ..train.launch import parallel
    from ..train.launch.config_consistency import run_facts

    parallel.check_layout(run.model, run.train, launch.world_size, launch.variables)
    launch.barrier.agree(
        "settings", run_facts(run, tokenizer, launch.world_size), run.train.distributed_timeout_minutes * 60
    )
    parallel.join(launch, run.model, run.train)
    return build(run, config, tokenizer, vocab_size, launch, stop)


def build(run: Any, config: Any, tokenizer: Any, vocab_size: int, launch: Any, stop: Any) -> Any:
    """Build data, model, optimizer and report, once all ranks are connected. Return the trainer; None after a dry run."""
    from ..files.run_lock import job_name
    from ..mcore.iteration import set_training_length
    from ..mcore.sites import check_plan
    from ..telemetry import Telemetry
    from ..train import model
    from ..train.config.run_config import tokens_of_microbatch
    from ..train.data import datasets as data
    from ..train.health.loss_spikes import Rollbacks
    from ..train.launch import parallel
    from ..train.launch.config_consistency import agree_on_inputs, data_fact
    from ..train.loop import Trainer
    from ..train.metrics import Display, MetricsWriter, lacks_validation, model_flops_per_token
    from ..train.report import build_report, format_report, nothing_left, write_report
    from ..train.resume import checkpoint_compat, checkpoints
    from ..train.resume.run_folder import RunFolders, naming
    from ..train.step import Stepper

    set_training_length(config, run.train.train_iters)
    if config.fp8_size_filter_tokens is None:
        config.fp8_size_filter_tokens = tokens_of_microbatch(run)
    folders, watchdog = RunFolders(run), _watchdog(run, launch)
    if not run.dry_run:
        folders.claim()
    chosen = None if run.dry_run else checkpoints.choose(run, tokenizer)
    with folders.remembering(chosen[0] if chosen is not None else None):
        if chosen is not None and data.holds_text(run.data):
            checkpoint_compat.check_imported(run, chosen[1].facts)
        prefixes = data.find_data(run.data, tokenizer, run.train)
        agree_on_inputs("files", launch, prefixes, chosen, run.train.distributed_timeout_minutes * 60)
        data.check_data(prefixes, run.data, vocab_size)
        datasets = data.build_datasets(prefixes, run.data, run.train, tokenizer)
        chunks = model.build_chunks(config, run, vocab_size)
        optimizer = model.build_optimizer(config, run, chunks)
        scheduler = model.build_scheduler(run, optimizer)
        check_plan(chunks)
        parameters = model.count_parameters(chunks)
        report = build_report(run, config, chunks, parameters, launch.launcher)
        stepper = Stepper(run, chunks, optimizer, scheduler, datasets, stop, watchdog)
        first = launch.rank == 0
        Telemetry(chunks, run.telemetry.settings()).close()  # refuses a pattern that matches nothing
        if first:
            print(format_report(report), flush=True)
        if run.dry_run:
            _dry_run(stepper, vocab_size, first)
            return None
        if run.checkpoint.saves:
            folders.check_room(checkpoints.estimated_bytes(parameters["total"], config.params_dtype))
        content = parallel.on_first_rank(lambda: data_fact(prefixes))
        start = checkpoints.resume(run, chosen, tokenizer, chunks, optimizer, scheduler, content)
    facts = {
        "tokenizer": checkpoint_compat.tokenizer_fact(tokenizer),
        "accepted": start.accepted,
        "data": content,
    }
    facts["job"] = job_name(os.environ)
    entropy = data.corpus_bigram_entropy(prefixes) if first else math.nan
    # From here on the run's folder changes, so no later line may refuse the input.
    continues = folders.has(start.folder)
    done = start.iteration >= run.train.train_iters
    if done and start.folder is not None and not continues:
        if first:
            print(*map(printable, [*start.lines, nothing_left(run, start.folder)]), sep="\n", flush=True)
        return None
    if not continues:
        start.lines += folders.keep_earlier(start.folder, watchdog.folder)
    elif start.folder is not None:
        start.lines += folders.keep_newer(start.folder)
    folder = Path(run.run_dir)

    def after_first_step() -> None:
        launch.barrier.close()
        if stepper.saved is not None:
            report["saved_bytes"] = stepper.saved.bytes
        _add_site_notes(report, chunks, folder, first)

    writer = display = None
    unvalidated = False
    if first:
        print(f"data        {', '.join(prefixes)}; bigram entropy {entropy:.4f} nats", flush=True)
        print(*map(printable, start.lines), sep="\n", end="\n" if start.lines else "", flush=True)
        report["bigram_entropy"] = entropy
        with naming("run_dir", folder):
            writer = MetricsWriter(folder, start.iteration if continues else 0, start.before)
            unvalidated = done and bool(run.train.eval_iters) and lacks_validation(folder, start.iteration)
        if start.folder is not None:
            writer.event(start.iteration if continues else 0, "restart", f"goes on from {start.folder}")
        display = Display(run.train.train_iters, run.train.log_interval, start.iteration, start.skipped)
        if run.telemetry.settings().misses(start.iteration + 1, run.train.train_iters):
            print(
                f"telemetry   measures none of the iterations {start.iteration + 1} to {run.train.train_iters}: look at"
                " telemetry.every and its windows",
                flush=True,
            )
    with naming("run_dir", folder):
        telemetry = Telemetry(
            chunks,
            run.telemetry.settings(),
            folder=folder,
            wandb=run.telemetry.wandb,
            finished=start.iteration if continues else 0,
            say=display.say if display else print,
        )
    saves = checkpoints.Checkpoints(run, folders, chunks, optimizer, scheduler, facts)
    rewinds = None
    if run.train.rewind_on_spike:

        def restore(found: Any) -> Any:
            return checkpoints.resume(run, found, tokenizer, chunks, optimizer, scheduler, content)

        rewinds = Rollbacks(
            run.train.rewind_on_spike,
            run.checkpoint.save_interval,
            folders.checkpoints,
            restore,
            saves.wait,
            start.left_out,
        )
    if first:  # last, so that a refused start leaves earlier files unchanged
        with naming("run_dir", folder):
            run.save(folder / "config.yaml")
            # A run without iterations left keeps the report of its training.
            if not (done and continues and (folder / "report.json").is_file()):
                write_report(report, folder)
    return Trainer(
        stepper,
        start,
        model_flops_per_token(
            parameters.get("active", parameters["non_embedding"]),
            vocab_size,
            config.hidden_size,
            config.num_layers,
            run.train.seq_length,
        ),
        writer=writer,
        display=display,
        after_first_step=after_first_step,
        sites_moved=lambda: _add_site_notes(report, chunks, folder, first),
        checkpoints=saves,
        rewinds=rewinds,
        telemetry=telemetry,
        unvalidated=done and parallel.on_first_rank(lambda: unvalidated),
    )


def _watchdog(run: Any, launch: Any) -> Any:
    """Start the watchdog. Collective: all ranks write into one folder, named by the first rank's time."""
    from ..train.health.watchdog import START, Watchdog
    from ..train.launch import parallel

    start = parallel.on_first_rank(lambda: time.strftime("%Y%m%d-%H%M%S"))
    watchdog = Watchdog(
        Path(run.run_dir) / "stacks" / start,
        launch.rank,
        launch.world_size,
        least=run.train.watchdog,
        limit=run.train.distributed_timeout_minutes * 60,
        say=lambda text: print(text, file=sys.stderr, flush=True),
        stages=run.model.pipeline_model_parallel_size,
    )
    parallel.until_leave(watchdog.close)
    watchdog.enter(START, 0)
    if not run.dry_run:  # a dry run writes nothing
        watchdog.start()
    return watchdog


def _add_site_notes(report: dict[str, Any], chunks: list[Any], folder: Path, first: bool) -> None:
    """Add the sites' notes from their first iteration (such as a gather in high precision) to the report. Collective."""
    from ..mcore.guard_plans import guard_moves
    from ..mcore.report import site_report
    from ..train.report import format_notes, write_report

    report["sites"] = site_report(chunks)
    report["guard"] = [move._asdict() for move in guard_moves(chunks)]
    if not first:
        return
    try:
        write_report(report, folder)
    except OSError as error:
        warnings.warn(f"{str(folder / 'report.json')!r} cannot be written ({error.strerror}).", stacklevel=2)
    if notes := format_notes(report["sites"]):
        print(notes, flush=True)


def _dry_run(stepper: Any, vocab_size: int, first: bool) -> None:
    """Print this rank's shapes and check the first loss: an untrained model predicts uniformly, ln V nats."""
    from ..params.fp8_parameter import Fp8Parameter

    if first:
        print("shapes on this rank:")
        for chunk in stepper.chunks:
            for name, parameter in chunk.module.named_parameters():
                dtype = parameter.rule.fmt.dtype if isinstance(parameter, Fp8Parameter) else parameter.dtype
                print(f"  {name.removeprefix('module.'):<70} {list(parameter.shape)} {dtype}")
    loss, even = stepper.first_loss(), math.log(vocab_size)
    if first:
        print(f"first loss {loss:.4f}, ln({vocab_size}) = {even:.4f}", flush=True)
    if not abs(loss - even) < 0.1 * even:
        raise RuntimeError(
            f"the first loss {loss:.4f} is not near ln({vocab_size}) = {even:.4f}: an untrained model "
            "should guess evenly. Look at model.init_method_std and at the data."
        )


def _train(trainer: Any) -> int:
    from ..train.failure import TrainingFailed
    from ..train.launch.parallel import on_first_rank
    from ..train.report import summary_line

    start = time.perf_counter()
    if sys.__stderr__ is not None:
        # SIGBUS (a mapped file that became shorter) and SIGSEGV then print a stack.
        faulthandler.enable(sys.__stderr__)
    stop, line = trainer.stepper.stop, ""
    stop.listen("SIGTERM")
    stop.listen("SIGHUP")
    saves = "saves and " if trainer.run.checkpoint.saves else "does not save, and "
    stop.listen("SIGINT", _INTERRUPTED.replace("{saves}", saves) if trainer.display else "")
    with reader_may_leave(stop.reader_left):
        try:
            summary = trainer.train()
        except BaseException:
            warn_missing(_close(trainer))
            raise
        stop.ended()
        closed = _close(trainer)
        if trainer.display:
            line = summary_line(trainer, summary, time.perf_counter() - start)
            print(line, flush=True)
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
