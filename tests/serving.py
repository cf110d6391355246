"""Runs servers in a thread, with models small enough for a test."""

import json
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2 as httpx
import torch
from fastapi import FastAPI
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import commands
from commands import Process
from gptworks.chat_template import ChatTemplate
from gptworks.infer import Engine
from gptworks.model.gpt import GPT
from gptworks.recipe import parse_recipe, save_recipe
from gptworks.serve.app import create_app
from gptworks.serve.server import Server, make_server
from gptworks.serve.service import Service
from gptworks.serve.settings import ServerSettings
from gptworks.studio.app import create_studio
from gptworks.tokenizer import save_tokenizer, vocabulary_size
from gptworks.training.checkpoint_files import save_checkpoint
from tiny import plain_model

CONTEXT = 128
KEY = "sk-test"


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token per byte and chatml's special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.encode_special_tokens = True
    return tokenizer


TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_engine(*, chat: bool = False, context: int = CONTEXT, seed: int = 0, **options: Any) -> Engine:
    """Return an engine with a random model over bytes, whose greedy texts are mostly ASCII letters and do not end."""
    tokenizer = byte_tokenizer()
    torch.manual_seed(seed)
    config = plain_model(
        vocab_size=vocabulary_size(tokenizer), context_length=context, n_layers=2, d_model=32, n_heads=2, init_std=0.25
    )
    model = GPT(config).eval()
    template = ChatTemplate(TEMPLATE, tokenizer) if chat else None
    return Engine(model, tokenizer, **{"backend": "torch", "chat_template": template} | options)


class Running:
    """A running server: its address and its contents."""

    def __init__(self, service: Service, server: Server, url: str) -> None:
        self.service, self.server, self.url = service, server, url

    def engine(self, name: str) -> Engine:
        return self.service.get(name).engine

    def http(self, **options: Any) -> httpx.Client:
        defaults = {"headers": {"authorization": f"Bearer {KEY}"}, "timeout": 120}
        return httpx.Client(base_url=self.url, **defaults | options)


@contextmanager
def running(engines: Mapping[str, Engine], **settings: Any) -> Iterator[Running]:
    """Serve engines inside the `with`."""
    with running_app(create_app(engines, ServerSettings(**{"api_keys": (KEY,)} | settings))) as one:
        yield one


@contextmanager
def running_app(app: FastAPI) -> Iterator[Running]:
    """Serve an app inside the `with`; fails if it does not end in time."""
    with listening(app) as (server, thread, url):
        try:
            yield Running(app.state.service, server, url)
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()


@contextmanager
def running_studio(runs: Path) -> Iterator[Running]:
    """Run a studio over a folder of runs inside the `with`; its models run in torch."""
    settings = ServerSettings(api_keys=(KEY,), client_share=1.0)
    with running_app(create_studio([runs], settings, device="cpu", backend="torch")) as server:
        yield server


def posted(http: httpx.Client, path: str, status: int = 200, /, **body: Any) -> Any:
    """Return the answer to a request; fails unless it has this status."""
    response = http.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json()


@contextmanager
def listening(app: FastAPI) -> Iterator[tuple[Server, threading.Thread, str]]:
    """Yield an app's server, its thread and its address, inside the `with`."""
    listens, found = threading.Event(), []

    def started(port: int) -> None:
        found.append(port)
        listens.set()

    server = make_server(app, "127.0.0.1", 0, started)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert listens.wait(120)
    try:
        yield server, thread, f"http://127.0.0.1:{found[0]}"
    finally:
        server.should_exit = True
        thread.join(20)


def write_run(folder: Path) -> Path:
    """Write a run with a chat template and a context that takes a while to fill."""
    engine = tiny_engine(chat=True, context=3000)
    assert engine.chat_template is not None
    tree = {"name": "tiny", "run_dir": str(folder), "model": engine.model.config.model_dump(mode="json"),
            "tokenizer": {"type": "file", "path": str(folder / "tokenizer")},
            "data": {"sources": [{"type": "text", "path": "none.txt"}]}, "train": {"max_steps": 1}}  # fmt: skip
    save_checkpoint(folder, 1, dict(engine.model.state_dict()), {}, {"best_step": 1})
    save_recipe(parse_recipe(tree), folder / "recipe.yaml")
    save_tokenizer(engine.tokenizer, folder / "tokenizer")
    (folder / "tokenizer" / "chat_template.jinja").write_text(engine.chat_template.source)
    return folder


def read_log(process: Process, log: list[str] | None) -> None:
    """Read all that a process writes to standard error, so that the pipe never fills up."""
    assert process.stderr is not None
    with suppress(ValueError):  # it is closed
        for line in process.stderr:
            if log is not None:
                log.append(line.rstrip())


@contextmanager
def command(*arguments: str | Path, log: list[str] | None = None) -> Iterator[tuple[Process, httpx.Client]]:
    """Run `gptworks serve …` in a process of its own; yield a client. `log` receives the lines of its log."""
    whole = ("-m", "gptworks", "serve", *arguments, "--port", "0", "--backend", "torch")
    process = commands.start(*whole, env={"GPTWORKS_API_KEY": KEY}, stderr=subprocess.PIPE)
    assert process.stderr is not None
    try:
        line = next(line for line in process.stderr if "serving" in line or "error" in line)
        threading.Thread(target=read_log, args=(process, log), daemon=True).start()
        url = line.partition(" at ")[2].partition("/v1")[0]
        with httpx.Client(base_url=url, headers={"authorization": f"Bearer {KEY}"}, timeout=60) as http:
            yield process, http
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def head(length: int, path: str = "/v1/completions") -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {KEY}\r\n"
        f"content-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    ).encode()


def request(body: dict[str, Any], path: str = "/v1/completions") -> bytes:
    content = json.dumps(body).encode()
    return head(len(content), path) + content


@contextmanager
def paused_after(n_steps: int) -> Iterator[None]:
    """Stop the growth of texts after this number of engine steps inside the `with`, on a machine of any speed."""
    step, taken, goes_on = Engine._step, Counter[Engine](), threading.Event()

    def paused(engine: Engine) -> None:
        if taken[engine] == n_steps:
            assert goes_on.wait(120)
        taken[engine] += 1
        step(engine)

    Engine._step = paused  # type: ignore[method-assign]
    try:
        yield
    finally:
        Engine._step = step  # type: ignore[method-assign]
        goes_on.set()


def until(holds: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come to be"
        time.sleep(0.01)
