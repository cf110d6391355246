"""Cleaning within a build: one process, two processes, or a killed build give the same dataset and the same counts."""

import itertools
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from gptworks.config import Recipe
from gptworks.data import cleaned
from gptworks.data.cleaning import choose as clean
from gptworks.data.cleaning.counts import FilterCounts
from gptworks.data.opened import Prepared
from gptworks.data.prepare import find_prepared, prepare
from gptworks.data.shards import TokenShards
from gptworks.data.sources import base, records
from gptworks.errors import RunError, UserError
from tiny import plain_model

FILTERS = (
    {"type": "normalize-unicode"},
    {"type": "mask-personal-data"},
    {"type": "length", "min_words": 4},
    {"type": "exact-duplicates"},
    {"type": "near-duplicates"},
)


def essay(number: int) -> str:
    words = [f"w{(number * 7919 + at * (number + 3)) % 9973}" for at in range(60)]
    return f"Essay {number} by a{number}@mail.org:\r\n{' '.join(words)}\n"


ESSAYS = [essay(n) for n in range(60)]
TEXTS = [
    *ESSAYS[:40], "too short", ESSAYS[3], *ESSAYS[40:], ESSAYS[50].replace(" by ", " of "), "short too",
    ESSAYS[3].replace("\r\n", "\n"),
]  # fmt: skip
"""Of which the two short ones, two equal ones and one that is nearly equal are dropped."""


def n_dropped(counts: FilterCounts) -> int:
    return sum(one.documents for one in counts.dropped.values())


def recipe(folder: Path, *filters: dict[str, Any], **data: Any) -> Recipe:
    file = folder / "texts.jsonl"
    if not file.exists():
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    source = {"type": "jsonl", "path": str(file)}
    return Recipe(
        name="test",
        model=plain_model(context_length=8, n_layers=1, d_model=8, n_heads=1),
        tokenizer={"type": "char"},
        data={"sources": [source], "cache_dir": folder / "data", "clean": filters or FILTERS, "processes": 1, **data},
        train={"max_steps": 1},
    )


def documents(prepared: Prepared) -> list[str]:
    found = []
    for split in ("train", "validation"):
        shards = TokenShards(prepared.folder, split)  # type: ignore[arg-type]
        bounds = [*shards.document_starts().tolist(), shards.n_tokens]
        for start, end in itertools.pairwise(bounds):
            found.append(prepared.tokenizer.decode(shards.read(start, end - start).tolist()))
    return found


def contents(prepared: Prepared) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(prepared.folder.rglob("*")) if file.is_file()}


def counts(prepared: Prepared) -> dict[str, FilterCounts]:
    assert prepared.manifest.cleaning is not None
    return {one["type"]: FilterCounts.model_validate(one) for one in prepared.manifest.cleaning["filters"]}


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rensa")
    for module in (base, records):
        monkeypatch.setattr(module, "UNIT_BYTES", 4000)


def test_the_dataset_holds_the_filtered_text_and_its_manifest_the_counts(tmp_path: Path) -> None:
    prepared = prepare(recipe(tmp_path))
    kept = [text.replace("\r\n", "\n").replace(f"a{n}@mail.org", "<email>") for n, text in enumerate(ESSAYS)]
    assert sorted(documents(prepared)) == sorted(kept)
    found = counts(prepared)
    assert [*found] == [one["type"] for one in FILTERS]
    assert found["normalize-unicode"].seen.documents == len(TEXTS)
    assert found["normalize-unicode"].changed.documents == 62  # the short ones and one of the copies are as they should
    assert found["length"].dropped["few words"].documents == 2
    exact, near = found["exact-duplicates"], found["near-duplicates"]
    assert (exact.seen.documents, n_dropped(exact), n_dropped(near)) == (63, 2, 1)
    assert near.dropped["like an earlier document"].examples[0][1].startswith("Essay 50 of <email>")
    text_bytes = sum(split.text_bytes for split in prepared.manifest.splits.values())
    assert (near.kept.documents, near.kept.bytes) == (60, text_bytes) == (60, sum(map(len, kept)))
    assert not [*(tmp_path / "data").glob(".partial-*")]


