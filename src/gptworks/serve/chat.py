"""/v1/chat/completions: a conversation through the run's chat template, and its answer as OpenAI writes it."""

import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from gptworks.confined import Task
from gptworks.errors import UserError
from gptworks.serve import openai
from gptworks.serve.caller import Caller
from gptworks.serve.completions import sampling_settings
from gptworks.serve.errors import APIError
from gptworks.serve.generate import Delta, Entry, Generation, Order, Prompt, begin
from gptworks.serve.models import ServedModel
from gptworks.serve.service import Service
from gptworks.serve.settings import MAX_SCHEMA_BYTES


async def begin_chat(service: Service, body: openai.ChatRequest, caller: Caller) -> Generation:
    """Submit a conversation.

    Raises:
        APIError, UserError, QueueFull: it cannot be taken.
    """
    model = service.models.get(body.model)
    template = model.chat_template
    max_tokens = next(n for n in (body.max_completion_tokens, body.max_tokens, model.engine.context) if n is not None)
    settings = sampling_settings(
        body,
        max_tokens=max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        json_schema=_schema(body.response_format),
        stop_token_ids=() if body.ignore_eos else template.end_token_ids(),
    )
    order = Order(settings, n=body.n or 1, streams=bool(body.stream))
    task = caller.task()
    return await begin(
        service, model, order, [lambda: Prompt(conversation_ids(model, body.messages, task=task))], caller
    )


def conversation_ids(
    model: ServedModel,
    messages: list[openai.ChatMessage],
    *,
    add_generation_prompt: bool = True,
    task: Task | None = None,
) -> list[int]:
    """What the model reads of a conversation. Call it in a thread.

    Raises:
        APIError: it is too long, or the template refuses it.
    """
    n_bytes = sum(len(message.text.encode()) + len((message.name or "").encode()) for message in messages)
    if n_bytes > model.tokens.max_bytes:
        raise APIError(
            400,
            f"messages: {n_bytes} bytes of text; this model's context of {model.engine.context} tokens and the "
            f"server's limit allow {model.tokens.max_bytes}.",
            param="messages",
            code="context_length_exceeded",
        )
    turns = [message.turn() for message in messages]
    try:
        ids = model.chat_template.encode(turns, add_generation_prompt=add_generation_prompt, task=task)
    except UserError as error:
        raise APIError(400, f"messages: {error}", param="messages") from None
    if not ids:
        raise APIError(400, "messages: the template makes no text of them.", param="messages")
    return model.tokens.check(ids, "messages")


def _schema(wanted: openai.ResponseFormat | None) -> dict[str, Any] | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.json_schema is None:
        return {"type": "object"}
    schema = wanted.json_schema.json_schema
    if len(wanted.json_schema.model_dump_json().encode()) > MAX_SCHEMA_BYTES:
        raise APIError(400, f"response_format: the schema has more than {MAX_SCHEMA_BYTES} bytes.",
                       param="response_format")  # fmt: skip
    return {} if schema is None else schema


async def complete(generation: Generation, body: openai.ChatRequest) -> openai.ChatCompletion:
    """All answers, when they are finished."""
    entries: dict[int, list[Entry]] = {choice.index: [] for choice in generation.choices}
    async for deltas in generation.deltas():
        for delta in deltas:
            entries[delta.choice] += delta.entries
    choices = []
    for choice in generation.choices:
        assert choice.finish_reason is not None
        choices.append(
            openai.ChatChoice(
                index=choice.index,
                message=openai.AnswerMessage(role="assistant", content=choice.text, refusal=None),
                logprobs=_logprobs(entries[choice.index]) if body.logprobs else None,
                finish_reason=choice.finish_reason,
            )
        )
    return openai.ChatCompletion(
        **_frame(generation), object="chat.completion", choices=choices, usage=generation.usage()
    )


async def stream(generation: Generation, body: openai.ChatRequest) -> AsyncGenerator[list[openai.ChatChunk]]:
    """The answers as they come: who speaks, the text, and why it ended."""
    frame = _frame(generation) | {"object": "chat.completion.chunk"}
    with_usage = body.stream_options is not None and body.stream_options.include_usage
    null_usage = {"usage": None} if with_usage else {}
    async for deltas in generation.deltas():
        yield [
            openai.ChatChunk(**frame, choices=[choice], **null_usage)
            for delta in deltas
            for choice in _chunk_choices(delta, body)
        ]
    if with_usage:
        yield [openai.ChatChunk(**frame, choices=[], usage=generation.usage())]


def _frame(generation: Generation) -> dict[str, Any]:
    """What all chunks of an answer have in common."""
    return {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": generation.model.name}


def _chunk_choices(delta: Delta, body: openai.ChatRequest) -> list[openai.ChatChunkChoice]:
    made: list[openai.ChatChunkChoice] = []

    def add(what: openai.Delta, finish_reason: Any = None, entries: list[Entry] | None = None) -> None:
        logprobs = _logprobs(entries) if body.logprobs and entries else None
        made.append(
            openai.ChatChunkChoice(index=delta.choice, delta=what, logprobs=logprobs, finish_reason=finish_reason)
        )

    if delta.first:
        add(openai.Delta(role="assistant", content=""))
    if delta.text or delta.entries:
        add(openai.Delta(content=delta.text), entries=delta.entries)
    if delta.finish_reason is not None:
        add(openai.Delta(), delta.finish_reason)
    return made


def _logprobs(entries: list[Entry]) -> openai.ChatLogprobs:
    return openai.ChatLogprobs(
        content=[
            openai.TokenLogprob(
                token=entry.text,
                logprob=entry.logprob if entry.logprob is not None else 0.0,
                bytes=entry.bytes,
                top_logprobs=[
                    openai.TopLogprob(token=text, logprob=logprob, bytes=spelled)
                    for text, spelled, logprob in entry.top or ()
                ],
            )
            for entry in entries
        ],
        refusal=None,
    )
