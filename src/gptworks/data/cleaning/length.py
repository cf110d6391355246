"""The filter on the length of documents."""

from gptworks.config.cleaning import LengthRules
from gptworks.data.cleaning.base import Dropped, Filter


class LengthFilter(Filter):
    """Drops short or long documents, by characters without white space at the ends, and by words."""

    settings: LengthRules

    def apply(self, text: str) -> str | Dropped:
        rules = self.settings
        for unit, size, least, most in (
            ("characters", len(text.strip()), rules.min_characters, rules.max_characters),
            ("words", len(text.split()), rules.min_words, rules.max_words),
        ):
            if size < least:
                return Dropped(f"few {unit}")
            if most is not None and size > most:
                return Dropped(f"many {unit}")
        return text
