"""Reports on a run: on the terminal, in metrics.jsonl, in curves.svg, and on the model card."""

import math
import shlex
import time

import torch

from gptworks.config import Recipe
from gptworks.data.beginnings import Beginning, rule
from gptworks.device import BusyCores, advice_on_threads, device_name, memory_figures
from gptworks.evaluation.loss import LossReport
from gptworks.files import shown
from gptworks.kernels.step import refused_architecture
from gptworks.model.moe import busiest_load
from gptworks.planning.params import count_parameters
from gptworks.training.objectives.base import Objective
from gptworks.training.progress import Length, Progress
from gptworks.training.record.card import MemoryPeaks, write_model_card
from gptworks.training.record.curves import draw_curves
from gptworks.training.record.display import Display, clock
from gptworks.training.record.metrics import LOG, MetricsLog, NoLog, write_samples
from gptworks.training.record.speed import Throughput
from gptworks.training.record.writers import open_log
from gptworks.training.step import Step, TrainStep
from gptworks.units import counted, epochs_words, significant

DESCRIBED_EVERY_SECONDS = 60.0
"""Minimum time between updates of curves.svg and the card; the first evaluation and the end always update them."""

PACE_KNOWN_SECONDS = 10.0
"""Seconds after which a session announces when the run will end, unless less time than this is left."""


