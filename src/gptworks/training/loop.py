"""The training loop. Read `train` first; the methods of `Run` follow in the order in which `train` calls them.

session.py starts or resumes a run.
"""

import contextlib
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from gptworks.config import Recipe
from gptworks.data.opened import Prepared
from gptworks.data.prepare import prepare as prepare_data
from gptworks.device import cpu_threads
from gptworks.infer.sampling import SamplingSettings
from gptworks.terminal import Console
from gptworks.training.distributed.parallel import StopAsked
from gptworks.training.distributed.ranks import ALONE, Ranks
from gptworks.training.objectives.base import RunContext, generating
from gptworks.training.objectives.next_token import LossFunction, StepBatches
from gptworks.training.progress import anomaly, rate_factor
from gptworks.training.record.display import Display
from gptworks.training.remote_run import remote_run
from gptworks.training.run_folder import open_run_folder
from gptworks.training.session import Session
from gptworks.training.setup import prepare_run
from gptworks.training.signals import stop_signals
from gptworks.training.step import Step


@dataclass(frozen=True)
class Outcome:
    """The result of a training run: why it ended, what it did, and its best loss."""

    reason: str
    stop: str | None
    """Name of the signal that stopped the run; None if no signal did."""
    step: int
    tokens: int
    seconds: float
    best_validation_loss: float
    run_dir: Path


def train(
    recipe: Recipe,
    *,
    resume: bool = False,
    change: Collection[str] = (),
    force: bool = False,
    display: Display | None = None,
    objective: LossFunction | None = None,
    ranks: Ranks = ALONE,
    overrides: Sequence[str] = (),
    prepare: Callable[[Recipe], Prepared] = prepare_data,
) -> Outcome:
    """Train the recipe's model until the run's planned end, until its loss stops improving, or until a signal stops it.

    Args:
        recipe: the settings of the model, the data and the training.
        resume: continue from the newest undamaged checkpoint of `recipe.run_dir`, bit for bit as if the run had not
            stopped; without a checkpoint, start at step 0.
        change: paths of settings that a resumed run may change although its loss curve depends on them.
        force: start even if the plan says that the run does not fit in memory.
        objective: a loss function to use instead of the recipe's.
        ranks: the processes that train together, from `gptworks.training.distributed.ranks.join`; each calls `train`.
        overrides: the `key.path=value` settings of the command line, kept in the run folder for a resumed run.
        prepare: builds the dataset on rank 0.

    Raises:
        UserError: the recipe, its data or the run folder cannot be used, or the run does not fit in memory.
        RunError: too many steps are skipped as non-finite or spikes, a checkpoint cannot be written, or the store of a
            remote run folder fails.
    """
    display = display or Display(None if ranks.is_rank_zero else Console(quiet=True))
    with contextlib.ExitStack() as opened:
        taken = opened.enter_context(remote_run(recipe.run_dir, ranks, display.message))
        setup = prepare_run(
            recipe, display, resume=resume, change=change, force=force, overrides=overrides, ranks=ranks,
            prepare=prepare,
        )  # fmt: skip
        run, settings = Run(setup, display, objective), setup.recipe.train
        if ranks.is_rank_zero:
            opened.enter_context(open_run_folder(setup.recipe, resume, change))
        opened.enter_context(run.state.writer)
        opened.enter_context(cpu_threads(settings.threads))
        run.begin()
        with stop_signals() as stop_asked, display:
            run.parallel.stop_asked = lambda: stop_asked() or taken()
            while True:
                stop = ranks.agree_to_stop(run.parallel.stop_asked())
                if (reason := run.length.end_reason(run.progress, stop)) is not None:
                    return run.finish(reason, stop)
                again = run.progress.evaluation_cut  # a signal interrupted the evaluation: repeat it first
                if not again:
                    run.training_step()
                due = partial(run.length.due, run.progress)
                if (again or due(settings.evaluate_every)) and not run.evaluate():
                    continue
                if due(settings.sample_every):
                    run.sample()
                if due(settings.checkpoint_every):
                    run.state.save()
                elif run.progress.best_step == run.progress.step:
                    run.state.save(weights_only=True)


