"""Generate the texts of a request.

A thread tokenizes the prompts and submits them to the engine; the engine's pieces become deltas of the choices.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gptworks.confined import Abandoned
from gptworks.infer.constrain import Grammar
from gptworks.infer.logprobs import TokenLogprob
from gptworks.infer.loop import Stream
from gptworks.infer.request import Request
from gptworks.infer.sampling import SamplingSettings
from gptworks.infer.text import DECODER_CONTEXT_TOKENS, Piece
from gptworks.serve import openai
from gptworks.serve.errors import APIError, invalid
from gptworks.serve.metrics import RequestClock
from gptworks.serve.models import ServedModel, Tokens
from gptworks.serve.service import Caller, Service
from gptworks.serve.settings import MAX_LOGPROB_NUMBERS, MAX_TEXTS
from gptworks.tokenizer import StreamDecoder

PIECES_AT_ONCE = 32
"""Number of unread pieces that wake the reader of a request without streaming. A text's end also wakes the reader."""

LEAST_LOGPROB = -9999.0
"""Replaces −inf, which JSON cannot represent."""


@dataclass(frozen=True)
class Prompt:
    """A text to continue."""

    ids: list[int]
    text: str = ""
    """The prompt's text, for `echo`."""
    n_dropped: int = 0
    """Number of a conversation's oldest messages that are not in the prompt."""


@dataclass(frozen=True)
class Order:
    """A request's options for all of its prompts."""

    settings: SamplingSettings
    n: int = 1
    """Number of texts for each prompt."""
    generates: bool = True
    echo: bool = False
    prompt_logprobs: int | None = None
    streams: bool = False
    """Whether pieces are sent as they come, instead of complete texts at the end."""

    @property
    def n_made(self) -> int:
        """Number of texts that the engine computes for each prompt; 1 if the engine only scores the prompt."""
        return self.n if self.generates else 1


class Entry(NamedTuple):
    """A token of an answer, with its bytes, its log-probability and its alternatives."""

    text: str
    bytes: list[int] | None
    logprob: float | None
    top: list[tuple[str, list[int] | None, float]] | None
    offset: int
    """Index of the token's first character in the choice's text."""


class Delta(NamedTuple):
    """The text and entries that one piece adds to a choice."""

    choice: int
    text: str
    entries: list[Entry]
    finish_reason: openai.FinishReason | None
    first: bool
    piece: Piece


class Speller:
    """Makes the entries of consecutive tokens, with their offsets."""

    def __init__(self, tokens: Tokens, before: Sequence[int] = (), offset: int = 0) -> None:
        self._tokens, self._decoder, self._offset = tokens, StreamDecoder(tokens.tokenizer), offset
        for token in before[-DECODER_CONTEXT_TOKENS:]:
            self._decoder.push(token)

    def entry(self, token: int, given: TokenLogprob | None) -> Entry:
        text, spelled = self._tokens.spell(token)
        offset = self._offset
        self._offset += len(self._decoder.push(token))
        if given is None:
            return Entry(text, spelled, None, None, offset)
        top = [(*self._tokens.spell(other), max(logprob, LEAST_LOGPROB)) for other, logprob in given.top]
        return Entry(text, spelled, max(given.logprob, LEAST_LOGPROB), top, offset)


