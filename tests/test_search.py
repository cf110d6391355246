"""Searching the training tokens: every occurrence of a phrase in the text, however it was tokenized."""

import json
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import chats
import tiny
from gptworks.cli import app
from gptworks.data import search
from gptworks.data.opened import Prepared, open_prepared
from gptworks.data.prepare import prepare
from gptworks.data.search import SearchIndex
from gptworks.data.shards import TokenShards
from gptworks.errors import UserError
from gptworks.evaluation import memorization
from gptworks.evaluation.memorization import find_copied
from gptworks.recipe import load_recipe, parse_recipe
from gptworks.runs.data import data_of

DOCUMENTS = [
    f"{'Ünder' if i % 7 else 'under'} the {'lazy ' * (i % 5)}dog, {i * i} times; the  end{'…' * (i % 3)}"
    for i in range(120)
]


def prepared(folder: Path, documents: Sequence[str] = DOCUMENTS, **tokenizer: Any) -> Prepared:
    """Return documents prepared as tokens, in many small shards."""
    folder.mkdir(parents=True, exist_ok=True)
    chats.write_jsonl(folder / "text.jsonl", [{"text": text} for text in documents])
    tree = tiny.recipe_tree(folder)
    tree["tokenizer"] = tokenizer or {"type": "bpe", "vocab_size": 300}
    tree["data"] |= {
        "sources": [{"type": "jsonl", "path": str(folder / "text.jsonl")}], "shard_tokens": 500,
        "validation": {"fraction": 0.1, "by": "document"},
    }  # fmt: skip
    return prepare(parse_recipe(tree))


def texts_of(made: Prepared) -> list[str]:
    """Return the training documents, decoded by the tokenizer."""
    shards = TokenShards(made.folder, "train")
    bounds = [*shards.document_starts().tolist(), shards.n_tokens]
    return [made.tokenizer.decode(shards.read(a, b - a).tolist()) for a, b in pairwise(bounds)]


def scanned(texts: Sequence[str], phrase: str) -> list[tuple[int, int]]:
    """Return every occurrence of a phrase as (document, character)."""
    return [(number, at) for number, text in enumerate(texts) for at in range(len(text)) if text.startswith(phrase, at)]


def built(made: Prepared) -> SearchIndex:
    index = SearchIndex(made)
    index.build()
    return index


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepared(tmp_path_factory.mktemp("searched"))


