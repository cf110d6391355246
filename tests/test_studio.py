"""The studio's interface over real run folders: each text and number equals the engine's."""

import json
import math
import os
import shutil
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
import httpx2 as httpx
import pytest
from typer.testing import CliRunner

import serving
import tiny
from gptworks import cli
from gptworks.errors import UserError
from gptworks.infer.engine import Engine, load
from gptworks.recipe import parse_recipe
from gptworks.serve.settings import ServerSettings
from gptworks.studio import loaded
from gptworks.studio.answers import as_json
from gptworks.studio.app import create_served, create_studio
from gptworks.training.loop import train
from gptworks.training.run_folder import is_in_use
from histories import training
from serving import KEY, Running, paused_after, request, running_app, until

PROMPT = "line 7: the quick"
HOSTILE = "<img src=x onerror=alert(1)>"
SETTINGS = ServerSettings(api_keys=(KEY,), client_share=1.0)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two checkpoints, one in a subfolder that works, and three that cannot be used."""
    home = tmp_path_factory.mktemp("studio")
    folder, other = home / "runs", home / "other"
    other.mkdir()
    tree = tiny.recipe_tree(other, max_steps=8, checkpoint_every=4, evaluate_every=4, evaluate_sequences=2)
    train(parse_recipe(tree | {"run_dir": str(folder / "demo")}))
    serving.write_run(folder / "tuned" / "chat")
    shutil.copytree(folder / "demo", folder / HOSTILE)
    weights = folder / HOSTILE / "checkpoints" / "step-000008" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8] + b"\xff" * 8)
    (folder / "broken").mkdir()
    (folder / "broken" / "recipe.yaml").write_text("model: [", encoding="utf-8")
    shutil.copytree(folder / "demo", other / "secret")
    (folder / "link").symlink_to(other / "secret")
    shutil.copytree(folder / "demo", folder / "leads-out")
    shutil.rmtree(folder / "leads-out" / "checkpoints")
    (folder / "leads-out" / "checkpoints").symlink_to(other / "secret" / "checkpoints")
    return folder


@pytest.fixture(scope="module")
def server(runs: Path) -> Iterator[Running]:
    with running_app(create_studio([runs], SETTINGS, device="cpu", backend="torch")) as one:
        yield one


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with server.http() as one:
        yield one


@pytest.fixture(scope="module")
def demo(runs: Path) -> Engine:
    """An engine with the run's last checkpoint."""
    return load(runs / "demo", 8, device="cpu", backend="torch")