class Choice:
    """One generated text; turns each of its pieces into a delta."""

    def __init__(self, index: int, prompt: Prompt, order: Order, tokens: Tokens) -> None:
        self.index, self.order = index, order
        self.text = ""
        self.n_tokens, self.logprob = 0, 0.0
        self.finish_reason: openai.FinishReason | None = None
        self._prompt, self._tokens = prompt, tokens
        self._speller: Speller | None = None
        self._held: list[Entry] = []
        self._begun = False

    def push(self, piece: Piece, request: Request) -> Delta:
        """Add a piece to the text and return the delta to send."""
        first, self._begun = not self._begun, True
        text = piece.text
        if first and self.order.echo:
            text = self._prompt.text + text
            if self.order.prompt_logprobs is not None:
                self._held += self._of_prompt(request)
        if piece.token_id is not None:
            self.n_tokens += 1
            if piece.logprob is not None:
                self.logprob += piece.logprob.logprob
                self._held.append(self._entry(piece.token_id, piece.logprob))
        self.text += text
        if piece.finish_reason is not None:
            self.finish_reason = "stop" if piece.finish_reason == "stop" else "length"
        return Delta(self.index, text, self._settled(piece), self.finish_reason, first, piece)

    @property
    def mean_logprob(self) -> float:
        return self.logprob / max(1, self.n_tokens)

    def _entry(self, token: int, given: TokenLogprob) -> Entry:
        if self._speller is None:
            n_echoed = len(self._prompt.text) if self.order.echo else 0
            self._speller = Speller(self._tokens, self._prompt.ids, n_echoed)
        return self._speller.entry(token, given)

    def _of_prompt(self, request: Request) -> list[Entry]:
        speller, given = Speller(self._tokens), request.prompt_logprobs
        assert given is not None
        return [speller.entry(token, one) for token, one in zip(request.prompt_ids, given, strict=True)]

    def _settled(self, piece: Piece) -> list[Entry]:
        """Remove and return the held entries whose text has been sent; entries of a stop string are never sent."""
        n = len(self._held)
        ended_by_text = piece.finish_reason == "stop" and piece.token_id is not None
        if piece.finish_reason is None or ended_by_text:
            while n and self._held[n - 1].offset >= len(self.text):
                n -= 1
        settled, self._held = self._held[:n], self._held[n:]
        return settled


@dataclass
class Generation:
    """Generates a request's texts: `order.n` choices for each prompt, in the prompts' order."""

    model: ServedModel
    order: Order
    stream: Stream
    caller: Caller
    choices: list[Choice] = field(default_factory=list)
    prompts: list[Prompt] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def submit(self, prompts: Sequence[Any], read: Callable[[Any], Prompt]) -> None:
        """Tokenize each prompt with `read` and submit it to the engine. Slow: call it in a thread."""
        order = self.order
        for given in prompts:
            if self.stream.cancelled:  # the client left
                return
            prompt = read(given)
            self.choices += [
                Choice(len(self.prompts) * order.n + i, prompt, order, self.model.tokens) for i in range(order.n)
            ]
            self.prompts.append(prompt)
            self.caller.n_tokens += len(prompt.ids)
            self.stream.submit(
                prompt.ids, order.settings, n_samples=order.n_made, generates=order.generates,
                prompt_logprobs=order.prompt_logprobs,
            )  # fmt: skip

    async def deltas(self) -> AsyncGenerator[list[Delta]]:
        """Yield the deltas of all choices, in lists, as they come. Leaving the iteration cancels unfinished texts."""
        clock = RequestClock(self.model.metrics, self.began)
        async with aclosing(self.stream.batches()) as batches:
            async for batch in batches:
                found = []
                for number, piece, came_at in batch:
                    request = self.stream.requests[number]
                    choices = self.choices[number * self.order.n :][: self.order.n]
                    if self.order.generates:
                        choices = [choices[piece.sample]]
                    self.caller.n_tokens += piece.token_id is not None
                    for choice in choices:
                        found.append(choice.push(piece, request))
                        clock.tick(came_at, choice.index, request, choice.n_tokens, choice.finish_reason)
                yield found

    def cancel(self) -> None:
        self.stream.cancel()

    def usage(self) -> openai.Usage:
        n_prompt = sum(len(prompt.ids) for prompt in self.prompts)
        n_made = sum(choice.n_tokens for choice in self.choices)
        n_cached = sum(request.n_reused_tokens for request in self.stream.requests)
        return openai.Usage(
            prompt_tokens=n_prompt,
            completion_tokens=n_made,
            total_tokens=n_prompt + n_made,
            prompt_tokens_details=openai.PromptTokensDetails(cached_tokens=n_cached),
        )


