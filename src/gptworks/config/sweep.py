"""Settings of a sweep, which searches for better settings of a recipe."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from gptworks.config.base import Free, PositiveInt, Section

MOST_STEPS = 10**9


class SweepRange(Section):
    """The values that a sweep tries for one setting: numbers from low to high, or choices."""

    low: Free[int | float | None] = Field(
        None, description="Smallest number. If low, high and step are integers, only integers are tried."
    )
    high: Free[int | float | None] = Field(None, description="Largest number.")
    log: Free[bool] = Field(False, description="Draw numbers evenly on a logarithmic scale.")
    step: Free[Annotated[int, Field(gt=0)] | Annotated[float, Field(gt=0)] | None] = Field(
        None, description="Try only low plus multiples of this."
    )
    choices: Free[Annotated[tuple[bool | int | float | str | None, ...], Field(max_length=10_000)] | None] = Field(
        None, description="The values to try, in place of a range."
    )

    @property
    def whole(self) -> bool:
        """Whether the sweep tries only the integers of a range; false for `choices`."""
        return all(isinstance(value, int) for value in (self.low, self.high, 1 if self.step is None else self.step))

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.choices is not None:
            if self.log or (self.low, self.high, self.step) != (None, None, None):
                raise ValueError("choices is set with low, high, log or step: give only choices, or a range")
            if len(set(map(repr, self.choices))) != len(self.choices) or len(self.choices) < 2:
                raise ValueError(f"choices={list(self.choices)}: give at least two different ones")
            return self
        if self.low is None or self.high is None:
            raise ValueError("neither choices nor both of low and high are set: say what to try")
        if self.low >= self.high:
            raise ValueError(f"low={self.low:g} is not below high={self.high:g}: exchange them")
        if self.log and self.low <= 0:
            raise ValueError(f"low={self.low:g} with log=true: raise low above 0, or leave log out")
        if self.step is not None:
            if self.log:
                raise ValueError(f"step={self.step:g} with log=true: a logarithmic range has no step; drop one of them")
            n_steps = (self.high - self.low) / self.step
            if n_steps > MOST_STEPS:
                raise ValueError(
                    f"step={self.step:g} makes more than {MOST_STEPS:,} values between low={self.low:g} and "
                    f"high={self.high:g}: increase it, or leave it out"
                )
            if abs(n_steps - round(n_steps)) > 1e-9 * n_steps:
                raise ValueError(
                    f"step={self.step:g} does not divide high - low = {self.high:g} - {self.low:g}: change one of them"
                )
        return self


class SweepConfig(Section):
    """A search for better settings: trials of the recipe, each judged by its best validation loss."""

    ranges: Free[dict[str, SweepRange]] = Field(
        min_length=1, description="The values to try by path of the setting, such as train.learning_rate."
    )
    n_trials: Free[PositiveInt] = Field(20, le=1_000_000, description="Number of trials, interrupted sweeps included.")
    startup_trials: Free[PositiveInt] = Field(
        5,
        le=1_000_000,
        description="First trials, drawn at random and trained to the end, from which sampler and pruner learn.",
    )
    pruner: Free[Literal["median", "none"]] = Field(
        "median",
        description="median: stop a trial whose best loss is above the median of earlier trials at the same step.",
    )
    seed: Free[int] = Field(0, ge=0, lt=2**32, description="Seed of the sampler.")
