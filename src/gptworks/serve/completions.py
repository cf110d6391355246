"""/v1/completions: a request as an order for the engine, and its texts as OpenAI writes them."""

import time
import uuid
from collections.abc import AsyncGenerator, Iterable
from typing import Any

from gptworks.infer.sampling import SamplingSettings
from gptworks.serve import openai
from gptworks.serve.caller import Caller
from gptworks.serve.errors import APIError
from gptworks.serve.generate import Choice, Delta, Entry, Generation, Order, Prompt, Reader, begin
from gptworks.serve.models import ServedModel
from gptworks.serve.service import Service

DEFAULT_MAX_TOKENS = 16
"""OpenAI's, for completions."""

_PASSED_ON = ("top_p", "stop", "seed", "logit_bias", "frequency_penalty", "presence_penalty", "top_k", "min_p",
              "repetition_penalty", "min_tokens", "ignore_eos")  # fmt: skip


def sampling_settings(body: openai.SamplingFields, **more: Any) -> SamplingSettings:
    """How to sample, by a request.

    Raises:
        UserError: settings that do not go together.
    """
    given = {name: value for name in _PASSED_ON if (value := getattr(body, name)) is not None}
    if given.get("top_k") == -1:  # vLLM's way to say all
        given["top_k"] = 0
    if given.get("top_p") == 0:  # the likeliest token alone
        given |= {"top_p": 1.0, "top_k": 1}
    temperature = 1.0 if body.temperature is None else body.temperature
    return SamplingSettings(temperature=temperature, **given, **more)


async def begin_completions(service: Service, body: openai.CompletionRequest, caller: Caller) -> Generation:
    """Submit a request's prompts.

    Raises:
        APIError, UserError, QueueFull: it cannot be taken.
    """
    model, n_prompts = service.models.get(body.model), len(body.prompt)
    if n_prompts > service.settings.max_waiting:
        raise APIError(
            400, f"prompt: {n_prompts} of them, and {service.settings.max_waiting} may wait.", param="prompt"
        )
    n, max_tokens = body.n or 1, DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    ranked = body.best_of is not None and body.best_of > n
    logprobs = 0 if ranked and body.logprobs is None else body.logprobs
    order = Order(
        sampling_settings(body, max_tokens=max(1, max_tokens), logprobs=logprobs),
        n=body.best_of if ranked and body.best_of is not None else n,
        generates=max_tokens > 0,
        echo=bool(body.echo),
        prompt_logprobs=body.logprobs if body.echo else None,
        streams=bool(body.stream),
    )
    return await begin(service, model, order, [_reader(model, prompt, order) for prompt in body.prompt], caller)


def _reader(model: ServedModel, prompt: str | list[int], order: Order) -> Reader:
    def read() -> Prompt:
        ids = model.tokens.read(prompt, "prompt")
        if not order.echo:
            return Prompt(ids)
        return Prompt(ids, prompt if isinstance(prompt, str) else model.tokens.decode(ids))

    return read


async def complete(generation: Generation, body: openai.CompletionRequest) -> openai.Completion:
    """All texts, when they are finished; of those made for `best_of`, the n likeliest by token."""
    entries: dict[int, list[Entry]] = {choice.index: [] for choice in generation.choices}
    async for deltas in generation.deltas():
        for delta in deltas:
            entries[delta.choice] += delta.entries
    kept = _best(generation.choices, generation.order.n, body.n or 1)
    choices = [
        openai.CompletionChoice(
            index=i,
            text=choice.text,
            logprobs=None if body.logprobs is None else _logprobs(entries[choice.index]),
            finish_reason=choice.finish_reason,
        )
        for i, choice in enumerate(kept)
    ]
    return _Frame(generation).completion(choices, generation.usage())


async def stream(generation: Generation, body: openai.CompletionRequest) -> AsyncGenerator[list[openai.Completion]]:
    """The texts as they come, in chunks."""
    frame, with_usage = _Frame(generation), body.stream_options is not None and body.stream_options.include_usage
    async for deltas in generation.deltas():
        yield [
            frame.chunk([_chunk_choice(delta, body)], with_usage)
            for delta in deltas
            if delta.text or delta.entries or delta.finish_reason
        ]
    if with_usage:
        yield [frame.completion([], generation.usage())]


class _Frame:
    """What all chunks of an answer have in common."""

    def __init__(self, generation: Generation) -> None:
        self._fields: dict[str, Any] = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": generation.model.name,
        }

    def completion(self, choices: list[openai.CompletionChoice], usage: openai.Usage) -> openai.Completion:
        return openai.Completion(**self._fields, choices=choices, usage=usage)

    def chunk(self, choices: list[openai.CompletionChoice], with_usage: bool) -> openai.Completion:
        """Where the last chunk tells the usage, the others have a null."""
        more = {"usage": None} if with_usage else {}
        return openai.Completion(**self._fields, choices=choices, **more)


def _chunk_choice(delta: Delta, body: openai.CompletionRequest) -> openai.CompletionChoice:
    logprobs = None if body.logprobs is None or not delta.entries else _logprobs(delta.entries)
    return openai.CompletionChoice(
        index=delta.choice, text=delta.text, logprobs=logprobs, finish_reason=delta.finish_reason
    )


def _best(choices: list[Choice], n_made: int, n_wanted: int) -> Iterable[Choice]:
    if n_made == n_wanted:
        return choices
    kept: list[Choice] = []
    for start in range(0, len(choices), n_made):
        kept += sorted(choices[start : start + n_made], key=lambda choice: -choice.mean_logprob)[:n_wanted]
    return kept


def _logprobs(entries: list[Entry]) -> openai.CompletionLogprobs:
    return openai.CompletionLogprobs(
        tokens=[entry.text for entry in entries],
        token_logprobs=[entry.logprob for entry in entries],
        top_logprobs=[_alternatives(entry) for entry in entries],
        text_offset=[entry.offset for entry in entries],
    )


def _alternatives(entry: Entry) -> dict[str, float] | None:
    """The likeliest tokens, and the one that is there."""
    if entry.top is None or entry.logprob is None:
        return None
    return {text: logprob for text, _, logprob in entry.top} | {entry.text: entry.logprob}
