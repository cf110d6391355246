"""The training loop: read `train` first; the steps it is built of follow in the order in which they run."""

import contextlib
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from gptworks.chat_template import load_chat_template, other_templates, save_chat_template, save_other_templates
from gptworks.checkpoint import checkpoints
from gptworks.config import Recipe
from gptworks.data.conversations.inspection import check_records
from gptworks.data.opened import Prepared
from gptworks.data.prepare import prepare
from gptworks.device import (
    BusyCores,
    Precision,
    choose_device,
    choose_precision,
    cpu_threads,
    free_threads,
    peak_growth_bytes,
    reset_peak,
)
from gptworks.errors import RunError, UserError
from gptworks.files import write_sums
from gptworks.infer.engine import Engine
from gptworks.infer.sampling import SamplingSettings
from gptworks.native.library import torch_trains_because
from gptworks.planning.fit import layout_words
from gptworks.planning.layout import Layout
from gptworks.planning.memory import training_peak
from gptworks.recipe import load_recipe, save_recipe, with_vocab_size
from gptworks.terminal import Console
from gptworks.tokenizer import save_tokenizer, vocabulary_size
from gptworks.training.changes import change_words, changed, inexact, record
from gptworks.training.distributed.agreed import check_shared
from gptworks.training.distributed.parallel import Parallel, StopAsked, check_parallel, choose_parallel, run_layout
from gptworks.training.distributed.ranks import ALONE, Ranks
from gptworks.training.generating import generating
from gptworks.training.length import Length
from gptworks.training.objectives.base import RunContext
from gptworks.training.objectives.choose import OBJECTIVES, choose_objective
from gptworks.training.objectives.next_token import Batch, LossFunction
from gptworks.training.optim.anomalies import anomaly
from gptworks.training.optim.schedule import rate_factor
from gptworks.training.optim.trainable import check_trained, trainable_model
from gptworks.training.prefetch import Prefetcher
from gptworks.training.progress import Progress
from gptworks.training.record.card import MemoryPeaks
from gptworks.training.record.display import Display
from gptworks.training.record.layer_norms import LayerNorms
from gptworks.training.record.reporter import Reporter
from gptworks.training.record.writers import check_writers
from gptworks.training.rehearsal.held import StepMemory
from gptworks.training.rehearsal.preflight import check_memory, choose_allocation, run_setting
from gptworks.training.run_folder import check_run_folder, open_run_folder
from gptworks.training.saving import remove_newer
from gptworks.training.signals import stop_signals
from gptworks.training.start import check_start, starting_weights
from gptworks.training.state import TrainingState
from gptworks.training.step import TrainStep
from gptworks.units import readable


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    reason: str
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
) -> Outcome:
    """Train the recipe's model until its length is reached, it stops improving, or a signal asks it to stop.

    Args:
        recipe: what to train, on what, for how long.
        resume: go on from the newest whole checkpoint of `recipe.run_dir`, bit for bit as if never stopped; a folder
            without one is begun anew.
        change: settings by path that a resumed run may change, though its loss curve depends on them.
        force: try also where the run should not fit in memory.
        objective: a loss of your own instead of the recipe's.
        ranks: the processes that train together, from `gptworks.training.distributed.ranks.join`; each calls this.
        overrides: the `key.path=value` settings of the command line, kept in the run folder for a later one.

    Raises:
        UserError: the recipe, its data or the run folder cannot be used, or the run does not fit in memory.
        RunError: loss or gradients stayed non-finite, or a checkpoint could not be written.
    """
    display = display or Display(None if ranks.is_rank_zero else Console(quiet=True))
    ranks.from_rank_zero(lambda: check_train(recipe, resume, ranks.size, change))
    cores, is_new = BusyCores(), not (recipe.run_dir / "recipe.yaml").exists()
    device = choose_device(recipe.train.device)
    precision = choose_precision(recipe.train.precision, device)
    if device.type == "cpu" and ranks.is_rank_zero and (why := torch_trains_because()):
        display.message(f"training's C++ is not used: {why} torch computes instead, slower.")
    prepared = ranks.rank_zero_first(lambda: prepare(recipe))
    ranks.from_rank_zero(lambda: check_records(recipe, prepared, display.message))
    recipe = with_vocab_size(recipe, vocabulary_size(prepared.tokenizer))
    layout = Layout(**ranks.from_rank_zero(lambda: asdict(run_layout(recipe, ranks, device))))
    peak = check_memory(recipe, device, precision, force or not ranks.is_rank_zero, layout, ranks.local_size)
    if ranks.size > 1:
        display.message(f"{ranks.size} ranks: {layout_words(layout)}")
    display.message(f"memory: {readable(peak.total_bytes, 'B')} planned at the peak, reached during: {peak.moment}")
    choose_allocation(peak, device, ranks.local_size)
    if is_new and ranks.size == 1 and recipe.train.threads is None and (free := free_threads(cores, device)):
        threads, words = free
        display.message(words)
        recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"threads": threads})})
        overrides = [*overrides, f"train.threads={threads}"]  # a resumed run keeps them, and so repeats each bit
    parallel = choose_parallel(recipe, ranks, device, layout)
    run = Run(recipe, prepared, display, device, precision, objective, ranks, parallel)
    folder = open_run_folder(recipe, resume, change) if ranks.is_rank_zero else contextlib.nullcontext()
    with folder, run.state.writer, cpu_threads(recipe.train.threads):
        run.begin(resume, overrides)
        run.reporter.opening(run.model, run.progress)
        with stop_signals() as stop_asked, display:
            parallel.stop_asked = stop_asked
            while (reason := run.end_reason(ranks.agree_to_stop(stop_asked()))) is None:
                again = run.progress.evaluation_cut  # by a stop: a resumed run makes up for it first
                if not again:
                    run.training_step()
                if (again or run.due(recipe.train.evaluate_every)) and not run.evaluate():
                    continue
                if run.due(recipe.train.sample_every):
                    run.sample()
                if run.due(recipe.train.checkpoint_every):
                    run.state.save()
                elif run.is_best:
                    run.state.save(weights_only=True)
            return run.finish(reason)


