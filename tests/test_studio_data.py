"""The studio's part Data: it shows the data that the training loop used, token by token."""

import json
import math
import os
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import torch

import chats
import hf
import serving
import tiny
from gptworks.checkpoint import all_checkpoints, load_run
from gptworks.config import IGNORED
from gptworks.data.opened import open_prepared
from gptworks.data.samples import Batch
from gptworks.data.shards import TokenShards
from gptworks.errors import UserError
from gptworks.files import sealed_json
from gptworks.model.gpt import GPT
from gptworks.recipe import load_recipe, parse_recipe
from gptworks.runs.data import RunData
from gptworks.studio import data as studio_data
from gptworks.tokenizer import encode_text, load_tokenizer
from gptworks.training.fork import fork
from gptworks.training.loop import train
from gptworks.training.objectives.base import choose_objective
from gptworks.training.objectives.next_token import Losses, next_token
from gptworks.training.record.metrics import read_metrics
from gptworks.training.samples import samples_of_step
from gptworks.training.step import TrainStep
from serving import posted, running_studio

Batches = dict[str, dict[int, list[Batch]]]
"""By run and step, the micro-batches that the loop trained on."""

DOCUMENTS = [f"story {i}: é and ü, {i * i} times the lazy dog.\n" * (1 + i % 3) for i in range(60)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Batches]:
    """A base run that was resumed with another batch size, two that were tuned, and an imported one."""
    home, batches = tmp_path_factory.mktemp("data"), {}
    chats.write_jsonl(home / "text.jsonl", [{"text": text} for text in DOCUMENTS])
    steps = {"checkpoint_every": 2, "evaluate_every": 100, "keep_checkpoints": 9, "schedule": "constant"}
    steps |= {"precision": "fp32", "optimizer": "adamw", "evaluate_sequences": 1}
    base = chats.base_tree(home, **steps, max_steps=4) | {"run_dir": str(home / "runs" / "base")}
    base["data"] |= {"sources": [{"type": "jsonl", "path": str(home / "text.jsonl")}], "validation": {"fraction": 0.1}}
    tuned = chats.tune_tree(home, **steps, max_steps=4) | {
        "run_dir": str(home / "runs" / "tuned"), "initialize_from": str(home / "runs" / "base"),
    }  # fmt: skip
    tuned["tokenizer"] |= {"path": str(home / "runs" / "base" / "tokenizer")}
    pairs = [{"prompt": row["instruction"], "chosen": row["output"], "rejected": f"no, {i}"}
             for i, row in enumerate(chats.records(40))]  # fmt: skip
    chats.write_jsonl(home / "pairs.jsonl", pairs)
    preferred = tuned | {"run_dir": str(home / "runs" / "preferred"), "objective": {"type": "preference"}}
    preferred["data"] = tuned["data"] | {"sources": [{"type": "preferences", "path": str(home / "pairs.jsonl")}]}
    accumulate = TrainStep.accumulate

    def recorded(
        step: TrainStep, micro_batches: list[Batch], n_targets: int, seed: tuple[int, int], *numbers: Any
    ) -> Any:
        batches.setdefault(name, {})[seed[1] + 1] = micro_batches
        return accumulate(step, micro_batches, n_targets, seed, *numbers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainStep, "accumulate", recorded)
        for name, tree in {"base": base, "tuned": tuned, "preferred": preferred}.items():
            train(parse_recipe(tree))
            if name == "base":
                longer = base | {"train": base["train"] | {"max_steps": 6, "batch_size": 12}}
                train(parse_recipe(longer), resume=True, change=["train.batch_size"])
    hf.make_run(home / "runs" / "bytes", serving.tiny_engine().model, serving.byte_tokenizer())
    return home / "runs", batches


@pytest.fixture(scope="module")
def runs(made: tuple[Path, Batches]) -> Path:
    return made[0]


@pytest.fixture(scope="module")
def http(runs: Path) -> Iterator[httpx.Client]:
    with running_studio(runs) as server, server.http() as one:
        yield one


def asked(http: httpx.Client, what: str, **body: Any) -> Any:
    return posted(http, f"/studio/data/{what}", **({"model": "base"} | body))


def refused(http: httpx.Client, status: int, part: str, what: str, **body: Any) -> None:
    assert part in posted(http, f"/studio/data/{what}", status, **({"model": "base"} | body))["error"]["message"]


