"""Faults planted among good documents: near duplicates, parts of tasks, broken encodings.

The default suite plants some hundred; `make test-planted` the numbers that the project states.
"""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter

from gptworks.config.cleaning import FilterConfig
from gptworks.data.cleaning.base import Dropped
from gptworks.data.cleaning.choose import choose_filters
from gptworks.data.cleaning.duplicates import Duplicates

_ADAPTER: TypeAdapter[FilterConfig] = TypeAdapter(FilterConfig)
_SYLLABLES = "ba ce di fo gu ha je ki lo mu na pe ri so tu va we xi yo zu sta pre con ter"


def filter_of(**values: Any) -> Any:
    [one] = choose_filters((_ADAPTER.validate_python(values),))
    return one


def vocabulary(rng: random.Random) -> list[str]:
    return ["".join(rng.choices(_SYLLABLES.split(), k=rng.randint(1, 4))) for _ in range(8000)]


def article(rng: random.Random, words: list[str]) -> str:
    """Return prose of 100 to 400 words with the word frequencies of a language."""
    drawn = [words[int(len(words) ** rng.random()) - 1] for _ in range(rng.randint(100, 400))]
    return " ".join(drawn).capitalize() + "."


def edited(rng: random.Random, text: str, words: list[str]) -> str:
    """Return the text with every hundredth word replaced, or in capitals or with other white space; sometimes an end is
    cut."""
    parts = text.split(" ")
    for _ in range(1 + len(parts) // 100):
        parts[rng.randrange(len(parts))] = rng.choice(words)
    text = rng.choice((" ", "\n", "  ")).join(parts)
    return rng.choice((text, text.upper(), text[: -len(text) // 50], "* " + text))


def hold_near_duplicates(documents: int, planted: int) -> None:
    """Check that at least 95% of the planted duplicates are found, and at most 1% of other documents are taken for
    one."""
    rng = random.Random(f"near {documents}")
    words = vocabulary(rng)
    originals = [article(rng, words) for _ in range(documents)]
    texts = [(text, False) for text in originals]
    texts += [(edited(rng, rng.choice(originals), words), True) for _ in range(planted)]
    duplicates = Duplicates((_ADAPTER.validate_python({"type": "near-duplicates"}),))
    signatures = np.frombuffer(b"".join(duplicates.signature(text) for text, _ in texts), dtype="<u8")
    kept = duplicates.verdicts(signatures.reshape(len(texts), duplicates.columns)) == 0
    found = np.mean([not one for one, (_, copy) in zip(kept, texts, strict=True) if copy])
    wrong = np.mean([not one for one, (_, copy) in zip(kept, texts, strict=True) if not copy])
    print(f"near duplicates: {found:.2%} of {planted:,} found, {wrong:.3%} of {documents:,} others dropped")
    assert found >= 0.95
    assert wrong <= 0.01


def hold_contamination(planted: int, folder: Path) -> None:
    """Check that exactly the documents with 13 words of a task item are found."""
    rng = random.Random(f"task {planted}")
    words = vocabulary(rng)
    items = [{"question": article(rng, words), "answer": "no"} for _ in range(planted)]
    (folder / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    (folder / "task.yaml").write_text("type: exact_match\ndata: items.jsonl\nprompt: '{{question}}'\n")
    one = filter_of(type="decontaminate", tasks=[folder / "task.yaml"])
    for item in items:
        asked = item["question"].split()
        at = rng.randrange(len(asked) - 12)
        quoted = rng.choice((" ", "\n", ", ")).join(asked[at : at + 13])
        text = f"{article(rng, words)} {rng.choice((quoted, quoted.upper(), f'“{quoted}”'))}! {article(rng, words)}"
        assert one.apply(text) == Dropped("in a task"), quoted
        clean = article(rng, words)
        assert one.apply(clean) == clean


def hold_encodings(planted: int) -> None:
    """Check that each broken text is repaired, or dropped if bytes are lost."""
    rng = random.Random(f"encodings {planted}")
    good = [
        "Le café où l’élève déjeune ferme à midi ; « désolé », dit-il.",
        "Die Brücke über den Fluß wurde im März größer – endlich schön.",
        "¿Dónde está el niño? Mañana vendrá con su señora… ¡quizás!",
        "“Quoted,” she said — it’s 20 € – and left the façade.",
        "Příliš žluťoučký kůň úpěl ďábelské ódy, říká se.",
    ]
    one = filter_of(type="repair-encoding")
    for number in range(planted):
        text = " ".join(rng.choices(good, k=rng.randint(1, 3)))
        kind = number % 5
        if kind == 0:  # UTF-8 read as Windows-1252
            assert one.apply(text.encode().decode("sloppy-windows-1252")) == text
        elif kind == 1:  # and so read twice
            assert one.apply(text.encode().decode("sloppy-windows-1252").encode().decode("sloppy-windows-1252")) == text
        elif kind == 2:
            at = rng.randrange(len(text))
            assert one.apply("\ufeff" + text[:at] + "\ufeff" + text[at:]) == text
        elif kind == 3:  # an emoji as JSON spells it, in two halves
            assert one.apply(text + " \ud83d\ude00") == text + " 😀"
        else:  # bytes that were no UTF-8
            lost = text.encode("latin-1", "ignore").decode("utf-8", "replace")
            assert isinstance(one.apply(lost + "\ud83d" * 3), Dropped)


def test_near_duplicates_are_found() -> None:
    pytest.importorskip("rensa")
    hold_near_duplicates(600, 200)


def test_contaminated_documents_are_found(tmp_path: Path) -> None:
    hold_contamination(50, tmp_path)


def test_broken_encodings_are_repaired_or_dropped() -> None:
    pytest.importorskip("ftfy")
    hold_encodings(50)


@pytest.mark.planted
def test_10000_near_duplicates_are_found() -> None:
    hold_near_duplicates(30_000, 10_000)


@pytest.mark.planted
def test_500_contaminated_documents_are_found(tmp_path: Path) -> None:
    hold_contamination(500, tmp_path)


@pytest.mark.planted
def test_200_broken_encodings_are_repaired_or_dropped() -> None:
    hold_encodings(200)