def events(http: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    """Return the events of a generated text."""
    response = http.post("/studio/generate", json={"model": "demo"} | body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return [json.loads(part.removeprefix("data: ")) for part in response.text.split("\n\n") if part]


def made(http: httpx.Client, **body: Any) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
    """Return a generation's start, its tokens and its end."""
    start, *tokens, end = (event for event in events(http, **body) if event["type"] != "loading")
    assert (start["type"], end["type"]) == ("start", "end"), end
    assert {token["type"] for token in tokens} <= {"token"}
    return start, tokens, end


def text_of(tokens: list[dict[str, Any]], end: dict[str, Any] | None = None) -> str:
    return "".join(token["text"] for token in tokens) + (end["text"] if end else "")


def values(top: list[dict[str, Any]]) -> list[float]:
    return [one["logprob"] for one in top]


def refused(http: httpx.Client, status: int, part: str, **body: Any) -> None:
    response = http.post("/studio/generate", json={"model": "demo", "prompt": "line"} | body)
    assert response.status_code == status, response.text
    assert part in response.json()["error"]["message"]


# --------------------------------------------------------------------------------------------------- the runs


def test_an_answer_has_null_for_numbers_that_are_not_finite_also_next_to_text_that_is_not_unicode() -> None:
    @dataclass
    class Hit:
        text: str
        loss: float

    for text, shown in (("plain", "plain"), ("half \ud800", "half \\ud800")):
        body = bytes(as_json({"hits": (Hit(text, float("nan")),), "n": 1}).body)
        assert json.loads(body) == {"hits": [{"text": shown, "loss": None}], "n": 1}


def test_an_answer_with_an_object_that_json_cannot_hold_fails_and_holds_no_text_of_it() -> None:
    with pytest.raises(ValueError, match="unknown type"):
        as_json({"n": object()})


def test_state_lists_the_runs_and_what_is_wrong_with_them(http: httpx.Client, runs: Path, demo: Engine) -> None:
    state = http.get("/studio/state").json()
    assert "play" in state["parts"] and state["read_only"] is False
    models = {model["id"]: model for model in state["models"]}
    assert models.keys() == {"demo", "tuned/chat", HOSTILE, "broken", "leads-out"}, "links are not followed"
    one, config = models["demo"], demo.model.config
    assert one["run"] == str(runs / "demo") and one["problem"] is None and not one["chat"]
    assert (one["context"], one["vocab_size"]) == (config.context_length, config.vocab_size)
    assert one["parameters"] == sum(parameter.numel() for parameter in demo.model.parameters())
    records = [json.loads(line) for line in (runs / "demo" / "metrics.jsonl").read_text().splitlines()]
    losses = {record["step"]: record["loss"] for record in records if record["kind"] == "validation"}
    best = min((4, 8), key=lambda step: losses[step])
    assert [(c["step"], c["best"], c["last"]) for c in one["checkpoints"]] == [
        (4, best == 4, False), (8, best == 8, True)
    ]  # fmt: skip
    assert all(c["loss"] == pytest.approx(losses[c["step"]]) for c in one["checkpoints"] if c["best"])
    assert "leads out" in models["leads-out"]["problem"] and models["leads-out"]["checkpoints"] == []
    assert models["tuned/chat"]["chat"] and "recipe.yaml" in models["broken"]["problem"]


def test_whether_a_run_goes_on(http: httpx.Client, runs: Path) -> None:
    def state() -> str:
        return next(one["state"] for one in http.get("/studio/state").json()["models"] if one["id"] == "demo")

    outcome = runs / "demo" / "outcome.json"
    ended = outcome.read_text(encoding="utf-8")
    assert state() == "finished"
    log = runs / "demo" / "metrics.jsonl"
    os.utime(log, ns=(2**62, 2**62))  # as in a copy of the folder
    assert state() == "finished"
    before = log.read_text(encoding="utf-8")
    log.write_text(before + json.dumps(training(9, 2.0)) + "\n", encoding="utf-8")  # it was resumed, and crashed
    assert state() == "killed"
    log.write_text(before, encoding="utf-8")
    outcome.write_text(ended.replace('"finished"', '"stopped by SIGTERM"'), encoding="utf-8")
    assert state() == "stopped"
    outcome.rename(outcome.with_suffix(".aside"))
    assert state() == "killed"
    with filelock.FileLock(runs / "demo" / ".lock"):
        assert state() == "running"
    (runs / "demo" / "quantization.json").write_text("{}", encoding="utf-8")
    assert state() == "quantized"
    (runs / "demo" / "quantization.json").unlink()
    outcome.with_suffix(".aside").unlink()
    outcome.write_text(ended, encoding="utf-8")


def test_asking_whether_a_folder_is_in_use_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("text", encoding="utf-8")
    (tmp_path / "run").mkdir()
    assert not is_in_use(tmp_path / "run") and not list((tmp_path / "run").iterdir())
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "precious")
    with filelock.FileLock(tmp_path / "precious", is_singleton=False):
        assert not is_in_use(tmp_path / "run")


def test_folders_without_end_and_files_that_wait_are_passed_by(runs: Path, tmp_path: Path) -> None:
    one = shutil.copytree(runs / "demo", tmp_path / "demo")
    for name in ("outcome.json", "checkpoints/step-000008/state.json", "checkpoints/step-000004/manifest.json"):
        (one / name).unlink()
        os.mkfifo(one / name)
    (tmp_path / "huge").mkdir()
    (tmp_path / "huge" / "recipe.yaml").write_bytes(b" " * (1 << 25))
    deep = tmp_path.joinpath(*["deep"] * 20)
    shutil.copytree(runs / "demo", deep)
    (tmp_path / os.fsdecode(b"\xff")).mkdir()
    shutil.copy(one / "recipe.yaml", tmp_path / os.fsdecode(b"\xff"))
    described = create_studio([tmp_path]).state.studio.describe()
    models = {one["id"]: one for one in described["models"]}
    json.dumps(described, ensure_ascii=False).encode("utf-8")
    assert models.keys() == {"demo", "huge", "\\udcff"}
    assert [one["step"] for one in models["demo"]["checkpoints"]] == [4, 8]
    assert models["huge"]["problem"] and "not a valid path" in models["\\udcff"]["problem"]


def test_ids_of_several_folders_are_each_a_runs_own(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "demo", tmp_path / "demo", ignore=shutil.ignore_patterns("checkpoints"))
    library = create_studio([runs, tmp_path, runs / "demo"]).state.studio.library
    folders = {run.folder.resolve() for run in library.runs().values()}
    assert library.runs()["demo"].folder == runs / "demo" and (tmp_path / "demo").resolve() in folders
    with pytest.raises(UserError, match=r"none: no such folder\. Give run folders"):
        create_studio([tmp_path / "none"])


# --------------------------------------------------------------------------------------------------- the texts


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0}, {"seed": 5}, {"seed": 2, "top_k": 5, "top_p": 0.9, "repetition_penalty": 1.2},
        {"seed": 1, "stop": ["e", "the"], "min_tokens": 2, "logit_bias": {"3": -100}},
    ],
    ids=str,
)  # fmt: skip
def test_a_text_is_the_engines_own(http: httpx.Client, demo: Engine, settings: dict[str, Any]) -> None:
    start, tokens, end = made(http, prompt=PROMPT, checkpoint=8, settings=settings | {"max_tokens": 12}, n_top=3)
    own = settings | {"logit_bias": {int(i): x for i, x in settings.get("logit_bias", {}).items()}}
    (expected,) = demo.complete(PROMPT, max_tokens=12, logprobs=3, processed_logprobs=3, **own)
    assert text_of(tokens, end) == expected.text and [token["id"] for token in tokens] == expected.token_ids
    assert (end["reason"], end["generated"]) == (expected.finish_reason, len(tokens))
    assert text_of(start["tokens"]) == PROMPT and start["step"] == 8
    for token, own_token, drawn in zip(tokens, expected.logprobs or [], expected.processed_logprobs or [], strict=True):
        assert token["logprob"] == pytest.approx(own_token.logprob, abs=1e-4)
        assert values(token["top"]) == pytest.approx([value for _, value in own_token.top], abs=1e-4)
        assert token["after"]["logprob"] == pytest.approx(drawn.logprob, abs=1e-4)
        assert values(token["after"]["top"]) == pytest.approx([value for _, value in drawn.top], abs=1e-4)
        assert token["rank"] == own_token.rank
        assert token["spelling"] == demo.tokenizer.decode([token["id"]], skip_special_tokens=False)


