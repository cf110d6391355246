"""What a filter is.

To add one, write its settings in `gptworks.config.cleaning`, a subclass of `Filter` in a file here, and an entry in
`choose.FILTERS`. Every filter takes time linear in the text, whatever the text is.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Dropped:
    """A document that a filter drops, and why: one of a small number of reasons."""

    reason: str


class Filter:
    """Looks at a document and keeps, changes or drops it. Subclasses state what they need in their settings."""

    def __init__(self, settings: Any) -> None:
        """
        Raises:
            UserError: a library or a file that the settings need is missing or broken.
        """
        self.settings = settings

    def apply(self, text: str) -> str | Dropped:
        """The document, which may be changed, or why it is dropped. It depends on the text and the settings alone."""
        raise NotImplementedError


def ratio(part: float, whole: float) -> float:
    """The part of the whole; 0 of nothing."""
    return part / whole if whole else 0.0