class Reporter:
    """Reports on a run; only rank 0 prints and writes."""

    def __init__(self, recipe: Recipe, objective: Objective, step: TrainStep, length: Length, display: Display) -> None:
        self.recipe, self.objective, self.length, self.display = recipe, objective, length, display
        self.log: MetricsLog | NoLog = NoLog()
        self._device, self._precision, self._ranks = step.model.device, step.precision, step.ranks
        self._stopwatch, self._layout = step.stopwatch, step.parallel.layout
        self._throughput = Throughput(recipe.model, self._device, self._precision, self._ranks.size)
        self._cores, self._advised = BusyCores(), False
        self._described = -math.inf  # last update of curves and card, as `time.monotonic()`
        self._started: tuple[float, float] | None = None  # start of the session, and the fraction of the run done then
        self._end_announced = False

    def opening(self, model: torch.nn.Module, progress: Progress) -> None:
        """Print the model's size, the device, the amount of text, the run's length, and an explanation of the
        progress figures."""
        total = count_parameters(self.recipe.model).total
        trained = sum(math.prod(p.shape) for p in model.parameters() if p.requires_grad)
        part = "" if trained == total else f", {trained:,} of them trained" if self.recipe.adapter is None else (
            f" and an adapter of {trained:,}, the only part trained ({trained / total:.2%})"
        )  # fmt: skip
        n_tokens = self.objective.samples.train_shards.n_tokens
        self.display.message(
            f"{shown(self.recipe.run_dir)}: {total:,} parameters{part}\n"
            f"{self._precision.name} on {device_name(self._device)}; {n_tokens:,} training tokens, and the run "
            f"ends after {self.length.words(progress)}{self._epochs(progress)}"
        )
        if self.recipe.data.mixture:
            self.display.message(self._mixture(progress))
        self.display.message("\n".join(self._legend()))
        self._started = time.monotonic(), self.length.share_done(progress)

    def _legend(self) -> list[str]:
        """Return lines that explain the figures of the progress."""
        unit, guessing = self.recipe.objective.loss_unit, math.log(self.recipe.model.vocab_size)
        what = f"{unit}; lower is better"
        if unit == "nats per token":
            what = f"how badly the next token is predicted, in nats; blind guessing has {guessing:.2f}"
        n_there = self.objective.n_validation
        n_read = self.objective.n_evaluated or n_there
        share = f"{n_read:,} of {counted(n_there, 'sequence')}" if n_read < n_there else counted(n_there, "sequence")
        if stages := self.recipe.train.shorter_contexts:  # each is shorter than the context
            context, (step, _) = self.recipe.model.context_length, stages[-1]
            share += f" of {context:,} tokens: longer than the rows to learn from until step {step:,}"
        reaches = "this machine reaches" if self._ranks.size == 1 else f"{self._ranks.size} such devices reach"
        lines = [
            f"loss: {what}",
            f"held out: the same on data that is not trained on, {share}",
            f"full speed: what {reaches} in large products of matrices (a share of it: MFU)",
        ]
        return [*lines, f"samples continue {chosen}"] if (chosen := self._samples_rule()) else lines

    def _samples_rule(self) -> str:
        """Return the rule by which the held-out beginnings were chosen; empty if the samples have none."""
        train, held_out = self.recipe.train, self.objective.samples.validation_shards
        if not train.sample_every or not train.sample_held_out:
            return ""
        most = train.held_out_tokens(self.recipe.model.context_length)
        return f"{rule(held_out, train.sample_held_out, most)}; chosen before training"

    def _epochs(self, progress: Progress) -> str:
        """Return a phrase with the tokens and epochs of the whole run; empty if its number of steps is unknown."""
        steps, objective = self.length.total_steps(progress), self.recipe.objective
        if steps is None:
            return ""
        left = self._samples_left(progress, steps)
        tokens = progress.tokens + left * objective.rows_per_sample * self.recipe.row_length
        epochs = significant((progress.samples + left) / self.objective.samples.per_epoch, 3)
        return f", {'at most ' if objective.varying_widths else ''}{tokens:,} tokens or {epochs} epochs"

    def _samples_left(self, progress: Progress, steps: int) -> int:
        before = self.recipe.train.samples_before
        return before(steps) - before(progress.step)

    def _mixture(self, progress: Progress) -> str:
        """Return a line with the epochs of each dataset, and the sample at which the datasets' weights change. If
        the run's number of steps is unknown, leave out the epochs; if no weights change either, name the datasets."""
        total, first = self.length.total_steps(progress), self.recipe.anneal_from
        left = 0 if total is None else self._samples_left(progress, total)
        epochs = self.objective.samples.epochs(progress.position + left)
        words = "" if total is None else f"epochs of each dataset: {epochs_words(epochs)}"
        then = [] if first is None else [f"the weights change at sample {first:,}"]
        return "; ".join(filter(None, [words, *then])) or f"datasets: {', '.join(epochs)}"

    def begin(self, progress: Progress) -> None:
        """Open the log after a start, a resume or a rollback."""
        self.log.close()
        self._throughput.start(progress.tokens, progress.seconds)
        if self._ranks.is_rank_zero:
            self.log = open_log(self.recipe, progress.step, progress.rollbacks)

    def end_step(self, progress: Progress, step: Step) -> None:
        """Report a step that was applied or skipped; `progress` includes it."""
        losses = step.losses
        if step.skipped is not None:
            self.log.write({"kind": "skipped", "step": progress.step, "loss": losses.loss, "grad_norm": step.norm})
            self.display.message(f"step {progress.step:,} skipped: {step.skipped} ({progress.skipped} so far)")
            return
        train, done = self.recipe.train, self.length.share_done(progress)
        n_before, whole = progress.step - 1, self.recipe.model.context_length
        if (length := train.length_at(n_before, whole)) < whole:
            self._throughput.count_short(train.batch_size_at(n_before) * whole, length)
        if progress.step % train.log_every == 0 or done >= 1:
            pace = self._throughput.pace(progress.tokens, progress.seconds)
            self._advise_on_threads()
            load = None if losses.expert_tokens is None else round(busiest_load(losses.expert_tokens), 3)
            self.log.write(
                {
                    "kind": "train",
                    "step": progress.step,
                    "tokens": progress.tokens,
                    "loss": losses.loss,
                    "grad_norm": step.norm,
                    "learning_rate": step.rate_factor * train.learning_rate,
                    "seconds": round(progress.seconds, 3),
                    **losses.figures,
                    **pace.record,
                    **memory_figures(self._device),
                    "seconds_by_part": self._stopwatch.take(),
                    **step.by_layer,
                    **({} if load is None else {"busiest_expert_load": load}),
                }
            )
            busiest = "" if load is None else f"{load:.2f}×"
            self.display.speed(pace.tokens_per_second, pace.utilization, busiest)
        self.display.step(self.length.reached(progress), done, losses.loss, self._seconds_left(progress, done))

    def _seconds_left(self, progress: Progress, done: float) -> float:
        """Return the seconds until the run's end, with evaluations, at this session's pace; announce the end once."""
        began, done_before = self._started or (0.0, 0.0)
        if self._started is None or done <= done_before:
            return progress.seconds / done * (1 - done) if done else 0.0
        taken = time.monotonic() - began
        left = taken / (done - done_before) * (1 - done)
        if not self._end_announced and taken >= PACE_KNOWN_SECONDS:
            self._end_announced = True
            if left >= PACE_KNOWN_SECONDS:
                at = time.strftime("%H:%M", time.localtime(time.time() + left))
                self.display.message(f"at this pace the run ends in {clock(left)}, at about {at}")
        return left

    def _advise_on_threads(self) -> None:
        if self._ranks.size == 1 and not self._advised and (by_others := self._cores.by_others()) is not None:
            if advice := advice_on_threads(by_others, self._device):
                self.display.message(advice)
            self._advised = advice is not None

    def rolled_back(self, progress: Progress, from_step: int) -> None:
        """Report that the run went back from step `from_step` to an earlier checkpoint."""
        self.begin(progress)
        self.log.write({"kind": "rollback", "step": progress.step, "from_step": from_step})
        self.display.message(f"back to step {progress.step:,}, and on past the batches of the skipped steps")

    def evaluated(self, progress: Progress, report: LossReport, figures: dict[str, float], is_best: bool) -> None:
        """Report an evaluation: its loss and the objective's other figures, each a mean over the samples evaluated."""
        n_there = self.objective.n_validation
        n_read = self.objective.n_evaluated or n_there
        likelihood = report.unit == "nats per token"
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
        self.display.validation(progress.step, report.loss, bits + ("  (best)" if is_best else ""))
        if self._ranks.is_rank_zero and time.monotonic() - self._described >= DESCRIBED_EVERY_SECONDS:
            self._describe(progress)

    def _describe(self, progress: Progress, reason: str | None = None, memory: MemoryPeaks | None = None) -> None:
        """Draw the curves and write the model card."""
        folder, samples = self.recipe.run_dir, self.objective.samples.per_epoch
        self._described = time.monotonic()
        draw_curves(folder / LOG, folder / "curves.svg", self.recipe.name)
        epochs = self.objective.samples.epochs(progress.position)
        write_model_card(self.recipe, progress, reason, samples, self._precision, memory, self._layout, epochs)

    def sample(self, progress: Progress, begun: Beginning, text: str) -> None:
        """Log and show a prompt, or the beginning of a held-out text, and its continuation."""
        actual = {} if begun.follows is None else {"follows": begun.follows}
        self.log.write({"kind": "sample", "step": progress.step, "prompt": begun.text, "text": text, **actual})
        self.display.sample(progress.step, begun.text, text)

    def sampled(self) -> None:
        """Write samples.md; called after all samples of a step."""
        if self._ranks.is_rank_zero:
            write_samples(self.recipe.run_dir / LOG, self.recipe.run_dir / "samples.md", self._samples_rule())

    def end(self, progress: Progress, reason: str, memory: MemoryPeaks, talks: bool) -> None:
        """Report the run's end: write curves, card and outcome.json, and print a summary and commands to run next. Only
        rank 0 calls this.

        Args:
            talks: whether the model has a chat template.
        """
        self.log.close()
        self._describe(progress, reason, memory)
        left = " Continue with --resume." if self.length.share_done(progress) < 1 else ""
        self.display.message(
            f"{reason} at step {progress.step:,} after {clock(progress.seconds)}, {progress.tokens:,} tokens. "
            f"Saved in {shown(self.recipe.run_dir)}.{left}"
        )
        folder = shlex.quote(shown(self.recipe.run_dir))
        commands = [
            f"chat {folder}" if talks else f"generate {folder} PROMPT",
            f"evaluate {folder}",
            f"report {folder}",
        ]
        if refused_architecture(self.recipe.model) is None:
            commands.append(f"export {folder} {shlex.quote(self.recipe.run_dir.name)}.html --format html")
        self.display.message("Next: " + "\n      ".join(f"gptworks {command}" for command in commands))
