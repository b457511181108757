"""The training loop: iterations, records, saves, validation."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch.distributed as dist

from ..files.checkpoint import folder_name
from ..mcore.iteration import guard_moves, iteration_counts
from ..mcore.optimizer.loss_scaler import scalers
from ..mcore.runtime import unwrap
from ..telemetry import Telemetry
from .health.finite_check import first_not_finite
from .health.loss_spikes import LossMonitor, Rollbacks
from .health.skipped_samples import ranges_of
from .metrics import Display, IterationMetrics, MetricsWriter, bf16_peak, finite, peak_memory
from .resume.checkpoints import Checkpoints, Start, checkpoint_before
from .step import Stepper
from .stop import TrainingFailed


class Trainer:
    """One rank's part of a training run.

    Args:
        stepper: runs one step on all ranks.
        start: finished iterations and the samples that they consumed.
        flops_per_token: forward and backward together.
        writer, display: on rank 0; None on other ranks.
        after_first_step: called on every rank after the first step, when all sites have run.
        sites_moved: called on every rank after a later step in which the guard moved sites.
        checkpoints: saves checkpoints; None: nothing is saved.
        telemetry: collects telemetry; None: none is collected.
        rewinds: rolls back behind loss spikes; None: a spike only causes a warning.
        unvalidated: all iterations are done already, but the final validation is not recorded.

    ``samples``: consumed so far. ``started``: the checkpoint from which training continues, if there is one.
    """

    def __init__(
        self,
        stepper: Stepper,
        start: Start,
        flops_per_token: float,
        *,
        writer: MetricsWriter | None = None,
        display: Display | None = None,
        after_first_step: Callable[[], None] = lambda: None,
        sites_moved: Callable[[], None] = lambda: None,
        checkpoints: Checkpoints | None = None,
        telemetry: Telemetry | None = None,
        unvalidated: bool = False,
        rewinds: Rollbacks | None = None,
    ) -> None:
        self.stepper, self.run = stepper, stepper.run
        self.finished, self.samples, self.started = start.iteration, start.samples, start.folder
        self.writer, self.display, self.checkpoints = writer, display, checkpoints
        self.telemetry, self._unvalidated = telemetry, unvalidated
        self.monitor, self.rewinds = LossMonitor(self.run.train.max_skipped_steps), rewinds
        self.monitor.remember(start.monitor_state)
        self._left_out, self._compared = start.left_out, 0
        self._after_first_step, self._sites_moved = after_first_step, sites_moved
        self._tokens_per_step = self.run.train.global_batch_size * self.run.train.seq_length
        self._flops_per_step = self._tokens_per_step * flops_per_token

    def train(self) -> dict[str, float]:
        """Train, validate and save until all iterations are done or a stop is requested.

        If no iteration is left, run the final validation if it is not recorded: the earlier run ended between the two.

        Returns the first and last loss, the last validation loss, and 'iteration': the last one done.
        """
        section = self.run.train
        training = self.stepper.training_data(self.samples, ranges_of(self._left_out))
        summary: dict[str, float] = {"iteration": self.finished}
        moves = guard_moves(self.stepper.chunks)
        if self.finished:
            self._event(self.finished, "resume", f"started after iteration {self.finished}")
        if self._unvalidated:
            self._validate(self.finished, summary)
        iteration, first = self.finished, True
        while iteration < section.train_iters:
            iteration += 1
            self._enter("step", iteration)
            metrics = self._timed_step(iteration, training)
            summary["iteration"] = iteration
            if first:
                self._after_first_step()
            moved = [move for move in guard_moves(self.stepper.chunks) if move not in moves]
            if moved and not first:
                self._sites_moved()
            moves, first = moves + moved, False
            if metrics.lm_loss is not None:
                summary.setdefault("first_loss", metrics.lm_loss)
                summary["last_loss"] = metrics.lm_loss
            if self.writer and self.display:
                self.writer.iteration(metrics)
                self.display.iteration(metrics)
            self._check_step(metrics)
            if self.monitor.spike_now and (back := self._rewind(iteration)) is not None:
                iteration = back
                training = self.stepper.training_data(self.samples, ranges_of(self._left_out))
                continue
            due = section.eval_interval and iteration % section.eval_interval == 0
            if section.eval_iters and (due or iteration == section.train_iters):
                self._validate(iteration, summary)
            stop = self.stepper.stop.reason is not None
            every = section.check_replicas_every
            if every and iteration % every == 0:
                self._compare(iteration)
            if self.checkpoints and self.checkpoints.due(iteration, stop):
                self._enter("save", iteration)
                self._compare(iteration)
                self.checkpoints.save(iteration, self.samples, self._rollback_state())
                self.stepper.stop.saved_in(self.checkpoints.seconds)
                self._event(iteration, "save", folder_name(iteration))
            if stop:
                break
        self._enter("end", int(summary["iteration"]))
        if self.checkpoints:
            self.checkpoints.close()
        self._check_end(summary)
        return summary

    def _enter(self, kind: str, iteration: int) -> None:
        """Tell the watchdog the next phase, which has its own time limit: 'step', 'validation', 'save' or 'end'."""
        self.stepper.watchdog.enter(kind, iteration)

    def _rewind(self, iteration: int) -> int | None:
        """Roll back after a spike and exclude the samples since then.

        Returns the iteration from which training continues; None without a rollback. Collective.
        """
        if self.rewinds is None or self.checkpoints is None:
            return None
        self._enter("save", iteration)  # reading takes about as long as saving
        start, line = self.rewinds.back(iteration, self.samples, self.monitor.spike_now)
        if self.display:
            self.display.say(line)
        if start is None:
            return None
        self.samples, self._left_out = start.samples, self.rewinds.records
        self.monitor.remember(start.monitor_state)
        self.stepper.check.forget()
        self._compared = 0
        self.checkpoints.went_back()
        if self.writer:
            self.writer.go_back(start.iteration)
            self._event(start.iteration, "rewind", line.removeprefix("rewind").strip())
        return start.iteration

    def _rollback_state(self) -> dict[str, Any]:
        """Manifest entries of rollbacks; empty if there are none."""
        memory = {"liveness": self.monitor.memory()} if self.rewinds is not None else {}
        return {**memory, **({"left_out": self._left_out} if self._left_out else {})}

    def _validate(self, iteration: int, summary: dict[str, float]) -> None:
        self._enter("validation", iteration)
        loss = self.stepper.validate()
        summary["validation_loss"] = loss
        if self.writer and self.display:
            self.writer.validation(iteration, loss)
            self.display.say(
                f"iteration {iteration:>5}/{self.run.train.train_iters}  validation loss {loss:.4f}"
            )

    def _event(self, iteration: int, event: str, text: str) -> None:
        if self.writer:
            self.writer.event(iteration, event, text)

    def _check_step(self, metrics: IterationMetrics) -> None:
        """Check a step and print warnings. Raises TrainingFailed on all ranks when training makes no progress."""
        scale_can_fall = any(
            scaler.rule.scale > scaler.rule.min_scale for scaler in scalers(self.stepper.optimizer)
        )
        monitor = self.monitor
        if self.stepper.damaged:
            self._fail("the optimizer or FP8 state of a rank is damaged", metrics.iteration - 1)
        warning = monitor.step(
            metrics.iteration, metrics.lm_loss, skipped=bool(metrics.skipped), scale_can_fall=scale_can_fall
        )
        if warning and self.display and self.rewinds is None:
            self.display.say(warning)
        if metrics.skipped and monitor.skipped_row == 1:
            self._report_skipped(metrics.iteration)
        if monitor.too_many_skipped:
            self._fail(
                f"{monitor.skipped_row} steps in a row were skipped, because a loss, a gradient or an FP8 cast was not"
                " finite",
                metrics.iteration - monitor.skipped_row,
            )

    def _report_skipped(self, iteration: int) -> None:
        """Report why the first step of a row was skipped on all ranks. Collective."""
        first = first_not_finite(self.stepper.chunks)
        why = first[1] if first else "the loss was not finite"
        self._event(iteration, "skip", why)
        if self.display:
            self.display.say(f"warning: the step of iteration {iteration} was skipped on all ranks: {why}.")

    def _check_end(self, summary: dict[str, float]) -> None:
        """Raise TrainingFailed on all ranks if the run ends without a usable model."""
        done, row, steps_taken = int(summary["iteration"]), self.monitor.skipped_row, self.monitor.taken
        if row > steps_taken:
            what = (
                f"of {row + steps_taken} steps the last {row} were skipped"
                if steps_taken
                else "no step could be taken"
            )
            self._fail(what, done - row)
        if not math.isfinite(summary.get("validation_loss", 0.0)):
            self._fail("the last validation's loss is not finite", done - 1)
        if row:
            first = first_not_finite(self.stepper.chunks)
            if first and first[0] == "weight":
                self._fail(f"the last {row} steps were skipped", done - row)
        if self.stepper.state_is_damaged():
            self._fail("the optimizer or FP8 state of a rank is damaged", done - 1)
        self._compare(done)

    def _compare(self, iteration: int) -> None:
        """Raise TrainingFailed on all ranks if replicated state differs between ranks after an iteration."""
        if iteration == self._compared:
            return
        if problem := self.stepper.describe_differences():
            raise TrainingFailed(
                f"training failed: after iteration {iteration} {problem}. A memory or a processor has changed bits, which"
                f" no step can mend. {self._remedy(iteration - 1)}; where it comes again, leave that rank's node out."
            )
        self._compared = iteration

    def _remedy(self, last_good: int) -> str:
        """A remedy: the newest checkpoint of at most iteration `last_good`."""
        saved = checkpoint_before(self.run, last_good, self.started)
        return (
            f"Go back to {saved} (--resume={saved})" if saved else "No checkpoint is from before: start again"
        )

    def _fail(self, what: str, last_good: int) -> NoReturn:
        """Raise TrainingFailed: what happened, where, and the newest checkpoint of at most `last_good`."""
        first = first_not_finite(self.stepper.chunks, self.stepper.check)
        where = f"; first, {first[1]}" if first else ""
        skipped, steps = self.monitor.skipped, self.monitor.skipped + self.monitor.taken
        remedy = "a lower optimizer.lr, a longer optimizer.lr_warmup_iters or other data"
        if self.run.model.fp16 and self.run.optimizer.loss_scale:
            remedy = (
                f"a lower optimizer.loss_scale than {self.run.optimizer.loss_scale:g} or without it, {remedy}"
            )
        raise TrainingFailed(
            f"training failed: {what}{where}. {self._remedy(last_good)}, with {remedy}."
            f" {skipped} of {steps} steps were skipped."
        )

    def _timed_step(self, iteration: int, training: list[Iterator[Any]]) -> IterationMetrics:
        start = time.perf_counter()
        learning_rate = max(group["lr"] for group in self.stepper.optimizer.param_groups)
        loss_scale = float(self.stepper.optimizer.get_loss_scale()) if self.run.model.fp16 else None
        loss, updated, grad_norm = self.stepper.step(training)
        mtp = self.stepper.mtp_loss()
        self.samples += self.run.train.global_batch_size
        # Not synchronised: on a GPU the optimizer's kernels may still run and count towards the next iteration's time.
        seconds = time.perf_counter() - start
        counts, peak = iteration_counts(unwrap(self.stepper.chunks[0]).config), bf16_peak()
        return IterationMetrics(
            iteration=iteration,
            lm_loss=finite(loss),
            grad_norm=finite(grad_norm),
            learning_rate=learning_rate,
            tokens=self.samples * self.run.train.seq_length,
            tokens_per_s=self._tokens_per_step / seconds,
            mfu=self._flops_per_step / seconds / (peak * dist.get_world_size()) if peak else None,
            skipped=int(not updated),
            loss_scale=loss_scale,
            nonfinite=counts["nonfinite"],
            fp8_gemms=counts["fp8_gemms"],
            hp_gemms=counts["hp_gemms"],
            amax_collectives=counts["amax_collectives"],
            peak_memory=peak_memory(),
            mtp_loss=finite(mtp),
        )
