"""Choose the filter for given settings, and apply a recipe's filters in order."""

from gptworks.config.cleaning import Decontaminate, FilterConfig, GlobalFilter
from gptworks.data.cleaning.base import Dropped, Filter
from gptworks.data.cleaning.counts import FilterCounts
from gptworks.data.cleaning.decontamination import DecontaminationFilter
from gptworks.data.registry import by_settings

FILTERS = by_settings("gptworks.data.cleaning", Filter)
"""Each filter's class, by the class of its settings. Filters that compare documents are in `duplicates`."""
PART_BYTES = 1 << 24
"""A larger document is cleaned in parts of this size, each like a document of its own."""


def files_signature(settings: tuple[FilterConfig, ...]) -> list[str]:
    """For each filter `decontaminate`, the sha256 of all that it looks for, which it reads from its files.

    Raises:
        UserError: one of these files is missing or broken.
    """
    return [DecontaminationFilter(one).signature() for one in settings if isinstance(one, Decontaminate)]


def choose_filters(settings: tuple[FilterConfig, ...]) -> list[Filter]:
    """The filters that look at single documents, in order, without those that compare documents.

    Raises:
        UserError: a library or a file that a filter needs is missing or broken.
    """
    return [FILTERS[type(one)](one) for one in settings if not isinstance(one, GlobalFilter)]


class Cleaner:
    """Cleans documents one by one and counts what each filter did."""

    def __init__(self, settings: tuple[FilterConfig, ...]) -> None:
        """
        Args:
            settings: a recipe's filters; those that compare documents are left out, see `duplicates`.

        Raises:
            UserError: see `choose_filters`.
        """
        self._filters = choose_filters(settings)
        self.take_counts()

    def take_counts(self) -> tuple[FilterCounts, ...]:
        """Each filter's counts since the last call. Resets the counts."""
        taken = getattr(self, "counts", ())
        self.counts = tuple(FilterCounts(type=one.settings.type) for one in self._filters)
        return taken

    def clean(self, text: str) -> str | None:
        """The filtered document; None if a filter drops it or removes all of its text."""
        size = size_bytes(text)
        for one, counts in zip(self._filters, self.counts, strict=True):
            result = one.apply(text) or Dropped("nothing left")
            if isinstance(result, Dropped):
                counts.drop(result.reason, text, size)
                return None
            before = size
            if changed := result != text:
                text, size = result, size_bytes(result)
            counts.keep(1, before, size, changed)
        return text


def size_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
