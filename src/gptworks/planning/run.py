"""Estimate of a training run before it starts: parameters, FLOPs, memory, steps, time and bytes on disk."""

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, lcm

from gptworks.config import Recipe, TrainConfig
from gptworks.planning.advice import Apply, Change, changes_that_fit
from gptworks.planning.arrange import device_setting, layout_of
from gptworks.planning.assumed import COMPUTE_OPTIMAL_TOKENS_PER_PARAMETER
from gptworks.planning.devices import UTILIZATION, Device, this_cpu
from gptworks.planning.fit import Alternative, Need, alternatives, largest_micro_batch, need
from gptworks.planning.host import HostMemory, checkpoint_copy_bytes
from gptworks.planning.inference import InferenceMemory, inference_memory
from gptworks.planning.memory import Peak, training_peak
from gptworks.planning.network import StepTime, collectives, machines, sent_bytes, step_time
from gptworks.planning.params import ParameterCount, count_parameters
from gptworks.planning.setting import ANSWERS_AT_ONCE, Setting
from gptworks.planning.state import held_weights_bytes, trained_state_bytes
from gptworks.planning.steps import UNKNOWN_SIZE, DataSize, planned_steps
from gptworks.planning.trained import Trained, everything
from gptworks.planning.work import Work, training_work


@dataclass(frozen=True)
class Measured:
    """Measured figures of a step."""

    peak_bytes: int | None
    """Peak memory: of tensors on CUDA; on a CPU, the growth of the process's resident memory if freed memory is
    returned at once. None: only the speed was measured."""
    kept_bytes: int | None
    """Peak memory if the allocator keeps freed memory, as in `gptworks train`."""
    tokens_per_second: float


