"""What a training run comes to before it starts: parameters, FLOPs, memory, steps, time and bytes on disk."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from rich.console import Group, RenderableType

from gptworks.config import Recipe, TrainConfig, computes_again
from gptworks.errors import UserError
from gptworks.plan.arrange import COMPUTE_OPTIMAL_TOKENS_PER_PARAMETER, rank_setting
from gptworks.plan.devices import UTILIZATION, Device, this_cpu
from gptworks.plan.fit import Alternative, Change, alternatives, changes_that_fit, largest_micro_batch
from gptworks.plan.flops import BACKWARD_PER_FORWARD, ForwardFlops, forward_flops
from gptworks.plan.inference import InferenceMemory, inference_memory
from gptworks.plan.memory import ONE_DEVICE, Layout, Peak, Setting, trained_state_bytes, training_peak
from gptworks.plan.objectives import teacher_flops_per_token
from gptworks.plan.params import ParameterCount, count_parameters


@dataclass(frozen=True)
class Measured:
    """What a step came to where it ran."""

    peak_bytes: int
    """Most memory in use: what tensors held on CUDA; on a CPU the growth of the process's resident memory, freed memory
    given back at once."""
    kept_bytes: int
    """The same with what the allocator keeps, as `gptworks train` lets it."""
    tokens_per_second: float


@dataclass(frozen=True)
class Plan:
    """What a run comes to before it starts."""

    name: str
    train: TrainConfig
    parameters: ParameterCount
    forward: ForwardFlops
    """Of one sequence of the training length."""
    steps: int | None
    """Optimizer steps; None where nothing known bounds them."""
    steps_reason: str
    """Which setting gives the steps, or why they are unknown."""
    n_train_tokens: int | None
    setting: Setting
    """The step on each device."""
    device: Device
    utilization: float
    """Share of the device's rate that the step is taken to reach, recomputation included."""
    teacher_flops_per_token: float = 0.0
    """Of the forward pass of a model that is learned from."""
    traced_bytes: int | None = None
    """Peak of the step run on fake tensors."""
    measured: Measured | None = None

    # ------------------------------------------------------------------------------------------ work

    @property
    def flops_per_token(self) -> float:
        """Forward and backward, at the training length, attention dense; a teacher's forward pass too. What is frozen
        counts as the rest."""
        return self.forward.training_per_token_dense + self.teacher_flops_per_token

    @property
    def tokens_per_step(self) -> int:
        """Every row at the full context, both answers of a pair counted."""
        return self.train.batch_size * self.setting.rows_per_sample * self.setting.model.context_length

    @property
    def tokens(self) -> int | None:
        """Tokens that the run reads, repeats included."""
        return None if self.steps is None else self.steps * self.tokens_per_step

    @property
    def flops_per_step(self) -> float:
        return self.flops_per_token * self.tokens_per_step

    @property
    def total_flops(self) -> float | None:
        return None if self.steps is None else self.steps * self.flops_per_step

    @property
    def flops_by_part(self) -> dict[str, tuple[float, float]]:
        """FLOPs a token of each kind of product, forward and backward."""
        f = self.forward
        parts = {
            "query, key, value": f.query + f.key + f.value,
            "scores and weighted sum": f.attention_dense,
            "output projection": f.out,
            "MLP": f.mlp,
            "head": f.head,
        }
        return {part: (n / f.length, BACKWARD_PER_FORWARD * n / f.length) for part, n in parts.items()}

    @property
    def tokens_per_parameter(self) -> float | None:
        return None if self.tokens is None else self.tokens / self.parameters.total

    @property
    def compute_optimal_tokens(self) -> int:
        """About as many tokens as a model of this size deserves (Hoffmann et al., 2022)."""
        return COMPUTE_OPTIMAL_TOKENS_PER_PARAMETER * self.parameters.total

    # ---------------------------------------------------------------------------------------- memory

    @cached_property
    def peak(self) -> Peak:
        """The most that each device holds."""
        return training_peak(self.setting)

    @property
    def step_bytes(self) -> int:
        """The peak without a checkpoint being written: what a trace or a measurement of `one_step` should show."""
        return training_peak(replace(self.setting, saves=False, averages=False)).total_bytes

    @property
    def one_step(self) -> TrainConfig:
        """The training section cut down to one micro-batch, or to two where a step has several."""
        micro = self.setting.micro_batch_size * self.setting.rows_per_sample
        batch = micro * (2 if self.setting.accumulates else 1)
        return self.train.model_copy(update={"batch_size": batch, "micro_batch_size": micro})

    @property
    def fits(self) -> bool:
        return self.peak.total_bytes <= self.device.memory_bytes

    @cached_property
    def largest_micro_batch_size(self) -> int:
        """The most sequences at a time whose step the device holds; 0 where one is too many."""
        return largest_micro_batch(self.setting, self.device.memory_bytes)

    @cached_property
    def changes(self) -> list[Change]:
        """What would make the run fit, where it does not."""
        return [] if self.fits else changes_that_fit(self.setting, self.device, self.device.memory_bytes)

    @cached_property
    def alternatives(self) -> list[Alternative]:
        """The same step in each precision, with and without checkpointing, sharded and not."""
        return alternatives(self.setting, ("fp32", "bf16") if self.device.on_cpu else ("fp32", "bf16", "fp16"))

    @cached_property
    def inference(self) -> list[InferenceMemory]:
        return inference_memory(self.setting.model)

    # ------------------------------------------------------------------------------------------ time

    @property
    def tokens_per_second(self) -> float | None:
        """Measured; or of all devices together at the utilization; None where the device's rate is unknown."""
        if self.measured is not None:
            return self.measured.tokens_per_second
        rate = self.device.flops(self.setting.precision)
        if rate is None:
            return None
        blocks, n_layers = self.forward.total_dense - self.forward.head, self.setting.model.n_layers
        n_again = sum(computes_again(self.setting.checkpointing, layer) for layer in range(n_layers))
        again = blocks * n_again / n_layers
        flops_per_token = self.flops_per_token + again / self.forward.length
        return rate * self.utilization * self.setting.layout.world_size / flops_per_token

    @property
    def seconds(self) -> float | None:
        """Of all training steps; evaluation, samples and checkpoints are not counted."""
        if self.tokens is None or self.tokens_per_second is None:
            return None
        return self.tokens / self.tokens_per_second

    # ------------------------------------------------------------------------------------------ disk

    @property
    def weights_bytes(self) -> int:
        """Weights in fp32, a tied head once, an adapter beside them; the file adds a header of some kilobytes."""
        return 4 * (self.parameters.total + (0 if self.setting.trained is None else self.setting.trained.added))

    @property
    def n_trained(self) -> int:
        """Parameters that are trained: all, or an adapter's, or what is not frozen."""
        return self.parameters.total if self.setting.trained is None else self.setting.trained.parameters

    @property
    def optimizer_state_bytes(self) -> int:
        return trained_state_bytes(self.parameters, self.train.optimizer, self.setting.trained)

    @property
    def checkpoint_bytes(self) -> int:
        """Weights, optimizer state and, where it is kept, the weights' average."""
        average = 4 * self.n_trained if self.setting.averages else 0
        return self.weights_bytes + average + self.optimizer_state_bytes

    @property
    def checkpoints_bytes(self) -> int:
        """Of the newest that are kept, the best, and one being written."""
        return (self.train.keep_checkpoints + 2) * self.checkpoint_bytes

    @property
    def shard_bytes_per_token(self) -> int:
        return 2 if self.setting.model.vocab_size <= 2**16 else 4

    @property
    def shards_bytes(self) -> int | None:
        """Training tokens on disk."""
        return None if self.n_train_tokens is None else self.n_train_tokens * self.shard_bytes_per_token

    # ---------------------------------------------------------------------------------------- output

    def to_json(self) -> dict[str, Any]:
        """Stable keys; null where a figure is unknown before the run."""
        from gptworks.plan.run_tables import plan_json

        return plan_json(self)

    def to_markdown(self) -> str:
        """The plan as tables."""
        from gptworks.plan.run_tables import tables

        body = "\n\n".join(table.markdown() for table in tables(self))
        return f"# {self.name}: plan\n\n{body}\n"

    def __rich__(self) -> RenderableType:
        from gptworks.plan.run_tables import tables

        return Group(*(table.rich() for table in tables(self)))


