"""Filters for web pages, with the rules of C4 and FineWeb."""

import re
from collections.abc import Iterator

from gptworks.config.cleaning import C4Rules, FineWebRules
from gptworks.data.cleaning.base import Dropped, Filter, RuleFilter, ratio
from gptworks.data.cleaning.gopher import repeated

_CITATION = re.compile(r"\[(?:\d*|edit|citation needed)\]")
_ENDS = (".", "?", "!", '"', "'")
_POLICY = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")
_SENTENCE_END = re.compile(r"[.!?]+[\"')\]]*(?:\s|$)")


class C4Filter(Filter):
    """Applies the rules of C4 (Raffel et al. 2020, section 2.2, with details from the released code).

    Removes lines that do not end with the end of a sentence, have fewer than three words or a word of more than 1,000
    characters, or name JavaScript, terms of use, or a policy on privacy or cookies. Removes citation marks. Drops pages
    in which another line has "lorem ipsum" or an opening curly bracket, and pages with fewer than five sentences. These
    numbers, and the rules about line ends and brackets, are settings. C4's list of bad words is not used. A sentence
    ends at `.`, `!` or `?` before white space, whereas C4's code uses a trained model.
    """

    settings: C4Rules

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
    """Return the number of sentences in a nonempty line; text after the last sentence end counts as a sentence too."""
    ends = [match.end() for match in _SENTENCE_END.finditer(line)]
    return len(ends) + (not ends or bool(line[ends[-1] :].strip()))


_SENTENCE_ENDS = tuple(".!?‼‽⁇⁈⁉。！？．｡։؟۔।॥።፧။។៕")
"""Characters that end a sentence, in all scripts in use that have such a character."""


class FineWebFilter(RuleFilter):
    """Applies the rules that FineWeb adds (Penedo et al. 2024, section 3.6): drops pages with few lines that end a
    sentence, many short lines, much text in repeated lines, or (as in the released code) many line breaks per word."""

    settings: FineWebRules

    def rules(self, text: str) -> Iterator[tuple[str, bool]]:
        rules = self.settings
        lines = [line for line in text.split("\n") if line and not line.isspace()]
        yield "empty", not lines
        ended = sum(line.endswith(_SENTENCE_ENDS) for line in lines)
        yield "few lines that end a sentence", ended / len(lines) < rules.min_punctuated_lines
        short = sum(len(line) <= rules.short_line_characters for line in lines)
        yield "short lines", short / len(lines) > rules.max_short_lines
        breaks = text.count("\n")
        again = ratio(repeated(lines)[1], len(text) - breaks)
        yield "characters in repeated lines", again > rules.max_duplicate_characters
        yield "line breaks", ratio(breaks, len(text.split())) > rules.max_line_breaks_per_word
