"""Several datasets in one run, each with its weight."""

from collections import Counter
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from gptworks.config.base import MOST_NAME_CHARACTERS, Fixed, Free, Measured, Place, Section, ShortPath, Steering
from gptworks.config.cleaning import FilterConfig, check_order
from gptworks.config.sources import RecordsSource, SourceConfig

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
Weight = Annotated[float, Field(ge=0, le=10**9)]


class MixtureMember(Section):
    """A dataset of a mixture: a folder that was built, or sources of text."""

    name: Free[str] = Field(max_length=MOST_NAME_CHARACTERS, pattern=NAME_PATTERN)
    weight: Fixed[Weight] = Field(
        1.0, description="Its share of the samples is this over the sum of all. 0: it is read from data.anneal on."
    )
    dataset: Free[Annotated[ShortPath | None, Place.PATH]] = Field(
        None, description="A folder of `gptworks data build`; or one of `gptworks data mix`, which holds this name."
    )
    sources: Measured[tuple[SourceConfig, ...]] = ()
    clean: Measured[Annotated[tuple[FilterConfig, ...], AfterValidator(check_order)]] = Field(
        (), description="Filters of the sources' text, in order."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if bool(self.sources) == (self.dataset is not None):
            raise ValueError(f"{self.name}: give either dataset, a folder that was built, or sources")
        if self.clean and not self.sources:
            raise ValueError(f"{self.name}: clean is for sources, and a dataset that was built stays as it is")
        if any(isinstance(source, RecordsSource) for source in self.sources):
            raise ValueError(f"{self.name}: a mixture is of text; conversations and preferences go into data.sources")
        return self


class Anneal(Section):
    """Other weights from one sample on, near the end of the run. A resumed run cannot change what it has read."""

    weights: Steering[dict[str, Weight]] = Field(
        description="By the datasets' names. One that is not named is read no more."
    )
    share: Steering[float | None] = Field(
        None, gt=0, lt=1, description="Of train.max_steps, at its end. The run's other lengths must not be set."
    )
    from_sample: Steering[int | None] = Field(
        None, gt=0, lt=2**53, description="Counted from the start of the run: train.batch_size a step."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.share is None) == (self.from_sample is None):
            raise ValueError("give either share (of the run's steps) or from_sample: it says where the weights change")
        return self


def check_mixture(members: tuple[MixtureMember, ...], anneal: Anneal | None) -> None:
    """Refuse a mixture whose names or weights make no sense.

    Raises:
        ValueError: two datasets of one name; weights that give one or all no samples; or weights of an unknown name.
    """
    names = [member.name for member in members]
    if twice := [name for name, n in Counter(names).items() if n > 1]:
        raise ValueError(f"mixture has two datasets of the name {twice[0]}: give each its own")
    last = {} if anneal is None else anneal.weights
    if unknown := [name for name in last if name not in names]:
        raise ValueError(f"anneal.weights has {unknown[0]}, and mixture has {', '.join(names) or 'no datasets'}")
    if anneal is not None and not any(last.values()):
        raise ValueError("anneal.weights are all 0: give one dataset at least a weight above 0")
    if members and not any(member.weight for member in members):
        raise ValueError("the weights of mixture are all 0: give one dataset at least a weight above 0")
    if never := [member.name for member in members if not member.weight and not last.get(member.name)]:
        raise ValueError(
            f"{never[0]} has weight=0 and no weight in anneal.weights, so nothing of it is read: give it one, or leave "
            f"it out"
        )