def plan(
    recipe: Recipe,
    n_train_tokens: int | None = None,
    *,
    samples_per_epoch: int | None = None,
    device: Device | None = None,
    layout: Layout = ONE_DEVICE,
    utilization: float = UTILIZATION,
) -> Plan:
    """What training `recipe` comes to.

    Args:
        n_train_tokens: the size of its prepared training split, if known.
        samples_per_epoch: rows or pairs of it, if known; None: windows of the text.
        device: what it runs on; None: this machine's CPU.
        layout: how many devices, and how model and batches lie on them.
        utilization: share of the device's rate that the step reaches.

    Raises:
        UserError: the vocabulary is not known yet, the training split is shorter than one window, or the batch or the
            model cannot be divided among the devices.
    """
    device, model, train = device or this_cpu(), recipe.model, recipe.train
    windows = samples_per_epoch is None and not recipe.data.records
    steps, reason = planned_steps(
        train, model.context_length, n_train_tokens if windows else None, windows_per_epoch=samples_per_epoch
    )
    return Plan(
        name=recipe.name,
        train=train,
        parameters=count_parameters(model),
        forward=forward_flops(model),
        steps=steps,
        steps_reason=reason,
        n_train_tokens=n_train_tokens,
        setting=rank_setting(recipe, device, layout),
        teacher_flops_per_token=teacher_flops_per_token(recipe),
        device=device,
        utilization=utilization,
    )


