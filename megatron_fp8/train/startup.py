"""Start of a training run: from the command line's options to a trainer.

All input errors are found before the first step and raised as ValueError.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..files.run_lock import job_name
from ..files.terminal import printable, warn_user
from ..mcore.iteration import guard_moves, set_training_length
from ..mcore.report import site_report
from ..mcore.sites import check_plan
from ..params.fp8_parameter import Fp8Parameter
from ..telemetry import Telemetry
from . import cuda_graph, model
from .config import run_config
from .config.model_section import padded_vocab_size, transformer_config
from .config.run_config import tokens_of_microbatch
from .data import datasets
from .data.indexed_dataset import corpus_bigram_entropy
from .data.tokenizers import load_tokenizer
from .health.loss_spikes import Rollbacks
from .health.watchdog import START, Watchdog
from .launch import parallel
from .launch.config_consistency import agree_on_inputs, data_fact, run_facts
from .loop import Trainer
from .metrics import Display, MetricsWriter, lacks_validation, model_flops_per_token
from .report import build_report, format_notes, format_report, no_iterations_left, write_report
from .resume import checkpoint_compat, checkpoints
from .resume.run_folder import RunFolders, name_folder_error
from .step import Stepper


def settings(arguments: list[str], ranks: int) -> tuple[Any, Any, Any, int]:
    """Return (the run's config, Megatron-Core's config, tokenizer, vocabulary size), checked; writes nothing.

    Raises:
        ValueError: `train` would refuse these options on any machine.
    """
    run = run_config.parse(arguments, ranks)
    cuda_graph.check_options(run)
    config = transformer_config(run.model)
    tokenizer = load_tokenizer(run.data.tokenizer)
    vocab_size = padded_vocab_size(run.model, tokenizer.vocab_size)
    datasets.check_tokenizer(run.data, tokenizer, run.model.vocab_size or run.model.padded_vocab_size or 0)
    return run, config, tokenizer, vocab_size


def prepare(arguments: list[str], launch: Any, stop: Any) -> Any:
    """Do all work before the first step: config, ranks, data, model, report. Return the trainer; None after a dry run."""
    run, config, tokenizer, vocab_size = settings(arguments, launch.world_size)
    cuda_graph.check_device(run)
    parallel.check_layout(run.model, run.train, launch.world_size, launch.variables)
    launch.barrier.agree(
        "settings", run_facts(run, tokenizer, launch.world_size), run.train.distributed_timeout_minutes * 60
    )
    parallel.join(launch, run.model, run.train)
    return build(run, config, tokenizer, vocab_size, launch, stop)


def build(run: Any, config: Any, tokenizer: Any, vocab_size: int, launch: Any, stop: Any) -> Any:
    """Build data, model, optimizer and report, once all ranks are connected. Return the trainer; None after a dry run."""
    set_training_length(config, run.train.train_iters)
    if config.fp8_size_filter_tokens is None:
        config.fp8_size_filter_tokens = tokens_of_microbatch(run)
    folders, watchdog = RunFolders(run), _watchdog(run, launch)
    if not run.dry_run:
        folders.claim()
    chosen = None if run.dry_run else checkpoints.choose(run, tokenizer)
    with folders.recording_parent(chosen[0] if chosen is not None else None):
        if chosen is not None and datasets.holds_text(run.data):
            checkpoint_compat.check_imported(run, chosen[1].facts)
        prefixes = datasets.find_data(run.data, tokenizer, run.train)
        agree_on_inputs("files", launch, prefixes, chosen, run.train.distributed_timeout_minutes * 60)
        datasets.check_data(prefixes, vocab_size)
        parts = datasets.build_datasets(prefixes, run.data, run.train, tokenizer, vocab_size)
        chunks = model.build_chunks(config, run, vocab_size)
        optimizer = model.build_optimizer(config, run, chunks)
        scheduler = model.build_scheduler(run, optimizer)
        check_plan(chunks)
        cuda_graph.check_backends(run, chunks)
        parameters = model.count_parameters(chunks)
        report = build_report(run, config, chunks, parameters, launch.launcher)
        stepper = Stepper(run, chunks, optimizer, scheduler, parts, stop, watchdog)
        Telemetry(chunks, run.telemetry.settings()).close()  # refuses a pattern that matches nothing
        if launch.rank == 0:
            print(format_report(report), flush=True)
        if run.dry_run:
            _dry_run(stepper, vocab_size, launch.rank == 0)
            return None
        if run.checkpoint.saves:
            folders.check_room(checkpoints.estimated_bytes(parameters["total"], config.params_dtype))
        digests = parallel.on_first_rank(lambda: data_fact(prefixes))

        def resume(found: Any) -> checkpoints.Start:
            return checkpoints.resume(run, found, tokenizer, chunks, optimizer, scheduler, digests)

        start = resume(chosen)
    report["bigram_entropy"] = corpus_bigram_entropy(prefixes) if launch.rank == 0 else math.nan
    # From here on the run's folder changes, so no later line may refuse the input.
    facts = {
        "tokenizer": checkpoint_compat.tokenizer_fact(tokenizer),
        "accepted": start.accepted,
        "data": digests,
        "job": job_name(os.environ),
    }
    saves = checkpoints.Checkpoints(run, folders, chunks, optimizer, scheduler, facts)
    sizes = (vocab_size, config.hidden_size, config.num_layers, run.train.seq_length)
    flops = model_flops_per_token(parameters.get("active", parameters["non_embedding"]), *sizes)
    done = start.iteration >= run.train.train_iters
    if done and start.folder is not None and not folders.has(start.folder):
        if launch.rank == 0:
            print(
                *map(printable, [*start.lines, no_iterations_left(run, start.folder)]), sep="\n", flush=True
            )
        return None
    return _trainer(stepper, start, folders, launch, report, saves, resume, flops, prefixes)


def _trainer(
    stepper: Stepper,
    start: checkpoints.Start,
    folders: RunFolders,
    launch: Any,
    report: dict[str, Any],
    saves: checkpoints.Checkpoints,
    resume: Callable[[Any], checkpoints.Start],
    flops_per_token: float,
    prefixes: list[str],
) -> Trainer:
    """Move what earlier runs left, open the run's records, and write its config and report."""
    run, chunks, first = stepper.run, stepper.chunks, launch.rank == 0
    continues, folder = folders.has(start.folder), Path(run.run_dir)
    done = start.iteration >= run.train.train_iters
    if not continues:
        start.lines += folders.keep_earlier(start.folder, stepper.watchdog.folder)
    elif start.folder is not None:
        start.lines += folders.keep_newer(start.folder)
    recorded = start.iteration if continues else 0
    writer = display = None
    unvalidated = False
    if first:
        data = f"data        {', '.join(prefixes)}; bigram entropy {report['bigram_entropy']:.4f} nats"
        start.lines.insert(0, f"{data}: the loss that pairs of tokens give")
        writer, display = _records(run, start, recorded)
        with name_folder_error("run_dir", folder):
            unvalidated = done and bool(run.train.eval_iters) and lacks_validation(folder, start.iteration)
    telemetry = _telemetry(run, chunks, recorded, display.say if display else print)
    rewinds = None
    if most := run.train.rewind_on_spike:
        every = run.checkpoint.save_interval
        assert isinstance(every, int), "check_rewinds"
        rewinds = Rollbacks(most, every, folders.checkpoints, resume, saves.wait, start.left_out)
    if first:  # last, so that a refused start leaves earlier files unchanged
        with name_folder_error("run_dir", folder):
            run.save(folder / "config.yaml")
            # A run without iterations left keeps the report of its training.
            if not (done and continues and (folder / "report.json").is_file()):
                write_report(report, folder)

    def after_first_step() -> None:
        launch.barrier.close()
        if stepper.saved is not None:
            report["saved_bytes"] = stepper.saved.bytes
        _add_site_notes(report, chunks, folder, first)

    return Trainer(
        stepper,
        start,
        flops_per_token,
        writer=writer,
        display=display,
        after_first_step=after_first_step,
        sites_moved=lambda: _add_site_notes(report, chunks, folder, first),
        checkpoints=saves,
        rewinds=rewinds,
        telemetry=telemetry,
        unvalidated=done and parallel.on_first_rank(lambda: unvalidated),
    )


