"""How long a document may be."""

from typing import TYPE_CHECKING

from gptworks.data.cleaning.base import Dropped, Filter

if TYPE_CHECKING:
    from gptworks.config.cleaning import LengthRules


class LengthFilter(Filter):
    """Counts characters without the white space at the ends, and words between white space."""

    settings: "LengthRules"

    def apply(self, text: str) -> str | Dropped:
        rules = self.settings
        characters = len(text.strip())
        if characters < rules.min_characters:
            return Dropped("few characters")
        if rules.max_characters is not None and characters > rules.max_characters:
            return Dropped("many characters")
        if rules.min_words or rules.max_words is not None:
            words = len(text.split())
            if words < rules.min_words:
                return Dropped("few words")
            if rules.max_words is not None and words > rules.max_words:
                return Dropped("many words")
        return text