def planned_steps(
    train: TrainConfig, context_length: int, n_train_tokens: int | None, windows_per_epoch: int | None = None
) -> tuple[int | None, str]:
    """Optimizer steps and the setting that gives them: the first reached of max_steps and epochs, as far as known.

    An epoch visits each window of `gptworks.data.batches.Batches` once, or `windows_per_epoch` rows that are cut
    otherwise; a run is a whole number of steps.
    """
    if windows_per_epoch is None and n_train_tokens is not None and n_train_tokens <= context_length:
        raise UserError(
            f"n_train_tokens={n_train_tokens} is shorter than one window (context_length={context_length}, and one): "
            f"use more text or a shorter context_length"
        )
    bounds: list[tuple[int, str]] = []
    unknown: list[str] = []
    if train.max_steps is not None:
        bounds.append((train.max_steps, f"max_steps={train.max_steps}"))
    windows, text = windows_per_epoch, f"{windows_per_epoch:,} samples" if windows_per_epoch else ""
    if windows is None and n_train_tokens is not None:
        windows, text = max(1, (n_train_tokens - context_length) // context_length), f"{n_train_tokens:,} tokens"
    if train.epochs is not None and windows is not None:
        bounds.append(
            (max(1, round(train.epochs * windows / train.batch_size)), f"epochs={train.epochs:g} over {text}")
        )
    elif train.epochs is not None:
        unknown.append(f"epochs={train.epochs:g} needs the number of training tokens")
    if train.max_minutes is not None:
        unknown.append(f"max_minutes={train.max_minutes:g} depends on the machine's speed")
    if not bounds:
        return None, "; ".join(unknown)
    steps, reason = min(bounds)
    return steps, "; ".join((f"{'at most, by ' if unknown else ''}{reason}", *unknown))
