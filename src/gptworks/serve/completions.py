"""The routes /v1/completions, which continues prompts, and /v1/chat/completions, which answers conversations."""

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from dataclasses import fields
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel

from gptworks.chat_template import ChatTemplate
from gptworks.choices import SAMPLING
from gptworks.confined import Task
from gptworks.infer.fitting import fit_conversation
from gptworks.infer.sampling import SamplingSettings
from gptworks.serve import openai
from gptworks.serve.errors import blaming, invalid
from gptworks.serve.generate import Choice, Delta, Entry, Generation, Order, Prompt, begin
from gptworks.serve.models import ServedModel
from gptworks.serve.service import Caller, Service
from gptworks.serve.settings import MAX_SCHEMA_BYTES

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for completions."""
_PASSED_ON = openai.SamplingFields.model_fields.keys() & {field.name for field in fields(SamplingSettings)}
"""Names of request fields that are also names of sampling settings."""


def sampling_settings(body: openai.SamplingFields, defaults: SamplingSettings, **more: Any) -> SamplingSettings:
    """Return a request's sampling settings. Settings in neither the request nor `more` are the model's `defaults`.

    Raises:
        UserError: the settings contradict each other.
    """
    given = {name: value for name in _PASSED_ON if (value := getattr(body, name)) is not None}
    if given.get("top_k") == -1:  # vLLM's value for no limit
        given["top_k"] = 0
    if given.get("seed") == -1:  # vLLM's and llama.cpp's value for a random seed
        del given["seed"]
    if given.get("top_p") == 0:  # 0 means only the most likely token
        given |= {"top_p": 1.0, "top_k": 1}
    return SamplingSettings.of(defaults, **given, **more)


Body = TypeVar("Body", bound=openai.SamplingFields)

_TEXT = "@text@"
_quoted = json.JSONEncoder(ensure_ascii=False).encode


class Answer(ABC, Generic[Body]):
    """The generated texts of a request, in the JSON format of its endpoint."""

    id_prefix: ClassVar[str]
    whole_type: ClassVar[type[BaseModel]]
    whole_object: ClassVar[str]
    chunk_type: ClassVar[type[BaseModel]]
    chunk_object: ClassVar[str]

    def __init__(self, generation: Generation, body: Body) -> None:
        self.generation, self.body = generation, body
        self._frame = {
            "id": f"{self.id_prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": generation.model.name
        }  # fmt: skip
        options = body.stream_options
        self._with_usage = options is not None and options.include_usage
        self._around_text: dict[int, tuple[str, str]] = {}

    @abstractmethod
    def choices(self, entries: list[list[Entry]]) -> list[Any]:
        """Return the endpoint's `choices` for the finished texts. `entries` has the tokens of each text."""

    @abstractmethod
    def chunk_choices(self, delta: Delta) -> list[Any]:
        """Return the `choices` that a stream sends for a delta, each choice in a separate chunk."""

    async def whole(self) -> BaseModel:
        """Return the complete answer once all texts are finished."""
        entries: list[list[Entry]] = [[] for _ in self.generation.choices]
        async for deltas in self.generation.deltas():
            for delta in deltas:
                entries[delta.choice] += delta.entries
        return self.whole_type(
            **self._frame, object=self.whole_object, choices=self.choices(entries), usage=self.generation.usage()
        )

    async def chunks(self) -> AsyncGenerator[list[str]]:
        """Yield chunks as JSON texts, as they come. If the last chunk has `usage`, it is null in the other chunks."""
        async for deltas in self.generation.deltas():
            yield [chunk for delta in deltas for chunk in self._chunks(delta)]
        if self._with_usage:
            yield [self._chunk([], self.generation.usage())]

    def _chunks(self, delta: Delta) -> list[str]:
        """Return a delta's chunks as JSON texts. Most chunks differ only in `text`, so the JSON around it is cached."""
        if not delta.text or delta.entries or delta.first or delta.finish_reason is not None:
            return [self._chunk([choice]) for choice in self.chunk_choices(delta)]
        around = self._around_text.get(delta.choice)
        if around is None:
            before, _, after = self._chunk(self.chunk_choices(delta._replace(text=_TEXT))).rpartition(_quoted(_TEXT))
            around = self._around_text[delta.choice] = before, after
        return [around[0] + _quoted(delta.text) + around[1]]

    def _chunk(self, choices: list[Any], usage: openai.Usage | None = None) -> str:
        frame = self._frame | ({"usage": usage} if self._with_usage else {})
        return self.chunk_type(**frame, object=self.chunk_object, choices=choices).model_dump_json(exclude_unset=True)


