"""The rules of papers, against datatrove's filters with the same rules: the same documents dropped, the same text left.

Words lie between white space in both, since datatrove's own word tokenizer is a model for each language; sentences are
counted as ours, and punctuation is Unicode's, of which datatrove's own list lacks the bullet.
"""

import random
import sysconfig
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gptworks.config.cleaning import C4Rules, FineWebRules, GopherQuality, GopherRepetition
from gptworks.data.cleaning.base import Dropped, Filter
from gptworks.data.cleaning.rules import (
    C4Filter,
    FineWebFilter,
    GopherQualityFilter,
    GopherRepetitionFilter,
    count_sentences,
    punctuation,
)

filters = pytest.importorskip("datatrove.pipeline.filters")

_COMMON = (
    "the of and to be that have with a in he it was for is on his as at by this had not are but from or which you one "
    "all were when we there can an your has more will if up out so said what its about into than them other time some"
)


def made_up(number: int) -> str:
    """Return a document that almost breaks some rules, or breaks them."""
    rng = random.Random(number)
    vocabulary = [
        *_COMMON.split(),
        *(f"word{rng.randrange(10 ** rng.randint(1, 12))}" for _ in range(rng.choice((5, 50, 500)))),
    ]
    odd = [
        "#",
        "##",
        "...",
        "…",
        "--",
        "12",
        "3.14",
        "x" * rng.choice((3, 30, 1200)),
        "{",
        "café,",
        "“so”",
        "日本",
        "lorem ipsum",
    ]
    marks = rng.choice((("", "", "", "• ", "- ", "  "), ("• ", "- ")))

    def line() -> str:
        words = rng.choices(vocabulary, k=rng.choice((1, 2, 5, 12, 40)))
        for _ in range(rng.choice((0, 0, 0, 1, 4))):
            words.insert(rng.randrange(len(words)), rng.choice(odd))
        words[0] = rng.choice(marks) + words[0]
        return " ".join(words) + rng.choice((".", ".", ".", "!", "?", '."', "", "...", "…", " [12].", " JavaScript."))

    lines = [line() for _ in range(rng.choice((3, 8, 30)))]
    for _ in range(rng.choice((0, 0, 1, 5, 20))):
        lines.insert(rng.randrange(len(lines)), rng.choice(lines))
    return "".join(one + rng.choice(("\n", "\n", "\n\n", "\n\n\n")) for one in lines)


def real() -> list[str]:
    """Return parts of this project's documents and of Python's library."""
    files = [*Path(__file__).parents[1].glob("*.md"), *sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-h]*.py"))]
    texts = [file.read_text(encoding="utf-8") for file in files]
    return [text[at : at + 6000] for text in texts for at in range(0, len(text), 20_000)]


DOCUMENTS = [*map(made_up, range(300)), *real()]


def reference(name: str, **options: Any) -> Callable[[str], str | None]:
    """Return a datatrove filter as a function from a text to the text that is left, None if nothing is."""
    data = pytest.importorskip("datatrove.data")
    one = getattr(filters, name)(**options)

    def apply(text: str) -> str | None:
        document = data.Document(text=text, id="")
        return document.text if one.filter(document) is True else None

    return apply


@pytest.fixture(autouse=True)
def same_words(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("gopher_quality_filter", "gopher_repetition_filter", "fineweb_quality_filter"):
        monkeypatch.setattr(f"datatrove.pipeline.filters.{module}.split_into_words", lambda text, _: text.split())
    monkeypatch.setattr("datatrove.pipeline.filters.gopher_quality_filter.PUNCTUATION_SET", {*punctuation()})
    name = "datatrove.pipeline.filters.c4_filters.split_into_sentences"
    monkeypatch.setattr(name, lambda line, _: [""] * count_sentences(line))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (GopherQualityFilter(GopherQuality(type="gopher-quality")), ("GopherQualityFilter", {})),
        (GopherRepetitionFilter(GopherRepetition(type="gopher-repetition")), ("GopherRepetitionFilter", {})),
        (C4Filter(C4Rules(type="c4")), ("C4QualityFilter", {})),
        (
            C4Filter(C4Rules(type="c4", require_punctuation=False, drop_braces=False)),
            ("C4QualityFilter", {"filter_no_terminal_punct": False, "filter_curly_bracket": False}),
        ),
        (FineWebFilter(FineWebRules(type="fineweb")), ("FineWebQualityFilter", {"char_duplicates_ratio": 0.1})),
        (FineWebFilter(FineWebRules(type="fineweb", max_duplicate_characters=0.01)), ("FineWebQualityFilter", {})),
    ],
    ids=["gopher-quality", "gopher-repetition", "c4", "c4-lax", "fineweb", "fineweb-code"],
)
def test_the_rules_are_those_of_datatrove(ours: Filter, theirs: tuple[str, dict[str, Any]]) -> None:
    expected = reference(theirs[0], **theirs[1])
    reasons: Counter[str] = Counter()
    for text in DOCUMENTS:
        result = ours.apply(text)
        reasons[result.reason if isinstance(result, Dropped) else "kept"] += 1
        assert (None if isinstance(result, Dropped) else result) == expected(text), (result, text)
    assert len(reasons) > 2, reasons  # the documents try the rules
    print(reasons)
