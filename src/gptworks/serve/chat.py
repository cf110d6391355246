"""/v1/chat/completions: continue a conversation, which the run's chat template renders."""

from collections.abc import Mapping
from typing import Any

from gptworks.chat_template import ChatTemplate
from gptworks.choices import SAMPLING
from gptworks.confined import Task
from gptworks.errors import UserError
from gptworks.infer.fitting import ContextExceeded, fit_conversation
from gptworks.serve import openai
from gptworks.serve.answer import Answer, sampling_settings
from gptworks.serve.errors import invalid
from gptworks.serve.generate import Delta, Entry, Generation, Order, Prompt, begin
from gptworks.serve.models import ServedModel
from gptworks.serve.service import Caller, Service
from gptworks.serve.settings import MAX_SCHEMA_BYTES


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
    """Submit a conversation to the engine and return the answer, before its texts are generated.

    Raises:
        APIError, UserError, QueueFull, RunError: the request is not accepted.
    """
    model, task = await service.model(body.model, caller), caller.task()
    template = _with_variables(model.chat_template, body.chat_template_kwargs)
    wanted = body.max_completion_tokens or body.max_tokens
    settings = sampling_settings(
        body,
        model.engine.defaults,
        max_tokens=wanted or model.engine.context,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        json_schema=_schema(body.response_format),
        stop_token_ids=() if body.ignore_eos else template.end_token_ids,
    )

    continues = bool(body.continue_final_message)

    def read(messages: list[openai.ChatMessage]) -> Prompt:
        if body.truncation == "auto":
            return fitted_prompt(model, messages, wanted or SAMPLING.max_tokens, task, template, continues=continues)
        advice = " `truncation: auto` drops the oldest turns."
        how = {"add_generation_prompt": not continues, "continues": continues}
        return Prompt(conversation_ids(model, messages, task, template, advice=advice, **how))

    order = Order(settings, n=body.n or 1, streams=bool(body.stream))
    return ChatAnswer(await begin(service, model, order, [body.messages], read, caller), body)


def conversation_ids(
    model: ServedModel,
    messages: list[openai.ChatMessage],
    task: Task,
    template: ChatTemplate,
    *,
    add_generation_prompt: bool = True,
    continues: bool = False,
    advice: str = "",
) -> list[int]:
    """Return the token ids of a conversation. Slow: call it in a thread.

    Args:
        advice: ends the message about a conversation that is too long.

    Raises:
        APIError: the conversation is too long or empty, or the template refuses it.
    """
    texts = (text for message in messages for text in (message.text, message.name or ""))
    model.tokens.check_bytes(sum(len(text.encode()) for text in texts), "messages", advice)
    turns = [message.turn() for message in messages]
    try:
        ids = template.encode(turns, add_generation_prompt=add_generation_prompt, continues=continues, task=task)
    except UserError as error:
        raise invalid("messages", str(error)) from None
    return model.tokens.check(_some(ids), "messages", advice)


def fitted_prompt(
    model: ServedModel,
    messages: list[openai.ChatMessage],
    answer_tokens: int,
    task: Task,
    template: ChatTemplate,
    *,
    continues: bool = False,
) -> Prompt:
    """Return a conversation as a prompt, without the oldest turns that do not fit; see `fit_conversation`. Slow.

    Raises:
        APIError: the system messages and the newest question together are too long, the template refuses the
            conversation, or it renders an empty text.
    """
    turns, most = [message.turn() for message in messages], model.tokens.max_bytes
    try:
        ids, n_dropped = fit_conversation(
            template, turns, model.engine.context, answer_tokens, continues=continues, most_bytes=most, task=task
        )
    except UserError as error:
        code = "context_length_exceeded" if isinstance(error, ContextExceeded) else None
        raise invalid("messages", str(error), code) from None
    return Prompt(_some(ids), n_dropped=n_dropped)


def _with_variables(template: ChatTemplate, variables: Mapping[str, Any] | None) -> ChatTemplate:
    try:
        return template.using(variables or {})
    except UserError as error:
        raise invalid("chat_template_kwargs", str(error)) from None


def _some(ids: list[int]) -> list[int]:
    if not ids:
        raise invalid("messages", "the template renders them as an empty text.")
    return ids


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