# --------------------------------------------------------------------------------------------------------- completions


class CompletionAnswer(Answer[openai.CompletionRequest]):
    id_prefix = "cmpl"
    whole_type = chunk_type = openai.Completion
    whole_object = chunk_object = "text_completion"

    def choices(self, entries: list[list[Entry]]) -> list[Any]:
        """Return all texts; with `best_of`, only the n texts of each prompt with the highest mean log-probability."""
        made, n_made, n_wanted = self.generation.choices, self.generation.order.n, self.body.n or 1
        kept: list[Choice] = []
        for start in range(0, len(made), n_made):
            group = made[start : start + n_made]
            kept += sorted(group, key=lambda c: -c.mean_logprob)[:n_wanted] if n_made > n_wanted else group
        return [self._choice(i, c.text, entries[c.index], c.finish_reason) for i, c in enumerate(kept)]

    def chunk_choices(self, delta: Delta) -> list[Any]:
        if not (delta.text or delta.entries or delta.finish_reason):
            return []
        return [self._choice(delta.choice, delta.text, delta.entries or None, delta.finish_reason)]

    def _choice(
        self, index: int, text: str, entries: list[Entry] | None, finish_reason: openai.FinishReason | None
    ) -> openai.CompletionChoice:
        logprobs = None if self.body.logprobs is None or entries is None else _completion_logprobs(entries)
        return openai.CompletionChoice(index=index, text=text, logprobs=logprobs, finish_reason=finish_reason)


async def begin_completions(service: Service, body: openai.CompletionRequest, caller: Caller) -> CompletionAnswer:
    """Submit a request's prompts to the engine and return the answer, before its texts are generated; see `begin`."""
    model = await service.model(body.model, caller)
    n, max_tokens = body.n or 1, DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    n_made = max(n, body.best_of or n)
    logprobs = 0 if n_made > n and body.logprobs is None else body.logprobs
    order = Order(
        sampling_settings(body, model.engine.defaults, max_tokens=max(1, max_tokens), logprobs=logprobs),
        n=n_made,
        generates=max_tokens > 0,
        echo=bool(body.echo),
        prompt_logprobs=body.logprobs if body.echo else None,
        streams=bool(body.stream),
    )

    def read(prompt: str | list[int]) -> Prompt:
        ids = model.tokens.read(prompt, "prompt")
        if not order.echo:
            return Prompt(ids)
        return Prompt(ids, prompt if isinstance(prompt, str) else model.tokens.decode(ids))

    return CompletionAnswer(await begin(service, model, order, body.prompt, read, caller), body)


def _completion_logprobs(entries: list[Entry]) -> openai.CompletionLogprobs:
    return openai.CompletionLogprobs(
        tokens=[entry.text for entry in entries],
        token_logprobs=[entry.logprob for entry in entries],
        top_logprobs=[_alternatives(entry) for entry in entries],
        text_offset=[entry.offset for entry in entries],
    )


def _alternatives(entry: Entry) -> dict[str, float] | None:
    """Return the log-probabilities of the most likely tokens and the chosen token, by token text.

    None: the entry has no log-probabilities.
    """
    if entry.top is None or entry.logprob is None:
        return None
    return {text: logprob for text, _, logprob in entry.top} | {entry.text: entry.logprob}