def check_train(recipe: Recipe, resume: bool = False, n_ranks: int = 1, change: Collection[str] = ()) -> None:
    """Refuse a run that cannot be, before any work is done.

    Raises:
        UserError: the run folder, the run to start from, a logger or the number of ranks; it says which.
    """
    check_run_folder(recipe, resume, change)
    check_start(recipe, resume)
    check_trained(recipe)
    OBJECTIVES[recipe.objective.type].check(recipe)
    check_writers(recipe.train.loggers)
    check_parallel(recipe, n_ranks)


class Run:
    """A model in training with everything around it."""

    def __init__(
        self,
        recipe: Recipe,
        prepared: Prepared,
        display: Display,
        device: torch.device,
        precision: Precision,
        loss: LossFunction | None = None,
        ranks: Ranks = ALONE,
        parallel: Parallel | None = None,
    ) -> None:
        self.recipe, self.settings, self.display = recipe, recipe.train, display
        self.ranks, self.parallel = ranks, parallel or Parallel(recipe.train)
        self.tokenizer, self.precision = prepared.tokenizer, precision
        with ranks.busy():
            self.objective = choose_objective(recipe, prepared.folder, verify=ranks.is_rank_zero)
        torch.manual_seed(recipe.seed)
        self._memory_before_bytes = reset_peak(device)
        self.model = self.parallel.place(trainable_model(recipe.model, recipe.adapter, recipe.freeze), device)
        self.model.activation_checkpointing = recipe.train.activation_checkpointing
        self.step = TrainStep(
            self.model, recipe.train, loss or self.objective.loss, self.precision, self.parallel, ranks
        )
        self.step_memory = StepMemory(device.type == "cpu" and ranks.size == 1 and recipe.train.compile != "block")
        self.prefetcher = Prefetcher(self.objective, self.parallel, device)
        self.layer_norms = LayerNorms(self.model, self.parallel, recipe.train.log_every)
        held_out_sha256 = self.objective.validation_shards.manifest.validation_text_sha256 or ""
        start = Progress(data_fingerprint=self.objective.data_fingerprint, validation_text_sha256=held_out_sha256)
        self.state = TrainingState(recipe, self.step, start, display)
        self.length = Length(recipe, self.objective)
        self.reporter = Reporter(recipe, self.objective, self.step, self.length, display, self.precision)
        template = load_chat_template(prepared.folder / "tokenizer", self.tokenizer)
        self.engine = Engine(self.model, self.tokenizer, cache_dtype=self.precision.dtype, chat_template=template)
        self.other_templates = other_templates(prepared.folder / "tokenizer")
        for prompt in recipe.train.sample_prompts if recipe.train.sample_every else ():
            self.engine.encode_prompt(prompt)  # a prompt that cannot be used is refused now, not at the first sample

    @property
    def progress(self) -> Progress:
        """Where the run stands."""
        return self.state.progress

    # -------------------------------------------------------------------------------------------- begin

    def begin(self, resume: bool, overrides: Sequence[str] = ()) -> None:
        """Start a new run folder, or restore the newest whole checkpoint of the one that is there.

        With `keep_every`, a new run saves the weights that it begins with: 0 is a multiple too.
        """
        folder, report = self.recipe.run_dir, self.display.message
        before = load_recipe(folder) if self.ranks.is_rank_zero and (folder / "recipe.yaml").exists() else None
        self._batch_size_before = self.ranks.from_rank_zero(lambda: (before or self.recipe).train.batch_size)
        checkpoint = self.state.newest_checkpoint() if resume else None
        if checkpoint is not None:
            self.state.restore(checkpoint, self._batch_size_before)
            self.ranks.from_rank_zero(lambda: self.length.check_resume(self.progress, before))
            report(f"resuming {folder} from step {self.progress.step:,}")
        else:
            check_shared(self.ranks, folder)
            self.ranks.from_rank_zero(lambda: _refuse_damaged(folder))
            if resume:
                report(f"{folder} has no checkpoint to go on from: starting from step 0")
            if self.recipe.initialize_from is not None:
                with self.ranks.busy():  # not kept: all weights once more
                    self.state.start_from(starting_weights(self.recipe, self.tokenizer, report, self.ranks))
        is_new = checkpoint is None
        with self.parallel.inference_mode():
            self.objective.begin(
                RunContext(self.model, self.engine, self.precision, self.parallel, self.ranks, is_new, report)
            )
        if self.ranks.is_rank_zero:
            self._write_settings(None if is_new else before, before, resume, overrides)
        self.reporter.begin(self.progress)
        if is_new and self.settings.keep_every:
            self.state.save(weights_only=True)

    def _write_settings(
        self, resumed: Recipe | None, before: Recipe | None, resume: bool, overrides: Sequence[str]
    ) -> None:
        """Write what the run folder holds besides checkpoints, and what has changed in it.

        Args:
            resumed: the recipe of the run that goes on; None where one begins.
            before: the recipe that the folder has.
        """
        folder, step = self.recipe.run_dir, self.progress.step
        changes = {} if resumed is None else changed(resumed, self.recipe)
        exact = resumed is None or not inexact(resumed, self.recipe, changes, step)
        history = record(folder, step, changes, overrides, before, exact)
        if resume:  # the run makes them again on its way
            remove_newer(folder, step, weights_only=True)
        if changes:
            each = "".join(f"\n  {change_words({path: pair})}" for path, pair in changes.items())
            self.display.message(f"changed from step {step:,} on:{each}")
        save_recipe(self.recipe, folder / "recipe.yaml", history.lines())
        save_tokenizer(self.tokenizer, folder / "tokenizer")
        if self.engine.chat_template is not None:
            save_chat_template(self.engine.chat_template, folder / "tokenizer")
        save_other_templates(self.other_templates, folder / "tokenizer")
        write_sums(folder / "tokenizer")

    # --------------------------------------------------------------------------------------------- step

    def training_step(self) -> None:
        """One optimizer step: gradients of the whole batch, clipped, applied; or skipped where they would do harm."""
        started = time.perf_counter()
        progress, settings, step = self.progress, self.settings, self.step
        self.state.writer.check()
        done = self.length.share_done(progress)
        factor = rate_factor(settings, progress.step, done)
        self.objective.begin_step(done)
        self.layer_norms.begin(progress.step)
        self.state.untying.begin(progress.step, self.state.average)
        micro_batches, n_targets, n_tokens = self._batches()
        with self.step_memory.counted(settings.is_whole_step(progress.step)):
            losses = step.accumulate(micro_batches, n_targets, (self.recipe.seed, progress.step))
            with step.stopwatch.part("optimizer"):
                norm = step.gradient_norm()
                losses.loss, norm = self.ranks.broadcast([losses.loss, norm])
                by_layer = self.layer_norms.finish()
                skipped = anomaly(settings, progress.gradient, losses.loss, norm)
                if skipped is None:
                    step.apply(norm, factor)
                    self.state.average.update(progress.step, self.length.total_steps(progress))
                    progress.gradient.take(norm)
                    progress.skipped_in_a_row = 0
                else:
                    step.skip()
                    progress.skipped += 1
                    progress.skipped_in_a_row += 1
        progress.samples += settings.batch_size_at(progress.step)
        progress.step += 1
        progress.tokens += n_tokens
        progress.seconds = self.ranks.all_reduce_max(progress.seconds + time.perf_counter() - started)
        if skipped is None:
            self.reporter.step(progress, losses, norm, factor, by_layer)
        else:
            self.reporter.skipped(progress, skipped, losses.loss, norm)
            if progress.skipped_in_a_row >= settings.max_skipped_steps:
                self._roll_back(skipped)

    def _batches(self) -> tuple[list[Batch], int, int]:
        """This rank's micro-batches of the next step; the targets and the tokens of all ranks."""
        position, part = self.progress.position, self.step.stopwatch.part
        self.parallel.micro_steps = self.parallel.micro_steps_of(self.settings.batch_size_at(self.progress.step))
        with part("data"):
            micro_batches, *own = self.prefetcher.step(position, self.progress.step)
        if self.objective.generates:
            with part("rollouts"), self.parallel.inference_mode():
                micro_batches, *own = self.objective.generate(position, self.parallel.micro_steps, micro_batches)
        with part("data"):
            n_targets, n_tokens = map(round, self.parallel.all_reduce_numbers([float(number) for number in own]))
        return micro_batches, n_targets, n_tokens

    def _roll_back(self, reason: str) -> None:
        """After many skipped steps, go back to the last checkpoint and on past the batches that broke the run.

        Raises:
            RunError: there is none, or the run has gone back too often.
        """
        with self.ranks.busy():
            self.state.writer.wait()
        broken = self.progress
        before = broken.step - broken.skipped_in_a_row  # weights may have gone wrong before the first was skipped
        good = self.state.newest_checkpoint(before)
        if good is None or broken.rollbacks >= self.settings.max_rollbacks:
            good = good or self.state.newest_checkpoint()
            where = f"the last good checkpoint is {good.folder}" if good else "there is no checkpoint yet"
            raise RunError(
                f"{broken.skipped_in_a_row} steps in a row were skipped, the last at step {broken.step:,} because "
                f"{reason}: {where}. Lower train.learning_rate, warm up longer, use precision fp32, or set "
                f"train.max_rollbacks."
            )
        self.ranks.from_rank_zero(lambda: remove_newer(self.recipe.run_dir, good.step))
        self.state.restore(good, self._batch_size_before)
        progress = self.progress
        progress.seconds, progress.rollbacks = broken.seconds, broken.rollbacks + 1
        progress.skipped, progress.skipped_in_a_row = broken.skipped, 0
        progress.samples_passed = broken.position - progress.samples
        self.reporter.rolled_back(progress, broken.step)

    # --------------------------------------------------------------------------- evaluate, sample, end

    def evaluate(self) -> bool:
        """Loss over the validation split, or over the part of it that the recipe asks for; whether it was finished, and
        not cut short by a signal."""
        progress = self.progress
        try:
            with (
                self.display.during("evaluation"),
                self.step.stopwatch.part("evaluation"),
                self.state.average.applied(),
                self.parallel.inference_mode(),
            ):
                report, figures = self.objective.evaluate(self.model, self.parallel, self.precision)
        except StopAsked:
            progress.evaluation_cut = True
            self.display.message(f"step {progress.step:,}: the evaluation is cut short, and made up for by --resume")
            return False
        progress.evaluation_cut = False
        total, n_counted, *means = self.ranks.broadcast([report.total_nats, report.n_tokens, *figures.values()])
        report = replace(report, total_nats=total, n_tokens=round(n_counted))
        better = report.loss < progress.best_loss
        if better:
            progress.best_loss, progress.best_step, progress.evaluations_since_best = report.loss, progress.step, 0
        else:
            progress.evaluations_since_best += 1
        self.reporter.validation(progress, report, dict(zip(figures, means, strict=True)), better)
        return True

    def sample(self) -> None:
        """Continue the recipe's prompts; the same seed each time shows what training changed."""
        if not self.parallel.samples:
            return
        tokens, seed = self.settings.sample_tokens, self.recipe.seed
        sampling = SamplingSettings(max_tokens=tokens, temperature=0.8, top_k=50, seed=seed)
        for prompt in self.settings.sample_prompts:
            with (
                self.display.during("sample"),
                self.step.stopwatch.part("samples"),
                self.state.average.applied(),
                self.parallel.inference_mode(),
                generating(self.precision),
            ):
                text = self.engine.generate(prompt, sampling, overflow="slide")
            self.reporter.sample(self.progress, prompt, text)
        self.reporter.sampled()

    def due(self, every: int) -> bool:
        """Whether something done every `every` steps, and at the end, is to be done now."""
        return self.length.due(self.progress, every)

    def end_reason(self, stop_asked: str | None) -> str | None:
        """Why the run ends here; None while it goes on."""
        return self.length.end_reason(self.progress, stop_asked)

    @property
    def is_best(self) -> bool:
        """Whether the weights as they are have the lowest validation loss so far."""
        return self.progress.best_step == self.progress.step

    def finish(self, reason: str) -> Outcome:
        """Save, and describe the run in its folder."""
        self.state.save()
        self.ranks.from_rank_zero(lambda: self._describe(reason))
        progress = self.progress
        return Outcome(
            reason, progress.step, progress.tokens, progress.seconds, progress.best_loss, self.recipe.run_dir
        )

    def _describe(self, reason: str) -> None:
        self.state.writer.wait()
        talks = self.engine.chat_template is not None
        self.reporter.end(self.progress, reason, self._memory_peaks(), talks)

    def _memory_peaks(self) -> MemoryPeaks:
        """What was planned, and what was held."""
        device, before_bytes = self.model.device, self._memory_before_bytes
        setting = run_setting(self.recipe, device, self.precision, self.parallel.layout)
        grown_bytes, step_bytes = peak_growth_bytes(device, before_bytes) or None, self.step_memory.peak_bytes
        if device.type == "cuda":  # which counts what tensors hold
            step_bytes, grown_bytes = grown_bytes, None
        elif step_bytes is not None:
            step_bytes += self.state.writer.copied_bytes
        return MemoryPeaks(training_peak(setting).total_bytes, step_bytes, grown_bytes)


def _refuse_damaged(run_dir: Path) -> None:
    if checkpoints(run_dir):
        raise UserError(f"every checkpoint of {run_dir} is damaged: restore one from a copy, or give another run_dir=.")