@pytest.fixture(scope="module", params=[1 << 24, 300, 7])
def index(request: pytest.FixtureRequest, made: Prepared, tmp_path_factory: pytest.TempPathFactory) -> SearchIndex:
    """An index in blocks of a given number of tokens, so that phrases cross the blocks' borders."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "BLOCK_TOKENS", request.param)
        patch.setattr(search, "FOLDER", f"search-{request.param}")
        return built(made)


def test_a_search_equals_a_scan_of_the_text(made: Prepared, index: SearchIndex) -> None:
    texts, drawn = texts_of(made), random.Random(5)
    phrases = ["the ", " the", "lazy lazy", "e", "Ü", "…", "times; the  end", "not there", "dog, 1"]
    for _ in range(40):
        text = drawn.choice(texts)
        at = drawn.randrange(len(text))
        phrases.append(text[at : at + drawn.choice((1, 2, 3, 5, 9, 30))])
    for phrase in phrases:
        found, places = index.find(phrase, most=10_000), scanned(texts, phrase)
        assert found.n == len(found.hits) == len(places)
        assert [hit.document for hit in found.hits] == [document for document, _ in places]
        for hit, (document, at) in zip(found.hits, places, strict=True):
            assert hit.text == phrase
            assert texts[document][:at].endswith(hit.before.removeprefix("<|endoftext|>"))
            assert texts[document][at + len(phrase) :].startswith(hit.after)


def test_a_hit_says_where_it_is(made: Prepared, index: SearchIndex) -> None:
    shards = TokenShards(made.folder, "train")
    for hit in index.find("azy d", most=10_000).hits:
        assert hit.position - shards.document_starts()[hit.document] == hit.first
        touched = made.tokenizer.decode(shards.read(hit.position, hit.n_tokens).tolist())
        inner = made.tokenizer.decode(shards.read(hit.position + 1, max(0, hit.n_tokens - 2)).tolist())
        assert "azy d" in touched and "azy d" not in inner


def test_the_first_hits_are_returned(index: SearchIndex) -> None:
    every = index.find("the", most=10_000)
    for most in (0, 1, 3, 10):
        assert index.find("the", most=most) == search.Found(every.n, every.hits[:most])


def test_no_phrase_crosses_from_one_document_into_the_next(tmp_path: Path) -> None:
    documents = [f"cd{i}ab" for i in range(80)]
    made = prepared(tmp_path, documents, type="char")
    assert built(made).find("bc").n == 0
    data = json.loads((made.folder / "tokenizer" / "tokenizer.json").read_text())
    data["added_tokens"] = []  # a tokenizer without special tokens: nothing separates documents
    (tmp_path / "plain.json").write_text(json.dumps(data))
    plain = prepared(tmp_path / "plain", documents, type="file", path=str(tmp_path / "plain.json"))
    index = built(plain)
    texts = texts_of(plain)
    assert index.find("bc").n == 0
    assert index.find("b", 100).n == len(scanned(texts, "b")) and "".join(texts).count("bc") > 0


def test_words_are_found_by_their_tokens(tmp_path: Path) -> None:
    made = prepared(tmp_path, ["The cat sat.", "a CAT, the cat sat", "cats"] * 20, type="word", vocab_size=30)
    index = built(made)
    assert not index.spelling.by_text
    tokens = " ".join(texts_of(made))
    assert index.find("THE cat", 1000).n == tokens.count("the cat sat")
    [first, *_] = index.find("cat,").hits
    assert first.text == "cat ,"
    with pytest.raises(UserError, match="does not know all of 'dog'"):
        index.find("dog")


def test_an_interrupted_build_continues(made: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "BLOCK_TOKENS", 300)
    monkeypatch.setattr(search, "FOLDER", "interrupted")
    written: list[str] = []
    write = SearchIndex._write

    def failing(self: SearchIndex, block: Any, sort: Any) -> None:
        if len(written) == 3:
            raise KeyboardInterrupt
        write(self, block, sort)
        written.append(block.file.name)

    index = SearchIndex(made)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(SearchIndex, "_write", failing)
        index.build(threads=1)
    with pytest.raises(UserError, match="not complete"):
        index.find("dog")
    before = {path.name: path.stat().st_mtime_ns for path in index.folder.glob("*.index")}
    assert sorted(before) == sorted(written)
    reported: list[tuple[int, int]] = []
    index.build(report=lambda done, total: reported.append((done, total)))
    assert 600 < reported[0][0] <= 900 and reported[-1] == (index._shards.n_tokens,) * 2
    assert all((index.folder / name).stat().st_mtime_ns == time for name, time in before.items())
    assert index.missing == 0 and index.find("dog").n == len(scanned(texts_of(made), "dog"))


def _cut(data: bytearray) -> bytearray:
    return data[:-10]


def _of_others(data: bytearray) -> bytearray:
    return bytearray(data.replace(b'"n_tokens": ', b'"n_tokens": 1', 1))


def _no_json(data: bytearray) -> bytearray:
    return bytearray(b"[" * 1024) + data[1024:]


@pytest.mark.parametrize("damage", [_cut, _of_others, _no_json])
def test_a_file_that_is_not_of_these_tokens_is_built_again(
    made: Prepared, monkeypatch: pytest.MonkeyPatch, damage: Callable[[bytearray], bytearray]
) -> None:
    monkeypatch.setattr(search, "FOLDER", f"damaged{damage.__name__}")
    file = sorted(built(made).folder.glob("*.index"))[1]
    whole = file.read_bytes()
    file.write_bytes(damage(bytearray(whole)))
    index = SearchIndex(made)
    assert 0 < index.missing < 1000
    index.build()
    assert file.read_bytes() == whole


@pytest.mark.parametrize("seed", range(4))
def test_contents_that_lie_are_an_error_and_no_crash(
    made: Prepared, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(search, "FOLDER", f"lying-{seed}")
    random_bytes = np.random.default_rng(seed)
    for file in built(made).folder.glob("*.index"):
        data = file.read_bytes()
        file.write_bytes(data[:1024] + random_bytes.bytes(len(data) - 1024))
    lying = SearchIndex(made)
    assert lying.missing == 0
    for phrase in ("e", "the", "\x00", "dog, 1"):
        try:
            assert all(hit.text == phrase for hit in lying.find(phrase).hits)
        except UserError as error:
            assert "Delete it to build it again" in str(error)


@pytest.mark.parametrize("phrase, message", [
    ("", "has 0 bytes"), ("x" * 70_000, "has 70000 bytes"), ("\ud800", "half of a surrogate pair"),
])  # fmt: skip
def test_a_phrase_that_cannot_be_searched_is_refused(made: Prepared, phrase: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        SearchIndex(made).find(phrase)


def test_another_datasets_index_is_not_used(made: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "FOLDER", "other")
    built(made)
    other = prepared(tmp_path, [text + "!" for text in DOCUMENTS])
    (made.folder / "other").rename(other.folder / "other")
    assert SearchIndex(open_prepared(other.folder)).missing == TokenShards(other.folder, "train").n_tokens


def asked(*arguments: object) -> Any:
    """Return the JSON that `gptworks data` prints."""
    result = CliRunner().invoke(app, ["data", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_the_command_takes_a_dataset_a_recipe_and_a_run(trained_run: Path) -> None:
    recipe = load_recipe(trained_run)
    made = prepare(recipe)
    places = scanned(texts_of(made), "the lazy dog, 1")
    for place in (made.folder, trained_run):
        tree = json.loads(asked("search", place, "the lazy dog, 1", "--most", 2, "--json"))
        assert tree["n"] == len(places) and tree["n_tokens"] == made.manifest.splits["train"].tokens
        assert [hit["text"] for hit in tree["hits"]] == ["the lazy dog, 1"] * 2
    lines = asked("search", made.folder, "the lazy dog, 1", "--most", 2).splitlines()
    assert lines[0].startswith(f"{len(places)} places in ") and lines[-1].startswith(f"and {len(places) - 2} more")
    assert "jumps over ⟦the lazy dog, 1⟧ times.⏎" in lines[1]
    held_out = json.loads(asked("search", trained_run, "the lazy dog", "--validation", "--json"))
    assert held_out["split"] == "validation" and held_out["n"] > 0
    with pytest.raises(UserError, match="is not built: run `gptworks data build"):
        data_of(tiny.write_recipe(trained_run.parent), ["tokenizer.type=word"])
    with pytest.raises(UserError, match=r"is not in nowhere, its data\.cache_dir"):
        data_of(trained_run, ["data.cache_dir=nowhere"])
    with pytest.raises(UserError, match="is a dataset, which has no settings: leave out seed=1"):
        data_of(made.folder, ["seed=1"])


def test_hostile_text_does_not_steer_the_terminal(tmp_path: Path) -> None:
    made = prepared(tmp_path, [f"{i} bad\x1b[2Jtext\r\u202e{i}\x07 \x9b1m end" for i in range(40)], type="char")
    shown = asked("search", made.folder, "text") + asked("search", made.folder, "bad")
    assert not set(shown) & {"\x1b", "\r", "\u202e", "\x07", "\x9b"} and "⟦text⟧␍" in shown


def test_memorization_finds_what_a_scan_of_the_tokens_finds(made: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    shards, drawn = TokenShards(made.folder, "train"), np.random.default_rng(1)
    texts = [shards.read(at, 40) for at in drawn.integers(0, shards.n_tokens - 40, 12).tolist()]
    for text in texts[4:]:
        text[drawn.integers(0, 40, 3)] = drawn.integers(0, 300, 3)
    split_word = made.tokenizer.encode("la").ids + made.tokenizer.encode("zy dog, 1").ids  # as the text never has it
    texts.append(np.array(split_word * 4))
    monkeypatch.setattr(memorization, "_PIECE_TOKENS", 97)
    found, tokens = find_copied(shards, texts, (2, 4, 8, 16)), shards.read(0, shards.n_tokens).tolist()
    for n, copied in found.items():
        known = {tuple(tokens[at : at + n]) for at in range(len(tokens) - n + 1)}
        expected = [[tuple(text[at : at + n].tolist()) in known for at in range(len(text) - n + 1)] for text in texts]
        assert 0 < sum(map(sum, expected)) < sum(map(len, expected))
        assert [one.tolist() for one in copied] == expected
