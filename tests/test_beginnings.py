"""The held-out beginnings that samples continue: chosen by a stated rule, before training."""

import io
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import tiny
from chats import base_tree, tune_tree
from gptworks.data.beginnings import beginnings, rule
from gptworks.data.prepare import prepare
from gptworks.data.shards import TokenShards
from gptworks.recipe import load_recipe, parse_recipe
from gptworks.training.loop import train
from gptworks.training.record.display import Display
from gptworks.training.record.metrics import read_metrics

SENTENCES = "The cat sat on the mat. A dog ran in the park.\nThe end came soon.\n\n"


def texts(folder: Path, n: int, by: str = "document") -> dict[str, Any]:
    """Write `n` texts, of which a part is held out; return a recipe that reads them."""
    (folder / "texts").mkdir()
    for i in range(3, n + 3):
        text = f"Story {i} begins here. It is short.\n\n" + SENTENCES * (i % 4 * 480 // n)
        (folder / "texts" / f"{i}.txt").write_text(text, encoding="utf-8")
    tree = tiny.recipe_tree(folder, max_steps=4, sample_every=2, sample_held_out=2, sample_tokens=12)
    tree["data"]["sources"] = [{"type": "files", "path": str(folder / "texts")}]
    tree["data"]["validation"] = {"fraction": 0.2, "by": by}
    return tree


@pytest.mark.parametrize("by", ["document", "auto"])
def test_beginnings_are_those_of_evenly_spaced_held_out_documents_and_end_at_a_paragraph(
    by: str, tmp_path: Path
) -> None:
    prepared = prepare(parse_recipe(texts(tmp_path, 60, by)))
    shards = TokenShards(prepared.folder, "validation")
    found = beginnings(shards, prepared.tokenizer, 3, 40, 10)
    starts = [*shards.document_starts().tolist(), shards.n_tokens]
    documents = [prepared.tokenizer.decode(shards.read(a, b - a).tolist()) for a, b in pairwise(starts)]
    long = [text for text in documents if len(text) > 80]  # a character is a token
    places = [long.index(next(text for text in long if text.startswith(one.text))) for one in found]
    n = len(long)
    assert n < len(documents), "short ones are passed over"
    assert places == [n // 6, 3 * n // 6, 5 * n // 6]
    for place, one in zip(places, found, strict=True):
        assert one.text.startswith("Story ") and one.text.endswith("\n\n")
        assert one.follows and long[place].startswith(one.text + one.follows)
    assert found == beginnings(shards, prepared.tokenizer, 3, 40, 10)
    assert rule(shards, 3, 40) == (
        f"3 of {n} held-out documents of over 80 tokens, evenly spaced, each from its start to the last end of a "
        "paragraph (else line, sentence or word) within 40 tokens"
    )


@pytest.mark.parametrize("by", ["tail", "auto"])
def test_the_held_out_ends_of_a_few_texts_give_beginnings_at_paragraphs_inside_them(by: str, tmp_path: Path) -> None:
    prepared = prepare(parse_recipe(texts(tmp_path, 8, by)))
    assert "2 evenly spaced places" in rule(TokenShards(prepared.folder, "validation"), 2, 30)


def test_the_held_out_end_of_one_text_gives_several_beginnings_at_paragraphs(tmp_path: Path) -> None:
    prepared = prepare(parse_recipe(texts(tmp_path, 1, "tail")))
    shards = TokenShards(prepared.folder, "validation")
    found = beginnings(shards, prepared.tokenizer, 2, 30)
    assert len(found) == 2 and all(one.text[0] in "TA" and one.text[-1] in "\n." for one in found)
    assert "2 evenly spaced places" in rule(shards, 2, 30)


def test_of_a_conversation_the_beginning_is_the_question(tmp_path: Path) -> None:
    train(parse_recipe(base_tree(tmp_path, max_steps=2)), display=Display(Console(quiet=True)))
    prepared = prepare(parse_recipe(tune_tree(tmp_path)))
    shards = TokenShards(prepared.folder, "validation")
    [one] = beginnings(shards, prepared.tokenizer, 1, 30, 20)
    assert one.token_ids is not None
    first = int(shards.document_starts()[shards.n_documents // 2])
    assert shards.read(first, len(one.token_ids)).tolist() == list(one.token_ids)
    learned = shards.read_learned(first, len(one.token_ids) + 1)
    assert not learned[: len(one.token_ids)].any() and learned[len(one.token_ids)]
    assert one.follows and "held-out conversation" in rule(shards, 1, 30)


def test_a_run_shows_first_how_held_out_texts_go_on_and_says_how_they_were_chosen(tmp_path: Path) -> None:
    tree, out = texts(tmp_path, 60), io.StringIO()
    train(parse_recipe(tree), display=Display(Console(file=out, width=200)))
    said = " ".join(out.getvalue().split())
    assert "samples continue 2 of" in said and "chosen before training" in said
    assert said.index("chosen before training") < said.index("step 1/4")
    records = list(read_metrics(tmp_path / "run" / "metrics.jsonl", kinds=("sample",)))
    assert [record["step"] for record in records] == [2, 2, 4, 4]
    assert [one["prompt"] for one in records[:2]] == [one["prompt"] for one in records[2:]]
    assert all(one["prompt"].startswith("Story") and one["follows"] for one in records)
    samples = (tmp_path / "run" / "samples.md").read_text(encoding="utf-8")
    assert samples.startswith("# Samples\n\nHeld-out texts: 2 of ") and "The held-out text continues:" in samples
    assert load_recipe(tmp_path / "run").train.sample_prompts == ()


def test_generate_continues_the_same_held_out_texts(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train(parse_recipe(texts(tmp_path, 60)), display=Display(Console(quiet=True)))
    records = list(read_metrics(tmp_path / "run" / "metrics.jsonl", kinds=("sample",)))
    result = tiny.gptworks("generate", tmp_path / "run", "--held-out", "2", "--max-tokens", "5", "--seed", "1")
    assert result.returncode == 0, result.stderr
    assert all(record["prompt"] in result.stdout for record in records)
    assert "2 of" in result.stderr and "evenly spaced" in result.stderr
    assert "--held-out" in tiny.gptworks("generate", tmp_path / "run", "a prompt", "--held-out", "2").stderr


def test_a_tuned_run_shows_answers_to_held_out_questions(tmp_path: Path) -> None:
    train(parse_recipe(base_tree(tmp_path, max_steps=2)), display=Display(Console(quiet=True)))
    out = io.StringIO()
    tree = tune_tree(tmp_path, max_steps=2, sample_every=2, sample_held_out=2, sample_tokens=8)
    train(parse_recipe(tree), display=Display(Console(file=out, width=200)))
    assert "samples continue 2 held-out conversations of" in out.getvalue()
    records = list(read_metrics(tmp_path / "tuned" / "metrics.jsonl", kinds=("sample",)))
    assert (
        all("what of" in one["prompt"] and one["follows"].startswith("the ") for one in records) and len(records) == 2
    )
