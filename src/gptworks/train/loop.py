"""The training loop: read `train` first; the steps it is built of follow in the order in which they run."""

import contextlib
import itertools
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from tokenizers import Tokenizer

from gptworks.chat_template import load_chat_template, save_chat_template
from gptworks.checkpoint import Checkpoint, checkpoints, newest_verified
from gptworks.config import Recipe
from gptworks.data.conversations.inspection import check_records
from gptworks.data.prepare import prepare
from gptworks.device import (
    BusyCores,
    Precision,
    advice_on_threads,
    choose_device,
    choose_precision,
    cpu_threads,
    device_name,
    peak_growth_bytes,
    reset_peak,
)
from gptworks.errors import RunError, UserError
from gptworks.files import write_sums
from gptworks.infer.engine import Engine
from gptworks.infer.sampling import SamplingSettings
from gptworks.model import GPT
from gptworks.model.moe import busiest_load
from gptworks.plan.fit import layout_words
from gptworks.plan.layout import Layout
from gptworks.plan.memory import training_peak
from gptworks.plan.params import count_parameters
from gptworks.recipe import load_recipe, save_recipe, with_vocab_size
from gptworks.tensors import Expected
from gptworks.tokenizer import save_tokenizer, vocabulary_size
from gptworks.train.changes import change_words, changed, record
from gptworks.train.distributed.agreed import agreed_checkpoint
from gptworks.train.distributed.parallel import Parallel, StopAsked, check_parallel, choose_parallel, run_layout
from gptworks.train.distributed.ranks import ALONE, Ranks
from gptworks.train.feed import Feed
from gptworks.train.generating import generating
from gptworks.train.objectives.choose import choose_task
from gptworks.train.objectives.distillation import check_teacher
from gptworks.train.objectives.next_token import Batch, Objective
from gptworks.train.objectives.reward import check_reward
from gptworks.train.optim.anomalies import anomaly
from gptworks.train.optim.average import WeightAverage
from gptworks.train.optim.schedule import rate_factor
from gptworks.train.optim.trainable import check_trained, trained_part
from gptworks.train.progress import Progress
from gptworks.train.record.card import MemoryPeaks, write_model_card
from gptworks.train.record.display import Display, clock
from gptworks.train.record.layer_norms import LayerNorms
from gptworks.train.record.metrics import MetricsLog, NoLog, Record, draw_curves, write_samples
from gptworks.train.record.throughput import Throughput
from gptworks.train.record.writers import check_writers, open_log
from gptworks.train.rehearsal.preflight import check_memory, choose_allocation, run_setting
from gptworks.train.run_folder import check_run_folder, open_run_folder
from gptworks.train.saving import CheckpointWriter, remove_newer
from gptworks.train.signals import stop_signals
from gptworks.train.start import check_start, starting_weights
from gptworks.train.step import StepLosses, TrainStep
from gptworks.units import readable, significant