def texts_of_loop(batch: Batch) -> list[list[tuple[list[int], list[bool]]]]:
    """Return the texts in each row of the loop's tensors: the tokens read, and which of them are learned."""
    inputs, targets, *positions = batch
    found = []
    for row in range(len(inputs)):
        begins = [0] if not positions else (positions[0][row] == 0).nonzero().flatten().tolist()
        texts = []
        for start, end in zip(begins, [*begins[1:], inputs.size(1)], strict=True):
            counted = (targets[row, start:end] != IGNORED).tolist()
            if any(counted):  # else it is padding
                last = [int(targets[row, end - 1])] if counted[-1] else []
                texts.append(([*inputs[row, start:end].tolist(), *last], [False, *counted][: end - start + len(last)]))
        found.append(texts)
    return found


def texts_shown(row: dict[str, Any]) -> list[tuple[list[int], list[bool]]]:
    """Return the texts of a row as the studio shows it, like `texts_of_loop`."""
    texts: list[tuple[list[int], list[bool]]] = []
    for token in row["tokens"]:
        if token["begins"] and token["begins"]["alone"]:
            texts.append(([], []))
        texts[-1][0].append(token["id"])
        texts[-1][1].append(token["learned"])
    return texts


def rows_of_step(http: httpx.Client, model: str, step: int, **more: Any) -> list[Any]:
    """Return all rows of a step, requested in parts."""
    rows: list[Any] = []
    while True:
        found = asked(http, "step", model=model, step=step, sample=len(rows), n_samples=5, n=4096, **more)
        rows += found["rows"]
        if len(rows) >= found["n_samples"]:
            return rows


@pytest.mark.parametrize("model", ["base", "tuned"])
def test_a_step_shows_the_batch_that_the_loop_trained_on(
    made: tuple[Path, Batches], http: httpx.Client, model: str
) -> None:
    """With gradient accumulation, across the end of an epoch, and after a resume with another batch size."""
    about = asked(http, "about", model=model)
    assert sorted(made[1][model]) == list(range(1, about["n_steps"] + 1))
    epochs = set()
    for step, micro_batches in made[1][model].items():
        rows = rows_of_step(http, model, step)
        theirs = [row for batch in micro_batches for row in texts_of_loop(batch)]
        assert [texts_shown(row) for row in rows] == theirs
        assert [row["sample"] for row in rows] == list(range(len(theirs)))
        epochs |= {row["epoch"] for row in rows}
    assert len(micro_batches) > 1 and len(epochs) > 1
    packed = any(sum(token["begins"] is not None for token in row["tokens"]) > 1 for row in rows)
    assert packed and all(row["padding"] > 0 for row in rows) == (model == "tuned")


def test_a_step_of_pairs_shows_both_answers(made: tuple[Path, Batches], http: httpx.Client) -> None:
    shown = asked(http, "step", model="preferred", step=2, n_samples=8, n=256)["rows"]
    chosen, rejected = shown[::2], shown[1::2]
    assert {row["answer"] for row in chosen} == {"chosen"} and {row["answer"] for row in rejected} == {"rejected"}
    at = 0
    for inputs, targets, _ in made[1]["preferred"][2]:
        n = len(inputs) // 2
        for i, row in enumerate([*chosen[at : at + n], *rejected[at : at + n]]):
            [(ids, learned)] = texts_shown(row)
            counted = (targets[i] != IGNORED).nonzero().flatten().tolist()
            assert [place - 1 for place, counts in enumerate(learned) if counts] == counted
            assert [ids[place + 1] for place in counted] == targets[i, counted].tolist()
            n_read = int(inputs[i].nonzero().max()) + 1
            assert ids[:n_read] == inputs[i, :n_read].tolist() and len(ids) == max(n_read, counted[-1] + 2)
        at += n


@pytest.mark.parametrize("model", ["base", "tuned"])
def test_the_losses_are_those_of_the_model(made: tuple[Path, Batches], http: httpx.Client, model: str) -> None:
    """The mean loss of a step's tokens under the checkpoint before it equals the loss in the run's log."""
    step = 3
    rows = rows_of_step(http, model, step, checkpoint=step - 1, loss=True)
    ours = [token["nats"] for row in rows for token in row["tokens"] if token["nats"] is not None]
    network = load_run(made[0] / model, str(step - 1)).model
    theirs = []
    for inputs, targets, *positions in made[1][model][step]:
        with torch.no_grad():
            logits = network.features(inputs, None, None, *positions) @ network.head_weight.T
        nats = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        theirs += nats[targets.flatten() != IGNORED].tolist()
    assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    logged = [one for one in read_metrics(made[0] / model / "metrics.jsonl") if one["kind"] == "train"][step - 1]
    assert sum(ours) / len(ours) == pytest.approx(logged["loss"], rel=1e-4)
    part = asked(http, "step", model=model, step=step, checkpoint=step - 1, loss=True, n_samples=2, first=30, n=20)
    cut = [token["nats"] for row in part["rows"] for token in row["tokens"]]
    whole = [token["nats"] for row in rows[:2] for token in row["tokens"][30:50]]
    assert [nats is None for nats in cut] == [nats is None for nats in whole]
    found = [nats for nats in cut if nats is not None]
    assert found == pytest.approx([nats for nats in whole if nats is not None], rel=1e-4)
    assert part["loss"] == (pytest.approx(sum(found) / len(found)) if found else None)


