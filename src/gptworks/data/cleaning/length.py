"""The filter that drops documents that are too short or too long."""

from gptworks.config.cleaning import LengthRules
from gptworks.data.cleaning.base import Dropped, Filter


class LengthFilter(Filter):
    """Drops documents with too few or too many words or characters, not counting white space at both ends."""

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
