import contextlib
import csv
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import commands
from gptworks.config import Recipe, ValidationSplit
from gptworks.data import opened
from gptworks.data.opened import Prepared, held_out_text, open_prepared
from gptworks.data.prepare import find_prepared, prepare
from gptworks.data.shards import TokenShards
from gptworks.data.sources import base
from gptworks.data.sources import files as found_files
from gptworks.data.sources.base import Piece
from gptworks.data.sources.choose import iter_documents
from gptworks.data.split import split_documents
from gptworks.errors import RunError, UserError
from gptworks.files import sha256_file
from gptworks.tokenizer import document_frame, fingerprint
from tiny import plain_model

Make = Callable[..., Recipe]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A function that makes a recipe on tmp_path/text; keywords go to its data section."""

    def make(tokenizer: dict[str, Any] | None = None, path: Path = tmp_path / "text", **data: Any) -> Recipe:
        return Recipe(
            name="test",
            model=plain_model(context_length=8, n_layers=1, d_model=8, n_heads=1),
            tokenizer=tokenizer or {"type": "char"},
            data={"sources": [{"type": "text", "path": str(path)}], "cache_dir": tmp_path / "data", **data},
            train={"max_steps": 1},
        )

    (tmp_path / "text").mkdir()
    return make


def write(folder: Path, *texts: str) -> None:
    for index, text in enumerate(texts):
        (folder / "text" / f"{index:03d}.txt").write_text(text, encoding="utf-8", newline="")


def essays(count: int) -> list[str]:
    return [
        f"Essay {i}.\n" + f"The {i * 7919 % 1000} cats sat — naïvely — on {i} mats.\n" * (1 + i % 5)
        for i in range(count)
    ]


def tokens(prepared: Prepared, split: Any) -> list[int]:
    shards = TokenShards(prepared.folder, split, verify=True)
    return shards.read(0, shards.n_tokens).tolist()


def decoded(prepared: Prepared, split: Any) -> list[str]:
    """Return the text of each document, without special tokens."""
    shards = TokenShards(prepared.folder, split)
    parts = np.split(shards.read(0, shards.n_tokens), shards.document_starts()[1:])
    return [prepared.tokenizer.decode(part.tolist()) for part in parts]


def contents(prepared: Prepared) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in sorted(prepared.folder.rglob("*")) if f.is_file()}


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.glob(".partial-*")]


# ----------------------------------------------------------------------------------------------------- contents


def test_a_table_gives_the_shards_of_its_texts(make: Make, tmp_path: Path) -> None:
    """The same documents are held out, by their hash, even with line breaks and quotation marks in the fields."""
    texts = [f'"{text}", he wrote' for text in essays(60)]
    write(tmp_path, *texts)
    with (tmp_path / "essays.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([["id", "text"], *enumerate(texts)])
    table = [{"type": "csv", "path": str(tmp_path / "essays.csv")}]
    one, other = (prepare(make(validation={"fraction": 0.2}, **data)) for data in ({}, {"sources": table}))
    for split in ("train", "validation"):
        assert decoded(one, split) == decoded(other, split) != []


@pytest.mark.parametrize("kind", [{"type": "char"}, {"type": "bpe", "vocab_size": 300}], ids=["char", "bpe"])
def test_the_shards_hold_the_text_in_both_splits(kind: dict[str, Any], make: Make, tmp_path: Path) -> None:
    texts = essays(60)
    write(tmp_path, *texts)
    prepared = prepare(make(kind, validation={"fraction": 0.2}))
    train, validation = decoded(prepared, "train"), decoded(prepared, "validation")
    assert sorted(train + validation) == sorted(texts)
    assert train == [text for text in texts if text in set(train)]
    assert 4 <= len(validation) <= 24
    splits = prepared.manifest.splits
    assert (splits["train"].documents, splits["validation"].documents) == (len(train), len(validation))
    assert splits["train"].text_bytes == len("".join(train).encode())
    assert prepared.manifest.round_trips
    assert b"".join(held_out_text(prepared)) == "".join(validation).encode()
    assert not prepared.reused


@pytest.mark.parametrize("added", [[], ["<|endoftext|>"]])
def test_a_tokenizer_without_a_separator_is_named_and_can_be_given_one(
    added: list[str], make: Make, tmp_path: Path
) -> None:
    write(tmp_path, *essays(30))
    prepared = prepare(make(validation={"fraction": 0.3}))
    tree = json.loads((prepared.folder / "tokenizer/tokenizer.json").read_text())
    del tree["model"]["vocab"]["<|endoftext|>"]
    tree["added_tokens"] = [token for token in tree["added_tokens"] if token["content"] != "<|endoftext|>"]
    (tmp_path / "plain.json").write_text(json.dumps(tree))
    tokenizer = {"type": "file", "path": str(tmp_path / "plain.json"), "added_tokens": added}
    said = list[str]()
    prepared = prepare(make(tokenizer, validation={"fraction": 0.3}), report=lambda stage, *_: said.append(stage))
    assert any("no token that begins or ends a document" in line for line in said) == (not added)
    shards = TokenShards(prepared.folder, "train")
    begins = {prepared.tokenizer.id_to_token(int(shards.read(at, 1)[0])) for at in shards.document_starts().tolist()}
    assert begins == set(added or "E")


def test_each_document_begins_with_the_separator(make: Make, tmp_path: Path) -> None:
    write(tmp_path, *essays(30))
    prepared = prepare(make(validation={"fraction": 0.3}))
    for split in ("train", "validation"):
        ids = np.array(tokens(prepared, split))
        assert np.flatnonzero(ids == 0).tolist() == TokenShards(prepared.folder, split).document_starts().tolist()


def test_bos_and_eos_are_around_each_document(make: Make, tmp_path: Path) -> None:
    write(tmp_path, *[f"Word {i} here" for i in range(40)])
    prepared = prepare(make({"type": "word"}, validation={"fraction": 0.3}))
    ids = np.array(tokens(prepared, "train"))
    starts = TokenShards(prepared.folder, "train").document_starts()
    assert ids[starts].tolist() == [2] * len(starts)
    assert ids[[*(starts[1:] - 1), -1]].tolist() == [3] * len(starts)
    assert 2 not in np.delete(ids, starts)


def test_a_separator_written_in_a_text_is_text(make: Make, tmp_path: Path) -> None:
    write(tmp_path, *[f"{i} <|endoftext|> more" * 3 for i in range(30)])
    prepared = prepare(make({"type": "bpe", "vocab_size": 270}, validation={"fraction": 0.3}))
    assert tokens(prepared, "train").count(0) == prepared.manifest.splits["train"].documents
    assert "".join(decoded(prepared, "train")).count("<|endoftext|>") > 30


def test_words_are_counted_where_unknown_and_do_not_round_trip(make: Make, tmp_path: Path) -> None:
    write(tmp_path, *[f"Common unique{i}" for i in range(40)])
    prepared = prepare(make({"type": "word"}, validation={"fraction": 0.3}))
    validation = prepared.manifest.splits["validation"]
    assert validation.unknown_tokens == validation.documents > 0
    assert prepared.manifest.splits["train"].unknown_tokens == 0
    assert not prepared.manifest.round_trips
    with pytest.raises(UserError, match="does not restore the text"):
        list(held_out_text(prepared))


def test_the_tokenizer_is_trained_on_the_training_split_only(make: Make, tmp_path: Path) -> None:
    write(tmp_path, "a" * 90 + "z" * 10)
    prepared = prepare(make(validation={"fraction": 0.1}))
    assert "z" not in prepared.tokenizer.get_vocab()
    assert prepared.manifest.splits["validation"].unknown_tokens == 10
    assert not prepared.manifest.round_trips


def test_tiny_shakespeare_is_cut_where_others_cut_it(make: Make, shared_data: Path) -> None:
    file = shared_data / "tinyshakespeare.txt"
    prepared = prepare(make(path=file, validation={"fraction": 0.1}))
    text = file.read_text()
    assert tokens(prepared, "train")[0] == document_frame(prepared.tokenizer)[0][0]
    assert decoded(prepared, "train") == [text[:1_003_854]]
    assert decoded(prepared, "validation") == [text[1_003_854:]]
    assert len(tokens(prepared, "validation")) == 111_540
    assert prepared.manifest.vocab_size == 65 + 2
    assert sum(split.unknown_tokens for split in prepared.manifest.splits.values()) == 0


# -------------------------------------------------------------------------------------------------------- split


def pieces(*texts: str, size: int = 1000) -> list[Piece]:
    return [
        Piece(text[at : at + size], at == 0, at + size >= len(text), len(text.encode()))
        for text in texts
        for at in range(0, len(text), size)
    ]


def joined(given: list[Piece], **settings: Any) -> dict[str, str]:
    found = {"train": "", "validation": ""}
    for split, piece in split_documents(given, ValidationSplit(**settings)):
        found[split] += piece.text
    return found


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("text", ["0123456789", "éééééééééé", "你好🙂世界🙂", "x"])
def test_a_tail_is_cut_by_bytes_at_a_character(text: str, size: int) -> None:
    found = joined(pieces(text, size=size), by="tail", fraction=0.25)
    cut = int(len(text.encode()) * 0.75)
    assert found["train"] + found["validation"] == text
    assert cut <= len(found["train"].encode()) < cut + 4


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_a_tail_starts_once_and_its_document_ends_in_it(size: int) -> None:
    given = list(
        split_documents(pieces("0123456789" * 2, "abcdefghij", size=size), ValidationSplit(by="tail", fraction=0.3))
    )
    tails = [piece for split, piece in given if split == "validation"]
    heads = [piece for split, piece in given if split == "train"]
    assert sum(piece.starts_document for piece in tails) == sum(piece.ends_document for piece in tails) == 2
    assert (sum(piece.starts_document for piece in heads), sum(piece.ends_document for piece in heads)) == (2, 0)


def test_documents_are_held_out_by_their_text_only() -> None:
    texts = essays(200)
    settings = {"by": "document", "fraction": 0.25}
    forward, backward = joined(pieces(*texts), **settings), joined(pieces(*texts[::-1]), **settings)
    held_out = {text for text in texts if text in forward["validation"]}
    assert held_out == {text for text in texts if text in backward["validation"]}
    assert 25 < len(held_out) < 75
    twice = joined(pieces(*texts, *texts), **settings)
    assert all(text not in twice["train"] for text in held_out)


def test_a_document_in_pieces_stays_in_one_split() -> None:
    texts = essays(50)
    found = joined(pieces(*texts, size=7), by="document", fraction=0.3)
    assert all((text in found["train"]) != (text in found["validation"]) for text in texts)


def test_auto_takes_tails_of_few_documents(make: Make, tmp_path: Path) -> None:
    write(tmp_path, *essays(19))
    few = prepare(make(validation={"fraction": 0.25}))
    assert few.manifest.splits["train"].documents == few.manifest.splits["validation"].documents == 19
    separators = tokens(few, "validation").count(0)
    assert separators == 18  # the first tail continues the training text; then the text jumps
    write(tmp_path, *essays(20))
    many = prepare(make(validation={"fraction": 0.25}))
    assert sum(split.documents for split in many.manifest.splits.values()) == 20
    seldom = prepare(make(validation={"fraction": 0.001}))
    assert all(split.documents == 20 for split in seldom.manifest.splits.values()), "no whole one is held out"


def test_a_long_document_in_pieces_gives_the_same_text(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(essays(50))
    write(tmp_path, text)
    monkeypatch.setattr(base, "PIECE_BYTES", 100)
    monkeypatch.setattr(opened, "_DECODED_TOKENS", 3)
    prepared = prepare(make({"type": "bpe", "vocab_size": 280}, validation={"fraction": 0.3}))
    held_out = b"".join(held_out_text(prepared)).decode()
    assert decoded(prepared, "train") == [text.removesuffix(held_out)]
    assert prepared.manifest.round_trips
    assert 0.25 < len(held_out) / len(text) < 0.31


def test_a_tokenizer_that_adds_a_space_to_each_piece_does_not_round_trip(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "the cat sat\n" * 40
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer.train_from_iterator([text], trainers.BpeTrainer(vocab_size=40, show_progress=False))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, text)
    recipe = make({"type": "file", "path": tmp_path / "tokenizer.json"}, validation={"fraction": 0.9})
    monkeypatch.setattr(base, "PIECE_BYTES", 60)
    assert tokenizer.decode(tokenizer.encode("the cat\n").ids) == "the cat\n"
    assert not prepare(recipe).manifest.round_trips


@pytest.mark.parametrize(
    ("texts", "settings", "message"),
    [
        (["", ""], {}, "data.sources hold no text"),
        (["one"], {"by": "document"}, r"fraction=0.05 by document leaves the validation split without text\. Raise"),
        (["one"], {"by": "document", "fraction": 0.999}, r"leaves the training split without text\. Lower .*by=tail"),
    ],
)
def test_an_empty_split_is_refused(
    texts: list[str], settings: dict[str, Any], message: str, make: Make, tmp_path: Path
) -> None:
    write(tmp_path, *texts)
    with pytest.raises(UserError, match=message):
        prepare(make(validation=settings))
    assert leftovers(tmp_path / "data") == []


@pytest.mark.parametrize("kind", ["char", "word", "file"])
def test_another_vocabulary_than_the_tokenizer_s_is_refused_before_any_text_is_encoded(
    kind: str, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, *essays(30))
    first = prepare(make({"type": kind} if kind != "file" else None))
    size = first.manifest.vocab_size
    tokenizer = {"type": kind} if kind != "file" else {"type": kind, "path": first.folder / "tokenizer"}
    recipe = make(tokenizer, cache_dir=tmp_path / "other")
    wrong = recipe.model_copy(update={"model": recipe.model.model_copy(update={"vocab_size": size - 1})})
    monkeypatch.setattr("gptworks.data.jobs._JobWriter._write_documents", lambda *_: pytest.fail("text is encoded"))
    with pytest.raises(UserError, match=rf"model\.vocab_size={size - 1} and the tokenizer has {size} tokens"):
        prepare(wrong)
    assert leftovers(tmp_path / "other") == []


# --------------------------------------------------------------------------------------------- reuse and identity


def test_nothing_changed_does_nothing(make: Make, tmp_path: Path) -> None:
    write(tmp_path, *essays(30))
    first = prepare(make(validation={"fraction": 0.3}))
    before = {file: file.stat().st_mtime_ns for file in first.folder.rglob("*")}
    second = prepare(make(validation={"fraction": 0.3}), report=lambda *_: pytest.fail("it worked"))
    assert second.reused and second.folder == first.folder and second.manifest == first.manifest
    assert fingerprint(second.tokenizer) == fingerprint(first.tokenizer)
    assert {file: file.stat().st_mtime_ns for file in first.folder.rglob("*")} == before


def test_every_change_makes_another_folder(make: Make, tmp_path: Path) -> None:
    write(tmp_path, *essays(30))
    tokenizer = tmp_path / "tokenizer.json"
    half = {"fraction": 0.5}
    first = prepare(make(validation=half))
    before = contents(first)
    first.tokenizer.save(str(tokenizer))
    other = [
        prepare(make(validation={"fraction": 0.4})),
        prepare(make({"type": "word"}, validation=half)),
        prepare(make(validation=half, shard_tokens=100)),
        prepare(make({"type": "file", "path": tokenizer}, validation=half)),
    ]
    tokenizer.write_text(other[1].tokenizer.to_str())
    other.append(prepare(make({"type": "file", "path": tokenizer}, validation=half)))
    write(tmp_path, "another beginning")
    other.append(prepare(make(validation=half)))
    folders = {prepared.folder for prepared in (first, *other)}
    assert len(folders) == 7
    assert all(folder.name.startswith("shards-") and len(folder.name) == 15 for folder in folders)
    assert contents(first) == before


def test_recipes_of_any_name_share_the_shards_of_one_text(make: Make, tmp_path: Path) -> None:
    write(tmp_path, *essays(30))
    recipe = make(validation={"fraction": 0.3})
    first = prepare(recipe)
    for name in ("another", "test", "a-third"):
        again = prepare(recipe.model_copy(update={"name": name}))
        assert again.reused and again.folder == first.folder
    assert [path.name for path in recipe.data.cache_dir.glob("[!.]*")] == [first.folder.name]


def test_a_dataset_is_known_by_the_contents_of_its_sources(make: Make, tmp_path: Path) -> None:
    """File times and paths do not matter."""
    write(tmp_path, *essays(30))
    half = {"fraction": 0.5}
    made = prepare(make(validation=half)).folder
    for file in (tmp_path / "text").iterdir():
        os.utime(file, (1, 1))
    moved = shutil.copytree(tmp_path / "text", tmp_path / "elsewhere")
    again = prepare(make(path=moved, validation=half), report=lambda *_: pytest.fail("it worked"))
    assert again.folder == prepare(make(validation=half)).folder == made
    (moved / "003.txt").write_text("other words", encoding="utf-8")
    assert prepare(make(path=moved, validation=half)).folder != made


def test_a_dataset_is_used_where_its_sources_are_gone(make: Make, tmp_path: Path) -> None:
    write(tmp_path, *essays(30))
    tokenizer = {"type": "file", "path": str(tmp_path / "tokenizer.json")}
    prepare(make()).tokenizer.save(tokenizer["path"])
    named = {"type": "file", "path": str(tmp_path / "named")}
    (tmp_path / "named" / "additional_chat_templates").mkdir(parents=True)
    shutil.copy(tokenizer["path"], tmp_path / "named" / "tokenizer.json")
    for file in ("chat_template.jinja", "additional_chat_templates/tool_use.jinja"):
        (tmp_path / "named" / file).write_text("{{ messages[0].content }}", encoding="utf-8")
    half = {"fraction": 0.5}
    kinds = (None, tokenizer, named)
    made = [prepare(make(kind, validation=half)) for kind in kinds]
    assert "other_templates" in made[-1].manifest.made_from
    shutil.copytree(tmp_path / "data", tmp_path / "copy", copy_function=shutil.copyfile)
    shutil.rmtree(tmp_path / "text")
    (tmp_path / "tokenizer.json").unlink()
    shutil.rmtree(tmp_path / "named")
    for kind, known in zip(kinds, made, strict=True):
        recipe = make_again(make(kind, validation=half), tmp_path / "copy")
        with pytest.warns(UserWarning, match=rf"{tmp_path}.*no such.*copy/{known.folder.name}, made by these settings"):
            found = prepare(recipe, report=lambda *_: pytest.fail("it worked"))
        assert found.folder == tmp_path / "copy" / known.folder.name and contents(found) == contents(known)
        assert find_prepared(recipe) is not None
    with pytest.raises(UserError, match="no such file or folder"):
        prepare(make(validation={"fraction": 0.4}))


def test_with_several_datasets_of_missing_sources_none_is_guessed(make: Make, tmp_path: Path) -> None:
    for texts in (essays(30), essays(31)):
        write(tmp_path, *texts)
        prepare(make())
    shutil.rmtree(tmp_path / "text")
    with pytest.raises(UserError, match=r"shards-\w{8} and .*shards-\w{8} were all built with its settings"):
        prepare(make())


def test_the_sum_of_a_large_file_is_remembered_until_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPTWORKS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(found_files, "REMEMBERED_BYTES", 10)
    files, read = [tmp_path / "a.txt", tmp_path / "b.txt.gz"], []
    for file in files:
        file.write_bytes(b"x" * 20)
        os.utime(file, (1, 1))
    monkeypatch.setattr(found_files, "_SETTLED_NS", -1)
    monkeypatch.setattr(found_files, "sha256_file", lambda file: read.append(file.name) or sha256_file(file))
    first = found_files.contents(files)
    assert first == [[".txt", hashlib.sha256(b"x" * 20).hexdigest()], [".txt.gz", first[0][1]]]
    assert found_files.contents(files) == first and sorted(read) == ["a.txt", "b.txt.gz"], "each once"
    files[0].write_bytes(b"y" * 20)
    os.utime(files[0], (1, 1))
    assert found_files.contents(files)[0] != first[0], "though its size and time are as before"
    (tmp_path / "cache" / "sums.json").write_text("{broken")
    assert found_files.contents(files)[1] == first[1]
    monkeypatch.setattr(found_files, "_SETTLED_NS", 10**12)
    files[0].write_bytes(b"z" * 20)
    for _ in range(2):
        read.clear()
        found_files.contents(files)
        assert "a.txt" in read, "it may change again within a tick"


def test_processes_do_not_change_the_shards(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, *essays(300))
    kind = {"type": "bpe", "vocab_size": 300}
    monkeypatch.setattr(base, "UNIT_BYTES", 20_000)
    one_process = prepare(make(kind, processes=1, shard_tokens=2000, cache_dir=tmp_path / "one"))
    together = prepare(make(kind, processes=2, shard_tokens=2000, cache_dir=tmp_path / "together"))
    assert contents(one_process) == contents(together)
    assert len(one_process.manifest.splits["train"].shards) > 5
    assert not multiprocessing.active_children()


def test_progress_is_reported_to_the_last_byte(make: Make, tmp_path: Path) -> None:
    write(tmp_path, *essays(30))
    seen: list[tuple[str, int, int | None]] = []
    prepare(make(validation={"fraction": 0.3}), report=lambda *reported: seen.append(reported))
    total = len("".join(essays(30)).encode())
    assert seen[-1] == ("shards", total, total)
    stages = [stage for stage, *_ in seen]
    assert list(dict.fromkeys(stages)) == ["tokenizer", "merging", "shards"], "each stage by its own name"
    assert seen[stages.index("merging")] == ("merging", 0, None), "how long it takes is not known"


def test_a_prepared_dataset_is_found_without_preparing(make: Make, tmp_path: Path) -> None:
    recipe = make(validation={"fraction": 0.3})
    assert find_prepared(recipe) is None  # there is no text yet
    write(tmp_path, *essays(30))
    assert find_prepared(recipe) is None and not (tmp_path / "data").exists()
    folder = prepare(recipe).folder
    found = find_prepared(recipe)
    assert found is not None and found.folder == folder


def test_a_damaged_folder_is_refused(make: Make, tmp_path: Path) -> None:
    write(tmp_path, *essays(30))
    recipe = make(validation={"fraction": 0.3})
    folder = prepare(recipe).folder
    tokenizer = (folder / "tokenizer" / "tokenizer.json").read_text()
    (folder / "tokenizer" / "tokenizer.json").write_text(tokenizer.replace('"a":', '"ä":'))
    with pytest.raises(UserError, match=r"tokenizer\.json is missing or not as it was written"):
        prepare(recipe)
    (folder / "tokenizer" / "tokenizer.json").write_text(tokenizer)
    config = folder / "tokenizer" / "tokenizer_config.json"
    config.write_text(config.read_text().replace("false", "true"))
    with pytest.raises(UserError, match=r"tokenizer_config\.json is missing or not as it was written"):
        prepare(recipe)
    (folder / "train-00000.tokens").unlink()
    with pytest.raises(UserError, match=rf"train-00000\.tokens is missing\. Delete {folder}"):
        open_prepared(folder)


def make_again(recipe: Recipe, cache_dir: Path) -> Recipe:
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"cache_dir": cache_dir})})


# ------------------------------------------------------------------------------------------------------ failures


SCRIPT = """
import os, resource, signal, sys, time
from pathlib import Path
from gptworks.config import Recipe
from gptworks.data.prepare import prepare