def test_a_text_without_a_seed_is_drawn_again_with_the_seed_that_it_got(http: httpx.Client) -> None:
    body = {"prompt": PROMPT, "settings": {"max_tokens": 10, "temperature": 1.5}}
    start, tokens, _ = made(http, **body)
    again = made(http, **body | {"settings": body["settings"] | {"seed": start["seed"]}})
    assert [token["id"] for token in again[1]] == [token["id"] for token in tokens]
    assert made(http, **body)[0]["seed"] != start["seed"]


def test_a_greedy_text_goes_on_from_any_of_its_tokens(http: httpx.Client) -> None:
    settings = {"temperature": 0, "max_tokens": 8}
    start, tokens, end = made(http, prompt=PROMPT, settings=settings)
    ids = [token["id"] for token in (*start["tokens"], *tokens)]
    for n in range(len(ids) - len(tokens), len(ids)):
        left = len(ids) - n
        branch = made(http, tokens=ids[:n], settings=settings | {"max_tokens": left})
        assert text_of(branch[0]["tokens"]) + text_of(branch[1], branch[2]) == PROMPT + text_of(tokens, end)


def test_a_prompts_scores_are_those_of_score(http: httpx.Client, demo: Engine) -> None:
    start, *_ = made(http, prompt=PROMPT, score_prompt=True, n_top=4, checkpoint=8, settings={"max_tokens": 1})
    expected = demo.score(PROMPT, top=4)
    assert [token["logprob"] is None for token in start["tokens"]] == [one is None for one in expected]
    for token, own in zip(start["tokens"][1:], expected[1:], strict=True):
        assert own is not None and token["logprob"] == pytest.approx(own.logprob, abs=1e-4)
        assert token["rank"] == own.rank == 1 + sum(value > own.logprob for _, value in own.top) or own.rank > 4
        assert values(token["top"]) == pytest.approx([value for _, value in own.top], abs=1e-4)
    unscored, *_ = made(http, prompt=PROMPT, settings={"max_tokens": 1})
    assert all(token["logprob"] is None and token["top"] == [] for token in unscored["tokens"])


