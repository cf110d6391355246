"""Settings of the data that a run reads: sources of text, or a mixture of several weighted datasets."""

from collections import Counter
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from gptworks.config.base import (
    Fixed,
    Free,
    Measured,
    Name,
    Place,
    PositiveInt,
    RemotePath,
    Repeat,
    Section,
    ShortPath,
    Steering,
)
from gptworks.config.cleaning import CLEAN, Filters
from gptworks.config.sources import ConversationsSource, PreferencesSource, RecordsSource, SourceConfig


class ValidationSplit(Section):
    """Text held out for validation. The choice is deterministic: it depends only on the text."""

    fraction: Measured[float] = Field(0.05, gt=0, lt=1, description="Share of the text to hold out.")
    by: Measured[Literal["auto", "document", "tail"]] = Field(
        "auto",
        description="document: whole documents, chosen by a hash of their text. tail: the end of each document. "
        "auto: document if there are at least 20 and at least one is chosen, else tail.",
    )


Weight = Annotated[float, Field(ge=0, le=10**9)]


class MixtureMember(Section):
    """A dataset of a mixture: a built folder, or sources of text."""

    name: Free[Name] = Field(description="The name that weights and reports use.")
    weight: Fixed[Weight] = Field(
        1.0, description="Its share of the samples is weight / sum of all weights. 0: not read before data.anneal."
    )
    dataset: Free[Annotated[RemotePath | None, Place.PATH]] = Field(
        None, description="A folder or URL of `gptworks data build`, or of `gptworks data mix` with this name in it."
    )
    sources: Measured[tuple[SourceConfig, ...]] = Field((), description="Sources of text to build it from.")
    clean: Measured[Filters] = CLEAN

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
    """Raise a ValueError if a name occurs twice or is unknown, or a dataset has no weight above 0."""
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


class DataConfig(Section):
    sources: Measured[tuple[SourceConfig, ...]] = Field((), description="Sources to build one dataset from.")
    mixture: Measured[tuple[MixtureMember, ...]] = Field((), description="In place of sources: weighted datasets.")
    anneal: Steering[Anneal | None] = Field(None, description="New weights near the end of the run.")
    clean: Measured[Filters] = CLEAN
    validation: ValidationSplit = Field(ValidationSplit(), description="The held-out text.")
    snippets: Fixed[float] = Field(
        0.0,
        ge=0,
        le=1,
        description="For Python: size of additional training documents as a share of the Python files' size. Each has "
        "statements from inside a training file, so that a model also continues prompts with which few files begin, "
        "such as `for`.",
    )
    cache_dir: Free[Annotated[ShortPath, Place.PATH]] = Field(
        Path("data"), description="Folder for the datasets that are built, each in a folder of its own."
    )
    shard_tokens: Repeat[PositiveInt] = Field(
        100_000_000,
        description="Tokens after which a shard is closed; the last shard of each part of the work may be shorter.",
    )
    processes: Free[int] = Field(0, ge=0, le=1024, description="Worker processes that prepare data. 0: one per core.")

    def of_member(self, member: MixtureMember) -> Self:
        """Return the settings to build one dataset of the mixture."""
        return self.model_copy(update={"sources": member.sources, "clean": member.clean, "mixture": (), "anneal": None})

    @property
    def conversations(self) -> tuple[ConversationsSource, ...]:
        """The sources of conversations."""
        return tuple(source for source in self.sources if isinstance(source, ConversationsSource))

    @property
    def texts(self) -> tuple[SourceConfig, ...]:
        """The sources of text."""
        return tuple(source for source in self.sources if not isinstance(source, RecordsSource))

    @property
    def preferences(self) -> tuple[PreferencesSource, ...]:
        """The sources of preference pairs."""
        return tuple(source for source in self.sources if isinstance(source, PreferencesSource))

    @property
    def records(self) -> tuple[ConversationsSource | PreferencesSource, ...]:
        """The sources of conversations and preference pairs, whose turns a chat template renders."""
        return (*self.conversations, *self.preferences)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if bool(self.sources) == bool(self.mixture):
            raise ValueError(
                "`data.sources` and `data.mixture` are both given: move the sources into a dataset of the mixture"
                if self.sources
                else "`data.sources` and `data.mixture` are both empty: say where the text is"
            )
        check_mixture(self.mixture, self.anneal)
        if sum(map(bool, (self.conversations, self.preferences, self.texts))) > 1:
            raise ValueError(
                "data.sources mixes text, conversations or preferences: train on one kind, then start from that run"
            )
        if self.clean and (self.records or self.mixture):
            raise ValueError(
                "`data.clean` applies to the text of `data.sources`: "
                + ("leave it out for conversations and preferences" if self.records else "move it to the members")
            )
        if self.snippets and (self.records or self.validation.by == "tail"):
            raise ValueError(
                "`data.snippets` needs whole documents of text, and "
                + ("these sources are records" if self.records else "validation.by=tail cuts them: set by=document")
                + ", or remove data.snippets"
            )
        if self.snippets and self.mixture and not any(member.sources for member in self.mixture):
            raise ValueError(
                "`data.snippets` are made while a dataset is built, and all of `data.mixture` are built already: "
                "remove data.snippets"
            )
        if self.records and self.validation.by == "tail":
            raise ValueError("validation.by=tail with sources of records, which are held out as units: leave it out")
        return self
