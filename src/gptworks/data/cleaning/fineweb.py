"""Lists, menus and boilerplate."""

from typing import TYPE_CHECKING

from gptworks.data.cleaning.base import Dropped, Filter, ratio
from gptworks.data.cleaning.gopher_repetition import repeated

if TYPE_CHECKING:
    from gptworks.config.cleaning import FineWebRules

_SENTENCE_ENDS = tuple(".!?‼‽⁇⁈⁉。！？．｡։؟۔।॥።፧။។៕")
"""Of the scripts in use that have one."""


class FineWebFilter(Filter):
    """The rules that FineWeb adds (Penedo et al. 2024, section 3.6): few lines that a sentence ends, many short lines,
    characters in repeated lines. And line breaks for each word, from the released code."""

    settings: "FineWebRules"

    def apply(self, text: str) -> str | Dropped:
        rules = self.settings
        lines = [line for line in text.split("\n") if line and not line.isspace()]
        if not lines:
            return Dropped("empty")
        if ratio(sum(line.endswith(_SENTENCE_ENDS) for line in lines), len(lines)) < rules.min_punctuated_lines:
            return Dropped("few lines that end a sentence")
        short = sum(len(line) <= rules.short_line_characters for line in lines)
        if ratio(short, len(lines)) > rules.max_short_lines:
            return Dropped("short lines")
        breaks = text.count("\n")
        if ratio(repeated(lines)[1], len(text) - breaks) > rules.max_duplicate_characters:
            return Dropped("characters in repeated lines")
        if ratio(breaks, len(text.split())) > rules.max_line_breaks_per_word:
            return Dropped("line breaks")
        return text