CURVES_EVERY_SECONDS = 60.0
"""How often an evaluation draws curves.png anew; the end of a run always does."""


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
    force: bool = False,
    display: Display | None = None,
    objective: Objective | None = None,
    ranks: Ranks = ALONE,
    overrides: Sequence[str] = (),
) -> Outcome:
    """Train the recipe's model until its length is reached, it stops improving, or a signal asks it to stop.

    Args:
        recipe: what to train, on what, for how long.
        resume: go on from the newest whole checkpoint of `recipe.run_dir`, bit for bit as if never stopped; a folder
            without one is begun anew.
        force: try also where the run should not fit in memory.
        objective: a loss of your own instead of the recipe's.
        ranks: the processes that train together, from `gptworks.train.distributed.ranks.join`; each calls this.
        overrides: the `key.path=value` settings of the command line, kept in the run folder for a later one.

    Raises:
        UserError: the recipe, its data or the run folder cannot be used, or the run does not fit in memory.
        RunError: loss or gradients stayed non-finite, or a checkpoint could not be written.
    """
    display = display or Display(None if ranks.is_first else Console(quiet=True))
    ranks.first(lambda: check_train(recipe, resume, ranks.size))
    device = choose_device(recipe.train.device)
    precision = choose_precision(recipe.train.precision, device)
    prepared = ranks.in_turn(lambda: prepare(recipe))
    ranks.first(lambda: check_records(recipe, prepared, display.message))
    recipe = with_vocab_size(recipe, vocabulary_size(prepared.tokenizer))
    layout = Layout(**ranks.first(lambda: asdict(run_layout(recipe, ranks, device, precision))))
    peak = check_memory(recipe, device, precision, force or not ranks.is_first, layout, ranks.local_size)
    if ranks.size > 1:
        display.message(f"{ranks.size} ranks: {layout_words(layout)}")
    display.message(f"memory: {readable(peak.total_bytes, 'B')} planned at the peak, reached during: {peak.moment}")
    choose_allocation(peak, device, ranks.local_size)
    parallel = choose_parallel(recipe, ranks, device, layout)
    run = Run(recipe, prepared.folder, prepared.tokenizer, device, precision, objective, display, ranks, parallel)
    folder = open_run_folder(recipe, resume) if ranks.is_first else contextlib.nullcontext()
    with folder, run.writer, cpu_threads(recipe.train.threads):
        run.begin(resume, overrides)
        display.message(run.opening)
        with stop_signals() as stop_asked, display:
            parallel.stop_asked = stop_asked
            while (reason := run.end_reason(ranks.asked(stop_asked()))) is None:
                again = run.progress.evaluation_cut  # by a stop: a resumed run makes up for it first
                if not again:
                    run.training_step()
                if (again or run.due(recipe.train.evaluate_every)) and not run.evaluate():
                    continue
                if run.due(recipe.train.sample_every):
                    run.sample()
                if run.due(recipe.train.checkpoint_every):
                    run.save()
                elif run.is_best:
                    run.save(weights_only=True)
            return run.finish(reason)


def check_train(recipe: Recipe, resume: bool = False, n_ranks: int = 1) -> None:
    """Refuse a run that cannot be, before any work is done.

    Raises:
        UserError: the run folder, the run to start from, a logger or the number of ranks; it says which.
    """
    check_run_folder(recipe, resume)
    check_start(recipe, resume)
    check_trained(recipe)
    check_teacher(recipe)
    check_reward(recipe)
    check_writers(recipe.train.loggers)
    check_parallel(recipe, n_ranks)


