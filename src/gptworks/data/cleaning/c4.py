"""Sentences of web pages."""

import re
from typing import TYPE_CHECKING

from gptworks.data.cleaning.base import Dropped, Filter

if TYPE_CHECKING:
    from gptworks.config.cleaning import C4Rules

_CITATION = re.compile(r"\[(?:\d*|edit|citation needed)\]")
_ENDS = (".", "?", "!", '"', "'")
_POLICY = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")
_SENTENCE_END = re.compile(r"[.!?]+[\"')\]]*(?:\s|$)")


class C4Filter(Filter):
    """The rules of C4 (Raffel et al. 2020, section 2.2, and the released code for what the paper leaves out).

    Lines are removed that no sentence ends, with fewer than three words, with a word of more than 1,000 characters, or
    that name JavaScript, cookies or terms of use. Marks of citations are removed. A page with "lorem ipsum", a curly
    bracket or fewer than five sentences is dropped. The list of bad words is left out. A sentence ends at `.`, `!` or
    `?` before white space; the released code asks a trained model.
    """

    settings: "C4Rules"

    def apply(self, text: str) -> str | Dropped:
        rules, kept, sentences = self.settings, [], 0
        for raw in text.splitlines():
            words = raw.split()
            line = _CITATION.sub("", raw.strip()) if "[" in raw else raw.strip()
            if rules.require_punctuation and (not line.endswith(_ENDS) or line.endswith("...")):
                continue
            if len(words) < rules.min_line_words or (
                len(line) > rules.max_word_characters and max(map(len, words)) > rules.max_word_characters
            ):
                continue
            lower = line.lower()
            if "lorem ipsum" in lower:
                return Dropped("lorem ipsum")
            if "javascript" in lower:
                continue
            if rules.drop_braces and "{" in line:
                return Dropped("curly bracket")
            if any(phrase in lower for phrase in _POLICY):
                continue
            sentences += count_sentences(line)
            kept.append(line)
        if sentences < rules.min_sentences:
            return Dropped("few sentences")
        return "\n".join(kept).strip()


def count_sentences(line: str) -> int:
    """Sentences in a line that is not empty; what follows the last end is one too."""
    ends = [match.end() for match in _SENTENCE_END.finditer(line)]
    return len(ends) + (not ends or bool(line[ends[-1] :].strip()))
