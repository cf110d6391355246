"""Settings of a mixture, which trains one run on several weighted datasets."""

from collections import Counter
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from gptworks.config.base import MOST_NAME_CHARACTERS, Fixed, Free, Measured, Place, RemotePath, Section, Steering
from gptworks.config.cleaning import FilterConfig, check_order
from gptworks.config.sources import RecordsSource, SourceConfig

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
Weight = Annotated[float, Field(ge=0, le=10**9)]


class MixtureMember(Section):
    """A dataset of a mixture: a built folder, or sources of text."""

    name: Free[str] = Field(
        max_length=MOST_NAME_CHARACTERS, pattern=NAME_PATTERN, description="The name that weights and reports use."
    )
    weight: Fixed[Weight] = Field(
        1.0, description="Its share of the samples is weight / sum of all weights. 0: not read before data.anneal."
    )
    dataset: Free[Annotated[RemotePath | None, Place.PATH]] = Field(
        None,
        description="A folder or URL of `gptworks data build`, or of `gptworks data mix` with this name in it.",
    )
    sources: Measured[tuple[SourceConfig, ...]] = Field((), description="Sources of text to build it from.")
    clean: Measured[Annotated[tuple[FilterConfig, ...], AfterValidator(check_order)]] = Field(
        (), description="Filters for the text of the sources, in order."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if bool(self.sources) == (self.dataset is not None):
            raise ValueError(f"{self.name}: give either dataset (a built folder) or sources")
        if self.clean and not self.sources:
            raise ValueError(f"{self.name}: clean applies only to sources: leave it out for a built dataset")
        if any(isinstance(source, RecordsSource) for source in self.sources):
            raise ValueError(f"{self.name}: a mixture is of text: put conversations and preferences into data.sources")
        return self


class Anneal(Section):
    """New dataset weights near the end of a run. A resumed run cannot change the weights of samples already read."""

    weights: Steering[dict[str, Weight]] = Field(
        description="The new weights by dataset name. A dataset that is not named is no longer read."
    )
    share: Steering[float | None] = Field(
        None, gt=0, lt=1, description="The last share of train.max_steps, which must be the run's only length."
    )
    from_sample: Steering[int | None] = Field(
        None, gt=0, lt=2**53, description="The first sample, counted from the start of the run."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.share is None) == (self.from_sample is None):
            raise ValueError("set either share or from_sample, which say where the weights change")
        return self


def check_mixture(members: tuple[MixtureMember, ...], anneal: Anneal | None) -> None:
    """Check that names are unique and that every dataset is read.

    Raises:
        ValueError: a name occurs twice or is unknown, or a dataset has no weight above 0, or all weights are 0.
    """
    names = [member.name for member in members]
    if twice := [name for name, n in Counter(names).items() if n > 1]:
        raise ValueError(f"mixture has two datasets with the name {twice[0]}: rename one")
    last = {} if anneal is None else anneal.weights
    if unknown := [name for name in last if name not in names]:
        raise ValueError(
            f"anneal.weights has {unknown[0]}, and mixture has {', '.join(names) or 'no datasets'}: correct the name"
        )
    if anneal is not None and not any(last.values()):
        raise ValueError("anneal.weights are all 0: give one dataset at least a weight above 0")
    if members and not any(member.weight for member in members):
        raise ValueError("the weights of mixture are all 0: give one dataset at least a weight above 0")
    if never := [member.name for member in members if not member.weight and not last.get(member.name)]:
        raise ValueError(
            f"{never[0]} has weight=0 and no weight in anneal.weights, so it is never read: give it a weight, or "
            f"leave it out"
        )
