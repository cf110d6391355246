"""The studio's part Read: each number equals that of `evaluate`, of the engine, or of the package that computes it."""

import base64
import json
import math
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import torch

import hf
import serving
import tiny
from gptworks.checkpoint import load_run
from gptworks.data.shards import TokenShards
from gptworks.evaluation.evaluated_run import EvaluatedRun
from gptworks.evaluation.text import evaluate_text
from gptworks.infer.engine import Engine, load
from gptworks.interpret.attribution import attribute
from gptworks.interpret.record import record
from gptworks.interpret.text import TokenizedText
from gptworks.recipe import parse_recipe
from gptworks.training.loop import train
from serving import Running, posted, running_studio, until

TEXT = tiny.TEXT[:150]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a character tokenizer and two checkpoints, and an imported one with a byte tokenizer."""
    home = tmp_path_factory.mktemp("read")
    tree = tiny.recipe_tree(home, max_steps=8, checkpoint_every=4, evaluate_every=4, evaluate_sequences=2)
    train(parse_recipe(tree | {"run_dir": str(home / "runs" / "demo")}))
    model = serving.tiny_engine().model
    hf.make_run(home / "runs" / "bytes", model, serving.byte_tokenizer())
    return home / "runs"


@pytest.fixture(scope="module")
def server(runs: Path) -> Iterator[Running]:
    with running_studio(runs) as one:
        yield one


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with server.http() as one:
        yield one


@pytest.fixture(scope="module")
def demo(runs: Path) -> Engine:
    return load(runs / "demo", 8, device="cpu", backend="torch")


def read(http: httpx.Client, what: str, **body: Any) -> Any:
    return posted(http, f"/studio/read/{what}", **({"model": "demo", "checkpoint": 8} | body))


def refused(http: httpx.Client, status: int, part: str, what: str, **body: Any) -> None:
    assert part in posted(http, f"/studio/read/{what}", status, **({"model": "demo"} | body))["error"]["message"]


def test_a_text_costs_what_evaluate_says(http: httpx.Client, demo: Engine) -> None:
    found = read(http, "text", text=TEXT)
    report = evaluate_text(demo.model, demo.tokenizer, TEXT).report
    assert (found["loss"], found["bits_per_byte"], found["perplexity"]) == pytest.approx(
        (report.loss, report.bits_per_byte, report.perplexity), rel=1e-9
    )
    assert found["n_tokens"] == report.n_tokens and found["text_bytes"] == report.text_bytes and found["step"] == 8
    assert "".join(token["text"] for token in found["tokens"]) == TEXT
    assert sum(token["nats"] or 0 for token in found["tokens"]) == pytest.approx(report.total_nats, rel=1e-9)
    assert found["segments"] is None and 1 < len(found["along"]) <= 32
    assert read(http, "text", text=TEXT) == found


def test_two_checkpoints_and_two_tokenizers_are_compared(http: httpx.Client, demo: Engine, runs: Path) -> None:
    found = read(http, "text", text=TEXT, against={"model": "demo", "checkpoint": 4})
    early = evaluate_text(load_run(runs / "demo", "4").model, demo.tokenizer, TEXT).report
    assert found["other"]["loss"] == pytest.approx(early.loss, rel=1e-9) and found["other"]["step"] == 4
    assert [part["nats"] for part in found["segments"]][1:] == [token["nats"] for token in found["tokens"]][1:]
    assert sum(part["other_nats"] or 0 for part in found["segments"]) == pytest.approx(early.total_nats, rel=1e-9)
    text = "line 7: é"  # é is two tokens of the other model
    found = read(http, "text", model="bytes", checkpoint=None, text=text, against={"model": "demo"})
    assert [part["text"] for part in found["segments"]] == list(text)
    assert found["segments"][-1]["tokens"][1] - found["segments"][-1]["tokens"][0] == 2
    total = sum(part["nats"] for part in found["segments"])
    assert total == pytest.approx(sum(token["nats"] or 0 for token in found["tokens"]), rel=1e-9)


def test_validation_documents_have_numbers(http: httpx.Client, runs: Path) -> None:
    shards = TokenShards(EvaluatedRun(runs / "demo").prepared.folder, "validation")
    assert read(http, "documents") == {"n_documents": shards.n_documents, "n_tokens": shards.n_tokens}
    found = read(http, "text", document=0)
    assert [token["id"] for token in found["tokens"]] == shards.read(0, shards.n_tokens).tolist()
    refused(http, 400, "numbered from 0", "text", document=shards.n_documents)
    refused(http, 400, "Paste a text instead", "text", model="bytes", document=0)


def test_a_token_is_explained(http: httpx.Client, demo: Engine) -> None:
    index = 100
    found = read(http, "token", text=TEXT, index=index, against=3)
    text = TokenizedText.of_text(demo.tokenizer, TEXT)
    start, end = text.window(32, index)
    assert found["first_read"] == start
    mine = record(demo.model, text.ids[start:end], [index - 1 - start])
    shape, data = found["attention"]["shape"], base64.b64decode(found["attention"]["data"])
    assert shape == [2, 2, index - start]
    given = torch.tensor(struct.unpack(f"<{math.prod(shape)}f", data)).view(shape)
    torch.testing.assert_close(given, mine.weights[:, :, 0, : index - start], rtol=1e-4, atol=1e-6)
    assert given.sum(-1).tolist() == [pytest.approx([1, 1], abs=1e-5)] * 2
    nats = read(http, "text", text=TEXT)["tokens"][index]["nats"]
    lens = found["lens"]
    last = lens["layers"][-1][lens["tokens"].index(index)]
    assert -math.log(last["probability"]) == pytest.approx(nats, rel=1e-4) and len(lens["layers"]) == 3
    made = attribute(demo.model, mine, 0, int(text.ids[index]), 3)
    assert found["attribution"]["logit"] == pytest.approx(made.logit, rel=1e-4)
    assert sum(part["value"] for part in found["attribution"]["parts"]) == pytest.approx(made.logit, abs=1e-3)
    assert found["attribution"]["token"]["id"] == text.ids[index] and found["attribution"]["against"]["id"] == 3
    refused(http, 400, "choose one from 1 to 150", "token", text=TEXT, index=151)
    refused(http, 400, "token 90000 is not in the vocabulary", "token", text=TEXT, index=5, against=90000)


def test_the_training_data_is_searched(http: httpx.Client, demo: Engine, runs: Path) -> None:
    text = tiny.TEXT[400:430]
    found = read(http, "ngrams", text=text, index=30)
    training = TokenShards(EvaluatedRun(runs / "demo").prepared.folder, "train")
    whole = demo.tokenizer.decode(training.read(0, training.n_tokens).tolist(), skip_special_tokens=True)
    assert found["longest"] == 16 and found["searched_tokens"] == found["n_tokens"] == training.n_tokens
    assert found["by_length"][15]["followed"] == whole.count(text[-16:])
    place = found["places"][0]
    assert place["found"] == text[-16:] and place["before"] + place["found"] + place["after"] in whole


def test_a_text_through_the_checkpoints(http: httpx.Client, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"model": "demo", "checkpoint": 8, "text": TEXT, "threshold": 0.02}
    response = http.post("/studio/read/checkpoints", json=body)
    start, *points, end = [json.loads(one.removeprefix("data: ")) for one in response.text.split("\n\n") if one]
    assert start == {"type": "start", "steps": [4, 8]} and [one["step"] for one in points] == [4, 8]
    for point in points:
        again = read(http, "text", text=TEXT, checkpoint=point["step"])
        nats = [token["nats"] for token in again["tokens"]]
        assert point["nats"][0] is None and point["nats"][1:] == pytest.approx(nats[1:], rel=1e-6)
        assert point["loss"] == pytest.approx(again["loss"], rel=1e-6)
    for i, learned in enumerate(end["learned"][1:], 1):
        likely = [math.exp(-point["nats"][i]) >= 0.02 for point in points]
        assert learned == (None if not likely[1] else 4 if likely[0] else 8)


def test_tokens_are_read_as_they_are(http: httpx.Client) -> None:
    found = read(http, "text", text=TEXT)
    ids = [token["id"] for token in found["tokens"]]
    assert read(http, "text", tokens=ids) == found
    assert read(http, "token", tokens=ids, index=9) == read(http, "token", text=TEXT, index=9)
    joined = read(http, "text", tokens=[*ids, *ids])
    assert [token["id"] for token in joined["tokens"]] == [*ids, *ids]
    assert [token["nats"] for token in joined["tokens"]][1:9] == pytest.approx(
        [one["nats"] for one in found["tokens"]][1:9], rel=1e-4
    )
    refused(http, 400, "is not among the model's", "text", tokens=[*ids, 99_999])


def test_what_cannot_be_read_is_refused(http: httpx.Client) -> None:
    refused(http, 404, "no run", "text", model="nothing", text="a")
    refused(http, 404, "no checkpoint of step 5", "text", checkpoint=5, text="a")
    refused(http, 400, "give one of text, document and tokens", "text")
    refused(http, 400, "give one of text, document and tokens", "text", text="a", document=0)
    refused(http, 400, "`textt` is not supported; did you mean `text`?", "text", textt="a")
    refused(http, 400, "at most 100000 characters", "text", text="a" * 100_001)
    refused(http, 400, "9002 tokens and at most 8192", "text", text="a" * 9001)
    assert http.post("/studio/read/text", json={}, headers={"authorization": "Bearer no"}).status_code == 401


def test_work_ends_when_nobody_waits_for_it(
    server: Running, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, ended = threading.Event(), threading.Event()

    def slowly(_text: TokenizedText, _model: Any, check: Any) -> Any:
        began.set()
        try:
            while True:
                check()
                threading.Event().wait(0.01)
        finally:
            ended.set()

    monkeypatch.setattr(TokenizedText, "token_nats", slowly)
    body = {"model": "demo", "checkpoint": 8, "text": TEXT}
    with http.stream("POST", "/studio/read/checkpoints", json=body):
        until(began.is_set)
    until(ended.is_set)
    assert read(http, "documents")["n_documents"]
