"""Events of a stream equal, byte for byte, the serialized chunks of the API's types."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from gptworks.infer.text import Piece
from gptworks.serve import openai
from gptworks.serve.completions import Answer, ChatAnswer, CompletionAnswer
from gptworks.serve.events import EventStream
from gptworks.serve.generate import Delta, Entry

TEXTS = [
    "a",
    " naïve 🙂",
    '"quoted" \\ and\n\t\r\b\f',
    "\x00\x01\x1f\x7f",
    "\u2028\ufffd",
    "@text@",
    '","text":"@text@"',
]
PIECE = Piece(0, "", 1)
ENTRY = Entry("a", [97], -0.5, [("a", [97], -0.5), ("\n", [10], -1.0)], 0)
DELTAS = [
    *(Delta(i, text, [], None, text == TEXTS[0], PIECE) for text in TEXTS for i in range(2)),
    Delta(0, "", [], None, False, PIECE),
    Delta(0, "a", [ENTRY], None, False, PIECE),
    Delta(1, "end", [], "length", False, PIECE),
    Delta(0, "", [], "stop", False, PIECE),
]
COMPLETION = {"model": "m", "prompt": "a", "logprobs": 2}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 2}


class Texts:
    """A fake generation that gives several deltas at a time."""

    model = SimpleNamespace(name="@text@")

    async def deltas(self) -> Any:
        for i in range(0, len(DELTAS), 3):
            yield DELTAS[i : i + 3]

    def usage(self) -> openai.Usage:
        details = openai.PromptTokensDetails(cached_tokens=0)
        return openai.Usage(prompt_tokens=1, completion_tokens=2, total_tokens=3, prompt_tokens_details=details)


@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": True}}], ids=["plain", "usage"])
@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_an_event_is_what_the_types_make_of_it(kind: str, options: dict[str, Any]) -> None:
    generation: Any = Texts()
    answer: Answer[Any]
    if kind == "chat":
        answer = ChatAnswer(generation, openai.ChatRequest.model_validate(CHAT | {"stream": True} | options))
    else:
        request = openai.CompletionRequest.model_validate(COMPLETION | {"stream": True} | options)
        answer = CompletionAnswer(generation, request)

    async def chunks() -> list[str]:
        return [chunk async for several in answer.chunks() for chunk in several]

    sent = asyncio.run(chunks())
    type_of: Any = answer.chunk_type
    first = type_of.model_validate_json(sent[0])
    frame = {"id": first.id, "object": answer.chunk_object, "created": first.created, "model": "@text@"}
    no_usage: dict[str, Any] = {"usage": None} if options else {}
    made = [
        type_of(**frame, choices=[choice], **no_usage) for delta in DELTAS for choice in answer.chunk_choices(delta)
    ]
    if options:
        made.append(type_of(**frame, choices=[], usage=generation.usage()))
    assert sent == [chunk.model_dump_json(exclude_unset=True) for chunk in made]


def test_a_silent_stream_is_kept_alive_by_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm#47647, llama.cpp#24013, ollama#14420: proxies close a stream whose first token takes a minute."""
    monkeypatch.setattr(EventStream, "silent_seconds", 0.02)
    sent: list[Any] = []
    ended: list[bool] = []

    async def chunks() -> Any:
        yield ["first"]
        while len([one for one in sent if one.get("body") == b": \n\n"]) < 3:
            await asyncio.sleep(0.005)
        yield ["last"]

    async def send(message: Any) -> None:
        sent.append(message)

    async def serve() -> None:
        stream = EventStream(chunks(), lambda: ended.append(True))
        await stream({"type": "http", "state": {}}, None, send)  # type: ignore[arg-type]
        n = len(sent)
        await asyncio.sleep(0.06)
        assert len(sent) == n, "a comment after the end"

    asyncio.run(serve())
    start, *parts = sent
    assert start["type"] == "http.response.start" and ended == [True] and not parts[-1]["more_body"]
    body = b"".join(part["body"] for part in parts)
    assert body.replace(b": \n\n", b"") == b"data: first\n\ndata: last\n\ndata: [DONE]\n\n"
    assert b"first\n\n: \n\n: \n\n: \n\n" in body
