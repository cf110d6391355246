"""What a sweep tries."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from gptworks.config.base import Free, PositiveInt, Section

MOST_STEPS = 10**9


class SweepRange(Section):
    """What a setting may be in a sweep: a number from low to high, or one of some choices."""

    low: Free[int | float | None] = Field(
        None, description="Only whole numbers are tried if low, high and step are whole."
    )
    high: Free[int | float | None] = None
    log: Free[bool] = Field(False, description="Orders of magnitude are equally likely.")
    step: Free[Annotated[int, Field(gt=0)] | Annotated[float, Field(gt=0)] | None] = Field(
        None, description="Only low plus multiples of this are tried."
    )
    choices: Free[Annotated[tuple[bool | int | float | str | None, ...], Field(max_length=10_000)] | None] = None

    @property
    def whole(self) -> bool:
        """Whether it is a range of whole numbers."""
        return all(isinstance(value, int) for value in (self.low, self.high, 1 if self.step is None else self.step))

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.choices is not None:
            if self.log or (self.low, self.high, self.step) != (None, None, None):
                raise ValueError("choices stands with low, high, log or step: give choices alone, or a range")
            if len(set(map(repr, self.choices))) != len(self.choices) or len(self.choices) < 2:
                raise ValueError(f"choices={list(self.choices)}: give at least two, each once")
            return self
        if self.low is None or self.high is None:
            raise ValueError("neither choices nor both of low and high: say what to try")
        if self.low >= self.high:
            raise ValueError(f"low={self.low:g} is not below high={self.high:g}: exchange them, or leave the key out")
        if self.log and self.low <= 0:
            raise ValueError(f"low={self.low:g} with log=true: a logarithm needs a low above 0")
        if self.step is not None:
            if self.log:
                raise ValueError(
                    f"step={self.step:g} with log=true: steps of a logarithm are not equal; drop one of them"
                )
            n_steps = (self.high - self.low) / self.step
            if n_steps > MOST_STEPS:
                raise ValueError(
                    f"step={self.step:g} makes more than {MOST_STEPS:,} values from low={self.low:g} to "
                    f"high={self.high:g}: take a larger one, or leave it out"
                )
            if abs(n_steps - round(n_steps)) > 1e-9 * n_steps:
                raise ValueError(
                    f"step={self.step:g} does not lead from low={self.low:g} to high={self.high:g}: change one"
                )
        return self


class SweepConfig(Section):
    """A search for better settings: trials of the recipe, each judged by its best validation loss."""

    ranges: Free[dict[str, SweepRange]] = Field(
        min_length=1, description="By the setting's path, such as train.learning_rate."
    )
    n_trials: Free[PositiveInt] = Field(20, le=1_000_000, description="Number of trials, interrupted sweeps included.")
    startup_trials: Free[PositiveInt] = Field(
        5,
        le=1_000_000,
        description="Drawn at random and trained to the end; the sampler and the pruner learn from them.",
    )
    pruner: Free[Literal["median", "none"]] = Field(
        "median",
        description="median: stop a trial whose best loss is above the median of the earlier ones at its step.",
    )
    seed: Free[int] = Field(0, ge=0, lt=2**32, description="Seed of the sampler.")
