"""A server in a thread, with models so small that a test can afford them."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx2 as httpx
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from gptworks.chat_template import ChatTemplate
from gptworks.config import ModelConfig
from gptworks.infer import Engine
from gptworks.model import GPT
from gptworks.serve.app import create_app
from gptworks.serve.server import Server, make_server
from gptworks.serve.service import Service
from gptworks.serve.settings import ServerSettings
from gptworks.tokenizer import vocabulary_size

CONTEXT = 128
KEY = "sk-test"


def byte_tokenizer() -> Tokenizer:
    """Every byte is a token; the special ones are those of chatml."""
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
    """A random model over bytes. Its greedy texts are ASCII letters mostly, and do not end by themselves."""
    tokenizer = byte_tokenizer()
    torch.manual_seed(seed)
    config = ModelConfig(
        vocab_size=vocabulary_size(tokenizer), context_length=context, n_layers=2, d_model=32, n_heads=2, init_std=0.25
    )
    model = GPT(config).eval()
    template = ChatTemplate(TEMPLATE, tokenizer) if chat else None
    return Engine(model, tokenizer, **{"backend": "torch", "chat_template": template} | options)


class Running:
    """A server that runs: where it is, and what is in it."""

    def __init__(self, service: Service, server: Server, url: str) -> None:
        self.service, self.server, self.url = service, server, url

    def engine(self, name: str) -> Engine:
        return self.service.models.get(name).engine

    def http(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, **{"headers": {"authorization": f"Bearer {KEY}"}} | options)


@contextmanager
def running(engines: Mapping[str, Engine], **settings: Any) -> Iterator[Running]:
    """Serve engines while the `with` lasts."""
    app = create_app(engines, ServerSettings(**{"api_keys": (KEY,)} | settings))
    listens, found = threading.Event(), []

    def started(port: int) -> None:
        found.append(port)
        listens.set()

    server = make_server(app, "127.0.0.1", 0, started)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert listens.wait(30)
    try:
        yield Running(app.state.service, server, f"http://127.0.0.1:{found[0]}")
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()
