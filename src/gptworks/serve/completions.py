"""/v1/completions: continue one or several prompts."""

from typing import Any

from gptworks.serve import openai
from gptworks.serve.answer import Answer, sampling_settings
from gptworks.serve.generate import Choice, Delta, Entry, Order, Prompt, begin
from gptworks.serve.service import Caller, Service

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for completions."""


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
        logprobs = None if self.body.logprobs is None or entries is None else _logprobs(entries)
        return openai.CompletionChoice(index=index, text=text, logprobs=logprobs, finish_reason=finish_reason)


async def begin_completions(service: Service, body: openai.CompletionRequest, caller: Caller) -> CompletionAnswer:
    """Submit a request's prompts to the engine and return the answer, before its texts are generated.

    Raises:
        APIError, UserError, QueueFull, RunError: the request is not accepted.
    """
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


def _logprobs(entries: list[Entry]) -> openai.CompletionLogprobs:
    return openai.CompletionLogprobs(
        tokens=[entry.text for entry in entries],
        token_logprobs=[entry.logprob for entry in entries],
        top_logprobs=[_alternatives(entry) for entry in entries],
        text_offset=[entry.offset for entry in entries],
    )


def _alternatives(entry: Entry) -> dict[str, float] | None:
    """Return log-probabilities by token: the most likely ones and the chosen one; None if the entry has none."""
    if entry.top is None or entry.logprob is None:
        return None
    return {text: logprob for text, _, logprob in entry.top} | {entry.text: entry.logprob}
