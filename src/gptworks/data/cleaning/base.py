"""The interface of filters.

To add a filter, write its settings class in `gptworks.config.cleaning`, and a subclass of `Filter` in a file here.
Every filter must take linear time for any text.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Dropped:
    """The result of a filter that drops a document. A filter may give only few reasons: each is counted separately."""

    reason: str


class Filter:
    """Keeps, changes or drops a document. A subclass annotates `settings` with its settings class."""

    version = 1
    """Version of the filter. Raise it when the same settings give other texts, so that datasets are built again."""

    def __init__(self, settings: Any) -> None:
        """Take the filter's settings. Raises UserError if a library or a file that the settings need is
        missing or broken."""
        self.settings = settings

    def apply(self, text: str) -> str | Dropped:
        """Return the text, perhaps changed, or the reason to drop it. The result depends only on text and settings."""
        raise NotImplementedError


class RuleFilter(Filter):
    """Drops documents that break a rule, and keeps all others unchanged."""

    def apply(self, text: str) -> str | Dropped:
        return next((Dropped(reason) for reason, is_broken in self.rules(text) if is_broken), text)

    def rules(self, text: str) -> Iterator[tuple[str, bool]]:
        """Yield (reason to drop the document, whether the document breaks the rule) for each rule. The caller stops at
        the first broken rule."""
        raise NotImplementedError


def ratio(part: float, whole: float) -> float:
    """Return part / whole, or 0 if whole is 0."""
    return part / whole if whole else 0.0