class Run:
    """A model in training with everything around it."""

    def __init__(
        self,
        recipe: Recipe,
        data_folder: Path,
        tokenizer: Tokenizer,
        device: torch.device,
        precision: Precision,
        objective: Objective | None,
        display: Display,
        ranks: Ranks = ALONE,
        parallel: Parallel | None = None,
    ) -> None:
        self.recipe, self.settings, self.display = recipe, recipe.train, display
        self.ranks, self.parallel = ranks, parallel or Parallel(recipe.train)
        self.device, self.precision, self.tokenizer = device, precision, tokenizer
        self._cores, self._advised = BusyCores(), False
        with ranks.busy():
            self.task = choose_task(recipe, data_folder, verify=ranks.is_first)
        self.task.ranks = ranks
        torch.manual_seed(recipe.seed)
        self._memory_before_bytes = reset_peak(device)
        self.model = self.parallel.place(trained_part(GPT(recipe.model), recipe.adapter, recipe.freeze), device)
        self.model.activation_checkpointing = recipe.train.activation_checkpointing
        loss = objective or self.task.loss
        self.step = TrainStep(self.model, recipe.train, loss, precision, self.parallel, ranks)
        self.stopwatch = self.step.stopwatch
        self.average = WeightAverage(self.model, recipe.train.ema_decay)
        self.feed = Feed(self.task, self.parallel.micro_batch_size, self.parallel.micro_steps, device)
        self.throughput = Throughput(recipe.model, device, precision, ranks.size)
        self.layer_norms = LayerNorms(self.model, self.parallel, recipe.train.log_every)
        self.writer = CheckpointWriter(recipe.run_dir, recipe.train.keep_checkpoints, recipe.train.keep_every)
        held_out_sha256 = self.task.validation_shards.manifest.validation_text_sha256
        self.progress = Progress(
            data_fingerprint=self.task.data_fingerprint, validation_text_sha256=held_out_sha256 or ""
        )
        template = load_chat_template(data_folder / "tokenizer", tokenizer)
        self.engine = Engine(self.model, tokenizer, cache_dtype=precision.dtype, chat_template=template)
        for prompt in recipe.train.sample_prompts if recipe.train.sample_every else ():
            self.engine.encode_prompt(prompt)  # a prompt that cannot be used is refused now, not at the first sample
        self._saved_step = -1
        self._curves_drawn = time.monotonic()

    # -------------------------------------------------------------------------------------------- begin

    @property
    def opening(self) -> str:
        """What is trained, where, on how much text and for how long."""
        total = count_parameters(self.recipe.model).total
        trained = sum(math.prod(p.shape) for p in self.model.parameters() if p.requires_grad)
        part = "" if trained == total else f", {trained:,} of them trained" if self.recipe.adapter is None else (
            f" and an adapter of {trained:,}, which alone is trained ({trained / total:.2%})"
        )  # fmt: skip
        length = [f"{self.total_steps:,} steps"] if self.total_steps else []
        length += [f"{self.settings.max_minutes:g} minutes"] if self.settings.max_minutes is not None else []
        device = f"{self.precision.name} on {device_name(self.device)}"
        epoch = f"{self.task.tokens_per_epoch:,} tokens an epoch"
        return (
            f"{self.recipe.run_dir}: {total:,} parameters{part}\n"
            f"{device}; {epoch}, and the run ends after {' or '.join(length)}"
        )

    def begin(self, resume: bool, overrides: Sequence[str] = ()) -> None:
        """Start a new run folder, or restore the newest whole checkpoint of the one that is there."""
        folder = self.recipe.run_dir
        before = load_recipe(folder) if self.ranks.is_first and (folder / "recipe.yaml").exists() else None
        self._batch_size_before = self.ranks.first(lambda: (before or self.recipe).train.batch_size)
        checkpoint = self._newest_whole() if resume else None
        if checkpoint is None:
            self.ranks.first(lambda: _refuse_damaged(folder))
        if checkpoint is not None:
            self._restore(checkpoint)
            self.ranks.first(lambda: self._check_length(before))
            self.display.message(f"resuming {folder} from step {self.progress.step:,}")
        elif resume:
            self.display.message(f"{folder} has no checkpoint to go on from: starting from step 0")
        if checkpoint is None and self.recipe.initialize_from is not None:
            with self.ranks.busy():
                weights = starting_weights(self.recipe, self.tokenizer, self.display.message, self.ranks)
            self.model.load_state_dict(self.parallel.shares(weights), strict=self.recipe.adapter is None)
            self.average = WeightAverage(self.model, self.settings.ema_decay)
        fresh, writes = checkpoint is None, self.ranks.is_first
        with self.parallel.resting():
            self.task.begin(self.model, self.engine, self.precision, fresh, writes, self.display.message, self.parallel)
        if self.ranks.is_first:
            changes = {} if before is None or checkpoint is None else changed(before, self.recipe)
            record(folder, self.progress.step, changes, overrides, before)
            if resume:  # the run makes them again on its way
                remove_newer(folder, self.progress.step, weights_only=True)
            if changes:
                self.display.message(f"changed from step {self.progress.step:,} on: {change_words(changes)}")
            save_recipe(self.recipe, folder / "recipe.yaml")
            save_tokenizer(self.tokenizer, folder / "tokenizer")
            if self.engine.chat_template is not None:
                save_chat_template(self.engine.chat_template, folder / "tokenizer")
            write_sums(folder / "tokenizer")
        self.log = self._open_log()

    def _check_length(self, before: Recipe | None) -> None:
        """Refuse a length that was changed to less than what is done."""
        train, progress, folder = self.settings, self.progress, self.recipe.run_dir
        if self.total_steps is not None and self.total_steps < progress.step:
            name = "max_steps" if train.max_steps == self.total_steps else "epochs"
            done = f"{progress.step:,} steps"
        elif (
            train.max_minutes is not None
            and before is not None
            and train.max_minutes != before.train.max_minutes
            and progress.seconds > 60 * train.max_minutes
        ):
            name, done = "max_minutes", f"{progress.seconds / 60:.1f} minutes"
        else:
            return
        raise UserError(
            f"train.{name}={getattr(train, name):g} and {folder} has done {done}: give more to go on, or use its "
            f"checkpoints as they are."
        )

    def _open_log(self) -> MetricsLog | NoLog:
        if not self.ranks.is_first:
            return NoLog()
        return open_log(self.recipe, self.progress.step, self.progress.rollbacks)

    def _newest_whole(self, up_to_step: int | None = None) -> Checkpoint | None:
        """The newest checkpoint that rank 0 finds whole, on every rank."""
        folder, report = self.recipe.run_dir, self.display.message
        return agreed_checkpoint(self.ranks, folder, lambda: newest_verified(folder, report, up_to_step=up_to_step))

    def _restore(self, checkpoint: Checkpoint) -> None:
        state = checkpoint.state()
        progress = Progress.from_json(state, self._batch_size_before, checkpoint.folder / "state.json")
        folder = self.recipe.run_dir
        if not progress.data_fingerprint:
            raise UserError(
                f"{folder} was imported and has no training to go on with: start one from it with "
                f"initialize_from={folder} and another run_dir=."
            )
        if progress.data_fingerprint != self.progress.data_fingerprint:
            raise UserError(
                f"the data has changed since {self.recipe.run_dir} began: its shards were "
                f"{progress.data_fingerprint[:12]} and are now {self.progress.data_fingerprint[:12]}. "
                f"Restore the text, or start anew with another run_dir=."
            )
        self.progress = progress
        self._saved_step = progress.step
        shares = self.parallel.shares
        own = self.average.own_tensors
        weights = checkpoint.model_tensors({name: Expected.like(p) for name, p in self.average.parameters.items()})
        moments = checkpoint.optimizer_tensors(lambda stored: self.step.optimizer.expected_tensors(stored, own))
        tensors = self.average.restore(shares(weights), shares(moments))
        self.step.optimizer.load_state_tensors(tensors)
        if progress.scaler:
            self.step.scaler.load_state_dict(progress.scaler)
        self.throughput.start(progress.tokens, progress.seconds)

    # --------------------------------------------------------------------------------------------- step

    def training_step(self) -> None:
        """One optimizer step: gradients of the whole batch, clipped, applied; or skipped where they would do harm."""
        started = time.perf_counter()
        progress, settings, step = self.progress, self.settings, self.step
        self.writer.check()
        factor = rate_factor(settings, progress.step, self.share_done)
        self.layer_norms.begin(progress.step)
        micro_batches, n_targets, n_tokens = self._batches()
        losses = step.accumulate(micro_batches, n_targets, (self.recipe.seed, progress.step))
        with self.stopwatch.part("optimizer"):
            norm = step.gradient_norm()
            losses.loss, norm = self.ranks.agreed([losses.loss, norm])
            by_layer = self.layer_norms.finish()
            skipped = anomaly(settings, progress.gradient, losses.loss, norm)
            if skipped is None:
                step.apply(norm, factor)
                self.average.update(progress.step)
                progress.gradient.take(norm)
                progress.skipped_in_a_row = 0
            else:
                step.skip()
                progress.skipped += 1
                progress.skipped_in_a_row += 1
        progress.step += 1
        progress.samples += settings.batch_size
        progress.tokens += n_tokens
        progress.seconds = self.ranks.latest(progress.seconds + time.perf_counter() - started)
        if skipped is None:
            self._report_step(losses, norm, factor, by_layer)
        else:
            self._report_skipped(skipped, losses.loss, norm)

    def _batches(self) -> tuple[list[Batch], int, int]:
        """This rank's micro-batches of the next step; the targets and the tokens of all ranks."""
        position = self.progress.position
        with self.stopwatch.part("data"):
            micro_batches, *own = self.feed.step(position)
        if self.task.rolls_out:
            with self.stopwatch.part("rollouts"), self.parallel.resting():
                micro_batches, *own = self.task.roll_out(position, self.parallel.micro_steps, micro_batches)
        with self.stopwatch.part("data"):
            n_targets, n_tokens = map(round, self.parallel.add_up([float(number) for number in own]))
        return micro_batches, n_targets, n_tokens

    def _report_step(self, losses: StepLosses, norm: float, factor: float, by_layer: Record) -> None:
        progress, settings, loss = self.progress, self.settings, losses.loss
        if progress.step % settings.log_every == 0 or self.share_done >= 1:
            pace = self.throughput.pace(progress.tokens, progress.seconds)
            if self.ranks.size == 1 and not self._advised and (by_others := self._cores.by_others()) is not None:
                if advice := advice_on_threads(by_others, self.device):
                    self.display.message(advice)
                self._advised = advice is not None
            load = None if losses.expert_tokens is None else round(busiest_load(losses.expert_tokens), 3)
            self.log.write(
                {
                    "kind": "train",
                    "step": progress.step,
                    "tokens": progress.tokens,
                    "loss": loss,
                    "grad_norm": norm,
                    "learning_rate": factor * settings.learning_rate,
                    "seconds": round(progress.seconds, 3),
                    **losses.figures,
                    **pace.record,
                    "seconds_by_part": self.stopwatch.take(),
                    **by_layer,
                    **({} if load is None else {"busiest_expert_load": load}),
                }
            )
            note = "" if load is None else f"  busiest expert {load:.2f}×"
            self.display.speed(pace.tokens_per_second, pace.utilization, note)
        done = self.share_done
        self.display.step(self._where, done, loss, progress.seconds / done * (1 - done) if done else 0.0)

    @property
    def _where(self) -> str:
        """The step reached, and how far that is by what ends the run: steps or the clock."""
        progress, minutes = self.progress, self.settings.max_minutes
        step = f"step {progress.step:,}"
        if minutes is not None and (not self.total_steps or progress.seconds / (60 * minutes) >= self.share_done):
            return f"{step}  {clock(progress.seconds)} of {clock(60 * minutes)}"
        return f"{step}/{self.total_steps:,}"

    def _report_skipped(self, reason: str, loss: float, norm: float) -> None:
        """Say that a step was skipped; after many in a row, go back to the last checkpoint, or end the run."""
        progress, settings = self.progress, self.settings
        self.log.write({"kind": "skipped", "step": progress.step, "loss": loss, "grad_norm": norm})
        self.display.message(f"step {progress.step:,} skipped: {reason} ({progress.skipped} so far)")
        if progress.skipped_in_a_row < settings.max_skipped_steps:
            return
        with self.ranks.busy():
            self.writer.wait()
        before = progress.step - progress.skipped_in_a_row  # weights may have gone wrong before the first was skipped
        good = self._newest_whole(before)
        if good is not None and progress.rollbacks < settings.max_rollbacks:
            self._roll_back(good)
            return
        good = good or self._newest_whole()
        where = f"the last good checkpoint is {good.folder}" if good else "there is no checkpoint yet"
        raise RunError(
            f"{progress.skipped_in_a_row} steps in a row were skipped, the last at step {progress.step:,} because "
            f"{reason}: {where}. Lower train.learning_rate, warm up longer, use precision fp32, or set "
            f"train.max_rollbacks."
        )

    def _roll_back(self, checkpoint: Checkpoint) -> None:
        """Restore a checkpoint and go on from it with the batches that come after those that broke the run."""
        broken, seconds = self.progress, self.progress.seconds
        self.ranks.first(lambda: remove_newer(self.recipe.run_dir, checkpoint.step))
        self._restore(checkpoint)
        self.progress.seconds = seconds
        self.progress.rollbacks = broken.rollbacks + 1
        self.progress.skipped, self.progress.skipped_in_a_row = broken.skipped, 0
        self.progress.samples_passed = broken.position - self.progress.samples
        self.log.close()
        self.log = self._open_log()
        self.log.write({"kind": "rollback", "step": self.progress.step, "from_step": broken.step})
        self.display.message(f"back to step {self.progress.step:,}, and on past the batches of the skipped steps")

    # --------------------------------------------------------------------------- evaluate, sample, save

    def evaluate(self) -> bool:
        """Loss over the validation split, or over the part of it that the recipe asks for; whether it was finished, and
        not cut short by a signal."""
        progress = self.progress
        try:
            with self.stopwatch.part("evaluation"), self.average.applied(), self.parallel.resting():
                report, figures = self.task.evaluate(self.model, self.parallel, self.precision)
        except StopAsked:
            progress.evaluation_cut = True
            self.display.message(f"step {progress.step:,}: the evaluation is cut short, and made up for by --resume")
            return False
        progress.evaluation_cut = False
        total, n_counted, *means = self.ranks.agreed([report.total_nats, report.n_tokens, *figures.values()])
        report = replace(report, total_nats=total, n_tokens=round(n_counted))
        figures = dict(zip(figures, means, strict=True))
        n_there = self.task.n_validation
        n_read = self.task.n_evaluated or n_there
        likelihood = report.unit == "nats per token"
        better = report.loss < progress.best_loss
        if better:
            progress.best_loss, progress.best_step, progress.evaluations_since_best = report.loss, progress.step, 0
        else:
            progress.evaluations_since_best += 1
        self.log.write(
            {
                "kind": "validation",
                "step": progress.step,
                "tokens": progress.tokens,
                "loss": report.loss,
                "perplexity": report.perplexity if likelihood else None,
                **({} if likelihood else {"unit": report.unit}),
                "bits_per_byte": report.bits_per_byte,
                "sequences": n_read,
                "sequences_held_out": n_there,
                **figures,
            }
        )
        bits = f"  perplexity {significant(report.perplexity)}" if likelihood else ""
        bits += "".join(f"  {name.replace('_', ' ')} {value:.4g}" for name, value in figures.items())
        bits += f"  {report.bits_per_byte:.4f} bits per byte" if report.bits_per_byte is not None else ""
        bits += f"  of {n_read:,} of {n_there:,} held-out sequences" if n_read < n_there else ""
        self.display.validation(progress.step, report.loss, bits + ("  (best)" if better else ""))
        if self.ranks.is_first and time.monotonic() - self._curves_drawn >= CURVES_EVERY_SECONDS:
            self._draw_curves()
        return True

    def _draw_curves(self) -> bool:
        folder = self.recipe.run_dir
        self._curves_drawn = time.monotonic()
        return draw_curves(folder / "metrics.jsonl", folder / "curves.png", self.recipe.name)

    def sample(self) -> None:
        """Continue the recipe's prompts; the same seed each time shows what training changed."""
        if not self.parallel.samples:
            return
        sampling = SamplingSettings(
            max_tokens=self.settings.sample_tokens, temperature=0.8, top_k=50, seed=self.recipe.seed
        )
        for prompt in self.settings.sample_prompts:
            with (
                self.stopwatch.part("samples"),
                self.average.applied(),
                self.parallel.resting(),
                generating(self.precision),
            ):
                text = self.engine.generate(prompt, sampling, overflow="slide")
            self.log.write({"kind": "sample", "step": self.progress.step, "prompt": prompt, "text": text})
            self.display.sample(self.progress.step, prompt, text)
        if self.ranks.is_first:
            write_samples(self.recipe.run_dir / "metrics.jsonl", self.recipe.run_dir / "samples.md")

    def save(self, *, weights_only: bool = False) -> None:
        """Write a checkpoint of this step, unless it is written already, and delete the oldest beyond those to keep.

        Args:
            weights_only: leave out what training alone needs; the optimizer's state is not gathered from the ranks.
        """
        progress = self.progress
        if self._saved_step == progress.step:
            return
        progress.scaler = self.step.scaler.state_dict()
        with self.stopwatch.part("checkpoint"):
            tensors = {"model": self.parallel.whole(self.average.model_tensors)}
            if not weights_only:
                moments = self.step.optimizer.state_tensors() | self.average.own_tensors
                tensors["optimizer"] = self.parallel.whole(moments)
            if self.ranks.is_first:
                with self.ranks.busy():
                    self.writer.wait()
                self.writer.save(progress.step, tensors, asdict(progress))
            else:
                deque(itertools.chain(*tensors.values()), maxlen=0)  # our part in making them whole
        if not weights_only:
            self._saved_step = progress.step

    # ---------------------------------------------------------------------------------------------- end

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps of the whole run, where that is known; after a change of batch_size, from where it is."""
        train, progress, planned = self.settings, self.progress, self.task.total_steps
        if train.epochs is None or progress.samples == progress.step * train.batch_size:
            return planned
        left = train.epochs * self.task.samples_per_epoch - progress.samples
        by_epochs = progress.step + max(0, math.floor(left / train.batch_size + 0.5))
        return min(by_epochs, train.max_steps or by_epochs)

    @property
    def share_done(self) -> float:
        """How much of the run is done, from 0 to 1: by steps, or by the clock where that is further."""
        shares = [self.progress.step / self.total_steps] if self.total_steps else []
        if self.settings.max_minutes is not None:
            shares.append(self.progress.seconds / (60 * self.settings.max_minutes))
        return min(1.0, max(shares))

    def due(self, every: int) -> bool:
        """Whether something done every so many steps, and at the end, is to be done now."""
        return every > 0 and (self.progress.step % every == 0 or self.share_done >= 1)

    @property
    def is_best(self) -> bool:
        """Whether the weights as they are have the lowest validation loss so far."""
        return self.progress.best_step == self.progress.step

    def end_reason(self, stop_asked: str | None) -> str | None:
        """Why the run ends here; None while it goes on."""
        patience = self.settings.early_stopping_patience
        if stop_asked:
            return f"stopped by {stop_asked}"
        if self.progress.evaluation_cut:
            return None
        if self.share_done >= 1:
            return "finished"
        if patience is not None and self.progress.evaluations_since_best >= patience:
            return f"no better validation loss in {patience} evaluations"
        return None

    def finish(self, reason: str) -> Outcome:
        """Save, and describe the run in its folder."""
        self.save()
        self.ranks.first(lambda: self._describe(reason))
        progress = self.progress
        return Outcome(
            reason, progress.step, progress.tokens, progress.seconds, progress.best_loss, self.recipe.run_dir
        )

    def _describe(self, reason: str) -> None:
        self.writer.wait()
        self.log.close()
        folder, progress = self.recipe.run_dir, self.progress
        if not self._draw_curves():
            self.display.message("curves.png is left out: matplotlib is not installed (pip install 'gptworks[plots]').")
        setting = run_setting(self.recipe, self.device, self.precision, self.parallel.layout)
        memory = MemoryPeaks(
            predicted_bytes=training_peak(setting).total_bytes,
            measured_bytes=peak_growth_bytes(self.device, self._memory_before_bytes),
        )
        write_model_card(
            self.recipe, progress, reason, self.task.samples_per_epoch, self.precision, memory, self.parallel.layout
        )
        left = " Go on with --resume." if self.share_done < 1 else ""
        self.display.message(
            f"{reason} at step {progress.step:,} after {clock(progress.seconds)}, {progress.tokens:,} tokens. "
            f"Saved in {folder}.{left}"
        )


def _refuse_damaged(run_dir: Path) -> None:
    if checkpoints(run_dir):
        raise UserError(f"every checkpoint of {run_dir} is damaged: restore one from a copy, or give another run_dir=.")