def test_each_checkpoint_writes_its_own_text(http: httpx.Client, runs: Path) -> None:
    for step in (4, 8):
        start, tokens, end = made(http, prompt=PROMPT, checkpoint=step, settings={"seed": 3, "max_tokens": 20})
        expected = load(runs / "demo", step, device="cpu", backend="torch").generate(PROMPT, seed=3, max_tokens=20)
        assert (start["step"], text_of(tokens, end)) == (step, expected)
    assert made(http, prompt=PROMPT, checkpoint="last", settings={"max_tokens": 1})[0]["step"] == 8


def test_a_conversation_and_its_branches_end_with_the_turn(http: httpx.Client, runs: Path) -> None:
    chat = load(runs / "tuned" / "chat", 1, device="cpu", backend="torch")
    assert chat.chat_template is not None
    messages = [{"role": "user", "content": "Hello?"}]
    settings: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
    start, tokens, end = made(http, model="tuned/chat", messages=messages, settings=settings)
    assert text_of(tokens, end) == chat.chat(messages, **settings)
    ids = [token["id"] for token in start["tokens"]]
    assert ids == chat.chat_template.encode(messages, add_generation_prompt=True)
    special = [token for token in start["tokens"] if token["spelling"] == "<|im_start|>"]
    assert special and all(token["text"] == "" for token in special)
    ends = chat.tokenizer.token_to_id("<|im_end|>")
    wins = settings | {"logit_bias": {str(ends): 100}}
    assert made(http, model="tuned/chat", tokens=ids, answers=True, settings=wins)[2]["reason"] == "stop"
    assert made(http, model="tuned/chat", tokens=ids, settings=wins)[2]["reason"] == "length"


def test_what_the_filters_drop_is_no_alternative_after_them(http: httpx.Client) -> None:
    _, tokens, _ = made(http, prompt=PROMPT, n_top=5, settings={"top_k": 2, "max_tokens": 5, "seed": 1})
    for token in tokens:
        assert len(token["top"]) == 5 and len(token["after"]["top"]) == 2
        assert math.fsum(map(math.exp, values(token["after"]["top"]))) == pytest.approx(1)
    _, tokens, _ = made(http, prompt=PROMPT, settings={"temperature": 0, "max_tokens": 5})
    assert all(values(token["after"]["top"]) == [0.0] for token in tokens)