def test_processes_and_kills_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one_process = prepare(recipe(tmp_path, cache_dir=tmp_path / "one"))
    together = prepare(recipe(tmp_path, cache_dir=tmp_path / "together", processes=2))
    assert contents(one_process) == contents(together)

    finished: list[int] = []
    with monkeypatch.context() as patch:
        real = cleaned._clean_job

        def dies(*arguments: Any) -> None:
            if finished:
                raise RunError("killed")
            finished.append(arguments[-1].number)
            real(*arguments)

        patch.setattr(cleaned, "_clean_job", dies)
        with pytest.raises(RunError, match="killed"):
            prepare(recipe(tmp_path, cache_dir=tmp_path / "killed"))
    done: list[int] = []
    monkeypatch.setattr(cleaned, "_clean_job", lambda *arguments: (done.append(arguments[-1].number), real(*arguments)))
    resumed = prepare(recipe(tmp_path, cache_dir=tmp_path / "killed"))
    assert contents(resumed) == contents(one_process)
    assert finished == [0] and 0 not in done and done


def test_large_documents_are_cleaned_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cleaned, "PART_BYTES", 1000)
    monkeypatch.setattr(base, "PIECE_BYTES", 300)
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": "line of words\n" * 500}) + "\n")
    prepared = prepare(recipe(tmp_path, {"type": "length"}, validation={"by": "tail"}))
    assert sum(map(len, documents(prepared))) == 500 * len("line of words\n")
    assert counts(prepared)["length"].seen.documents == pytest.approx(7000 / 1000, abs=2)
    assert clean.PART_BYTES == 1 << 24


def test_the_filters_decide_which_dataset_it_is(tmp_path: Path) -> None:
    plain = recipe(tmp_path, clean=())
    assert prepare(plain).manifest.cleaning is None
    some = recipe(tmp_path, {"type": "length", "min_words": 3})
    assert find_prepared(some) is None
    assert prepare(some).folder != prepare(plain).folder != prepare(recipe(tmp_path)).folder
    assert prepare(recipe(tmp_path, {"type": "length", "min_words": 3}, processes=2)).reused

    items = tmp_path / "items.jsonl"
    items.write_text(json.dumps({"question": " ".join(ESSAYS[7].split()[10:30])}) + "\n")
    tasks = prepare(recipe(tmp_path, {"type": "decontaminate", "tasks": [str(items)]}))
    assert n_dropped(counts(tasks)["decontaminate"]) == 1
    moved = shutil.move(items, tmp_path / "moved.jsonl")
    assert prepare(recipe(tmp_path, {"type": "decontaminate", "tasks": [str(moved)]})).folder == tasks.folder
    moved.write_text(json.dumps({"question": "another text " * 9}) + "\n")
    assert find_prepared(recipe(tmp_path, {"type": "decontaminate", "tasks": [str(moved)]})) is None
    moved.unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert prepare(recipe(tmp_path, {"type": "decontaminate", "tasks": [str(items)]})).folder == tasks.folder


def test_each_dataset_of_a_mixture_has_filters_of_its_own(tmp_path: Path) -> None:
    recipe(tmp_path)
    source = {"type": "jsonl", "path": str(tmp_path / "texts.jsonl")}
    members = [{"name": "clean", "sources": [source], "clean": FILTERS}, {"name": "short", "sources": [source]}]
    members[1]["clean"] = [{"type": "mask-personal-data"}, {"type": "length", "max_words": 2}]
    prepared = prepare(recipe(tmp_path, sources=(), mixture=members, clean=(), validation={"by": "tail"}))
    assert [part.name for part in prepared.manifest.parts] == ["clean", "short"]
    assert sum(split.documents for split in prepared.manifest.splits.values()) == 2 * (60 + 2)  # heads and tails
    assert "@" not in prepared.tokenizer.get_vocab()  # it learned from what the filters leave
    with pytest.raises(ValidationError, match="move it to the members"):
        recipe(tmp_path, sources=(), mixture=members)


def test_filters_that_cannot_work_are_refused_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"leaves none of 65 documents; most, 65, were dropped by length: few words"):
        prepare(recipe(tmp_path, {"type": "length", "min_words": 1000}))
    assert not [*(tmp_path / "data").glob(".partial-*")]
    with pytest.raises(UserError, match="no such file"):
        prepare(recipe(tmp_path, {"type": "decontaminate", "tasks": ["none.yaml"]}))
    monkeypatch.setitem(__import__("sys").modules, "rensa", None)
    with pytest.raises(UserError, match=r"near-duplicates needs rensa.*gptworks\[clean\]"):
        prepare(recipe(tmp_path))
    with pytest.raises(ValidationError, match="length comes after exact-duplicates"):
        recipe(tmp_path, {"type": "exact-duplicates"}, {"type": "length"})
    with pytest.raises(ValidationError, match="clean` applies to the text"):
        recipe(tmp_path, sources=[{"type": "conversations", "path": "x.jsonl"}])