class Run(Session):
    """Adds the operations of the training loop to a run's session."""

    def begin(self) -> None:
        """Start the run in a new folder, or restore the newest undamaged checkpoint of its folder.

        With `keep_every`, a new run saves its initial weights, because step 0 is a multiple of every number.
        """
        is_new = self.restore()
        with self.parallel.inference_mode():
            self.objective.begin(
                RunContext(
                    self.model, self.engine, self.setup.precision, self.parallel, self.ranks, is_new,
                    self.display.message,
                )
            )  # fmt: skip
        if self.ranks.is_rank_zero:
            self.write_settings(is_new)
        self.reporter.begin(self.progress)
        if is_new and self.settings.keep_every:
            self.state.save(weights_only=True)
        self.reporter.opening(self.model, self.progress)

    def training_step(self) -> None:
        """Do one training step: compute the batch's gradients, and apply them or, if they are anomalous, skip them.
        After `max_skipped_steps` skipped steps in a row, roll back; raise a RunError if no rollback is possible."""
        started = time.perf_counter()
        progress, settings = self.progress, self.settings
        self.state.writer.check()
        done = self.length.share_done(progress)
        self.objective.begin_step(done)
        self.norms.begin_step(progress.step)
        batch = self._batches()
        with self.step_memory.counted(settings.is_whole_step(progress.step)):
            step = self._update(batch, rate_factor(settings, progress.step, done))
        progress.samples += settings.batch_size_at(progress.step)
        progress.step += 1
        progress.tokens += batch.n_tokens
        progress.seconds = self.ranks.all_reduce_max(progress.seconds + time.perf_counter() - started)
        self.reporter.end_step(progress, step)
        if step.skipped and progress.skipped_in_a_row >= settings.max_skipped_steps:
            from_step = self.state.roll_back(step.skipped)
            self.reporter.rolled_back(self.progress, from_step)

    def _batches(self) -> StepBatches:
        """Return this rank's micro-batches for the next step, with the numbers of targets and tokens on all ranks."""
        position, part = self.progress.position, self.step.stopwatch.part
        with part("data"):
            own = self.prefetcher.step(position, self.progress.step)
        if self.objective.generates:
            with part("rollouts"), self.parallel.inference_mode(generates=True):
                own = self.objective.generate(position, own)
        with part("data"):
            sums = self.parallel.all_reduce_numbers([float(own.n_targets), float(own.n_tokens)])
            return own._replace(n_targets=round(sums[0]), n_tokens=round(sums[1]))

    def _update(self, batch: StepBatches, factor: float) -> Step:
        """Compute the gradients and apply them, unless they are anomalous; return the step's results."""
        progress, train_step = self.progress, self.step
        losses = train_step.accumulate(batch.rows, batch.n_targets, (self.recipe.seed, progress.step), batch.numbers)
        with train_step.stopwatch.part("optimizer"):
            norm = train_step.gradient_norm()
            losses.loss, norm = self.ranks.broadcast([losses.loss, norm])
            skipped = anomaly(self.settings, progress.gradient, losses.loss, norm)
            by_layer = self.norms.figures()  # before clipping
            if skipped is None:
                train_step.apply(norm, factor)
                self.state.average.update(progress.step)
                progress.gradient.take(norm)
                progress.skipped_in_a_row = 0
            else:
                train_step.skip()
                progress.skipped += 1
                progress.skipped_in_a_row += 1
        return Step(factor, losses, norm, skipped, by_layer)

    def evaluate(self) -> bool:
        """Evaluate on the validation split, or on the part of it that the recipe sets. Return False if a signal
        interrupted the evaluation, else True."""
        progress = self.progress
        try:
            with (
                self.display.during("evaluation"),
                self.step.stopwatch.part("evaluation"),
                self.state.average.applied(),
                self.parallel.inference_mode(self.objective.generates),
            ):
                report, figures = self.objective.evaluate(self.model, self.parallel, self.setup.precision)
        except StopAsked:
            progress.evaluation_cut = True
            self.display.message(f"step {progress.step:,}: the evaluation was cut short; --resume repeats it")
            return False
        progress.evaluation_cut = False
        total, n_counted, *means = self.ranks.broadcast([report.total_nats, report.n_tokens, *figures.values()])
        report = replace(report, total_nats=total, n_tokens=round(n_counted))
        is_best = report.loss < progress.best_loss
        if is_best:
            progress.best_loss, progress.best_step, progress.evaluations_since_best = report.loss, progress.step, 0
        else:
            progress.evaluations_since_best += 1
        self.reporter.evaluated(progress, report, dict(zip(figures, means, strict=True)), is_best)
        return True

    def sample(self) -> None:
        """Generate a continuation of each text in `self.samples`, always with the same seed, and report the texts. Do
        nothing on ranks that take no part."""
        if not (self.parallel.samples or self.parallel.gathers_once):
            return
        sampling = SamplingSettings(
            max_tokens=self.settings.sample_tokens, temperature=0.8, top_k=50, seed=self.recipe.seed
        )
        if self.engine.chat_template is not None:
            sampling = sampling.ending_at(self.engine.chat_template.end_token_ids)
        with (
            self.display.during("sample"),
            self.step.stopwatch.part("samples"),
            self.state.average.applied(),
            self.parallel.inference_mode(generates=True),
            generating(self.setup.precision),
        ):
            if not self.parallel.samples:  # this rank only takes part in gathering the blocks
                return
            requests = [self.engine.submit(one.prompt, sampling, overflow="slide") for one in self.samples]
            for one, (completion,) in zip(self.samples, self.engine.finish(requests), strict=True):
                self.reporter.sample(self.progress, one, completion.text)
        self.reporter.sampled()

    def finish(self, reason: str, stop: str | None) -> Outcome:
        """Save a checkpoint, write the run's summary to its folder, and return the outcome."""
        self.state.save()
        self.ranks.from_rank_zero(lambda: self._describe(reason))
        p = self.progress
        return Outcome(reason, stop, p.step, p.tokens, p.seconds, p.best_loss, self.recipe.run_dir)

    def _describe(self, reason: str) -> None:
        self.state.writer.wait()
        memory = self.step_memory.peaks(self.state.writer.copied_bytes)
        self.reporter.end(self.progress, reason, memory, talks=self.engine.chat_template is not None)