def test_documents_are_those_of_the_shards(runs: Path, http: httpx.Client) -> None:
    about = asked(http, "about")
    shards = TokenShards(about["folder"], "train")
    assert about["splits"]["train"] == {
        "n_documents": shards.n_documents, "n_tokens": shards.n_tokens, "text_bytes": shards.text_bytes,
    }  # fmt: skip
    n_bytes = 0
    for number in range(shards.n_documents):
        found = asked(http, "document", document=number, n=4096)
        text = "".join(token["text"] for token in found["tokens"])
        assert (
            text in DOCUMENTS and found["n_bytes"] == len(text.encode()) and found["n_tokens"] == len(found["tokens"])
        )
        n_bytes += found["n_bytes"]
        if number == 5:  # in pages, which cut no character
            pages = [
                asked(http, "document", document=5, first=at, n=3)["tokens"] for at in range(0, found["n_tokens"], 3)
            ]
            assert [token for page in pages for token in page] == found["tokens"]
    assert n_bytes == shards.text_bytes
    held_out = asked(http, "document", split="validation", document=0, n=1)
    assert held_out["tokens"][0]["spelling"] == "<|endoftext|>" and held_out["tokens"][0]["text"] == ""


def test_documents_of_conversations_have_masks(http: httpx.Client) -> None:
    found = asked(http, "document", model="tuned", document=3)
    learned = "".join(token["text"] for token in found["tokens"] if token["learned"])
    assert learned in {record["output"] for record in chats.records()}
    assert [token["spelling"] for token in found["tokens"] if token["learned"]][-1] == "<|im_end|>"


def test_windows_show_where_documents_begin(http: httpx.Client) -> None:
    about = asked(http, "about")
    shards = TokenShards(about["folder"], "train")
    begins, at = set(shards.document_starts().tolist()), []
    for number in (0, 1, about["n_windows"] - 1):
        for epoch in (0, 1):
            [row] = asked(http, "window", window=number, epoch=epoch)["rows"]
            where = row["tokens"][0]["begins"]
            start = int(shards.document_starts()[where["document"]]) + where["first"]
            assert [token["id"] for token in row["tokens"]] == shards.read(start, about["context"] + 1).tolist()
            for i, token in enumerate(row["tokens"][1:], 1):
                assert (token["begins"] is not None) == (start + i in begins)
            at.append(start)
    assert at[2] - at[0] == about["context"] and at[1] - at[0] == at[3] - at[2] != 0


def test_two_tokenizers_cut_a_text(runs: Path, http: httpx.Client) -> None:
    text = "the lazy dog, é!"
    for name, found in zip(("base", "bytes"), asked_tokenizers(http, text), strict=True):
        tokenizer = load_tokenizer(runs / name / "tokenizer")
        ids = encode_text(tokenizer, text)
        assert [token["id"] for token in found["tokens"]] == ids and found["n_tokens"] == len(ids)
        assert "".join(token["text"] for token in found["tokens"]) == text
        assert found["bytes_per_token"] == len(text.encode()) / len(ids) and found["n_bytes"] == 17


def asked_tokenizers(http: httpx.Client, text: str) -> Any:
    response = http.post("/studio/data/tokenize", json={"models": ["base", "bytes"], "text": text})
    assert response.status_code == 200, response.text
    return response.json()["found"]


def test_what_cannot_be_shown_is_refused(http: httpx.Client) -> None:
    refused(http, 400, "not trained here but imported", "about", model="bytes")
    refused(http, 404, "no run", "about", model="nothing")
    refused(http, 400, "choose one from 1 to 6", "step", step=7)
    refused(http, 400, "sample 12 is not in the batch, which has 12", "step", step=6, sample=12)
    refused(http, 400, "token 500 is in no row", "window", first=500)
    refused(http, 400, "there is no window 99999", "window", window=99_999)
    refused(http, 400, "there is no pair 99999", "window", model="preferred", window=99_999)
    refused(http, 400, "document 99999 is not in the train split", "document", document=99_999)
    refused(http, 400, "token 4000 is not in document 0", "document", document=0, first=4000)
    refused(http, 400, "less than or equal to 4096", "document", n=5000)
    response = http.post("/studio/data/tokenize", json={"models": ["bytes"], "text": "a" * 9001})
    assert "9002 tokens and at most 8192" in response.json()["error"]["message"] and response.status_code == 400


