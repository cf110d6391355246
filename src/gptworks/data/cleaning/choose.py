"""Choose the filter for given settings, and apply a recipe's filters in order."""

from gptworks.config.cleaning import Decontaminate, FilterConfig, GlobalFilter
from gptworks.data.cleaning.base import Dropped, Filter
from gptworks.data.cleaning.counts import FilterCounts
from gptworks.data.cleaning.decontamination import DecontaminationFilter
from gptworks.data.registry import by_settings

FILTERS = by_settings("gptworks.data.cleaning", Filter)
"""Maps each settings class to its filter class. Filters that compare documents are in `duplicates` instead."""
PART_BYTES = 1 << 24
"""Maximum bytes of a document to clean. Parts of a larger document are cleaned as separate documents."""


def clean_signature(settings: tuple[FilterConfig, ...]) -> list[str]:
    """Return values that identify how texts are cleaned, apart from the settings: the sha256 of the word sequences of
    each `decontaminate` filter, and the type and version of each filter with a version above 1. Raises UserError if a
    task file of a `decontaminate` filter is missing or broken."""
    sequences = [DecontaminationFilter(one).signature() for one in settings if isinstance(one, Decontaminate)]
    versions = ((one.type, FILTERS[type(one)].version) for one in settings if type(one) in FILTERS)
    return sequences + [f"{name} {version}" for name, version in versions if version > 1]


def choose_filters(settings: tuple[FilterConfig, ...]) -> list[Filter]:
    """Return the filters that look at single documents, in the recipe's order; leave out those that compare documents.
    Raises UserError if a library or a file that a filter needs is missing or broken."""
    return [FILTERS[type(one)](one) for one in settings if not isinstance(one, GlobalFilter)]


class Cleaner:
    """Cleans documents one by one, and counts the documents that each filter kept, changed and dropped."""

    def __init__(self, settings: tuple[FilterConfig, ...]) -> None:
        """Take the filters of a recipe. Filters that compare documents are ignored. Raises UserError like
        `choose_filters`."""
        self._filters = choose_filters(settings)
        self.take_counts()

    def take_counts(self) -> tuple[FilterCounts, ...]:
        """Return each filter's counts since the last call, and reset them."""
        taken = getattr(self, "counts", ())
        self.counts = tuple(FilterCounts(type=one.settings.type) for one in self._filters)
        return taken

    def clean(self, text: str) -> str | None:
        """Return the cleaned text; None if a filter drops the document or nothing of its text is left."""
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