def test_openais_routes_take_a_run_and_a_step(http: httpx.Client, demo: Engine) -> None:
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 6}
    for name in ("demo@8", "demo"):
        answer = http.post("/v1/completions", json=body | {"model": name}).json()
        assert name == "demo" or answer["choices"][0]["text"] == demo.generate(PROMPT, temperature=0, max_tokens=6)
    assert http.post("/v1/completions", json=body | {"model": "none"}).status_code == 404


# ------------------------------------------------------------------------------------------- what is refused


def test_what_cannot_be_is_refused_in_words(http: httpx.Client) -> None:
    made(http, prompt=PROMPT, settings={"max_tokens": 1})  # it is loaded now
    refused(http, 404, "there is no run 'none'", model="none")
    refused(http, 404, "there is no run '../demo'", model="../demo")
    refused(http, 404, "no checkpoint of step 5; there are 8, 4", checkpoint=5)
    refused(http, 400, "not in the vocabulary", prompt=None, tokens=[1, 10**5])
    refused(http, 400, "at least 1 item", prompt=None, tokens=[])
    refused(http, 400, "context is 32", prompt=None, tokens=[1] * 33)
    refused(http, 400, "less than or equal to 20", n_top=21)
    refused(http, 400, "one of prompt, tokens and messages", tokens=[1])
    refused(http, 400, "base model", prompt=None, messages=[{"role": "user", "content": "Hello?"}])
    refused(http, 400, "base model", answers=True)
    refused(http, 400, "settings.top_p", settings={"top_p": 7})
    refused(http, 400, "did you mean `temperature`", settings={"temprature": 1})
    refused(http, 400, "leads out", model="leads-out")


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "model.safetensors"])
def test_a_run_with_a_fifo_does_not_hold_up_the_others(name: str, runs: Path, tmp_path: Path) -> None:
    """One thread loads all runs, so a read that waits would stop every run."""
    folder = tmp_path / "runs"
    for run in ("good", "hostile"):
        shutil.copytree(runs / "demo", folder / run)
    for checkpoint in (folder / "hostile" / "checkpoints").iterdir():
        (checkpoint / name).unlink()
        os.mkfifo(checkpoint / name)
    with running_app(create_studio([folder], SETTINGS, device="cpu", backend="torch")) as server, server.http() as http:
        *_, error = events(http, model="hostile", prompt="line")
        assert error["type"] == "error" and "is a FIFO" in error["message"]
        made(http, model="good", prompt="line", settings={"max_tokens": 1})


def test_a_page_that_stops_sending_is_gone_before_its_next_word(runs: Path) -> None:
    app = create_studio([runs / "demo"], SETTINGS, device="cpu", backend="torch")
    with running_app(app) as server, paused_after(2):
        host, _, port = server.url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), timeout=120) as one:
            asked = {"model": "demo", "prompt": "line", "settings": {"max_tokens": 20, "ignore_eos": True}}
            one.sendall(request(asked, "/studio/generate"))
            received = b""
            while b'"token"' not in received:
                received += one.recv(65536)
            one.shutdown(socket.SHUT_WR)
            until(lambda: server.service.in_flight == 0)


def test_a_damaged_checkpoint_is_an_error_in_words_and_others_go_on(http: httpx.Client) -> None:
    for _ in range(2):
        loading, error = events(http, model=HOSTILE, prompt="line", checkpoint=8)
        assert (loading["type"], error["type"]) == ("loading", "error")
        assert "damaged" in error["message"]
    assert made(http, model=HOSTILE, prompt="line", checkpoint=4, settings={"max_tokens": 2})[0]["step"] == 4