# ---------------------------------------------------------------------------------------------------------------- chat


class ChatAnswer(Answer[openai.ChatRequest]):
    id_prefix = "chatcmpl"
    whole_type, whole_object = openai.ChatCompletion, "chat.completion"
    chunk_type, chunk_object = openai.ChatChunk, "chat.completion.chunk"

    def __init__(self, generation: Generation, body: openai.ChatRequest) -> None:
        super().__init__(generation, body)
        if body.truncation == "auto":
            self._frame["dropped_messages"] = sum(prompt.n_dropped for prompt in generation.prompts)

    def choices(self, entries: list[list[Entry]]) -> list[Any]:
        return [
            openai.ChatChoice(
                index=choice.index,
                message=openai.AnswerMessage(role="assistant", content=choice.text, refusal=None),
                logprobs=_chat_logprobs(entries[choice.index]) if self.body.logprobs else None,
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
            logprobs = _chat_logprobs(delta.entries) if self.body.logprobs and delta.entries else None
            made.append(chunk(openai.Delta(content=delta.text), logprobs))
        if delta.finish_reason is not None:
            made.append(chunk(openai.Delta(), finish_reason=delta.finish_reason))
        return made


async def begin_chat(service: Service, body: openai.ChatRequest, caller: Caller) -> ChatAnswer:
    """Submit a conversation to the engine and return the answer, before its texts are generated; see `begin`."""
    model, task = await service.model(body.model, caller), caller.task()
    with blaming("chat_template_kwargs"):
        template = model.chat_template.using(body.chat_template_kwargs or {})
    wanted = body.max_completion_tokens or body.max_tokens
    settings = sampling_settings(
        body,
        model.engine.defaults,
        max_tokens=wanted or model.engine.context,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        json_schema=_schema(body.response_format),
    ).ending_at(template.end_token_ids)
    truncates, continues = body.truncation == "auto", bool(body.continue_final_message)
    answer_tokens = (wanted or SAMPLING.max_tokens) if truncates else None
    advice = "" if truncates else " `truncation: auto` drops the oldest turns."

    def read(messages: list[openai.ChatMessage]) -> Prompt:
        return fitted_prompt(model, messages, answer_tokens, task, template, continues=continues, advice=advice)

    order = Order(settings, n=body.n or 1, streams=bool(body.stream))
    return ChatAnswer(await begin(service, model, order, [body.messages], read, caller), body)


def fitted_prompt(
    model: ServedModel,
    messages: list[openai.ChatMessage],
    answer_tokens: int | None,
    task: Task,
    template: ChatTemplate,
    *,
    advice: str = "",
    **how: bool,
) -> Prompt:
    """Return a conversation as a prompt that fits in the context; see `fit_conversation`. Slow: call it in a thread.

    Args:
        advice: ends the message about a conversation that is too long.
        how: `add_generation_prompt` and `continues`, passed to `fit_conversation`.

    Raises:
        APIError: the conversation is too long, or the template refuses it or renders an empty text.
    """
    turns = [message.turn() for message in messages]
    with blaming("messages", advice):
        ids, n_dropped = fit_conversation(
            template, turns, model.engine.context, answer_tokens, most_bytes=model.tokens.max_bytes, task=task, **how
        )
    if not ids:
        raise invalid("messages", "the template renders them as an empty text.")
    return Prompt(ids, n_dropped=n_dropped)


def _schema(wanted: openai.ResponseFormat | None) -> dict[str, Any] | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.json_schema is None:
        return {"type": "object"}
    if len(wanted.json_schema.model_dump_json().encode()) > MAX_SCHEMA_BYTES:
        raise invalid("response_format", f"the schema has more than {MAX_SCHEMA_BYTES} bytes.")
    return wanted.json_schema.json_schema or {}


def _chat_logprobs(entries: list[Entry]) -> openai.ChatLogprobs:
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
