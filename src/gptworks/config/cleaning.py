"""Settings of the filters that clean text before it is tokenized; docs/topics/data.md describes them."""

import itertools
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from gptworks.config.base import Measured, Place, PositiveInt, Section, ShortPath

Ratio = Annotated[float, Field(ge=0, le=1)]
PersonalData = Literal["email", "ip", "phone", "key"]


class RepairEncoding(Section):
    """Repair wrongly decoded text (`cafÃ©`), and drop documents in which too many characters stay wrong. Needs the
    `clean` extra."""

    type: Measured[Literal["repair-encoding"]]
    max_lost: Measured[Ratio] = Field(
        0.005, description="Largest share of characters that are U+FFFD or still wrong after the repair."
    )


class NormalizeUnicode(Section):
    """Use one Unicode form, and end lines with `\\n`. Remove byte order marks, noncharacters, control characters except
    tabs, and combining marks after the thirtieth in a row."""

    type: Measured[Literal["normalize-unicode"]]
    form: Measured[Literal["NFC", "NFKC"]] = Field(
        "NFC", description="NFKC also replaces ligatures, full-width letters and superscripts."
    )


class LengthRules(Section):
    """Drop documents that are too short or too long."""

    type: Measured[Literal["length"]]
    min_characters: Measured[int] = Field(1, ge=0, description="Fewest characters of a kept document.")
    max_characters: Measured[PositiveInt | None] = Field(None, description="Most characters. None: no limit.")
    min_words: Measured[int] = Field(0, ge=0, description="Fewest words of a kept document.")
    max_words: Measured[PositiveInt | None] = Field(None, description="Most words. None: no limit.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("characters", "words"):
            least, most = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            if most is not None and most < least:
                raise ValueError(f"min_{name}={least} and max_{name}={most}: no document is kept; exchange them")
        return self


class GopherQuality(Section):
    """Drop documents that break the quality rules of Gopher (Rae et al., 2021), which are for English prose."""

    type: Measured[Literal["gopher-quality"]]
    min_words: Measured[int] = Field(50, ge=0, description="Fewest words of a kept document.")
    max_words: Measured[PositiveInt] = Field(100_000, description="Most words of a kept document.")
    min_mean_word_length: Measured[float] = Field(3.0, ge=0, description="Least mean length of a word in characters.")
    max_mean_word_length: Measured[float] = Field(10.0, gt=0, description="Largest mean length of a word.")
    max_symbols_per_word: Measured[Ratio] = Field(0.1, description="Most `#` per word, and most ellipses per word.")
    max_bullet_lines: Measured[Ratio] = Field(0.9, description="Largest share of lines that begin with a bullet.")
    max_ellipsis_lines: Measured[Ratio] = Field(0.3, description="Largest share of lines that end with an ellipsis.")
    min_alphabetic_words: Measured[Ratio] = Field(0.8, description="Least share of words that contain a letter.")
    min_stop_words: Measured[int] = Field(
        2,
        ge=0,
        le=8,
        description="How many of these words must occur: the, be, to, of, and, that, have, with. 0 for other "
        "languages.",
    )


class GopherRepetition(Section):
    """Drop documents that break the repetition rules of Gopher. The limits are shares of the lines, paragraphs or
    characters."""

    type: Measured[Literal["gopher-repetition"]]
    max_duplicate_lines: Measured[Ratio] = Field(0.30, description="Repeated lines.")
    max_duplicate_paragraphs: Measured[Ratio] = Field(0.30, description="Repeated paragraphs.")
    max_duplicate_line_characters: Measured[Ratio] = Field(0.20, description="Characters in repeated lines.")
    max_duplicate_paragraph_characters: Measured[Ratio] = Field(0.20, description="Characters in repeated paragraphs.")
    max_top_ngram: Measured[tuple[Ratio, Ratio, Ratio]] = Field(
        (0.20, 0.18, 0.16), description="Characters in the most frequent sequence of 2, 3 and 4 words."
    )
    max_duplicate_ngrams: Measured[tuple[Ratio, Ratio, Ratio, Ratio, Ratio, Ratio]] = Field(
        (0.15, 0.14, 0.13, 0.12, 0.11, 0.10), description="Characters in repeated sequences of 5, 6, … 10 words."
    )


class C4Rules(Section):
    """Remove lines that are not sentences, and drop pages with few sentences, by C4's rules for English (Raffel et al.,
    2020)."""

    type: Measured[Literal["c4"]]
    require_punctuation: Measured[bool] = Field(True, description="Remove lines without final punctuation.")
    drop_braces: Measured[bool] = Field(True, description="Drop pages with a curly bracket; false for text with code.")
    min_sentences: Measured[int] = Field(5, ge=0, description="Fewest sentences of a kept page.")
    min_line_words: Measured[int] = Field(3, ge=0, description="Remove lines with fewer words.")
    max_word_characters: Measured[PositiveInt] = Field(1000, description="Remove lines with a longer word.")


class FineWebRules(Section):
    """Drop pages of lists, menus or boilerplate: the rules that FineWeb adds to Gopher's and C4's (Penedo et al.,
    2024)."""

    type: Measured[Literal["fineweb"]]
    min_punctuated_lines: Measured[Ratio] = Field(0.12, description="Least share of lines with final punctuation.")
    max_short_lines: Measured[Ratio] = Field(0.67, description="Largest share of lines of short_line_characters.")
    short_line_characters: Measured[PositiveInt] = Field(30, description="Most characters of a short line.")
    max_duplicate_characters: Measured[Ratio] = Field(
        0.1,
        description="Largest share of characters in repeated lines. The default is the paper's; datatrove's code has "
        "0.01.",
    )
    max_line_breaks_per_word: Measured[Ratio] = Field(0.3, description="Most line breaks per word.")


class LanguageFilter(Section):
    """Drop documents that are not in the listed languages, by fastText's small model, offline. Needs the `clean`
    extra."""

    type: Measured[Literal["language"]]
    languages: Measured[tuple[Annotated[str, Field(pattern="^[a-z]{2,3}$")], ...]] = Field(
        min_length=1, description="ISO 639 codes of the languages to keep, such as en."
    )
    min_score: Measured[Ratio] = Field(0.65, description="Least probability of the language.")


class GeneratedCode(Section):
    """Drop files whose first lines say that a program generated them."""

    type: Measured[Literal["generated-code"]]
    lines: Measured[PositiveInt] = Field(10, description="Number of lines to read from the beginning.")


class CodeTables(Section):
    """Drop files that are mostly data: long lists of numbers or strings."""

    type: Measured[Literal["code-tables"]]
    max_data: Measured[Ratio] = Field(0.5, description="Largest share of characters in lines of literals only.")
    min_lines: Measured[PositiveInt] = Field(10, description="Keep files with fewer lines of literals.")


class LicenceHeaders(Section):
    """Remove a licence comment from the beginning of a file."""

    type: Measured[Literal["licence-headers"]]


class MinifiedCode(Section):
    """Drop files with very long lines, or with few letters and digits."""

    type: Measured[Literal["minified-code"]]
    max_line_characters: Measured[PositiveInt] = Field(1000, description="Most characters of the longest line.")
    max_mean_line_characters: Measured[PositiveInt] = Field(100, description="Largest mean length of a line.")
    min_alphanumeric: Measured[Ratio] = Field(0.25, description="Least share of letters and digits.")


class Decontaminate(Section):
    """Drop documents that share a sequence of words with an evaluation task."""

    type: Measured[Literal["decontaminate"]]
    tasks: Measured[Annotated[tuple[ShortPath, ...], Place.PATH]] = Field(
        min_length=1, description="Task files, or JSONL files of items, whose texts must not occur."
    )
    ngram: Measured[int] = Field(13, ge=2, le=100, description="Length in words of a shared sequence, as in GPT-3.")
    min_words: Measured[PositiveInt] = Field(
        8, description="Shortest text of a task to look for, in words; below ngram, all of the text must occur."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._at_most("min_words", "ngram", "lower it")
        return self


class MaskPersonalData(Section):
    """Replace e-mail and public IP addresses, phone numbers and keys with `<email>`, `<ip>`, `<phone>`, `<key>`."""

    type: Measured[Literal["mask-personal-data"]]
    kinds: Measured[tuple[PersonalData, ...]] = Field(
        ("email", "ip", "phone", "key"), min_length=1, description="What is replaced."
    )


class ExactDuplicates(Section):
    """Keep only the first of equal documents."""

    type: Measured[Literal["exact-duplicates"]]


class NearDuplicates(Section):
    """Keep only the first of documents that share most word sequences, found by MinHash. Needs the `clean` extra.

    If the sets of word sequences of two documents have Jaccard similarity s, MinHash finds the pair with probability
    1 - (1 - s^rows)^bands.
    """

    type: Measured[Literal["near-duplicates"]]
    ngram: Measured[int] = Field(5, ge=1, le=100, description="Words in a sequence.")
    bands: Measured[int] = Field(
        14, ge=1, le=256, description="Number of groups of hashes. Documents with an equal group are duplicates."
    )
    rows: Measured[int] = Field(8, ge=1, le=64, description="Hashes in a group.")


GlobalFilter = ExactDuplicates | NearDuplicates
"""Filters that compare documents with each other; all others look at one document at a time."""

FilterConfig = Annotated[
    RepairEncoding
    | NormalizeUnicode
    | LengthRules
    | GopherQuality
    | GopherRepetition
    | C4Rules
    | FineWebRules
    | LanguageFilter
    | GeneratedCode
    | CodeTables
    | LicenceHeaders
    | MinifiedCode
    | Decontaminate
    | MaskPersonalData
    | ExactDuplicates
    | NearDuplicates,
    Field(discriminator="type"),
]


def check_order(filters: tuple[FilterConfig, ...]) -> tuple[FilterConfig, ...]:
    """Check the order of the filters and return them unchanged. Raises ValueError if a filter in `GlobalFilter` occurs
    twice, or comes before a filter of single documents."""
    found = [one.type for one in filters if isinstance(one, GlobalFilter)]
    if again := [name for n, name in enumerate(found) if name in found[:n]]:
        raise ValueError(f"{again[0]} is listed more than once: keep one")
    for earlier, later in itertools.pairwise(filters):
        if isinstance(earlier, GlobalFilter) and not isinstance(later, GlobalFilter):
            raise ValueError(
                f"{later.type} comes after {earlier.type}, which compares all documents when they are clean: put "
                f"{later.type} before it"
            )
    return filters


Filters = Annotated[tuple[FilterConfig, ...], AfterValidator(check_order)]
CLEAN = Field((), description="Filters for the text of the sources, in order.")
