"""What filters did: documents and bytes, by reason, with examples of what was dropped."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

_EXAMPLES, _EXAMPLE_CHARACTERS = 3, 200
Count = Annotated[int, Field(ge=0, le=10**18)]
Example = tuple[Annotated[str, Field(max_length=16)], Annotated[str, Field(max_length=_EXAMPLE_CHARACTERS)]]
"""The hash of a document, and its beginning."""


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Tally(_Record):
    """A number of documents and the bytes of their text."""

    documents: Count = 0
    bytes: Count = 0

    def add(self, documents: int, n_bytes: int) -> None:
        self.documents += documents
        self.bytes += n_bytes


class DroppedCounts(Tally):
    """What was dropped for one reason."""

    examples: list[Example] = Field(default_factory=list, max_length=_EXAMPLES)
    """Those with the smallest hashes: the same, in whatever order counts are merged."""

    def show(self, examples: Iterable[Example]) -> None:
        self.examples = sorted({*self.examples, *examples})[:_EXAMPLES]


class FilterCounts(_Record):
    """What one filter did. What went in was kept, perhaps changed, or dropped."""

    type: str = Field(max_length=100)
    seen: Tally = Field(default_factory=Tally)
    kept: Tally = Field(default_factory=Tally)
    """With their bytes after the change."""
    changed: Tally = Field(default_factory=Tally)
    """Of those kept, with their bytes before the change."""
    dropped: dict[str, DroppedCounts] = Field(default_factory=dict)

    def keep(self, seen_bytes: int, kept_bytes: int, changed: bool) -> None:
        """Count a document that is kept."""
        self.seen.add(1, seen_bytes)
        self.kept.add(1, kept_bytes)
        if changed:
            self.changed.add(1, seen_bytes)

    def keep_many(self, documents: int, n_bytes: int) -> None:
        """Count documents that are kept as they are."""
        self.seen.add(documents, n_bytes)
        self.kept.add(documents, n_bytes)

    def drop(self, reason: str, text: str, seen_bytes: int) -> None:
        """Count a document that is dropped."""
        self.seen.add(1, seen_bytes)
        dropped = self.dropped.setdefault(reason, DroppedCounts())
        dropped.add(1, seen_bytes)
        hashed = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
        if len(dropped.examples) < _EXAMPLES or hashed < dropped.examples[-1][0]:
            shown = text[:_EXAMPLE_CHARACTERS].encode("utf-8", "replace").decode("utf-8")
            dropped.show([(hashed, shown)])

    def merge(self, other: "FilterCounts") -> None:
        """Add the counts of the same filter over other documents."""
        for mine, its in ((self.seen, other.seen), (self.kept, other.kept), (self.changed, other.changed)):
            mine.add(its.documents, its.bytes)
        for reason, its_dropped in other.dropped.items():
            dropped = self.dropped.setdefault(reason, DroppedCounts())
            dropped.add(its_dropped.documents, its_dropped.bytes)
            dropped.show(its_dropped.examples)
        self.dropped = dict(sorted(self.dropped.items()))

    @property
    def dropped_documents(self) -> int:
        return sum(one.documents for one in self.dropped.values())

    @property
    def dropped_bytes(self) -> int:
        return sum(one.bytes for one in self.dropped.values())


def merged(parts: Iterable[Sequence[FilterCounts]]) -> tuple[FilterCounts, ...]:
    """The counts of the same filters over the documents of all parts, in whatever order these come."""
    total: tuple[FilterCounts, ...] = ()
    for part in parts:
        total = total or tuple(FilterCounts(type=one.type) for one in part)
        for mine, its in zip(total, part, strict=True):
            mine.merge(its)
    return total