def test_what_is_too_long_is_refused_before_it_is_read(
    runs: Path, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gptworks.studio.data.MOST_READ", 50)
    refused(http, 400, "a row can be coloured up to its token 50", "window", loss=True, n=100)
    assert asked(http, "window", loss=True, n=40)["loss"] > 0
    monkeypatch.setattr("gptworks.runs.data.MOST_CONTEXT", 100)
    prepared = open_prepared(asked(http, "about")["folder"])
    data = RunData("base", runs / "base", load_recipe(runs / "base"), prepared)
    with pytest.raises(UserError, match=r"has rows of 128 tokens: rows of up to 100 are shown"):
        data.rows(0, 0)
    assert len(data.document("train", 0, 0, 5, lambda: None)["tokens"]) == 5


def test_data_that_is_gone_or_no_longer_what_it_was_is_refused(runs: Path, tmp_path: Path, http: httpx.Client) -> None:
    folder = Path(asked(http, "about", model="tuned")["folder"])
    aside = folder.rename(tmp_path / "aside")
    try:
        refused(http, 400, f"is not in {folder.parent}, its data.cache_dir. Put it back", "about", model="tuned")
        refused(http, 400, f"`gptworks data build {runs / 'tuned'}`", "step", model="tuned", step=1)
        shutil.copytree(aside, folder)
        (folder / "train-00000.tokens").write_bytes(bytes((folder / "train-00000.tokens").stat().st_size))
        refused(http, 400, "is corrupt: its sha256 is", "step", model="tuned", step=1)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
    assert asked(http, "step", model="tuned", step=1)["rows"]


@pytest.mark.parametrize(
    ("split", "changes", "words"),
    [
        ("train", {"tokens": 10**12}, "is broken"),
        ("train", {"documents": -1}, "is broken"),
        ("validation", {"shards": []}, "is broken"),
    ],
)
def test_a_manifest_whose_totals_lie_is_refused(
    split: str, changes: dict[str, Any], words: str, runs: Path, tmp_path: Path
) -> None:
    folder = copy_of_shards(runs, tmp_path)
    tree = json.loads((folder / "manifest.json").read_text())
    tree["splits"][split] |= changes
    del tree["sha256"]
    (folder / "manifest.json").write_text(sealed_json(tree))
    with pytest.raises(UserError, match=words):
        open_prepared(folder)


def copy_of_shards(runs: Path, tmp_path: Path) -> Path:
    recipe = load_recipe(runs / "base")
    [folder] = [file.parent for file in recipe.data.cache_dir.glob("*/manifest.json")
                if not json.loads(file.read_text())["origins"]]  # fmt: skip
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def test_files_of_shards_elsewhere_and_a_fifo_are_refused(runs: Path, tmp_path: Path) -> None:
    folder = copy_of_shards(runs, tmp_path)
    tree = json.loads((folder / "manifest.json").read_text())
    del tree["sha256"]
    tree["splits"]["train"]["shards"][0]["file"] = str(folder / "train-00000.tokens")
    (folder / "manifest.json").write_text(sealed_json(tree))
    with pytest.raises(UserError, match="is broken"):
        open_prepared(folder)
    (folder / "manifest.json").unlink()
    os.mkfifo(folder / "manifest.json")
    with pytest.raises(UserError, match="is a FIFO, socket or device"):
        open_prepared(folder)


def test_documents_that_do_not_follow_one_another_are_refused(runs: Path, tmp_path: Path) -> None:
    folder = copy_of_shards(runs, tmp_path)
    file = folder / "train-00000.offsets"
    file.write_bytes(file.read_bytes()[::-1])
    with pytest.raises(UserError, match="not ascending positions"):
        TokenShards(folder, "train", verify=False).document_starts()


# --------------------------------------------------------------------------------------------- samples of a step


def test_a_fork_knows_the_samples_of_the_steps_before_it(runs: Path, tmp_path: Path) -> None:
    folder = fork(runs / "base", 6, tmp_path / "forked", ["train.batch_size=4"])
    for step in range(1, 7):
        mine, theirs = (samples_of_step(load_recipe(run), run, step) for run in (folder, runs / "base"))
        assert mine == theirs
    assert (mine.position, mine.n_samples) == (4 * 8 + 12, 12)


def test_weights_between_two_checkpoints_know_the_samples_too(runs: Path, tmp_path: Path) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(runs / "base", copied)
    for checkpoint in all_checkpoints(copied):
        checkpoint.folder.rename(checkpoint.folder.with_name(f"weights-{checkpoint.step:06d}"))
    expected = samples_of_step(load_recipe(runs / "base"), runs / "base", 6)
    assert samples_of_step(load_recipe(copied), copied, 6) == expected


def test_after_a_rollback_steps_are_known_to_have_taken_other_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared with the loop's batches."""
    taken: dict[int, Batch] = {}
    accumulate = TrainStep.accumulate

    def recorded(
        step: TrainStep, micro_batches: list[Batch], n_targets: int, seed: tuple[int, int], *numbers: Any
    ) -> Any:
        taken[seed[1] + 1] = micro_batches[0]
        return accumulate(step, micro_batches, n_targets, seed, *numbers)

    seen: dict[int, int] = {}

    def exploding(model: GPT, batch: Batch) -> Losses:
        at = seen.setdefault(hash(batch[0].numpy().tobytes()), len(seen))
        losses = next_token(model, batch)
        return Losses(losses.objective * (math.inf if at in (6, 7, 8) else 1.0), losses.loss)

    monkeypatch.setattr(TrainStep, "accumulate", recorded)
    tree = tiny.recipe_tree(
        tmp_path, max_steps=12, batch_size=2, micro_batch_size=2, max_skipped_steps=3, max_rollbacks=1,
        checkpoint_every=4, evaluate_every=100, keep_checkpoints=9, precision="fp32", optimizer="adamw",
        evaluate_sequences=1,
    )  # fmt: skip
    recipe = parse_recipe(tree)
    train(recipe, objective=exploding)
    recipe = load_recipe(recipe.run_dir)
    [cache] = [file.parent for file in recipe.data.cache_dir.glob("*/manifest.json")]
    objective = choose_objective(recipe, cache)
    positions: list[int] = []
    for step, batch in taken.items():
        samples = samples_of_step(recipe, recipe.run_dir, step)
        assert torch.equal(objective.batch(samples.position, 0, samples.n_samples)[0], batch[0]), step
        positions.append(samples.position)
    assert positions == [0, 2, 4, 6, 18, 20, 22, 24, 26, 28, 30, 32]
    log = recipe.run_dir / "metrics.jsonl"
    with log.open("a") as file:
        file.write('{"kind": "skipped", "step": 12, "loss": 1.0, "grad_norm": "inf"}\n')
    assert [samples_of_step(recipe, recipe.run_dir, step).skipped for step in (11, 12)] == [False, True]
    log.write_text("".join(line for line in log.read_text().splitlines(True) if '"rollback"' not in line))
    assert samples_of_step(recipe, recipe.run_dir, 3).position == 4
    with pytest.raises(UserError, match="do not agree on the samples"):
        samples_of_step(recipe, recipe.run_dir, 6)
    (recipe.run_dir / "changes.json").write_text(sealed_json({"overrides": [], "changes": [{"step": "x"}]}))
    with pytest.raises(UserError, match=r"changes\.json is damaged"):
        samples_of_step(recipe, recipe.run_dir, 3)


def test_a_phrase_is_found_where_the_documents_have_it(
    http: httpx.Client, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    phrase, limit = "times the lazy", studio_data.MOST_INDEXED
    monkeypatch.setattr(studio_data, "MOST_INDEXED", 10)
    refused(http, 400, "Search it once with `gptworks data search`", "search", phrase=phrase)
    monkeypatch.setattr(studio_data, "MOST_INDEXED", limit)
    found = asked(http, "search", phrase=phrase, most=100)
    shards = TokenShards(Path(asked(http, "about")["folder"]), "train")
    starts = [*shards.document_starts().tolist(), shards.n_tokens]
    tokenizer = load_tokenizer(runs / "base" / "tokenizer")
    texts = [tokenizer.decode(shards.read(a, b - a).tolist()) for a, b in pairwise(starts)]
    assert found["n"] == sum(text.count(phrase) for text in texts) and found["n_tokens"] == shards.n_tokens
    places = [i for i, text in enumerate(texts) for _ in range(text.count(phrase))]
    assert [hit["document"] for hit in found["hits"]] == places[:100]
    info = asked(http, "info")
    assert info["amounts"][0]["documents"] == len(texts) and info["duplicates"]["train"]["documents"] == 0
