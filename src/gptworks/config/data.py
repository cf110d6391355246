"""What a run reads, and how it is split."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from gptworks.config.base import Free, Measured, Place, PositiveInt, Repeat, Section, ShortPath, Steering
from gptworks.config.cleaning import FilterConfig, check_order
from gptworks.config.mixture import Anneal, MixtureMember, check_mixture
from gptworks.config.sources import ConversationsSource, PreferencesSource, RecordsSource, SourceConfig


class ValidationSplit(Section):
    """What is held out. Deterministic: it depends on the text alone."""

    fraction: Measured[float] = Field(0.05, gt=0, lt=1, description="Share of the text that is held out.")
    by: Measured[Literal["auto", "document", "tail"]] = Field(
        "auto",
        description="document: whole documents, chosen by a hash of their text. tail: the end of each document. "
        "auto: document where there are at least 20 and one is chosen, else tail.",
    )


class DataConfig(Section):
    sources: Measured[tuple[SourceConfig, ...]] = Field((), description="One dataset is made of all of them.")
    mixture: Measured[tuple[MixtureMember, ...]] = Field((), description="Instead: several datasets, with weights.")
    anneal: Steering[Anneal | None] = Field(None, description="Other weights near the end of the run.")
    clean: Measured[Annotated[tuple[FilterConfig, ...], AfterValidator(check_order)]] = Field(
        (), description="Filters of the sources' text, in order."
    )
    validation: ValidationSplit = ValidationSplit()
    cache_dir: Free[Annotated[ShortPath, Place.PATH]] = Field(
        Path("data"), description="Prepared shards go to a folder of their own below this one."
    )
    shard_tokens: Repeat[PositiveInt] = Field(
        100_000_000,
        description="A shard is closed when it holds this many tokens, or at the end of a part of the work.",
    )
    processes: Free[int] = Field(0, ge=0, le=1024, description="Worker processes for preparing. 0: one for each core.")

    def of_member(self, member: MixtureMember) -> Self:
        """The settings of a dataset of the mixture by itself."""
        return self.model_copy(update={"sources": member.sources, "clean": member.clean, "mixture": (), "anneal": None})

    @property
    def conversations(self) -> tuple[ConversationsSource, ...]:
        """The sources where they are conversations; empty where they are text."""
        return tuple(source for source in self.sources if isinstance(source, ConversationsSource))

    @property
    def texts(self) -> tuple[SourceConfig, ...]:
        """The sources where they are text; empty where they are conversations."""
        return tuple(source for source in self.sources if not isinstance(source, RecordsSource))

    @property
    def preferences(self) -> tuple[PreferencesSource, ...]:
        """The sources where they are pairs of answers; else empty."""
        return tuple(source for source in self.sources if isinstance(source, PreferencesSource))

    @property
    def records(self) -> tuple[ConversationsSource | PreferencesSource, ...]:
        """The sources that hold turns, which a chat template writes."""
        return (*self.conversations, *self.preferences)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if bool(self.sources) == bool(self.mixture):
            raise ValueError(
                "`data.sources` and `data.mixture` are both given: a source may be a dataset of the mixture"
                if self.sources
                else "`data.sources` is empty, and so is `data.mixture`: say where the text is"
            )
        check_mixture(self.mixture, self.anneal)
        if sum(map(bool, (self.conversations, self.preferences, self.texts))) > 1:
            raise ValueError(
                "sources mix text, conversations or preferences: train on the one first, then start from that run"
            )
        if self.clean and (self.records or self.mixture):
            raise ValueError(
                "`data.clean` is for the text of `data.sources`: "
                + ("these are conversations or preferences, leave it out" if self.records else "give it to the members")
            )
        if self.records and self.validation.by == "tail":
            raise ValueError("validation.by=tail and sources of conversations: whole ones are held out; leave it out")
        return self
