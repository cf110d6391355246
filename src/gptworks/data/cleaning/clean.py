"""A recipe's filters, one after the other."""

from gptworks.config.cleaning import FilterConfig
from gptworks.data.cleaning.base import Dropped
from gptworks.data.cleaning.choose import choose_filters
from gptworks.data.cleaning.counts import FilterCounts

PART_BYTES = 1 << 24
"""Larger documents are cleaned in parts, each as a document."""


class Cleaner:
    """Cleans documents one by one and counts what each filter did."""

    def __init__(self, settings: tuple[FilterConfig, ...]) -> None:
        """
        Args:
            settings: a recipe's filters; those that compare documents are left out, see `duplicates`.

        Raises:
            UserError: a library or a file that a filter needs is missing or broken.
        """
        self._filters = choose_filters(settings)
        self.take_counts()

    def take_counts(self) -> tuple[FilterCounts, ...]:
        """What each filter did since this was called last; count anew."""
        taken = getattr(self, "counts", ())
        self.counts = tuple(FilterCounts(type=one.settings.type) for one in self._filters)
        return taken

    def clean(self, text: str) -> str | None:
        """The document as the filters leave it; None where one drops it, or leaves nothing."""
        size = size_bytes(text)
        for one, counts in zip(self._filters, self.counts, strict=True):
            result = one.apply(text) or Dropped("nothing left")
            if isinstance(result, Dropped):
                counts.drop(result.reason, text, size)
                return None
            changed = result != text
            before, size = size, size_bytes(result) if changed else size
            counts.keep(before, size, changed)
            text = result
        return text


def size_bytes(text: str) -> int:
    """Of the text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