def check_size(service: Service, model: ServedModel, order: Order, n_prompts: int) -> tuple[int, int]:
    """Return a request's number of texts and maximum number of log-probabilities.

    Raises:
        APIError: one of the numbers is too large.
    """
    n_choices, n_texts, settings = n_prompts * order.n, n_prompts * order.n_made, order.settings
    if n_choices > MAX_TEXTS:
        raise invalid("n", f"{n_prompts} prompts and {order.n} texts of each; one request may ask for {MAX_TEXTS}.")
    most = model.engine.max_waiting
    if n_prompts > 1 and most is not None and n_texts > most:
        raise invalid("prompt", f"{n_texts} texts of {n_prompts} prompts, and {most} may wait.")
    n_each = sum(1 + n for n in (settings.logprobs, settings.processed_logprobs) if n is not None)
    n_tokens = min(settings.max_tokens, model.engine.context)
    if order.streams:  # only unread pieces stay in memory
        n_tokens = min(n_tokens, service.settings.max_unread_pieces)
    n_tokens += model.engine.context if order.prompt_logprobs is not None else 0
    if (n_numbers := n_choices * n_tokens * n_each) > MAX_LOGPROB_NUMBERS:
        raise invalid(
            "logprobs",
            f"{n_choices} texts of up to {n_tokens} tokens with alternatives: {n_numbers} numbers; one answer may hold "
            f"{MAX_LOGPROB_NUMBERS}.",
        )
    return n_texts, n_numbers


async def compiled(service: Service, model: ServedModel, settings: SamplingSettings, caller: Caller) -> Grammar | None:
    """Return the grammar that constrains a request's texts, compiled if new; None without a constraint.

    Raises:
        UserError: the grammar cannot be compiled.
        APIError: too many schemas wait, or the server is about to stop.
        QueueFull: the grammars in use have reached their memory limit.
    """
    if settings.json_schema is None and settings.regex is None:
        return None
    loop, limits = asyncio.get_running_loop(), service.settings
    found = await loop.run_in_executor(service.threads, lambda: model.engine.admission.constraints().find(settings))
    if found is not None:
        return found
    n, n_all = service.held(caller.client, lambda one: one.compiles)
    if n >= limits.max_schemas_each or n_all >= limits.max_schemas:
        raise APIError(429, "too many schemas wait to be compiled: try again later.", code="too_many_schemas")
    caller.compiles, task = True, caller.task()
    try:
        return await loop.run_in_executor(
            service.schema_threads, lambda: model.engine.admission.constraints().grammar(settings, task)
        )
    except Abandoned:
        raise APIError(503, "the server is about to stop.", code="stopped") from None
    finally:
        task.abandon()  # stops the compilation if the client left
        caller.compiles = False


async def begin(
    service: Service,
    model: ServedModel,
    order: Order,
    prompts: Sequence[Any],
    read: Callable[[Any], Prompt],
    caller: Caller,
) -> Generation:
    """Start a generation: a thread tokenizes each prompt with `read` and submits it to the engine.

    Raises:
        APIError, UserError, QueueFull, RunError: the request is not accepted, and no part of it continues.
    """
    service.take_places(caller, *check_size(service, model, order, len(prompts)))
    grammar = await compiled(service, model, order.settings, caller)  # kept alive until the requests hold it
    stream = model.loop.open(
        max_unread=service.settings.max_unread_pieces * len(prompts) * order.n,
        patience=1 if order.streams else PIECES_AT_ONCE,
    )
    generation = Generation(model, order, stream, caller)
    loop = asyncio.get_running_loop()
    try:
        await loop.run_in_executor(service.threads, generation.submit, prompts, read)
    except BaseException:
        stream.cancel()
        caller.abandon()
        raise
    del grammar
    return generation