@dataclass(frozen=True)
class Plan:
    """Estimate of a run before it starts."""

    recipe: Recipe
    parameters: ParameterCount
    work: Work
    steps: int | None
    """Number of optimizer steps; None if no known setting limits it."""
    steps_reason: str
    """The setting that decides the number of steps, or why it is unknown."""
    data: DataSize
    setting: Setting
    """The properties of the step on each device."""
    device: Device
    utilization: float
    """Assumed share of the device's rate that the step reaches, recomputation included."""
    apply: Apply | None = None
    """A function that makes a recipe from overrides; None: they are applied to this recipe."""
    tokens_per_sample: float | None = None
    """Average number of tokens read of a pair of answers, with padding, if the rows are known; None: rows of the whole
    context, or rows of unknown lengths."""
    traced_bytes: int | None = None
    """Peak memory of the step, traced on fake tensors."""
    measured: Measured | None = None

    # ------------------------------------------------------------------------------------------ work

    @property
    def train(self) -> TrainConfig:
        return self.recipe.train

    @property
    def trained(self) -> Trained:
        """The part of the model that is trained."""
        return self.setting.trained or everything(self.parameters)

    @property
    def flops_per_token(self) -> float:
        """FLOPs of forward and backward pass at the training length with dense attention, plus the objective's own
        operations."""
        return self.work.per_token

    @property
    def tokens_per_step(self) -> int:
        """Tokens in a step of `batch_size` samples. A pair counts both answers; rows of unknown length count as full
        contexts."""
        return round(self.train.batch_size * self._tokens_per_sample)

    @property
    def _tokens_per_sample(self) -> float:
        if self.tokens_per_sample is not None:
            return self.tokens_per_sample
        return self.setting.objective.rows_per_sample * self.setting.model.context_length

    @property
    def at_most(self) -> bool:
        """Whether tokens, FLOPs and time are upper bounds: rows end with their texts, whose lengths are unknown or
        depend on the model's answers."""
        return self.setting.objective.varying_widths and self.tokens_per_sample is None

    @property
    def tokens(self) -> int | None:
        """Tokens that the run reads, repeats included."""
        return None if self.steps is None else round(self.train.samples_before(self.steps) * self._tokens_per_sample)

    @property
    def epochs_by_dataset(self) -> dict[str, float]:
        """Number of passes over each dataset of a mixture; empty if unknown."""
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
        """FLOPs computed once, over the training split; None if its size is unknown."""
        if not self.work.before_first_step_per_token:
            return 0.0
        if self.data.samples_per_epoch is None:
            return None
        return self.work.before_first_step_per_token * self.data.samples_per_epoch * self._tokens_per_sample

    @property
    def total_flops(self) -> float | None:
        before = self.flops_before_first_step
        if self.full_steps is None or before is None:
            return None
        return before + self.full_steps * self.flops_per_step - self._flops_less(again=False)

    def _flops_less(self, again: bool) -> float:
        """FLOPs that shorter rows save, compared with the same tokens in rows of the whole context.

        Args:
            again: whether to include the FLOPs that activation checkpointing recomputes.
        """
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
    def full_steps(self) -> float | None:
        """Number of steps of `batch_size` that read the run's samples; None if its length is unknown."""
        return None if self.steps is None else self.train.samples_before(self.steps) / self.train.batch_size

    @property
    def flops_by_part(self) -> dict[str, tuple[float, float]]:
        """FLOPs a token of each kind of work, forward and backward; together `flops_per_token`."""
        return {part: (n, self.work.backward[part]) for part, n in self.work.forward.items()}

    @property
    def tokens_per_parameter(self) -> float | None:
        return None if self.tokens is None else self.tokens / self.parameters.total

    @property
    def compute_optimal_tokens(self) -> int:
        """Compute-optimal number of training tokens for this size (Hoffmann et al., 2022)."""
        return COMPUTE_OPTIMAL_TOKENS_PER_PARAMETER * self.parameters.total

    # ---------------------------------------------------------------------------------------- memory

    @cached_property
    def need(self) -> Need:
        """Memory that the run needs on its devices and their hosts."""
        return need(self.setting, self.device)

    @property
    def peak(self) -> Peak:
        """Peak memory of each device."""
        return self.need.peak

    @property
    def step_bytes(self) -> int:
        """Peak memory of a step that writes no checkpoint, as a trace or measurement of `one_step` should show it."""
        return training_peak(replace(self.setting, saves=False, averages=False, shorter_lengths=())).total_bytes

    @property
    def one_step(self) -> TrainConfig:
        """The training section cut down to one micro-batch, or to two if a step has several."""
        micro = self.setting.micro_batch_size * self.setting.objective.rows_per_sample
        batch = micro * (2 if self.setting.accumulates else 1)
        return self.train.model_copy(update={"batch_size": batch, "micro_batch_size": micro})

    @property
    def host(self) -> HostMemory | None:
        """The memory of the fullest node's host; None on a CPU, which is both device and host."""
        return self.need.host

    @property
    def fits(self) -> bool:
        """Whether device and host hold the run."""
        return self.need.fits

    @cached_property
    def largest_micro_batch_size(self) -> int:
        """The largest micro-batch whose step fits on the device; 0 if even one sequence does not."""
        sequences = self.train.common_batch_size // self.setting.layout.data_parallel
        return largest_micro_batch(self.setting, self.device.memory_bytes, sequences)

    @cached_property
    def changes(self) -> list[Change]:
        """Changes with which the run would fit; empty if it fits."""
        ranks = self.setting.layout.world_size
        return [] if self.fits else changes_that_fit(self.recipe, ranks, self.device, self.apply)

    @cached_property
    def alternatives(self) -> list[Alternative]:
        """The same step in each precision, with and without checkpointing, sharded and not."""
        return alternatives(self.recipe, self.setting.layout.world_size, self.device)

    @cached_property
    def inference(self) -> list[InferenceMemory]:
        return inference_memory(self.setting.model)

    # ------------------------------------------------------------------------------------------ time

    @property
    def _rate(self) -> float | None:
        """FLOP/s of all devices together at the utilization. Ranks on one machine's CPU share its rate."""
        rate, layout = self.device.flops(self.setting.precision), self.setting.layout
        n = machines(layout, self.device) if self.device.on_cpu else layout.world_size
        return None if rate is None else rate * self.utilization * n

    @property
    def micro_steps(self) -> int:
        """Number of micro-batches of a step on each rank."""
        return max(1, self.train.batch_size // (self.setting.layout.data_parallel * self.setting.micro_batch_size))

    @cached_property
    def step_time(self) -> StepTime | None:
        """Seconds of computing and communication of a step on each rank, without sampling; None if the device's rate is
        unknown."""
        if self._rate is None:
            return None
        tokens = self.tokens_per_step
        forward = sum(self.work.forward.values()) * tokens / self._rate
        backward = (sum(self.work.backward.values()) + self.work.again_per_token) * tokens / self._rate
        return step_time(self.setting, self.device, self.micro_steps, forward, backward)

    @cached_property
    def sent_bytes(self) -> dict[str, float]:
        """Bytes that each rank sends, and receives, in a step, by kind of tensor; empty for one rank."""
        sent: dict[str, float] = {}
        for one in collectives(self.setting):  # several may send parts of one kind of tensor
            sent[one.what] = sent.get(one.what, 0) + sent_bytes(one, self.setting.layout, self.micro_steps)
        return sent

    @property
    def sampling_seconds_per_step(self) -> float | None:
        """Seconds to sample the answers of a step; None if the device's bandwidth is unknown. Each token of each
        round of answers reads all the weights, in float32, once; its FLOPs are counted with those of the step."""
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
        """Tokens/s: measured, or of all devices at the utilization; None if the device's rate is unknown."""
        if self.measured is not None:
            return self.measured.tokens_per_second
        sampling = self.sampling_seconds_per_step
        if self.step_time is None or sampling is None:
            return None
        return self.tokens_per_step / (self.step_time.total + sampling)

    @property
    def seconds(self) -> float | None:
        """Seconds for all training steps and the single computation before them, without evaluation, samples and
        checkpoints."""
        before = self.flops_before_first_step
        if self.tokens is None or self.tokens_per_second is None or before is None:
            return None
        at_first = before / self._rate if before and self._rate else 0.0
        if self.measured is None and self._rate is not None:
            at_first -= self._flops_less(again=True) / self._rate
        return at_first + self.tokens / self.tokens_per_second

    # ------------------------------------------------------------------------------------------ disk

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights in training, with an adapter's; a tied head counts once. A file adds some kB."""
        return held_weights_bytes(self.parameters, self.trained)

    @property
    def optimizer_state_bytes(self) -> int:
        return trained_state_bytes(self.parameters, self.train.optimizer, self.trained, self.train.optimizer_state)

    @property
    def checkpoint_bytes(self) -> int:
        """Size of a checkpoint: weights, optimizer state and, if kept, the weights' average."""
        return checkpoint_copy_bytes(self.setting)

    @property
    def most_checkpoints(self) -> int | None:
        """Maximum number of checkpoints with optimizer state on disk: the newest, the best, one being written, and with
        `keep_every` the permanent ones at its multiples; None if this depends on an unknown length."""
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
    def most_weights_only(self) -> int:
        """Maximum number of checkpoints on disk with weights only. If evaluations fall between saves: the best so far,
        and the best recorded by each of the newest checkpoints, except by the oldest one, whose best is among
        `most_checkpoints`. With `keep_every`, also the weights of step 0."""
        train = self.train
        return bool(train.keep_every) + (train.keep_checkpoints if train.evaluate_every % train.checkpoint_every else 0)

    @property
    def checkpoints_bytes(self) -> int | None:
        if self.most_checkpoints is None:
            return None
        return self.most_checkpoints * self.checkpoint_bytes + self.most_weights_only * self.weights_bytes

    @property
    def shard_bytes_per_token(self) -> int:
        return 2 if self.setting.model.vocab_size <= 2**16 else 4

    @property
    def shards_bytes(self) -> int | None:
        """Bytes of the training tokens on disk; None if their number is unknown."""
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
        data: the size of the training split.
        steps_reason: the origin of the number of steps, if no setting decides it.
        device: the kind of device; None: this machine's CPU.
        n_ranks: number of devices; `train.parallel` decides how model and batches are divided among them.
        utilization: share of the device's rate that the step reaches.
        apply: makes a recipe from recommended overrides; None: applies them to this recipe.

    Raises:
        UserError: the vocabulary is not known yet, the training split is shorter than one window, or the recipe cannot
            be arranged on this many devices.
    """
    device, model, train = device or this_cpu(), recipe.model, recipe.train
    counted = replace(data, train_tokens=None) if recipe.data.records else data  # an epoch is all records
    steps, reason = planned_steps(train, model.context_length, counted)
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
