"""Counts of the documents that filters kept, changed and dropped, with examples of dropped ones."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

_EXAMPLES, _EXAMPLE_CHARACTERS = 3, 200
Count = Annotated[int, Field(ge=0, le=10**18)]
Example = tuple[Annotated[str, Field(max_length=16)], Annotated[str, Field(max_length=_EXAMPLE_CHARACTERS)]]
"""The hash of a document and the beginning of its text."""


class Tally(BaseModel):
    """A number of documents, and the total bytes of their text."""

    model_config = ConfigDict(extra="forbid")

    documents: Count = 0
    bytes: Count = 0

    def add(self, documents: int, n_bytes: int) -> None:
        self.documents += documents
        self.bytes += n_bytes


class DroppedCounts(Tally):
    """The number and bytes of the documents dropped for one reason, with examples."""

    examples: list[Example] = Field(default_factory=list, max_length=_EXAMPLES)
    """The dropped documents with the smallest hashes, so that the order in which counts are merged does not matter."""

    def add_examples(self, examples: Iterable[Example]) -> None:
        self.examples = sorted({*self.examples, *examples})[:_EXAMPLES]


class FilterCounts(BaseModel):
    """Counts of the documents that one filter saw, kept, changed and dropped."""

    model_config = ConfigDict(extra="forbid")

    type: str = Field(max_length=100)
    seen: Tally = Field(default_factory=Tally)
    kept: Tally = Field(default_factory=Tally)
    """Kept documents; their bytes are counted after the filter has changed them."""
    changed: Tally = Field(default_factory=Tally)
    """Kept documents that the filter changed; their bytes are counted before the change."""
    dropped: dict[str, DroppedCounts] = Field(default_factory=dict)

    def keep(self, documents: int, seen_bytes: int, kept_bytes: int, changed: bool = False) -> None:
        self.seen.add(documents, seen_bytes)
        self.kept.add(documents, kept_bytes)
        if changed:
            self.changed.add(documents, seen_bytes)

    def drop(self, reason: str, text: str, seen_bytes: int) -> None:
        self.seen.add(1, seen_bytes)
        dropped = self.dropped.setdefault(reason, DroppedCounts())
        dropped.add(1, seen_bytes)
        hashed = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
        if len(dropped.examples) < _EXAMPLES or hashed < dropped.examples[-1][0]:
            shown = text[:_EXAMPLE_CHARACTERS].encode("utf-8", "replace").decode("utf-8")
            dropped.add_examples([(hashed, shown)])

    def merge(self, other: "FilterCounts") -> None:
        """Add the counts that the same filter made of other documents."""
        for mine, its in ((self.seen, other.seen), (self.kept, other.kept), (self.changed, other.changed)):
            mine.add(its.documents, its.bytes)
        for reason, its_dropped in other.dropped.items():
            dropped = self.dropped.setdefault(reason, DroppedCounts())
            dropped.add(its_dropped.documents, its_dropped.bytes)
            dropped.add_examples(its_dropped.examples)
        self.dropped = dict(sorted(self.dropped.items()))


def merged(parts: Iterable[Sequence[FilterCounts]]) -> tuple[FilterCounts, ...]:
    """Return each filter's counts, summed over several parts of the documents, which may be in any order."""
    total: tuple[FilterCounts, ...] = ()
    for part in parts:
        total = total or tuple(FilterCounts(type=one.type) for one in part)
        for mine, its in zip(total, part, strict=True):
            mine.merge(its)
    return total
