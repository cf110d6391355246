"""The interface of filters.

To add a filter, write its settings class in `gptworks.config.cleaning`, and a subclass of `Filter` in a file here.
Every filter must take linear time for any text.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Dropped:
    """The result of a filter that drops a document. A filter may give only few different reasons: each is counted."""

    reason: str


class Filter:
    """Keeps, changes or drops a document. A subclass annotates `settings` with its settings class."""

    version = 1
    """Increased when the same settings begin to change texts in another way, so that datasets are built again."""

    def __init__(self, settings: Any) -> None:
        """Raises UserError if a library or a file that the settings need is missing or broken."""
        self.settings = settings

    def apply(self, text: str) -> str | Dropped:
        """Return the text, perhaps changed, or the reason to drop it. The result depends only on text and settings."""
        raise NotImplementedError


class RuleFilter(Filter):
    """Drops a document that breaks a rule, and changes none."""

    def apply(self, text: str) -> str | Dropped:
        return next((Dropped(reason) for reason, is_broken in self.rules(text) if is_broken), text)

    def rules(self, text: str) -> Iterator[tuple[str, bool]]:
        """Yield, for one rule after the other, the reason to drop the document and whether it breaks the rule. A rule
        is asked for only if the document breaks none before it."""
        raise NotImplementedError


def ratio(part: float, whole: float) -> float:
    """Return part / whole, or 0 if whole is 0."""
    return part / whole if whole else 0.0