recipe = Recipe.model_validate_json(Path(sys.argv[1]).read_text())

def report(stage, done_bytes, total_bytes):
    if stage == "shards" and done_bytes > 1000:
        {act}

prepare(recipe, report=report)
"""


def start(recipe: Recipe, act: str, folder: Path) -> commands.Process:
    (folder / "recipe.json").write_text(recipe.model_dump_json())
    (folder / "script.py").write_text(SCRIPT.replace("{act}", act))
    return commands.start(folder / "script.py", folder / "recipe.json", stderr=subprocess.PIPE)


def test_a_killed_prepare_leaves_nothing_that_is_read(make: Make, tmp_path: Path) -> None:
    write(tmp_path, *essays(60))
    recipe, data = make(validation={"fraction": 0.3}), tmp_path / "data"
    process = start(recipe, "os.kill(os.getpid(), signal.SIGKILL)", tmp_path)
    assert process.communicate() and process.returncode == -signal.SIGKILL
    assert len(leftovers(data)) == 1
    assert not [path for path in data.iterdir() if not path.name.startswith(".")]
    write(tmp_path, "a change, so that the folder has another name")
    prepared = prepare(make(validation={"fraction": 0.3}))
    assert len(decoded(prepared, "train") + decoded(prepared, "validation")) == 60
    assert leftovers(data) == []


def test_an_interrupted_prepare_cleans_up(make: Make, tmp_path: Path) -> None:
    write(tmp_path, *essays(60))

    def interrupt(stage: str, done_bytes: int, total_bytes: int | None) -> None:
        if stage == "shards":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(make(validation={"fraction": 0.3}), report=interrupt)
    assert leftovers(tmp_path / "data") == []
    assert not prepare(make(validation={"fraction": 0.3})).reused


def test_jobs_finished_before_an_interruption_are_not_repeated(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, *essays(300))
    monkeypatch.setattr(base, "UNIT_BYTES", 10_000)
    kind: dict[str, Any] = {"type": "bpe", "vocab_size": 300}
    wanted = contents(prepare(make(kind, processes=1, cache_dir=tmp_path / "at-once")))
    n_jobs = len({name for name in wanted if re.fullmatch(r"train-\d+\.tokens", name)})
    assert n_jobs > 4
    recipe, kept = make(kind, processes=1), 0
    for _ in range(n_jobs + 2):
        first: list[int] = []

        def interrupt(stage: str, done_bytes: int, total_bytes: int | None, first: list[int] = first) -> None:
            if stage == "shards":
                first.append(done_bytes)
                if done_bytes > first[0] + 15_000:
                    raise KeyboardInterrupt

        try:
            made = prepare(recipe, report=interrupt)
        except KeyboardInterrupt:
            assert leftovers(tmp_path / "data") and first[0] >= kept
            kept = first[0]
        else:
            break
    assert kept > 20_000 and contents(made) == wanted
    assert leftovers(tmp_path / "data") == []


def test_text_that_changes_while_it_is_read_is_refused(make: Make, tmp_path: Path) -> None:
    write(tmp_path, *essays(60))

    def change(stage: str, done_bytes: int, total_bytes: int | None) -> None:
        if stage == "shards":
            (tmp_path / "text" / "059.txt").write_text(f"{done_bytes} other words\n" * 9, encoding="utf-8")

    with pytest.raises(UserError, match="changed while they were read"):
        prepare(make(), report=change)
    assert leftovers(tmp_path / "data") == [] and not list((tmp_path / "data").glob("shards-*"))
    assert not prepare(make()).reused


def test_two_at_once_are_safe_and_do_not_disturb_each_other(make: Make, tmp_path: Path) -> None:
    write(tmp_path, *essays(60))
    recipe, data = make(validation={"fraction": 0.3}), tmp_path / "data"
    process = start(recipe, "Path(sys.argv[1] + '.begun').touch(); time.sleep(0.02)", tmp_path)
    begun = tmp_path / "recipe.json.begun"
    while not begun.exists() and process.poll() is None:
        time.sleep(0.01)
    other = prepare(make(validation={"fraction": 0.4}))  # another folder of the same name and cache
    assert process.poll() is None and len(leftovers(data)) == 1
    stages: list[str] = []
    waited = prepare(recipe, report=lambda stage, *_: stages.append(stage))
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert waited.reused and stages == ["waiting"] and waited.folder != other.folder
    assert len(tokens(waited, "train")) > 100


def test_two_threads_make_one_folder(make: Make, tmp_path: Path) -> None:
    write(tmp_path, *essays(60))
    found: list[Prepared] = []
    recipe = make(validation={"fraction": 0.3})
    threads = [threading.Thread(target=lambda: found.append(prepare(recipe))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(prepared.reused for prepared in found) == [False, True, True, True]


@pytest.mark.skipif(sys.platform != "linux", reason="limits the size of a file as Linux does")
def test_a_full_disk_is_said_and_leaves_nothing(make: Make, tmp_path: Path) -> None:
    write(tmp_path, *[text * 20 for text in essays(60)])
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))"
    process = start(make(validation={"fraction": 0.3}), limit, tmp_path)
    _, errors = process.communicate()
    assert process.returncode != 0
    assert (
        "RunError" in errors
        and "the data could not be prepared: File too large" in errors
        and "data.cache_dir" in errors
    )
    assert leftovers(tmp_path / "data") == []
    assert not [path for path in (tmp_path / "data").iterdir() if not path.name.startswith(".")]


def test_a_dead_worker_is_said(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, *essays(300))
    monkeypatch.setattr(base, "UNIT_BYTES", 10_000)

    def kill_workers(stage: str, done_bytes: int, total_bytes: int | None) -> None:
        for child in multiprocessing.active_children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid or 0, signal.SIGKILL)

    with pytest.raises(RunError, match=r"a worker process died.*data\.processes=1"):
        prepare(make({"type": "bpe", "vocab_size": 300}, processes=2), report=kill_workers)
    assert not prepare(make({"type": "bpe", "vocab_size": 300}, processes=1)).reused


def test_a_mistake_far_into_a_file_is_a_clean_message(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "PIECE_BYTES", 64)
    write(tmp_path, "a line of text\n" * 500)
    with (tmp_path / "text" / "000.txt").open("ab") as file:
        file.write(b"\xff")
    for kind in ({"type": "char"}, {"type": "bpe", "vocab_size": 260}, {"type": "word"}):
        with pytest.raises(UserError, match=r"000\.txt is not UTF-8 text: byte 0xff at byte 7500"):
            prepare(make(kind, validation={"fraction": 0.001}))
    assert leftovers(tmp_path / "data") == []


def test_the_manifest_says_what_made_it(make: Make, tmp_path: Path) -> None:
    write(tmp_path, *essays(30))
    prepared = prepare(make(validation={"fraction": 0.3}))
    manifest = json.loads((prepared.folder / "manifest.json").read_text())
    assert manifest["made_from"]["tokenizer"]["type"] == "char"
    assert manifest["vocab_size"] == prepared.tokenizer.get_vocab_size()
    assert manifest["tokenizer_sha256"] == fingerprint(prepared.tokenizer)
    assert len(list(iter_documents(make().data.sources))) == sum(s["documents"] for s in manifest["splits"].values())
