"""/v1/chat/completions: continue a conversation, which the run's chat template renders."""

from typing import Any

from gptworks.confined import Task
from gptworks.errors import UserError
from gptworks.serve import openai
from gptworks.serve.answer import Answer, sampling_settings
from gptworks.serve.errors import invalid
from gptworks.serve.generate import Delta, Entry, Order, Prompt, begin
from gptworks.serve.models import ServedModel
from gptworks.serve.service import Caller, Service
from gptworks.serve.settings import MAX_SCHEMA_BYTES


class ChatAnswer(Answer[openai.ChatRequest]):
    id_prefix = "chatcmpl"
    whole_type, whole_object = openai.ChatCompletion, "chat.completion"
    chunk_type, chunk_object = openai.ChatChunk, "chat.completion.chunk"

    def choices(self, entries: list[list[Entry]]) -> list[Any]:
        return [
            openai.ChatChoice(
                index=choice.index,
                message=openai.AnswerMessage(role="assistant", content=choice.text, refusal=None),
                logprobs=_logprobs(entries[choice.index]) if self.body.logprobs else None,
                finish_reason=choice.finish_reason,
            )
            for choice in self.generation.choices
        ]

    def chunk_choices(self, delta: Delta) -> list[Any]:
        """Return separate choices for the role, the text and the finish reason of a delta."""

        def chunk(part: openai.Delta, logprobs: Any = None, finish_reason: Any = None) -> openai.ChatChunkChoice:
            return openai.ChatChunkChoice(
                index=delta.choice, delta=part, logprobs=logprobs, finish_reason=finish_reason
            )

        made = []
        if delta.first:
            made.append(chunk(openai.Delta(role="assistant", content="")))
        if delta.text or delta.entries:
            logprobs = _logprobs(delta.entries) if self.body.logprobs and delta.entries else None
            made.append(chunk(openai.Delta(content=delta.text), logprobs))
        if delta.finish_reason is not None:
            made.append(chunk(openai.Delta(), finish_reason=delta.finish_reason))
        return made


async def begin_chat(service: Service, body: openai.ChatRequest, caller: Caller) -> ChatAnswer:
    """Submit a conversation to the engine and return its answer.

    Raises:
        APIError, UserError, QueueFull: the request is not accepted.
    """
    model, task = await service.model(body.model, caller), caller.task()
    template = model.chat_template
    max_tokens = next(n for n in (body.max_completion_tokens, body.max_tokens, model.engine.context) if n is not None)
    settings = sampling_settings(
        body,
        max_tokens=max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        json_schema=_schema(body.response_format),
        stop_token_ids=() if body.ignore_eos else template.end_token_ids,
    )

    def read(messages: list[openai.ChatMessage]) -> Prompt:
        return Prompt(conversation_ids(model, messages, task))

    order = Order(settings, n=body.n or 1, streams=bool(body.stream))
    return ChatAnswer(await begin(service, model, order, [body.messages], read, caller), body)


def conversation_ids(
    model: ServedModel, messages: list[openai.ChatMessage], task: Task, *, add_generation_prompt: bool = True
) -> list[int]:
    """Return the token ids of a conversation. Slow: call it in a thread.

    Raises:
        APIError: the conversation is too long or empty, or the template refuses it.
    """
    texts = (text for message in messages for text in (message.text, message.name or ""))
    model.tokens.check_bytes(sum(len(text.encode()) for text in texts), "messages")
    turns = [message.turn() for message in messages]
    try:
        ids = model.chat_template.encode(turns, add_generation_prompt=add_generation_prompt, task=task)
    except UserError as error:
        raise invalid("messages", str(error)) from None
    if not ids:
        raise invalid("messages", "the template renders them as an empty text.")
    return model.tokens.check(ids, "messages")


def _schema(wanted: openai.ResponseFormat | None) -> dict[str, Any] | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.json_schema is None:
        return {"type": "object"}
    if len(wanted.json_schema.model_dump_json().encode()) > MAX_SCHEMA_BYTES:
        raise invalid("response_format", f"the schema has more than {MAX_SCHEMA_BYTES} bytes.")
    return wanted.json_schema.json_schema or {}


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
