"""Settings of a run's length and batches."""

import itertools
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from gptworks.config.base import Fixed, Free, PositiveInt, PositiveTime, Section, Steering

IGNORED = -100
"""Target of a token that the loss ignores: the default `ignore_index` of `torch.nn.functional.cross_entropy`."""


FUTURE_WEIGHT = 0.3
"""Default loss weight of each token beyond the next; DeepSeek-V3's training began with this weight."""

Weight = Annotated[float, Field(ge=0, le=1000)]


def _whole(number: Any) -> Any:
    if isinstance(number, float) and not number.is_integer():
        raise ValueError(f"{number:g} is no whole number, and no share between 0 and 1 of a run with max_steps")
    return number


OrShare = Annotated[
    PositiveInt, BeforeValidator(_whole), WithJsonSchema({"type": "number", "exclusiveMinimum": 0, "maximum": 10**9})
]
"""A whole number that a recipe may give as a share; see `in_whole_numbers`."""
_IN_STAGES = ("smaller_batches", "shorter_contexts")


def in_whole_numbers(given: Mapping[str, Any], context_length: int) -> dict[str, Any]:
    """Return the settings of growing batches and contexts, with shares converted to steps and tokens. A pair is dropped
    if its share of the run ends at step 0 or at the step of the pair before it, or if its length is not below the
    context. Raises ValueError for a share of the run without `max_steps`, or a share of the context that is not a whole
    number of tokens."""
    steps = given.get("max_steps")
    found = {name: _in_steps(name, given[name], steps) for name in _IN_STAGES if _is_pairs(given.get(name))}
    if (contexts := found.get("shorter_contexts")) is not None:
        lengths = [(until, _tokens(length, context_length)) for until, length in contexts]
        found["shorter_contexts"] = [
            (until, length) for until, length in lengths if not isinstance(length, int) or length < context_length
        ]
    return found