def test_a_key_is_needed_except_for_the_page(server: Running) -> None:
    with server.http(headers={}) as nobody:
        assert nobody.get("/studio/state").status_code == 401
        assert nobody.post("/studio/generate", json={}).status_code == 401
        page = nobody.get("/", headers={"accept": "text/html,*/*"})
        assert page.headers["content-type"].startswith("text/html") and page.text.startswith("<!doctype html>")
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        assert (
            nobody.get("/", headers={"accept": "text/html", "if-none-match": page.headers["etag"]}).status_code == 304
        )
        assert nobody.get("/static/index.html").content == page.content
        assert nobody.get("/").json()["name"] == "gptworks"
        for name in ("%2e%2e/page.py", "none.js", "/etc/passwd"):
            assert nobody.get(f"/static/{name}").status_code == 404


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "http://evil.example"}, 403), ({"origin": "null"}, 403), ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403), ({"origin": "http://localhost:1"}, 403),
        ({"sec-fetch-site": "same-origin"}, 200), ({"sec-fetch-site": "none"}, 200), ({}, 200),
    ],
    ids=str,
)  # fmt: skip
def test_pages_of_other_origins_are_refused(server: Running, headers: dict[str, str], status: int) -> None:
    with server.http() as http:
        assert http.get("/studio/state", headers=headers).status_code == status
        assert http.get("/v1/models", headers=headers).status_code == status
        assert http.get("/v1/models", headers=headers | {"origin": server.url}).status_code == (
            403 if "site" in str(headers) and status == 403 else 200
        )
        assert http.get("/", headers=headers).status_code == 200


def test_origins_that_are_named_may_call(runs: Path) -> None:
    friend = "http://localhost:3000"
    settings = ServerSettings(api_keys=(KEY,), cors_origins=(friend,))
    with running_app(create_studio([runs], settings)) as server, server.http() as http:
        headers = {"origin": friend, "sec-fetch-site": "same-site"}
        assert http.get("/v1/models", headers=headers).status_code == 200
        assert http.get("/v1/models", headers=headers | {"origin": "http://localhost:3001"}).status_code == 403


# --------------------------------------------------------------------------------------------- coming and going


def test_a_client_that_goes_away_frees_its_slot_and_its_engine(server: Running, http: httpx.Client) -> None:
    body = {"model": "tuned/chat", "prompt": "a", "settings": {"max_tokens": 2900, "ignore_eos": True}}
    with paused_after(10):
        with http.stream("POST", "/studio/generate", json=body) as response:
            lines = response.iter_lines()
            next(line for line in lines if '"token"' in line)
            engine = server.engine("tuned/chat@1")
            assert engine.statistics().running == 1
        until(lambda: server.service.in_flight == 0)
    until(lambda: engine.statistics().running == 0 and engine.statistics().slots_used == 0)
    assert engine.statistics().cancelled == 1


