"""The filters that clean text before it is tokenized. Each is described in the guide, with what it costs."""

import itertools
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from gptworks.config.base import Measured, Place, PositiveInt, Section, ShortPath

Ratio = Annotated[float, Field(ge=0, le=1)]
PersonalData = Literal["email", "ip", "phone", "key"]


class RepairEncoding(Section):
    """Text that was decoded wrongly (`cafÃ©`) becomes what was meant; what cannot be repaired is dropped. Needs the
    `clean` extra."""

    type: Measured[Literal["repair-encoding"]]
    max_lost: Measured[Ratio] = Field(
        0.005, description="Characters replaced by U+FFFD, or still wrong after the repair, of all."
    )


class NormalizeUnicode(Section):
    """One spelling of each character, `\\n` at the end of each line, no control characters."""

    type: Measured[Literal["normalize-unicode"]]
    form: Measured[Literal["NFC", "NFKC"]] = Field(
        "NFC", description="NFKC also replaces ligatures, full-width letters and superscripts."
    )


class LengthRules(Section):
    """Documents that are too short or too long are dropped."""

    type: Measured[Literal["length"]]
    min_characters: Measured[Annotated[int, Field(ge=0)]] = 1
    max_characters: Measured[PositiveInt | None] = None
    min_words: Measured[Annotated[int, Field(ge=0)]] = 0
    max_words: Measured[PositiveInt | None] = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("characters", "words"):
            least, most = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            if most is not None and most < least:
                raise ValueError(f"min_{name}={least} and max_{name}={most}: no document is kept; swap them")
        return self


class GopherQuality(Section):
    """The quality rules of Gopher, for English prose."""

    type: Measured[Literal["gopher-quality"]]
    min_words: Measured[Annotated[int, Field(ge=0)]] = 50
    max_words: Measured[PositiveInt] = 100_000
    min_mean_word_length: Measured[Annotated[float, Field(ge=0)]] = 3.0
    max_mean_word_length: Measured[Annotated[float, Field(gt=0)]] = 10.0
    max_symbols_per_word: Measured[Ratio] = Field(0.1, description="Of `#`, and of ellipses.")
    max_bullet_lines: Measured[Ratio] = 0.9
    max_ellipsis_lines: Measured[Ratio] = 0.3
    min_alphabetic_words: Measured[Ratio] = 0.8
    min_stop_words: Measured[Annotated[int, Field(ge=0, le=8)]] = Field(
        2, description="Of: the, be, to, of, and, that, have, with. 0 for other languages."
    )


class GopherRepetition(Section):
    """The repetition rules of Gopher."""

    type: Measured[Literal["gopher-repetition"]]
    max_duplicate_lines: Measured[Ratio] = 0.30
    max_duplicate_paragraphs: Measured[Ratio] = 0.30
    max_duplicate_line_characters: Measured[Ratio] = 0.20
    max_duplicate_paragraph_characters: Measured[Ratio] = 0.20
    max_top_ngram: Measured[tuple[Ratio, Ratio, Ratio]] = Field(
        (0.20, 0.18, 0.16), description="Characters in the most frequent sequence of 2, 3 and 4 words, of all."
    )
    max_duplicate_ngrams: Measured[tuple[Ratio, Ratio, Ratio, Ratio, Ratio, Ratio]] = Field(
        (0.15, 0.14, 0.13, 0.12, 0.11, 0.10),
        description="Characters in repeated sequences of 5, 6, … 10 words, of all.",
    )


class C4Rules(Section):
    """The rules of C4, for English web pages: lines that are no sentences are removed, pages with few left dropped."""

    type: Measured[Literal["c4"]]
    require_punctuation: Measured[bool] = Field(True, description="Remove lines that no sentence ends.")
    drop_braces: Measured[bool] = Field(True, description="Drop pages with a curly bracket; false for text with code.")
    min_sentences: Measured[Annotated[int, Field(ge=0)]] = 5
    min_line_words: Measured[Annotated[int, Field(ge=0)]] = 3
    max_word_characters: Measured[PositiveInt] = Field(1000, description="Lines with a longer word are removed.")


