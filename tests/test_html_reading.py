"""The part Read of a model in one file, in Node: the answers are those of the studio's server."""

import base64
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

import hf
import tiny
from gptworks.config import CharTokenizer
from gptworks.interop.html_file import export_html
from gptworks.model.gpt import GPT
from gptworks.tokenizer import train_tokenizer, vocabulary_size
from serving import posted, running_studio
from test_html_file import JS, in_node, needs_node
from test_html_models import framed
from test_html_words import in_bytes, like_gemma, like_llama

pytestmark = needs_node

LONG = tiny.TEXT[:700]  # more tokens than the context
STRANGE = "line 7: é ΩØ\nthe"  # é is two tokens of bytes; characters have no token for some
READ = f"""
import {{ readText, readToken }} from "{JS / "reading.js"}";
globalThis.navigator ??= {{ platform: "" }};
const {{ load }} = await import("{JS / "main.js"}");
const text = readFileSync(given.page, "utf8");
const found = [...text.matchAll(/<script[^>]*id="([^"]+)"[^>]*>([^]*?)<\\/script>/g)];
const blocks = new Map(found.map((one) => [one[1], one[2]]));
const model = await load((id) => blocks.get(id));
const answer = async ([what, body]) => {{
  try {{
    return await {{ text: readText, token: readToken }}[what](model, body);
  }} catch (error) {{
    return error.message;
  }}
}};
const answers = [];
for (const one of given.asked) answers.push(await answer(one));
const stopped = new AbortController();
const long = readText(model, {{ text: given.long }}, stopped.signal);
stopped.abort();
answers.push(await long.catch((error) => error.name));
answers.push(await model.trace([...Array(300).keys()].map((i) => i % 5)).catch((error) => error.message));
console.log(JSON.stringify(answers));
"""


def characters() -> Tokenizer:
    return train_tokenizer(CharTokenizer(type="char"), [tiny.TEXT])


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "bytes": in_bytes, "characters": characters, "llama": lambda: framed(like_llama()),
    "gemma": lambda: framed(like_gemma()),
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of random models, one for each kind of tokenizer."""
    folder = tmp_path_factory.mktemp("reading")
    for name, make in TOKENIZERS.items():
        tokenizer = make()
        settings = {"vocab_size": vocabulary_size(tokenizer), "context_length": 128, "d_model": 32, "n_heads": 2}
        torch.manual_seed(3)
        hf.make_run(folder / name, GPT(tiny.plain_model(**settings, n_layers=2)), tokenizer)
    return folder


@pytest.fixture(scope="module")
def client(runs: Path) -> Iterator[httpx.Client]:
    """A client of a studio with these runs."""
    with running_studio(runs) as server, server.http() as one:
        yield one


def ids_of(answer: Any) -> list[int]:
    return [token["id"] for token in answer["tokens"]]


def close(mine: Any, theirs: Any, at: str = "") -> None:
    """Fail unless two answers are equal within the rounding of fp32."""
    if isinstance(theirs, dict):
        assert mine.keys() == theirs.keys(), at
        for key in theirs:
            close(mine[key], theirs[key], f"{at}.{key}")
    elif isinstance(theirs, list):
        assert len(mine) == len(theirs), at
        for i, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            close(one, other, f"{at}.{i}")
    elif at.endswith(".data"):
        values = [np.frombuffer(base64.b64decode(one), "<f4") for one in (mine, theirs)]
        np.testing.assert_allclose(*values, rtol=1e-4, atol=1e-6)
    elif isinstance(theirs, float):
        assert math.isclose(mine, theirs, rel_tol=5e-4, abs_tol=5e-5), (at, mine, theirs)
    else:
        assert mine == theirs, at


@pytest.mark.parametrize("name", TOKENIZERS)
def test_answers_are_the_studio_s(name: str, runs: Path, client: httpx.Client, tmp_path: Path) -> None:
    export_html(runs / name, tmp_path / "model.html", weights="fp32", verify=False)

    def studio(what: str, status: int = 200, **body: Any) -> Any:
        return posted(client, f"/studio/read/{what}", status, model=name, **body)

    written = ids_of(studio("text", text=STRANGE))[::-1]
    asked: list[tuple[str, dict[str, Any]]] = [
        ("text", {"text": LONG}), ("text", {"text": STRANGE}), ("text", {"tokens": written}),
        ("token", {"text": LONG, "index": 1}), ("token", {"text": LONG, "index": 190, "against": 7}),
        ("token", {"text": STRANGE, "index": 5, "token": 9}), ("token", {"tokens": written, "index": 2}),
    ]  # fmt: skip
    wrong = [("text", {"text": LONG * 40}), ("token", {"text": STRANGE, "index": 500})]
    given = {"page": str(tmp_path / "model.html"), "asked": asked + wrong, "long": LONG}
    *answers, stopped, too_long = in_node(tmp_path, READ, given)
    for (what, body), mine in zip(asked, answers[: len(asked)], strict=True):
        close(mine, studio(what, **body), f"{what} {json.dumps(body)[:40]}")
    assert ["at most 8192 are read at once" in answers[-2], "choose one from 1 to" in answers[-1]] == [True, True]
    assert stopped == "AbortError"
    assert "The text has 300 tokens: from 1 to 128 are looked into at once." in too_long
