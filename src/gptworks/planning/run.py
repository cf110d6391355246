"""Estimates a training run before it starts: parameters, FLOPs, memory, steps, time and disk space."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, lcm

from gptworks.config import Recipe, TrainConfig
from gptworks.errors import UserError
from gptworks.planning.advice import Apply, Change, changes_that_fit, recipe_with
from gptworks.planning.arrange import device_setting, layout_of
from gptworks.planning.assumed import COMPUTE_OPTIMAL_TOKENS_PER_PARAMETER, with_largest_micro_batch
from gptworks.planning.device_table import DEVICES
from gptworks.planning.devices import UTILIZATION, Device, this_cpu
from gptworks.planning.fit import Alternative, Need, alternatives, largest_micro_batch, need
from gptworks.planning.flops import Work, training_work
from gptworks.planning.host import HostMemory, checkpoint_bytes
from gptworks.planning.inference import InferenceMemory, inference_memory
from gptworks.planning.memory import training_peak
from gptworks.planning.network import StepTime, collectives, machines, sent_bytes, step_time
from gptworks.planning.params import ParameterCount, Trained, count_parameters
from gptworks.planning.setting import ANSWERS_AT_ONCE, Setting
from gptworks.planning.state import held_weights_bytes, trained_state_bytes
from gptworks.planning.steps import UNKNOWN_SIZE, DataSize, planned_steps
from gptworks.planning.timeline import Peak


@dataclass(frozen=True)
class Measured:
    """Memory and speed of a training step, as measured."""

    peak_bytes: int | None
    """Growth of memory up to its peak: on CUDA, of tensors; on a CPU, of the process's resident memory, with an
    allocator that returns freed memory to the system immediately. None if only the speed was measured."""
    kept_bytes: int | None
    """Peak memory with an allocator that keeps freed memory, as in `gptworks train`; None if not measured."""
    tokens_per_second: float


@dataclass(frozen=True)
class Plan:
    """Estimates for a run; see `plan`."""

    recipe: Recipe
    parameters: ParameterCount
    work: Work
    steps: int | None
    """Number of optimizer steps; None if no limit in steps is known. It is an upper bound if `max_minutes`, or `epochs`
    over data of unknown size, may end the run sooner."""
    steps_reason: str
    """A clause that names the setting that decides the number of steps, or why the number is unknown."""
    data: DataSize
    setting: Setting
    """Properties of the training step on each device."""
    device: Device
    utilization: float
    """Assumed share of the device's FLOP/s that the step reaches, counting recomputed FLOPs."""
    apply: Apply | None = None
    """Returns the recipe with overrides applied, for a number of devices; by default, `recipe_with(recipe)`."""
    tokens_per_sample: float | None = None
    """Average number of tokens in a sample, with padding, if rows end with their texts and the lengths of the texts are
    known. If None, each row counts as a row of full length."""
    traced_bytes: int | None = None
    """Peak memory of the step in bytes, traced with fake tensors; None if not traced."""
    measured: Measured | None = None
    price: float | None = None
    """Price of an hour of a device, in any currency; None if not given."""

    # ----------------------------------------------------------------------------------------- FLOPs

    @property
    def train(self) -> TrainConfig:
        return self.recipe.train

    @property
    def trained(self) -> Trained:
        """The part of the model that is trained."""
        return self.setting.whole[1]

    @property
    def flops_per_token(self) -> float:
        """FLOPs per token of the forward and backward pass of full rows with dense attention, and of the objective's
        additional passes."""
        return self.work.per_token

    @property
    def tokens_per_step(self) -> int:
        """Number of tokens in a step of `batch_size` samples. A preference pair has the tokens of both answers. Rows of
        unknown length count as rows of full length."""
        return round(self.train.batch_size * self._tokens_per_sample)

    @property
    def _tokens_per_sample(self) -> float:
        if self.tokens_per_sample is not None:
            return self.tokens_per_sample
        return self.setting.objective.rows_per_sample * self.setting.row_length

    @property
    def at_most(self) -> bool:
        """Whether tokens, FLOPs and time are upper bounds, because rows end with their texts and the lengths of the
        texts are unknown."""
        return self.setting.objective.varying_widths and self.tokens_per_sample is None

    @property
    def tokens(self) -> int | None:
        """Number of tokens that the run reads in all epochs; None if the number of steps is unknown."""
        return None if self.steps is None else round(self.train.samples_before(self.steps) * self._tokens_per_sample)

    @property
    def epochs_by_dataset(self) -> dict[str, float]:
        """Number of passes over each dataset of a mixture, by name; empty without a mixture or if unknown."""
        if self.steps is None or not self.data.datasets:
            return {}
        from gptworks.data.batches import Shares, weights_over_run, windows_per_epoch

        context, shares = self.recipe.model.context_length, Shares(weights_over_run(self.recipe), self.recipe.seed)
        read = shares.before(self.train.samples_before(self.steps)).tolist()
        sizes = self.data.datasets.items()
        return {name: n / windows_per_epoch(size, context) for n, (name, size) in zip(read, sizes, strict=True)}

    @property
    def flops_per_step(self) -> float:
        return self.flops_per_token * self.tokens_per_step

    @property
    def flops_before_first_step(self) -> float | None:
        """FLOPs of the starting model's pass over the training split before the first step; 0 if the objective needs
        no such pass; None if the size of the split is unknown."""
        if not self.work.before_first_step_per_token:
            return 0.0
        if self.data.samples_per_epoch is None:
            return None
        return self.work.before_first_step_per_token * self.data.samples_per_epoch * self._tokens_per_sample

    @property
    def total_flops(self) -> float | None:
        before = self.flops_before_first_step
        if self.steps is None or before is None:
            return None
        full_steps = self.train.samples_before(self.steps) / self.train.batch_size
        return before + full_steps * self.flops_per_step - self._flops_less(again=False)

    def _flops_less(self, again: bool) -> float:
        """Return the FLOPs that `train.shorter_contexts` saves, compared with the same tokens in rows of the full
        context. With `again`, include the FLOPs that activation checkpointing recomputes."""
        assert self.steps is not None
        less, model = 0.0, self.recipe.model
        for length, samples in self.train.samples_by_length(self.steps, model.context_length).items():
            if length < model.context_length:
                work = training_work(
                    self.recipe.model_copy(update={"model": model.model_copy(update={"context_length": length})})
                )
                cheaper = self.work.per_token - work.per_token
                cheaper += (self.work.again_per_token - work.again_per_token) if again else 0.0
                less += samples * self._tokens_per_sample * cheaper
        return less

    @property
    def flops_by_part(self) -> dict[str, tuple[float, float]]:
        """(forward, backward) FLOPs per token by part of the work, which add up to `flops_per_token`."""
        return {part: (n, self.work.backward[part]) for part, n in self.work.forward.items()}

    @property
    def tokens_per_parameter(self) -> float | None:
        return None if self.tokens is None else self.tokens / self.parameters.total

    @property
    def compute_optimal_tokens(self) -> int:
        """Compute-optimal number of training tokens for a model of this size (Hoffmann et al., 2022)."""
        return COMPUTE_OPTIMAL_TOKENS_PER_PARAMETER * self.parameters.total

    # ---------------------------------------------------------------------------------------- memory

    @cached_property
    def need(self) -> Need:
        """Memory that the run needs on its devices and hosts, compared with the memory that they have."""
        return need(self.setting, self.device)

    @property
    def peak(self) -> Peak:
        """Peak memory use of each device."""
        return self.need.peak

    @property
    def step_bytes(self) -> int:
        """Peak memory of a step without checkpoint and average, for comparison with a traced or measured `one_step`."""
        return training_peak(replace(self.setting, saves=False, averages=False, shorter_lengths=())).total_bytes

    @property
    def one_step(self) -> TrainConfig:
        """Training settings for a step of one micro-batch, or of two micro-batches if the run accumulates gradients.
        The batch sizes count rows: a pair has two."""
        micro = self.setting.micro_batch_size * self.setting.objective.rows_per_sample
        batch = micro * (2 if self.setting.accumulates else 1)
        return self.train.model_copy(update={"batch_size": batch, "micro_batch_size": micro})

    @property
    def host(self) -> HostMemory | None:
        """Memory use of the fullest node's host; None on a CPU, which is both device and host."""
        return self.need.host

    @property
    def fits(self) -> bool:
        """Whether the run fits both on each device and on each host."""
        return self.need.fits

    @cached_property
    def largest_micro_batch_size(self) -> int:
        """Largest micro-batch whose step fits on the device; 0 if even one sample does not fit."""
        step_samples = self.train.common_batch_size // self.setting.layout.data_parallel
        return largest_micro_batch(self.setting, self.device.memory_bytes, step_samples)

    @cached_property
    def changes(self) -> list[Change]:
        """The changes that `changes_that_fit` recommends, the cheapest first; empty if the run fits as it is."""
        ranks = self.setting.layout.world_size
        return [] if self.fits else changes_that_fit(self.recipe, ranks, self.device, self.apply)

    def with_overrides(self, overrides: Sequence[str], largest_micro_batch: bool = False) -> "Plan | None":
        """Return the plan of the recipe with overrides applied, on the same devices; None if it cannot run there.

        With `largest_micro_batch`, also set the largest micro-batch that fits.
        """
        n_ranks = self.setting.layout.world_size
        try:
            recipe = (self.apply or recipe_with(self.recipe))(overrides, n_ranks)
            if largest_micro_batch:
                recipe = with_largest_micro_batch(recipe, self.device, n_ranks)
            return plan(
                recipe, self.data, steps_reason=self.steps_reason, device=self.device, n_ranks=n_ranks,
                utilization=self.utilization,
            )  # fmt: skip
        except UserError:
            return None

    @property
    def smallest_device(self) -> str | None:
        """Name of the smallest known device of this kind whose memory holds the run as it is; None if the run fits on
        the plan's device, or if no known device holds it."""
        own = self.device
        alike = {
            name: device.memory_bytes
            for name, device in DEVICES.items()
            if (device.kind, device.has_bf16, device.has_flash) == (own.kind, own.has_bf16, own.has_flash)
            and device.memory_bytes >= self.peak.total_bytes
        }
        return min(alike, key=alike.__getitem__) if alike and not self.need.fits_device else None

    @cached_property
    def alternatives(self) -> list[Alternative]:
        """The planned step in several precisions and layouts; see `gptworks.planning.fit.alternatives`."""
        return alternatives(self.recipe, self.setting.layout.world_size, self.device)

    @cached_property
    def inference(self) -> list[InferenceMemory]:
        return inference_memory(self.setting.model)

    # ------------------------------------------------------------------------------------------ time

    @property
    def _rate(self) -> float | None:
        """FLOP/s that all devices reach together at `utilization`; ranks on one machine's CPU share its FLOP/s."""
        rate = self.device.flops(self.setting.precision)
        return None if rate is None else rate * self.utilization * self.n_priced

    @property
    def micro_steps(self) -> int:
        """Number of micro-batches per step on each rank."""
        return max(1, self.train.batch_size // (self.setting.layout.data_parallel * self.setting.micro_batch_size))

    @cached_property
    def step_time(self) -> StepTime | None:
        """Seconds per step of computation and communication on each rank, with the FLOPs of generated answers but
        without `sampling_seconds_per_step`; None if the device's FLOP/s are unknown."""
        if self._rate is None:
            return None
        tokens = self.tokens_per_step
        forward = sum(self.work.forward.values()) * tokens / self._rate
        backward = (sum(self.work.backward.values()) + self.work.again_per_token) * tokens / self._rate
        return step_time(self.setting, self.device, self.micro_steps, forward, backward)

    @cached_property
    def sent_bytes(self) -> dict[str, float]:
        """Bytes that each rank sends, and also receives, per step, by kind of tensor; empty for one rank."""
        sent: dict[str, float] = {}
        for one in collectives(self.setting):  # two collectives may send the same kind of tensor
            sent[one.what] = sent.get(one.what, 0) + sent_bytes(one, self.setting.layout, self.micro_steps)
        return sent

    @property
    def sampling_seconds_per_step(self) -> float | None:
        """Seconds per step to read all weights once for each token of each batch of answers; 0 if the objective
        generates no answers; None if the device's bandwidth is unknown. `step_time` has the FLOPs of generation."""
        rollouts = self.recipe.objective.rollouts
        if rollouts is None:
            return 0.0
        if self.device.bandwidth is None:
            return None
        rounds = ceil(self.train.batch_size / self.setting.layout.data_parallel / ANSWERS_AT_ONCE)
        reading = rounds * rollouts.max_tokens * self.weights_bytes / self.device.bandwidth
        return reading / rollouts.steps

    @property
    def tokens_per_second(self) -> float | None:
        """Training tokens per second of all devices, measured or estimated; None if the device's rates are unknown."""
        if self.measured is not None:
            return self.measured.tokens_per_second
        sampling = self.sampling_seconds_per_step
        if self.step_time is None or sampling is None:
            return None
        return self.tokens_per_step / (self.step_time.total + sampling)

    @property
    def seconds(self) -> float | None:
        """Seconds of all training steps and of `flops_before_first_step`, without evaluations, samples of text and
        checkpoints; None if unknown."""
        if self.tokens is None or self.tokens_per_second is None or self.flops_before_first_step is None:
            return None
        less = self._flops_less(again=True) / self._rate if self.measured is None and self._rate is not None else 0.0
        return self.seconds_before_first_step - less + self.tokens / self.tokens_per_second

    @property
    def seconds_before_first_step(self) -> float:
        """Seconds of `flops_before_first_step`; 0 if unknown."""
        before = self.flops_before_first_step
        return before / self._rate if before and self._rate else 0.0

    @property
    def n_priced(self) -> int:
        """Number of devices to pay for; on CPUs, each machine counts once for all of its ranks."""
        layout = self.setting.layout
        return machines(layout, self.device) if self.device.on_cpu else layout.world_size

    @property
    def device_hours(self) -> float | None:
        """Hours of the run times the number of its devices; None if unknown."""
        return None if self.seconds is None else self.seconds / 3600 * self.n_priced

    @property
    def cost(self) -> float | None:
        """Price of the run; None if unknown."""
        return None if self.price is None or self.device_hours is None else self.price * self.device_hours

    # ------------------------------------------------------------------------------------------ disk

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights in training, including an adapter's; a tied head counts once."""
        return held_weights_bytes(self.parameters, self.trained)

    @property
    def optimizer_state_bytes(self) -> int:
        return trained_state_bytes(self.parameters, self.train.optimizer, self.trained, self.train.optimizer_state)

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint: weights, optimizer state and, if the run keeps one, the weights' average."""
        return checkpoint_bytes(self.setting)

    @property
    def most_checkpoints(self) -> int | None:
        """Maximum number of checkpoints with optimizer state on disk: the newest `keep_checkpoints`, the best, one
        being written, and the permanent ones at multiples of `keep_every`. None if `keep_every` is set and the run's
        length is unknown."""
        train = self.train
        moving = train.keep_checkpoints + 2
        if not train.keep_every:
            return moving
        if self.steps is None:
            return None
        kept = self.steps // lcm(train.keep_every, train.checkpoint_every)
        at_the_end = self.steps % train.keep_every == 0 and self.steps % train.checkpoint_every != 0
        return moving + kept + at_the_end

    @property
    def weights_only_at_peak(self) -> int:
        """Maximum number of weights-only checkpoints at the peak of disk use, with `most_checkpoints` full checkpoints.

        If evaluations fall between saves, `keep_checkpoints` such checkpoints hold the best weights so far. With
        `keep_every`, one more holds the weights of step 0. At other times, up to two more exist, but fewer full
        checkpoints.
        """
        train = self.train
        return bool(train.keep_every) + (train.keep_checkpoints if train.evaluate_every % train.checkpoint_every else 0)

    @property
    def checkpoints_bytes(self) -> int | None:
        if self.most_checkpoints is None:
            return None
        return self.most_checkpoints * self.checkpoint_bytes + self.weights_only_at_peak * self.weights_bytes

    @property
    def shard_bytes_per_token(self) -> int:
        return 2 if self.setting.model.vocab_size <= 2**16 else 4

    @property
    def shards_bytes(self) -> int | None:
        """Bytes of the training tokens in shards on disk; None if the number of tokens is unknown."""
        return None if self.data.train_tokens is None else self.data.train_tokens * self.shard_bytes_per_token


def plan(
    recipe: Recipe,
    data: DataSize = UNKNOWN_SIZE,
    *,
    steps_reason: str | None = None,
    device: Device | None = None,
    n_ranks: int = 1,
    utilization: float = UTILIZATION,
    apply: Apply | None = None,
) -> Plan:
    """Estimate the FLOPs, memory, time and disk space of training `recipe`.

    Args:
        data: size of the training split.
        steps_reason: clause that explains the number of steps; by default, it names the setting that limits them.
        device: the kind of device; by default, this machine's CPU.
        n_ranks: number of devices; `train.parallel` decides how they divide model and batches.
        utilization: share of the device's FLOP/s that the step reaches.
        apply: returns the recipe with recommended overrides applied; by default, `recipe_with(recipe)`.

    Raises:
        UserError: the vocabulary size is unknown, the training split is shorter than one window, the recipe cannot
            run on this many devices, or the recipe of a teacher cannot be read.
    """
    device, model, train = device or this_cpu(), recipe.model, recipe.train
    counted = replace(data, train_tokens=None) if recipe.data.records else data  # steps count records, not windows
    steps, reason = planned_steps(train, recipe.row_length, counted)
    parameters, layout = count_parameters(model), layout_of(recipe, n_ranks, device)
    return Plan(
        recipe=recipe,
        parameters=parameters,
        work=training_work(recipe),
        steps=steps,
        steps_reason=steps_reason or reason,
        data=data,
        setting=device_setting(recipe, device, layout),
        device=device,
        utilization=utilization,
        apply=apply,
    )