def _records(run: Any, start: checkpoints.Start, recorded: int) -> tuple[MetricsWriter, Display]:
    """Print the start's lines and open the run's records, which hold ``recorded`` iterations. First rank only."""
    print(*map(printable, start.lines), sep="\n", flush=True)
    folder = Path(run.run_dir)
    with name_folder_error("run_dir", folder):
        writer = MetricsWriter(folder, recorded, start.before)
    if start.folder is not None:
        writer.event(recorded, "restart", f"goes on from {start.folder}")
    display = Display(run.train.train_iters, run.train.log_interval, start.iteration, start.skipped)
    if run.telemetry.settings().misses(start.iteration + 1, run.train.train_iters):
        print(
            f"telemetry   measures none of the iterations {start.iteration + 1} to {run.train.train_iters}: look at"
            " telemetry.every and its windows",
            flush=True,
        )
    return writer, display


def _telemetry(run: Any, chunks: list[Any], recorded: int, say: Callable[[str], Any]) -> Telemetry:
    """Open the run's telemetry, which holds ``recorded`` iterations. Collective."""
    folder = Path(run.run_dir)
    with name_folder_error("run_dir", folder):
        return Telemetry(
            chunks,
            run.telemetry.settings(),
            folder=folder,
            wandb=run.telemetry.wandb,
            finished=recorded,
            say=say,
        )


def _watchdog(run: Any, launch: Any) -> Any:
    """Start the watchdog. Collective: all ranks write into one folder, named by the first rank's time."""
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
    parallel.release_at_leave(watchdog.close)
    watchdog.enter(START, 0)
    if not run.dry_run:  # a dry run writes nothing
        watchdog.start()
    return watchdog


def _add_site_notes(report: dict[str, Any], chunks: list[Any], folder: Path, first: bool) -> None:
    """Add the sites' notes from their first iteration (such as a gather in high precision) to the report. Collective."""
    report["sites"] = site_report(chunks)
    report["guard"] = [move._asdict() for move in guard_moves(chunks)]
    if not first:
        return
    try:
        write_report(report, folder)
    except OSError as error:
        warn_user(f"{str(folder / 'report.json')!r} cannot be written ({error.strerror}).")
    if notes := format_notes(report["sites"]):
        print(notes, flush=True)


def _dry_run(stepper: Any, vocab_size: int, first: bool) -> None:
    """Print this rank's shapes and check the first loss: an untrained model predicts uniformly, ln V nats."""
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
