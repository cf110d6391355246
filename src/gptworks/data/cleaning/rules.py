"""Filters with rules for prose: the length of a document, and the rules of Gopher, C4 and FineWeb."""

import re
import string
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from gptworks.config.cleaning import C4Rules, FineWebRules, GopherQuality, GopherRepetition, LengthRules
from gptworks.data.cleaning.base import Dropped, Filter, RuleFilter, ratio

_STOP_WORDS = frozenset(("the", "be", "to", "of", "and", "that", "have", "with"))
_ELLIPSES = ("...", "…")
_BULLETS = ("•", "-")


class LengthFilter(RuleFilter):
    """Drops documents with too few or too many words or characters, not counting white space at both ends."""

    settings: LengthRules

    def rules(self, text: str) -> Iterator[tuple[str, bool]]:
        rules = self.settings
        for unit, size, least, most in (
            ("characters", len(text.strip()), rules.min_characters, rules.max_characters),
            ("words", len(text.split()), rules.min_words, rules.max_words),
        ):
            yield f"few {unit}", size < least
            yield f"many {unit}", most is not None and size > most


class GopherQualityFilter(RuleFilter):
    """Applies Gopher's quality rules (Rae et al. 2021, "Scaling Language Models", appendix A.1.1) in the paper's order.

    Words are separated by white space. As in datatrove, words of only punctuation count in the rules about symbols and
    letters, but not in the rules about the number and the mean length of words.
    """

    settings: GopherQuality

    def rules(self, text: str) -> Iterator[tuple[str, bool]]:
        rules = self.settings
        words = text.split()
        n_words = len(words)
        mixed = [word for word in words if not word.isalpha()]
        symbols = [word for word in mixed if not word.strip(string.punctuation if word.isascii() else punctuation())]
        n_spoken = n_words - len(symbols)
        yield "few words", n_spoken < rules.min_words
        yield "many words", n_spoken > rules.max_words
        if not n_words:
            return
        mean_length = ratio(sum(map(len, words)) - sum(map(len, symbols)), n_spoken)
        yield "short words", mean_length < rules.min_mean_word_length
        yield "long words", mean_length > rules.max_mean_word_length
        yield "hashes", text.count("#") / n_words > rules.max_symbols_per_word
        yield "ellipses", sum(map(text.count, _ELLIPSES)) / n_words > rules.max_symbols_per_word
        lines = text.splitlines()
        bullets = sum(line.lstrip().startswith(_BULLETS) for line in lines)
        yield "bullets", ratio(bullets, len(lines)) > rules.max_bullet_lines
        unfinished = sum(line.rstrip().endswith(_ELLIPSES) for line in lines)
        yield "lines that end in an ellipsis", ratio(unfinished, len(lines)) > rules.max_ellipsis_lines
        without_letters = sum(not any(map(str.isalpha, word)) for word in mixed)
        yield "words without letters", (n_words - without_letters) / n_words < rules.min_alphabetic_words
        yield "few stop words", len(_STOP_WORDS.intersection(words)) < rules.min_stop_words


@lru_cache
def punctuation() -> str:
    """Return all punctuation characters of Unicode, and the symbols of ASCII."""
    found = (chr(code) for code in range(128, sys.maxunicode + 1) if unicodedata.category(chr(code))[0] == "P")
    return string.punctuation + "".join(found)


# ----------------------------------------------------------------------------------------------- repetition rules

_PARAGRAPHS = re.compile("\n{2,}")
_LINES = re.compile("\n+")
Numbers = npt.NDArray[np.int64]


class GopherRepetitionFilter(RuleFilter):
    """Applies Gopher's repetition rules (Rae et al. 2021, "Scaling Language Models", table A1).

    The first occurrence of a word sequence does not count as repeated, and overlapping repetitions count once.
    """

    settings: GopherRepetition

    def rules(self, text: str) -> Iterator[tuple[str, bool]]:
        rules = self.settings
        yield "empty", not text.strip()
        paragraphs, lines = _PARAGRAPHS.split(text.strip()), _LINES.split(text)
        for name, parts, most, most_characters in (
            ("paragraphs", paragraphs, rules.max_duplicate_paragraphs, rules.max_duplicate_paragraph_characters),
            ("lines", lines, rules.max_duplicate_lines, rules.max_duplicate_line_characters),
        ):
            number, characters = repeated(parts)
            yield f"repeated {name}", ratio(number, len(parts)) > most
            yield f"characters in repeated {name}", ratio(characters, len(text)) > most_characters
        words = _Words(text.split())
        for n, limit in enumerate((1.0, *rules.max_top_ngram, *rules.max_duplicate_ngrams), 1):
            if not words.extend() or (n >= 5 and not len(words.starts)):
                return
            if 2 <= n <= 4:
                yield f"one sequence of {n} words", ratio(words.top_characters(), len(text)) > limit
            if n >= 5:
                yield f"repeated sequences of {n} words", ratio(words.repeated_characters(), len(text)) > limit


