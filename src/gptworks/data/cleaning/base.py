"""The interface of filters.

To add one, write its settings in `gptworks.config.cleaning` and a subclass of `Filter` in a file here. Every filter
takes time linear in the text, whatever the text is.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Dropped:
    """A document that a filter drops, and why: one of a small number of reasons."""

    reason: str


class Filter:
    """Keeps, changes or drops a document. A subclass annotates `settings` with the class of its settings."""

    def __init__(self, settings: Any) -> None:
        """
        Raises:
            UserError: a library or a file that the settings need is missing or broken.
        """
        self.settings = settings

    def apply(self, text: str) -> str | Dropped:
        """The document, which may be changed, or why it is dropped: a function of the text and the settings only."""
        raise NotImplementedError


def ratio(part: float, whole: float) -> float:
    """part / whole, or 0 if both are 0."""
    return part / whole if whole else 0.0