def test_two_clients_wait_for_one_load(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[Any] = []
    monkeypatch.setattr(loaded, "load", lambda *a, **k: loads.append(a) or load(*a, **k))
    app = create_studio([runs], SETTINGS, device="cpu", backend="torch")
    app.state.studio.engines.max_idle_bytes = 0
    with running_app(app) as server, server.http() as http, ThreadPoolExecutor(4) as threads:
        body = {"prompt": PROMPT, "checkpoint": 8, "settings": {"seed": 1, "max_tokens": 4}}
        texts = list(threads.map(lambda _: text_of(made(http, **body)[1]), range(4)))
        assert len(loads) == 1 and len(set(texts)) == 1
        assert made(http, **body | {"checkpoint": 4})[0]["step"] == 4
        assert [model.name for model in server.service.models] == ["demo@4"], "there is room for those in use alone"
        assert "demo@8" not in http.get("/metrics").text
        assert made(http, **body)[0]["step"] == 8 and len(loads) == 3


def test_a_model_is_loaded_before_a_text_is_asked_for(server: Running, http: httpx.Client) -> None:
    body = {"model": "demo", "checkpoint": 4}
    assert http.post("/studio/load", json=body).json() == {"loaded": True}
    assert "demo@4" in [model.name for model in server.service.models]
    assert server.engine("demo@4").backend_description is not None, "the first request waits for nothing"
    kinds = [
        event["type"]
        for event in events(http, prompt="line", checkpoint=4, settings={"max_tokens": 1, "ignore_eos": True})
    ]
    assert kinds == ["start", "token", "end"]
    assert http.post("/studio/load", json=body | {"checkpoint": 5}).status_code == 404
    damaged = {"model": HOSTILE, "checkpoint": 8}
    assert "damaged" in http.post("/studio/load", json=damaged).json()["error"]["message"]


def test_nothing_is_loaded_ahead_where_requests_use_the_memory(runs: Path) -> None:
    room = (runs / "demo/checkpoints/step-000008/model.safetensors").stat().st_size
    app = create_studio([runs], SETTINGS, device="cpu", backend="torch")
    app.state.studio.engines.max_idle_bytes = room
    with running_app(app) as server, server.http() as http:
        large = {"model": "tuned/chat", "prompt": "a", "settings": {"max_tokens": 2900, "ignore_eos": True}}
        with paused_after(10), http.stream("POST", "/studio/generate", json=large) as response:
            lines = response.iter_lines()
            next(line for line in lines if '"token"' in line)
            assert http.post("/studio/load", json={"model": "demo"}).json() == {"loaded": False}
            assert [model.name for model in server.service.models] == ["tuned/chat@1"]
        until(lambda: server.service.in_flight == 0)
        assert http.post("/studio/load", json={"model": "demo"}).json() == {"loaded": True}
        assert [model.name for model in server.service.models] == ["demo@8"], "the least recently used one went"


def test_a_model_is_not_loaded_for_a_page_that_went_on(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads, goes_on = [], threading.Event()

    def slow(folder: Path, step: int, **options: Any) -> Engine:
        loads.append(step)
        assert goes_on.wait(60)
        return load(folder, step, **options)

    monkeypatch.setattr(loaded, "load", slow)
    app = create_studio([runs], SETTINGS, device="cpu", backend="torch")
    with running_app(app) as server, server.http() as http, ThreadPoolExecutor(1) as threads:
        text = threads.submit(made, http, prompt="line", checkpoint=8, settings={"max_tokens": 1})
        until(lambda: loads == [8])
        with pytest.raises(httpx.ReadTimeout):
            http.post("/studio/load", json={"model": "demo", "checkpoint": 4}, timeout=httpx.Timeout(120, read=0.5))
        until(lambda: server.service.in_flight == 1)
        goes_on.set()
        assert text.result()[0]["step"] == 8
        assert http.post("/studio/load", json={"model": "demo", "checkpoint": 8}).json() == {"loaded": True}
        assert loads == [8]


def test_a_checkpoint_that_has_gone_names_those_there_are(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "demo", tmp_path / "demo")
    app = create_studio([tmp_path], SETTINGS, device="cpu", backend="torch")
    with running_app(app) as server, server.http() as http:
        made(http, prompt="line", checkpoint=4, settings={"max_tokens": 1})
        shutil.rmtree(tmp_path / "demo" / "checkpoints" / "step-000004")
        refused(http, 404, "no checkpoint of step 4; there are 8", checkpoint=4)
        shutil.rmtree(tmp_path / "demo")
        refused(http, 404, "there is no run 'demo'")


def test_a_server_shows_the_page_and_plays_its_models(demo: Engine, runs: Path) -> None:
    app = create_served({"demo": demo}, SETTINGS, {"demo": runs / "demo"})
    with running_app(app) as server, server.http() as http:
        (model,) = http.get("/studio/state").json()["models"]
        assert (model["id"], model["state"], model["checkpoints"]) == ("demo", "served", [])
        assert http.get("/", headers={"accept": "text/html"}).text.startswith("<!doctype html>")
        assert http.get("/", headers={"accept": "application/json"}).json()["name"] == "gptworks"
        _, tokens, end = made(http, prompt=PROMPT, settings={"seed": 5, "max_tokens": 9})
        assert text_of(tokens, end) == demo.generate(PROMPT, seed=5, max_tokens=9)
        refused(http, 400, "leave it out", checkpoint="best")
        refused(http, 404, "there is no model 'none'", model="none")


# ------------------------------------------------------------------------------------------------- the command


def started_with(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[Any, str]:
    """Return the app that the command would serve, and the address that it prints."""
    apps: list[Any] = []

    class Server:
        def __init__(self, app: Any, host: str, port: int, started: Any) -> None:
            apps.append(app)
            self.run = lambda: started(7)

    monkeypatch.setattr("gptworks.serve.server.make_server", Server)
    result = CliRunner().invoke(cli.app, ["studio", *arguments, "--no-open", "--device", "cpu"])
    assert result.exception is None, result.exception
    return apps[0], result.output.split(" at ")[1].split()[0]


def test_the_command_asks_for_a_session_wherever_it_listens(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPTWORKS_API_KEY", "from-the-environment")
    for arguments, is_local in (([], True), (["--host", "0.0.0.0", "--read-only"], False)):
        app, address = started_with(monkeypatch, str(runs), *arguments)
        assert address == ("http://127.0.0.1:7/" if is_local else "http://0.0.0.0:7/")
        assert app.state.service.sign_in is not None and app.state.studio.read_only is not is_local
        assert "GPTWORKS_API_KEY" not in os.environ, "no process that it starts has the key"
    app, _ = started_with(monkeypatch, str(runs), "--api-key", "mine")
    assert app.state.service.settings.api_keys == ("mine",) and app.state.service.sign_in is not None
    app, _ = started_with(monkeypatch, str(runs))
    assert app.state.service.settings.local_names_only and not app.state.service.settings.api_keys


def test_the_command_opens_the_runs_of_this_folder(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs.parent)
    app, _ = started_with(monkeypatch)
    assert "demo" in app.state.studio.library.runs()


def test_the_command_works_before_there_is_a_folder_of_runs(
    tmp_path: Path, runs: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    app, _ = started_with(monkeypatch)
    assert app.state.studio.describe()["models"] == [] and not Path("runs").exists()
    for arguments, message in ((["none"], "none: no such folder"), (["--read-only"], "no folder runs here")):
        result = CliRunner().invoke(cli.app, ["studio", *arguments])
        assert isinstance(result.exception, UserError) and message in str(result.exception)
    Path("runs").write_text("not a folder")
    result = CliRunner().invoke(cli.app, ["studio"])
    assert isinstance(result.exception, UserError) and "runs is not a folder" in str(result.exception)
    monkeypatch.chdir(runs / "demo")
    result = CliRunner().invoke(cli.app, ["studio"])
    assert isinstance(result.exception, UserError) and "gptworks studio ." in str(result.exception)


def test_a_missing_extra_is_named(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gptworks.studio.app", None)
    result = CliRunner().invoke(cli.app, ["studio", str(runs)])
    assert isinstance(result.exception, UserError) and "pip install 'gptworks[studio]'" in str(result.exception)


def test_a_list_that_leaves_runs_out_says_so(runs: Path) -> None:
    def described(**most: int) -> dict[str, Any]:
        studio = create_studio([runs]).state.studio
        vars(studio.library).update(most)
        return studio.describe()

    n = len(described()["models"])
    assert described()["notice"] is None and described(most_runs=n)["notice"] is None
    found = described(most_runs=n - 1)
    assert len(found["models"]) == n - 1 and f"more than {n - 1} runs" in found["notice"]
    assert "more than 2 folders" in described(most_folders=2)["notice"]


def test_a_number_that_is_not_finite_is_null() -> None:
    tree = {"a": [1.5, math.nan, (math.inf,)], "b": {"c": -math.inf}, "d": "nan"}
    assert json.loads(as_json(tree).body) == {"a": [1.5, None, [None]], "b": {"c": None}, "d": "nan"}