class FineWebRules(Section):
    """The rules that FineWeb adds to Gopher's and C4's: lists, menus and boilerplate are dropped."""

    type: Measured[Literal["fineweb"]]
    min_punctuated_lines: Measured[Ratio] = 0.12
    max_short_lines: Measured[Ratio] = Field(0.67, description="Lines of at most short_line_characters, of all.")
    short_line_characters: Measured[PositiveInt] = 30
    max_duplicate_characters: Measured[Ratio] = Field(
        0.1, description="Characters in repeated lines, of all. The paper's; datatrove's code has 0.01."
    )
    max_line_breaks_per_word: Measured[Ratio] = 0.3


class LanguageFilter(Section):
    """Documents in other languages are dropped. The model is fastText's small one, offline. Needs the `clean` extra."""

    type: Measured[Literal["language"]]
    languages: Measured[tuple[Annotated[str, Field(pattern="^[a-z]{2,3}$")], ...]] = Field(
        min_length=1, description="ISO 639 codes, such as en."
    )
    min_score: Measured[Ratio] = Field(0.65, description="The model's probability of the language.")


class GeneratedCode(Section):
    """Files whose beginning says that a program wrote them are dropped."""

    type: Measured[Literal["generated-code"]]
    lines: Measured[PositiveInt] = Field(10, description="Of the beginning that are read.")


class CodeTables(Section):
    """Files that are mostly data, long lists of numbers or strings, are dropped."""

    type: Measured[Literal["code-tables"]]
    max_data: Measured[Ratio] = Field(0.5, description="Characters in lines of literals alone, of all.")
    min_lines: Measured[PositiveInt] = Field(10, description="Files with fewer lines of literals are kept.")


class LicenceHeaders(Section):
    """A comment with a licence at the beginning of a file is removed."""

    type: Measured[Literal["licence-headers"]]


class MinifiedCode(Section):
    """Files with very long lines, or hardly a letter, are dropped."""

    type: Measured[Literal["minified-code"]]
    max_line_characters: Measured[PositiveInt] = 1000
    max_mean_line_characters: Measured[PositiveInt] = 100
    min_alphanumeric: Measured[Ratio] = 0.25


class Decontaminate(Section):
    """Documents that hold a part of an evaluation task are dropped."""

    type: Measured[Literal["decontaminate"]]
    tasks: Measured[Annotated[tuple[ShortPath, ...], Place.PATH]] = Field(
        min_length=1, description="Task files, or JSONL files of items, whose texts may not occur."
    )
    ngram: Measured[Annotated[int, Field(ge=2, le=100)]] = Field(
        13, description="Words in a row that both have, as in GPT-3."
    )
    min_words: Measured[PositiveInt] = Field(8, description="A shorter text of a task must occur whole; from here on.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min_words > self.ngram:
            raise ValueError(f"min_words={self.min_words} is above ngram={self.ngram}: lower it")
        return self


class MaskPersonalData(Section):
    """E-mail addresses, public IP addresses, phone numbers and secret keys become `<email>`, `<ip>`, `<phone>`,
    `<key>`."""

    type: Measured[Literal["mask-personal-data"]]
    kinds: Measured[tuple[PersonalData, ...]] = Field(("email", "ip", "phone", "key"), min_length=1)


class ExactDuplicates(Section):
    """Of equal documents the first is kept."""

    type: Measured[Literal["exact-duplicates"]]


class NearDuplicates(Section):
    """Of documents that share most of their word sequences the first is kept: MinHash. Needs the `clean` extra.

    Documents whose sets of word sequences have the Jaccard similarity s are found with the probability
    1 - (1 - s^rows)^bands.
    """

    type: Measured[Literal["near-duplicates"]]
    ngram: Measured[Annotated[int, Field(ge=1, le=100)]] = Field(5, description="Words in a sequence.")
    bands: Measured[Annotated[int, Field(ge=1, le=256)]] = 14
    rows: Measured[Annotated[int, Field(ge=1, le=64)]] = 8


GlobalFilter = ExactDuplicates | NearDuplicates
"""Compare documents with each other; the others look at one alone."""

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
    """The filters, if those that compare documents come last, each kind once.

    Raises:
        ValueError: they do not.
    """
    found = [one.type for one in filters if isinstance(one, GlobalFilter)]
    if len(set(found)) < len(found):
        raise ValueError(f"{found[0]} stands more than once: keep one")
    for earlier, later in itertools.pairwise(filters):
        if isinstance(earlier, GlobalFilter) and not isinstance(later, GlobalFilter):
            raise ValueError(
                f"{later.type} comes after {earlier.type}, which compares all documents when they are clean: put "
                f"{later.type} before it"
            )
    return filters