def without_shares(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without growing batches and contexts that have shares. Shares can be converted only if the
    other sections are valid."""
    return {
        name: value
        for name, value in given.items()
        if name not in _IN_STAGES or not _is_pairs(value) or not any(map(_is_share, itertools.chain(*value)))
    }


def _is_pairs(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(one, list | tuple) and len(one) == 2 for one in value)


def _is_share(number: Any) -> bool:
    return isinstance(number, float) and 0 < number < 1


def _in_steps(name: str, pairs: Any, max_steps: Any) -> list[tuple[Any, Any]]:
    found, last = list[tuple[Any, Any]](), 0
    for until, size in pairs:
        steps = _steps(name, until, max_steps)
        if steps is until or steps != last:
            found.append((steps, size))
        last = steps
    return found


def _steps(name: str, until: Any, max_steps: Any) -> Any:
    if not _is_share(until):
        return until
    if max_steps is None:
        raise ValueError(f"{name} has {until:g}, a share of max_steps: set max_steps, or give a number of steps")
    known = max_steps if isinstance(max_steps, int) else 0  # an invalid max_steps has its own error
    return math.floor(round(until * max(0, known), 6))


def _tokens(length: Any, context_length: int) -> Any:
    if not _is_share(length):
        return length
    tokens = length * context_length
    if tokens % 1:
        raise ValueError(
            f"shorter_contexts has {length:g} of model.context_length={context_length}, which is {tokens:g} tokens: "
            f"give a share that is a whole number of them, such as 0.5"
        )
    return int(tokens)


def computes_again(activation_checkpointing: str, layer: int) -> bool:
    """Return whether the backward pass recomputes a layer: all with `block`, every second one with `selective`."""
    return activation_checkpointing == "block" or (activation_checkpointing == "selective" and layer % 2 == 0)


class ParallelConfig(Section):
    """How the processes of a run divide its work; the launcher sets their number."""

    strategy: Free[Literal["auto", "ddp", "fsdp"]] = Field(
        "auto",
        description="ddp: the complete model on each device, with gradients reduced. fsdp: weights, gradients and "
        "optimizer state sharded (Zhao et al., 2023). auto: fsdp where a step of the complete model does not fit.",
    )
    tensor_parallel: Free[PositiveInt] = Field(
        1,
        le=65_536,
        description="Devices among which each block's heads and inner width are split (Shoeybi et al., 2019).",
    )
    reshard_after_forward: Free[bool] = Field(
        True, description="fsdp: free a block's gathered weights after its forward pass and gather them again later."
    )
    timeout_seconds: Free[PositiveTime] = Field(
        600, description="Seconds after which a rank that is silent, or for which all others wait, ends the run."
    )


def _least_batch(given: dict[str, Any]) -> Any:
    smaller = given.get("smaller_batches")
    return smaller[0][1] if smaller else given["batch_size"]


class BatchSettings(Section):
    """Length and batches of a run, which ends at max_steps, epochs or max_minutes, whichever comes first."""

    max_steps: Steering[PositiveInt | None] = Field(None, description="Optimizer steps.")
    epochs: Steering[float | None] = Field(
        None,
        gt=0,
        le=10**9,
        description="Passes over the training text. Default if no length is set: 4; from trained weights: 2.",
    )
    max_minutes: Steering[PositiveTime | None] = Field(
        None,
        description="Minutes in training steps; evaluations, samples and saves do not count. A run with this limit is "
        "not repeatable.",
    )

    batch_size: Steering[PositiveInt] = Field(32, le=10_000_000, description="Sequences in one optimizer step.")
    smaller_batches: Fixed[tuple[tuple[OrShare, PositiveInt], ...]] = Field(
        (),
        max_length=100,
        description="Growing batches (Smith et al., 2018): pairs of a step, or share of max_steps, and the batch size "
        "before it, both ascending. Afterwards the size is batch_size. The learning rates do not change.",
    )
    shorter_contexts: Fixed[tuple[tuple[OrShare, OrShare], ...]] = Field(
        (),
        max_length=100,
        description="Growing contexts (Li et al., 2022): pairs of a step, or share of max_steps, and the length before "
        "it, in tokens or as a share of the context, both ascending. Windows are cut into rows of this length, so "
        "every step has equally many tokens; up to 256 rows of a step come from different windows.",
    )
    row_tokens: Fixed[PositiveInt | None] = Field(
        None,
        description="Length in tokens of a row of conversations, and the most of a preference pair's. Longer ones lose "
        "their end. Shorter rows save memory and time. Default: model.context_length.",
    )
    micro_batch_size: Free[PositiveInt] = Field(
        default_factory=_least_batch,
        le=10_000_000,
        description="Sequences in one forward and backward pass; divides batch_size. Gradients are accumulated. Each "
        "of several devices takes this many, or its part of the batch if that is less.",
    )
    parallel: ParallelConfig = Field(ParallelConfig(), description="How several devices share the run.")
    activation_checkpointing: Free[Literal["none", "selective", "block"]] = Field(
        "none",
        description="block: keep only each block's input and recompute the block in the backward pass. selective: the "
        "same for every second block. Gradients are identical; block costs a quarter to a third more computation, "
        "selective half of that.",
    )
    compile: Free[Literal["auto", "none", "block"]] = Field(
        "auto", description="block: compile each block with torch.compile. auto: only on CUDA, if it pays."
    )
    deterministic: Free[bool] = Field(
        True,
        description="Compute gradients on CUDA with the same bits at each run, so that a resumed run is exact. false: "
        "attention adds them up in whatever order they are ready, which was up to a fifth faster. Other devices "
        "compute the same bits in any case.",
    )
    router_balance_weight: Steering[float] = Field(
        0.01, ge=0, description="Weight of the experts' load-balancing loss (Fedus et al., 2021)."
    )
    router_z_weight: Steering[float] = Field(
        0.001, ge=0, description="Weight of the routers' z-loss (Zoph et al., 2022)."
    )

    future_weights: Steering[tuple[Weight, ...]] = Field(
        (),
        description="Weights of the mean losses of tokens beyond the next, nearest first, if model.n_future_tokens is "
        f"more than 1. Default: {FUTURE_WEIGHT} each; none with an adapter, which trains no heads.",
    )
    future_weights_fall: Steering[bool] = Field(
        False, description="Let `future_weights` fall linearly to 0 over the run, as in modded-nanogpt."
    )

    @model_validator(mode="after")
    def _check_batches(self) -> Self:
        if self.max_steps is None and self.epochs is None and self.max_minutes is None:
            raise ValueError("the run has no end: set one of max_steps, epochs, max_minutes")
        self._multiple("batch_size", "micro_batch_size", "choose a micro_batch_size that divides it")
        self._check_smaller_batches()
        if self.future_weights_fall and not self.future_weights:
            raise ValueError(
                "future_weights_fall=true without tokens beyond the next: set model.n_future_tokens to 2 or more, or "
                "leave it out"
            )
        return self

    def _check_smaller_batches(self) -> None:
        if self.smaller_batches and self.epochs is not None:
            raise ValueError(
                f"smaller_batches and epochs={self.epochs:g}: sizes depend on steps; set max_steps, not epochs"
            )
        until = size = 0
        for step, smaller in self.smaller_batches:
            if step <= until or smaller <= size or smaller >= self.batch_size:
                raise ValueError(
                    f"smaller_batches has [{step}, {smaller}] after [{until}, {size}] and before batch_size="
                    f"{self.batch_size}: steps and sizes must ascend, and batch_size is the largest"
                )
            if smaller % self.micro_batch_size:
                raise ValueError(
                    f"smaller_batches has {smaller}, which is not a multiple of micro_batch_size="
                    f"{self.micro_batch_size}: a step is a whole number of micro-batches"
                )
            until, size = step, smaller

    def future_weights_at(self, share_done: float) -> tuple[float, ...]:
        """Return the loss weight of each token beyond the next, when this share of the run (0 to 1) is done."""
        factor = 1 - share_done if self.future_weights_fall else 1.0
        return tuple(factor * weight for weight in self.future_weights)

    def row_length(self, context_length: int) -> int:
        """Return the length of a training row in tokens after the steps of `shorter_contexts`."""
        return min(self.row_tokens or context_length, context_length)

    def in_words(self, row_length: int, rows_per_sample: int = 1) -> str:
        """Return as text the sequences and tokens of a step, such as `8 up to step 100, 16 × 1,024 in rows of 256 up to
        step 300`."""
        smaller = "".join(f"{size:,} up to step {until:,}, " for until, size in self.smaller_batches)
        rows = ", ".join(f"{length:,} up to step {until:,}" for until, length in self.shorter_contexts)
        sequences = f"{smaller}{self.batch_size:,}" + (f" × {rows_per_sample}" if rows_per_sample > 1 else "")
        return f"{sequences} × {row_length:,}" + (f" in rows of {rows}" if rows else "")

    def length_at(self, step: int, context_length: int) -> int:
        """Return the length of a row, in tokens, in optimizer step `step`, counted from 0."""
        return next((length for until, length in self.shorter_contexts if step < until), context_length)

    def samples_by_length(self, steps: int, context_length: int) -> dict[int, int]:
        """Return, by row length, the number of windows of `context_length` tokens that the first `steps` steps read."""
        found, before = dict[int, int](), 0
        for until, length in (*self.shorter_contexts, (steps, context_length)):
            samples = self.samples_before(min(until, steps))
            found[length], before = samples - before, samples
        return found

    def batch_size_at(self, step: int) -> int:
        """Return the number of samples in optimizer step `step`, counted from 0."""
        return next((size for until, size in self.smaller_batches if step < until), self.batch_size)

    def samples_before(self, step: int) -> int:
        """Return the number of samples in the first `step` optimizer steps."""
        samples = first = 0
        for until, size in self.smaller_batches:
            samples += size * (min(until, step) - min(first, step))
            first = until
        return samples + self.batch_size * max(0, step - first)

    def steps_with(self, samples: int) -> int:
        """Return the smallest number of optimizer steps that together read at least `samples` samples."""
        steps = 0
        for until, size in self.smaller_batches:
            needed = steps + max(0, math.ceil((samples - self.samples_before(steps)) / size))
            if needed <= until:
                return needed
            steps = until
        return steps + max(0, math.ceil((samples - self.samples_before(steps)) / self.batch_size))

    @property
    def common_batch_size(self) -> int:
        """Greatest common divisor of the batch sizes of all steps."""
        return math.gcd(self.batch_size, *(size for _, size in self.smaller_batches))

    @property
    def accumulation_steps(self) -> int:
        """Number of micro-batches in an optimizer step of `batch_size` samples on one device."""
        return self.batch_size // self.micro_batch_size

    def rank_micro_batch_size(self, n_ranks: int) -> int:
        """Return the micro-batch size of each device if `n_ranks` devices divide the batch."""
        return max(1, min(self.micro_batch_size, self.common_batch_size // n_ranks))