def repeated(parts: Sequence[str]) -> tuple[int, int]:
    """Return the number of parts that equal an earlier part, and the total length of these parts in characters."""
    seen: set[str] = set()
    number = characters = 0
    for part in parts:
        if part in seen:
            number += 1
            characters += len(part)
        else:
            seen.add(part)
    return number, characters


class _Words:
    """Finds the sequences of n words that occur more than once, for n from 1 on.

    A sequence that occurs twice contains only sequences that occur twice, so each step extends the sequences found
    before. Most texts have few long repeated sequences, so the first steps take most of the time.
    """

    def __init__(self, words: list[str]) -> None:
        known: dict[str, int] = {}
        self._ids = np.array([known.setdefault(word, len(known)) for word in words], dtype=np.int64)
        lengths = np.fromiter(map(len, words), dtype=np.int64, count=len(words))
        self._ends = np.concatenate(([0], np.cumsum(lengths)))  # number of characters in all words before each word
        self._n = 0
        self.starts = np.arange(len(words))  # index of the first word of each repeated sequence
        self._groups: Numbers = np.zeros(len(words), dtype=np.int64)  # group of each start: equal for equal sequences
        self._top = (0, 1)  # first start of the most frequent sequence, and its occurrences

    def extend(self) -> bool:
        """Make the sequences one word longer. Return False if the text has too few words for a sequence."""
        self._n += 1
        if len(self._ids) < self._n:
            return False
        inside = int(np.searchsorted(self.starts, len(self._ids) - self._n, side="right"))
        starts = self.starts[:inside]
        last_words = self._ids[starts + self._n - 1]
        keys = self._groups[:inside] * len(self._ids) + last_words  # keys < number of words squared: no overflow
        order = np.argsort(keys, kind="stable")
        in_order = keys[order]
        first = np.concatenate(([0], np.flatnonzero(in_order[1:] != in_order[:-1]) + 1))
        counts = np.concatenate((first[1:], [inside])) - first
        if (most := int(counts.max())) <= 1:
            self._top, self.starts, self._groups = (0, 1), starts[:0], order[:0]
            return True
        self._top = int(starts[order[np.repeat(counts == most, counts)].min()]), most
        groups = np.empty_like(order)
        groups[order] = np.repeat(np.where(counts > 1, np.arange(len(counts)), -1), counts)
        again = groups >= 0
        self.starts, self._groups = starts[again], groups[again]
        return True

    def top_characters(self) -> int:
        """Return the most frequent sequence's length in characters, with spaces, times its number of occurrences. If
        several sequences are most frequent, the first counts."""
        start, number = self._top
        return (self._characters(start) + self._n - 1) * number

    def repeated_characters(self) -> int:
        """Return the number of characters of words in repeated sequences, not counting sequences' first occurrences."""
        seen: set[int] = set()
        total = free = 0
        for start, group in zip(self.starts.tolist(), self._groups.tolist(), strict=True):
            if start < free:  # this sequence overlaps a repetition that was counted
                continue
            if group in seen:
                total += self._characters(start)
                free = start + self._n
            else:
                seen.add(group)
        return total

    def _characters(self, start: int) -> int:
        return int(self._ends[start + self._n] - self._ends[start])


# ------------------------------------------------------------------------------------------------- rules for web pages

_CITATION = re.compile(r"\[(?:\d*|edit|citation needed)\]")
_ENDS = (".", "?", "!", '"', "'")
_POLICY = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")
_SENTENCE_END = re.compile(r"[.!?]+[\"')\]]*(?:\s|$)")


class C4Filter(Filter):
    """Applies the rules of C4 (Raffel et al. 2020, section 2.2, with details from the released code).

    Removes lines that do not end with the end of a sentence, have fewer than three words or a word of more than 1,000
    characters, or name JavaScript, terms of use, or a policy on privacy or cookies. Removes citation marks. Drops pages
    in which a remaining line has "lorem ipsum" or an opening curly bracket, and pages with fewer than five sentences.
    These numbers, and the rules about line ends and brackets, are settings. C4's list of bad words is not used. A
    sentence ends at `.`, `!` or `?` before white space, whereas C4's code uses a trained model.
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
    """Applies the rules that FineWeb adds to Gopher's and C4's (Penedo et al. 2024, section 3.6).

    Drops pages with few lines that end a sentence, many short lines, much text in repeated lines, or (as in the
    released code) many line breaks per word.
    """

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
